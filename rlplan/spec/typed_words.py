"""Words of typed questions: the tables of typed.json, names of frameworks and algorithms, keys of a job.

In: words. Out: what each means. Left out: sentences (typed.py).
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

from rlplan.frameworks.profile import NAMES
from rlplan.spec.algorithms import ALGORITHMS
from rlplan.spec.base import read_json


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
