"""The bundled models by hub id, and names of models as people type them.

Configs are in `rlplan/spec/architectures/*.json`, which have the relevant keys of each `config.json`, the published
number of parameters against which tests check them, and their source.

In: `qwen3 8b`, `llama-70b`, `unsloth/Qwen3-8B-bnb-4bit`, `Qwen3-30B`. Out: the bundled id, other candidates, how the
name was read. Left out: downloads (runtime/models/hub.py), folders (catalogue.py).

A name is split into words and sizes. A bundled model is a candidate if it has all of them. Among the candidates, those
with the fewest further words come first, then the newest version.
"""

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import log2
from pathlib import Path
from typing import Any

from rlplan.spec.base import Spec

MOST_NAMED = 5
"""Most words of a model's name within a sentence."""
FOLDER = Path(__file__).resolve().parent.parent / "architectures"


class CatalogueEntry(Spec):
    """A bundled model."""

    id: str
    """Hub id of the model."""
    num_parameters: int
    """Published number of parameters, which the config must give."""
    source: str
    """Origin of the config."""
    like: str | None = None
    """Model whose config this one extends."""
    config: dict[str, Any]
    """Contents of config.json, including those of `like`."""


@cache
def load_catalogue() -> dict[str, CatalogueEntry]:
    """Every bundled model by id.

    >>> len(load_catalogue()) >= 60
    True
    """
    raw: dict[str, dict[str, Any]] = {}
    for path in sorted(FOLDER.glob("*.json")):
        data = json.loads(path.read_text("utf-8"))
        for model in data["models"]:
            assert model["id"] not in raw, f"{model['id']} occurs twice in the catalogue"
            raw[model["id"]] = model | {"source": data["sources"][model["source"]]}
    return {name: CatalogueEntry(**model | {"config": _merge_base(raw, name)}) for name, model in raw.items()}


def _merge_base(raw: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    model = raw[name]
    base = _merge_base(raw, model["like"]) if "like" in model else {}
    return {**base, **model["config"]}


_TOKENS = re.compile(r"a\d+(?:\.\d+)?b(?![a-z])|\d+x\d+b|\d+(?:\.\d+)?[bmt](?![a-z])|\d+(?:\.\d+)?|[a-z]+")
_SIZE = re.compile(r"(?:\d+x)?\d+(?:\.\d+)?[bmt]|a\d+(?:\.\d+)?b")
_PACKED = re.compile(
    r"(?i)[-_. ](?:bnb[-_]?4bit|unsloth[-_]bnb[-_]4bit|gptq(?:[-_]int\d)?|awq(?:[-_]int\d)?|gguf|fp8(?:[-_]dynamic)?|"
    r"[48]-?bits?|int[48]|nf4|w4a16|w8a8|q\d_k(?:_[sml])?|nvfp4|mxfp4|mlx|hqq|exl2|bf16|fp16)(?=[-_. ]|$)"
)
"""Words for quantized or converted weights."""
_BILLION = re.compile(r"(?i)(\d)[\s-]*([bm])(?:illion)?\b")
WEIGHTLESS = frozenset(["it", "instruct", "base", "hf", "chat", "meta", "pt", "v", "the", "model", "ai"])
"""Words that choose among variants of one shape."""
ALIASES = {"lama": "llama", "r1": "r 1", "quen": "qwen", "gwen": "qwen", "mixtral": "mixtral", "gptoss": "gpt oss"}
UNUSUAL = ("mosaicml/", "megatron-paper/", "nvidia/Nemotron-H")
"""Models for benchmarks: candidates only if a word of their name is typed."""
FAMILIES = ("qwen", "llama", "mistral", "gemma", "phi", "deepseek", "glm", "gpt")
"""Order of families for a name with only a size. Assumed; the chosen model is printed with the answer."""
MOST_CANDIDATES = 4
NEAR = 0.75
"""Least similarity of a misspelt word."""


@dataclass(frozen=True)
class ModelName:
    """A typed name and the bundled model that it means."""

    id: str
    """Bundled id; empty if there is none."""
    others: tuple[str, ...] = ()
    """Other candidates, the likeliest first."""
    packed: str = ""
    """Format of quantized weights in the name, such as `bnb-4bit`."""
    is_exact: bool = True
    """Whether the name has no other reading: the id in another case, without its owner, or in another owner's copy."""
    ignored: tuple[str, ...] = ()
    """Words that no bundled model has."""


def split_model_name(name: str) -> list[str]:
    """Words and sizes of a name.

    >>> split_model_name("Qwen2.5-Coder-7B"), split_model_name("qwen3 30b-a3b"), split_model_name("Mixtral-8x7B")
    (['qwen', '2.5', 'coder', '7b'], ['qwen', '3', '30b', 'a3b'], ['mixtral', '8x7b'])
    """
    return _TOKENS.findall(_BILLION.sub(r"\1\2", name.lower()))


@cache
def _load_words() -> dict[str, tuple[str, ...]]:
    return {known: tuple(split_model_name(known.rpartition("/")[2])) for known in load_catalogue()}


@cache
def list_words() -> frozenset[str]:
    """Every word of a bundled model's name."""
    return frozenset(word for words in _load_words().values() for word in words)


def has_family(words: Iterable[str], *, or_size: bool = False) -> bool:
    """Whether words have the name of a family of models. or_size: or a size.

    >>> has_family(["4", "epochs"]), has_family(["llama"]), has_family(["70b"]), has_family(["70b"], or_size=True)
    (False, True, False, True)
    """
    parts = [part for word in words for part in split_model_name(word)]
    names = list_words() - WEIGHTLESS
    return any((part.isalpha() and part in names) or (or_size and _SIZE.fullmatch(part)) for part in parts)


def match_model(name: str) -> ModelName:
    """The bundled model of a name, and other candidates.

    >>> match_model("qwen3-8b").id, match_model("llama 70b").id, match_model("unsloth/Qwen3-8B-bnb-4bit").id
    ('Qwen/Qwen3-8B', 'meta-llama/Llama-3.3-70B-Instruct', 'Qwen/Qwen3-8B')
    """
    catalogue = load_catalogue()
    if name in catalogue:
        return ModelName(name)
    name = _BILLION.sub(r"\1\2", name)
    packed = _PACKED.search(name)
    plain = _PACKED.sub("", name.strip().rstrip("/")) if packed else name.strip().rstrip("/")
    form = packed[0].strip("-_. ").lower() if packed else ""
    low = plain.lower().replace(" ", "-")
    squashed = re.sub(r"[^a-z0-9.]", "", low.rpartition("/")[2])
    for known in catalogue:
        if known.lower() == low or re.sub(r"[^a-z0-9.]", "", known.rpartition("/")[2].lower()) == squashed:
            return ModelName(known, packed=form)
    words, ignored, is_corrected = _read_words(plain.rpartition("/")[2])
    ranked = _rank(words)
    sizes = {load_catalogue()[known].num_parameters for known in ranked}
    is_open = len(sizes) > 1 and not any(_SIZE.fullmatch(word) for word in words)
    is_bare = all(word[0].isdigit() and not _SIZE.fullmatch(word) for word in words)
    is_stranger = (bool(ignored) or is_bare) and not any(word.isalpha() and word not in WEIGHTLESS for word in words)
    if is_stranger and not any(_SIZE.fullmatch(word) for word in words):
        return ModelName("", (), form, is_exact=False, ignored=tuple(ignored))
    if not ranked or is_open or is_stranger:
        near = tuple(ranked[:MOST_CANDIDATES]) if is_open else _find_near(words)
        return ModelName("", near, form, is_exact=False, ignored=tuple(ignored))
    own = _load_words()[ranked[0]]
    is_exact = len(ranked) == 1 and {*own} - WEIGHTLESS == {*words} - WEIGHTLESS and {*words} <= {*own}
    return ModelName(ranked[0], tuple(ranked[1:MOST_CANDIDATES]), form, is_exact and not is_corrected, tuple(ignored))


def _read_words(name: str) -> tuple[list[str], list[str], bool]:
    """(words of bundled names, words that none has, whether a misspelt word was corrected)."""
    known, words, ignored, is_corrected = list_words(), list[str](), list[str](), False
    for word in split_model_name(name):
        near = difflib.get_close_matches(word, known, n=1, cutoff=NEAR) if len(word) > 3 and word.isalpha() else []
        if word in known or _SIZE.fullmatch(word):
            words.append(word)
        elif instead := ALIASES.get(word) or next(iter(near), ""):
            words += instead.split()
            is_corrected = True
        else:
            ignored.append(word)
    return words, ignored, is_corrected


def _rank(words: list[str]) -> list[str]:
    """Bundled ids that have all words but WEIGHTLESS ones, the likeliest first."""
    typed, has_family = set(words), any(word.isalpha() and word not in WEIGHTLESS for word in words)
    if not typed - WEIGHTLESS:
        return []

    def order(known: str) -> tuple[float | int | str, ...]:
        own = _load_words()[known]
        further = [word for word in own if word not in typed]
        heavy = [word for word in further if word not in WEIGHTLESS]
        numbers = [float(word) for word in own if re.fullmatch(r"\d{1,2}(?:\.\d+)?", word)]
        family = next((place for place, name in enumerate(FAMILIES) if own[0].startswith(name)), len(FAMILIES))
        missing = len(typed - {*own})
        return (0 if has_family else family, len(heavy), missing, -max(numbers, default=0.0), len(further), known)

    candidates = [known for known, own in _load_words().items() if typed - WEIGHTLESS <= {*own}]
    usual = [known for known in candidates if has_family or not known.startswith(UNUSUAL)]
    return sorted(usual, key=order)


def has_size(name: str, known: str) -> bool:
    """Whether a bundled model has the sizes of a typed name.

    >>> has_size("falcon 40b", "tiiuae/falcon-7b"), has_size("mixtral", "mistralai/Mixtral-8x7B-v0.1")
    (False, True)
    """
    return {word for word in split_model_name(name) if _SIZE.fullmatch(word)} <= {*_load_words().get(known, ())}


def _find_near(words: list[str]) -> tuple[str, ...]:
    """Candidates for words that no model has together: the same family in the nearest size, or the same size."""
    typed = set(words)
    inner = [known for known, own in _load_words().items() if {*own} <= typed and len({*own} - WEIGHTLESS) > 1]
    if inner:  # the base of a fine-tuned model: Hermes-3-Llama-3.1-8B
        return tuple(sorted(inner, key=lambda known: -len(_load_words()[known]))[:MOST_CANDIDATES])
    sizes = [word for word in words if _SIZE.fullmatch(word)]
    family = [word for word in words if word not in sizes and word not in WEIGHTLESS]
    wanted = _count_parameters(sizes[0]) if sizes else 0.0
    while family:
        ranked = sorted(_rank(family), key=lambda known: _compare_sizes(known, wanted) if sizes else 0)
        if ranked and (not sizes or _compare_sizes(ranked[0], wanted) == 0):
            return tuple(ranked[:MOST_CANDIDATES])
        # another version in the same size is nearer than another size of the same version
        of_size = _rank([word for word in family if not word[0].isdigit()] + sizes) if sizes else []
        if of_size or ranked:
            return tuple((of_size or ranked)[:MOST_CANDIDATES])
        family.pop()
    if of_size := _rank(sizes):
        return tuple(of_size[:MOST_CANDIDATES])
    usual = [known for known in load_catalogue() if sizes and not known.startswith(UNUSUAL)]
    usual.sort(key=lambda known: abs(load_catalogue()[known].num_parameters - wanted))
    return tuple(usual[:MOST_CANDIDATES])


def _compare_sizes(known: str, wanted: float) -> int:
    """Distance of a model's size in steps of 40 %: within a step the plainer name comes first."""
    return round(2 * abs(log2(load_catalogue()[known].num_parameters / max(wanted, 1.0))))


def _count_parameters(size: str) -> float:
    """Parameters of a size in a name.

    >>> _count_parameters("8b"), _count_parameters("8x7b"), _count_parameters("a3b")
    (8000000000.0, 56000000000.0, 3000000000.0)
    """
    times, _, number = size.lstrip("a").rpartition("x")
    return float(times or 1) * float(number[:-1]) * {"m": 1e6, "b": 1e9, "t": 1e12}[number[-1]]


def find_inner_name(words: Sequence[str]) -> list[str]:
    """The longest run of words that names one model, if the others name no size and no model; else empty."""
    for length in range(min(len(words) - 1, MOST_NAMED), 0, -1):
        for start in range(len(words) - length + 1):
            inner, outer = list(words[start : start + length]), [*words[:start], *words[start + length :]]
            match = match_model(" ".join(inner))
            if match.id and not match.ignored and has_family(inner) and not has_family(outer, or_size=True):
                return inner
    return []
