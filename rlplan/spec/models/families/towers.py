"""Vision and audio towers: tables of tensors and how their configs are read. Counted, not modelled further.

In: the `vision_config` or `audio_config` of a multimodal config, and `towers.json`. Out: a VisionSpec, and its tensors.
Left out: images' tokens. A tower is held whole by every rank here; vLLM shards its linear layers unless told otherwise.

A size in `towers.json` is a sum of products. A factor is a number, a key of the config (`a|b`: the first that stands
there), a quotient `a//b` of two, or `text`, the width of the language model.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from rlplan.spec.models.config import MAX_LAYERS, Config
from rlplan.spec.models.parts import VisionSpec
from rlplan.spec.models.tensors import Parameter, Sizes, list_tensors, with_prefix


@dataclass(frozen=True)
class Tower:
    """A tower of one kind."""

    sizes: Mapping[str, str]
    """Symbols of its tables, and what they are in its config."""
    layers: str
    """Key of the number of layers."""
    before: Sequence[str]
    """Table of what comes before the stack."""
    layer: Sequence[str]
    """Table of one layer of the stack, below `prefix`."""
    prefix: str
    after: Sequence[str]
    """Table of what comes after the stack."""
    mergers: str = ""
    """Key of the layers that have a further merger each."""
    merger: Sequence[str] = ()
    """Table of one further merger, below `merger_prefix`."""
    merger_prefix: str = ""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Values that other keys must have, for what is not modelled."""
    switches: Mapping[str, tuple[bool, str]] = field(default_factory=dict)
    """Config booleans, the library's default for each, and the condition that they turn on."""


TOWERS = {
    name: Tower(**entry)
    for name, entry in json.loads(Path(__file__).with_name("towers.json").read_text("utf-8"))["towers"].items()
}


def read_tower(name: str, config: Config, text_hidden: int) -> VisionSpec:
    """The tower of that name as a config has it. Raises: SpecError."""
    tower = TOWERS[name]
    for key, allowed in tower.fixed.items():
        config.refuse_unless(key, allowed)
    switches = ((word, config.flag(key, default=default)) for key, (default, word) in tower.switches.items())
    return VisionSpec(
        tower=name,
        sizes={symbol: _size(config, text, text_hidden) for symbol, text in tower.sizes.items()},
        num_layers=config.count(_present(config, tower.layers), maximum=MAX_LAYERS),
        conditions=tuple(word for word, is_on in switches if is_on),
        num_mergers=len(config.indices(tower.mergers)) if tower.mergers else 0,
    )


def _size(config: Config, text: str, text_hidden: int) -> int:
    return sum(prod(_factor(config, factor, text_hidden) for factor in term.split("*")) for term in text.split("+"))


def _factor(config: Config, text: str, text_hidden: int) -> int:
    if "//" in text:
        dividend, divisor = (_factor(config, part, text_hidden) for part in text.split("//"))
        return dividend // divisor
    key = _present(config, text)
    return text_hidden if key == "text" else int(key) if key.isdecimal() else config.count(key)


def _present(config: Config, keys: str) -> str:
    """The first of several keys that the config has, else the last of them."""
    *others, last = keys.split("|")
    return next((key for key in others if config.get(key) is not None), last)


def tower_tensors(vision: VisionSpec) -> Iterator[Parameter]:
    """Every tensor of a vision tower and of what joins it to the language model."""
    tower, sizes = TOWERS[vision.tower], Sizes(vision.sizes, vision.sizes)
    conditions = frozenset(vision.conditions)

    def tensors(table: Sequence[str]) -> list[Parameter]:
        return list_tensors("\n".join(table), sizes, conditions)

    yield from tensors(tower.before)
    layer = tensors(tower.layer)
    for index in range(vision.num_layers):
        yield from with_prefix(f"{tower.prefix}{index}.", layer)
    yield from tensors(tower.after)
    for index in range(vision.num_mergers):
        yield from with_prefix(f"{tower.merger_prefix}{index}.", tensors(tower.merger))
