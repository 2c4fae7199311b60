"""Vision and audio towers: tables of tensors, and how their configs are read.

In: the `vision_config` or `audio_config` of a multimodal config, and `towers.json`. Out: a VisionSpec, and its tensors.
Left out: image tokens; sharding, as every rank holds a tower whole. vLLM shards its linear layers by default.

A size in `towers.json` is a sum of products. A factor is a number, a key of the config (`a|b`: the first that exists),
a quotient `a//b` of two, or `text`, the width of the language model.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from rlplan.spec.models.config import MAX_LAYERS, Config
from rlplan.spec.models.parts import VisionSpec
from rlplan.spec.models.tensors import Parameter, Sizes, add_prefix, list_tensors


@dataclass(frozen=True)
class Tower:
    """A kind of tower."""

    sizes: Mapping[str, str]
    """Symbols of its tables, each with its config key or expression."""
    layers: str
    """Key of the number of layers."""
    before: Sequence[str]
    """Table of the modules before the layers."""
    layer: Sequence[str]
    """Table of one layer, below `prefix`."""
    prefix: str
    after: Sequence[str]
    """Table of the modules after the layers."""
    mergers: str = ""
    """Key of the layers with an extra merger each."""
    merger: Sequence[str] = ()
    """Table of an extra merger, below `merger_prefix`."""
    merger_prefix: str = ""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Values that other keys must have, because other values are not modelled."""
    switches: Mapping[str, tuple[bool, str]] = field(default_factory=dict)
    """Config booleans with the library's defaults and the conditions that they turn on."""


TOWERS = {
    name: Tower(**entry)
    for name, entry in json.loads(Path(__file__).with_name("towers.json").read_text("utf-8"))["towers"].items()
}


def read_tower(name: str, config: Config, text_hidden: int) -> VisionSpec:
    """The tower of that name, with the config's sizes. Raises: SpecError."""
    tower = TOWERS[name]
    for key, allowed in tower.fixed.items():
        config.refuse_unless(key, allowed)
    switches = ((word, config.read_flag(key, default=default)) for key, (default, word) in tower.switches.items())
    return VisionSpec(
        tower=name,
        sizes={symbol: _size(config, text, text_hidden) for symbol, text in tower.sizes.items()},
        num_layers=config.read_count(_first_present(config, tower.layers), maximum=MAX_LAYERS),
        conditions=tuple(word for word, is_on in switches if is_on),
        num_mergers=len(config.read_indices(tower.mergers)) if tower.mergers else 0,
    )


def _size(config: Config, text: str, text_hidden: int) -> int:
    return sum(prod(_factor(config, factor, text_hidden) for factor in term.split("*")) for term in text.split("+"))


def _factor(config: Config, text: str, text_hidden: int) -> int:
    if "//" in text:
        dividend, divisor = (_factor(config, part, text_hidden) for part in text.split("//"))
        return dividend // divisor
    key = _first_present(config, text)
    return text_hidden if key == "text" else int(key) if key.isdecimal() else config.read_count(key)


def _first_present(config: Config, keys: str) -> str:
    """The first of several keys that the config has, else the last one."""
    *others, last = keys.split("|")
    return next((key for key in others if config.get(key) is not None), last)


def list_tower_tensors(vision: VisionSpec) -> Iterator[Parameter]:
    """Every tensor of a tower, including those that connect it to the language model."""
    tower, sizes = TOWERS[vision.tower], Sizes(vision.sizes, vision.sizes)
    conditions = frozenset(vision.conditions)

    def tensors(table: Sequence[str]) -> list[Parameter]:
        return list_tensors("\n".join(table), sizes, conditions)

    yield from tensors(tower.before)
    layer = tensors(tower.layer)
    for index in range(vision.num_layers):
        yield from add_prefix(f"{tower.prefix}{index}.", layer)
    yield from tensors(tower.after)
    for index in range(vision.num_mergers):
        yield from add_prefix(f"{tower.merger_prefix}{index}.", tensors(tower.merger))
