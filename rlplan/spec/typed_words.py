"""Words of typed questions: expressions, the tables of typed.json, frameworks, algorithms, keys of a job.

In: words. Out: what each means. Left out: sentences (typed.py).
"""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from rlplan.frameworks.profile import NAMES
from rlplan.spec.algorithms import ALGORITHMS
from rlplan.spec.base import read_json

HOW_MANY = re.compile(
    r"\b(?:how many|how much (?:gpu )?(?:v?ram|memory)|"
    r"(?:v?ram|memory|gpus?|hardware) (?:\w+ )?(?:need(?:ed)?|required?|requirements?)"
    r"|(?:fewest|least|minimum|min)(?: number of)?(?= gpus?\b))"
)
"""Questions for the number of GPUs."""
CHEAPEST = re.compile(r"\b(?:cheap(?:est)?|budget|dollars|(?:which|what|best) (?:gpus?|hardware|cluster))\b|\$")
"""Questions for the kind of GPUs, which `compare` answers."""
WHICH_MODEL = re.compile(
    r"\b(?:how (?:big|large)|(?:biggest|largest|max(?:imum)?|best|what|which)(?: size)?) "
    r"(?:\w+ ){0,3}?(?:models?|llms?)\b"
)
"""Questions for the model, which `solve model` answers."""
_MODEL_WORDS = r"(\S+(?:\s\d[\d.]*b\b)?)"
ROLES = (
    (re.compile(rf"\bteacher(?: model)?(?: is|:|=)?\s+{_MODEL_WORDS}"), "teacher"),
    (re.compile(rf"\bdistill?(?:ing)?\s+(?:from )?{_MODEL_WORDS} (?:in)?to\b"), "teacher"),
    (re.compile(rf"\bwith (?:an? |the )?{_MODEL_WORDS} (?:reward model|rm)\b"), "reward"),
)
"""Models beside the policy."""
_PART = r"(?<!\S)(\d+)\s*(?:gpus?\s*)?(?:for\s+)?{}\b(?:\s*gpus?\b)?"
_TRAINS, _GENERATES = _PART.format(r"train\w*"), _PART.format(r"(?:rollouts?|generat\w+|inference)")
SPLIT = re.compile(rf"{_TRAINS}\W+(?:and\s+)?{_GENERATES}|{_GENERATES}\W+(?:and\s+)?{_TRAINS}")
"""GPUs that train and others that generate: `6 train 2 rollout`."""
LONGEST = re.compile(
    r"\b(?:max(?:imum)?|longest|largest|biggest)\s(context|response|batch)\b(?:\s(?:size|length|len|window))?"
    r"(?!\s*(?:of|is|=|:|up to)?\s*\d)"
)
"""Questions for the largest value of a key, which `solve` answers."""
MONEY = re.compile(
    r"(?:\$\s?\d[\d,.]*k?|\b\d[\d,.]*k?\s*(?:dollars?|usd|bucks))(?:\s*(?:/|per|an)\s*h\w*)?|\b\d+\s*/\s*h\w*"
)
POOLS = re.compile(r"\b(train\w*|learner)\b|\b(rollouts?|generat\w+|infer\w*|vllm|engines?)\b")
VERSUS = re.compile(r"\s*(?:;|\b(?:vs\.?|versus|or|on|and|compare[d]?(?: to)?)\b)\s*")
COST = re.compile(r"\b(?:costs?|price[sd]?|dollars?|usd|bucks|expensive)\b|\$")
"""Questions for dollars."""


@cache
def load_words() -> dict[str, Any]:
    """The tables of typed.json."""
    data: dict[str, Any] = read_json(Path(__file__).with_name("typed.json"), "the words")
    return data


@cache
def list_frameworks() -> dict[str, str]:
    """Frameworks by every spelling: `prime-rl`, `prime rl`, `primerl`."""
    names = [name for name in NAMES if name not in ("vllm", "deepspeed")]
    spelt = {name.replace("_", sign): name.replace("_", "-") for name in names for sign in ("_", "-", " ", "")}
    return {**load_words()["frameworks"], **spelt}


def read_algorithm(name: str) -> str:
    """The algorithm of a name in any spelling; an unknown name unchanged, for the job to refuse.

    >>> read_algorithm("GRPO"), read_algorithm("Dr. GRPO"), read_algorithm("fine-tuning")
    ('grpo', 'dr_grpo', 'sft')
    """
    low = " ".join(name.lower().split())
    spelt = {known.replace("_", " "): known for known in ALGORITHMS}
    return load_words()["algorithms"].get(low) or spelt.get(re.sub(r"[-_\s]+", " ", low), name)


def is_key(word: str) -> bool:
    """Whether a word is a key of a job, dotted or short: `rollout.tp`, `lora_r`, `tp`."""
    return word in load_words()["keys"] or word in list_keys() or bool(find_leaf(word))


def find_leaf(word: str) -> str:
    """The only dotted key that ends with a word; empty if there are none or several."""
    return list_leaves().get(word, "")


@cache
def list_leaves() -> dict[str, str]:
    """Dotted keys by their last words, without words of several keys."""
    leaves: dict[str, list[str]] = {}
    for key in sorted(list_keys()):
        if not key.startswith(("scoring.", "roles.")):
            leaves.setdefault(key.rpartition(".")[2], []).append(key)
    return {leaf: keys[0] for leaf, keys in leaves.items() if len(keys) == 1}


@cache
def list_keys() -> frozenset[str]:
    from rlplan.spec.files.job_schema import job_keys

    return frozenset(job_keys())


@cache
def compile_numbers() -> list[tuple[re.Pattern[str], str]]:
    """Expressions of numbers with what they count, as a short key."""

    def expand(pattern: str) -> str:
        for name, part in load_words()["fragments"].items():
            pattern = pattern.replace(f"<{name}>", part)
        return expand(pattern) if re.search(r"(?<!\()<[A-Z]+>", pattern) else pattern

    return [(re.compile(rf"(?<![\w.-]){expand(pattern)}(?!\w)"), key) for pattern, key in load_words()["numbers"]]


def search_names(names: Iterable[str], text: str, after: str = "") -> re.Match[str] | None:
    """The first of some names in a text, the longest where several begin at one place."""
    words = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.search(rf"(?<![\w-])(?:{words}){after}(?![\w+-])", text)
