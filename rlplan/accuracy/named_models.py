"""Models by the names that logs and papers use: quantised checkpoints, older spellings, words such as `1.5B-class`.

In: a point. Out: its ModelSpec and what the checkpoint quantises. Left out: anything that is not in the catalogue, a
file or a config given with the point: it is refused, never guessed.
"""

import re
from collections.abc import Iterator

from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.registry import CannotPredict
from rlplan.errors import SpecError
from rlplan.memory.quantization import Quantization
from rlplan.memory.quantized_checkpoints import (
    quantization_by_name,
    quantization_by_word,
    quantization_of_spec,
    unquantized_name,
)
from rlplan.spec.base import shorten
from rlplan.spec.model import ModelSpec, model_from_config
from rlplan.spec.models.catalogue import find_model, load_catalogue

_TAILS = re.compile(r"-(class|instruct|chat|it|hf|base|pt|v\d(\.\d)?|\d{4})$")
QUANTIZATION_KEYS = ("quantization", "quant", "weights", "precision")
"""Settings that name a format of weights."""


def model_of(point: MeasuredPoint) -> ModelSpec:
    """The model of a point: its `config` setting where it has one, else by name. Raises: CannotPredict, SpecError."""
    config = point.settings.get("config")
    if isinstance(config, dict):
        return model_from_config(config, where=f"{point.id}: config")
    if not point.model:
        raise CannotPredict("the model is not named")
    return model_by_name(point.model)


def model_by_name(name: str) -> ModelSpec:
    """The bundled model that a name means: exactly, without its quantisation, or one with the same shape.

    >>> [model_by_name(name).num_layers for name in ("Qwen/Qwen3-32B-FP8", "Qwen2.5-1.5B-class")]
    [64, 28]
    """
    if len(name) > 200:
        raise CannotPredict(f"model {shorten(name)} is not in the catalogue")
    known = load_catalogue()
    if name in known:
        return find_model(name)
    by_last = {known_name.lower().rpartition("/")[2]: known_name for known_name in reversed(known)}
    for wanted in _spellings(unquantized_name(name).lower().rpartition("/")[2]):
        if wanted in by_last:
            return find_model(by_last[wanted])
    raise CannotPredict(f"model {shorten(name)} is not in the catalogue; give its config.json as the setting `config`")


def _spellings(last: str) -> Iterator[str]:
    """Names to try, nearest first: as it is, without its tail, with the tails of siblings of the same shape."""
    names = [last]
    while (shorter := _TAILS.sub("", names[-1])) != names[-1]:
        names.append(shorter)
    for name in names:
        for spelling in (name, name.removeprefix("meta-"), f"meta-{name}"):
            yield spelling
            yield from (f"{spelling}-{tail}" for tail in ("instruct", "hf", "it", "base", "v0.1"))


def quantization_of(point: MeasuredPoint) -> Quantization | None:
    """What a point's weights are: by config, the checkpoint's name, then a setting's word. Raises: CannotPredict."""
    if isinstance(point.settings.get("config"), dict):
        spec = model_of(point).quantization
        return quantization_of_spec(spec, where=f"{point.id}: config") if spec else None
    named = quantization_by_name(point.model or "")
    if named is not None:
        return named
    for key in QUANTIZATION_KEYS:
        word = point.settings.get(key)
        if isinstance(word, str) and word:
            try:
                return quantization_by_word(word, where=f"{point.id}: {key}")
            except SpecError as error:
                raise CannotPredict(f"{error.what}: {error.rule}") from None
    return None
