"""Hints for foreign words in a job file: `critic.optim.lr` is answered with rlplan's key.

The hints come from the same rows that import reads. In: a refused key, or a refused value of a key. Out: the refusal
with a way out in rlplan's keys. Left out: misspelt keys (spec/base.py).
"""

import difflib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from rlplan.errors import MisspeltError, SpecError, did_you_mean
from rlplan.foreign.convert import SHARES
from rlplan.foreign.table import SOURCES, WITH_EXPORTS, Row, Table, get_table_name, load_identity, load_table
from rlplan.frameworks.rules import format_value
from rlplan.spec.files.job_schema import job_keys
from rlplan.spec.files.yaml import read_yaml
from rlplan.spec.job import JobSpec
from rlplan.spec.typed_words import list_leaves, load_words

SHARED = (
    *("num_gpus", "num_nodes", "nodes", "train", "train_file", "train_data", "dataset", "train_files", "val"),
    *("val_file", "val_files", "test_file", "eval_file", "validation", "max_steps", "total_steps", "max_tokens"),
    *("group_size", "evaluate", "eval_steps", "eval_every", "deepspeed", "offload", "save_steps", "save_every"),
)
"""Words whose keys are the same in a job file and in a question (spec/typed.json)."""
NEAR = 0.78
"""Least similarity of a misspelt key."""
MAX_MEANT = 3
"""Keys that one hint may list."""


@cache
def _read_common() -> dict[str, str]:
    """Words that no stack's table has, and rlplan's keys for them."""
    words: dict[str, str] = read_yaml(Path(__file__).with_suffix(".yaml"), "common words")
    keys = load_words()["keys"]
    return {word: keys[word] for word in SHARED} | words


class _Hint(NamedTuple):
    """A hint from one table row; the smallest one is shown."""

    distance: int
    """How loosely the row matches the refused word; 0 for the full key."""
    is_only_read: bool
    """Whether the stack has no export."""
    others: int
    """Other keys that the row asks for."""
    rank: tuple[bool, str, int]
    """Whether the table is not the stack's main one; rlplan's key; place of the stack among `WITH_EXPORTS`."""
    text: str
    """The way out."""


def add_hint(error: MisspeltError) -> SpecError:
    """The refusal with rlplan's key in its way out, where a stack has the refused word."""
    key = error.key.replace("-", "_")
    nearest = min(_find_hints(key, error.word), default=None)
    way_out = _find_misplaced(key, error.value_text) if error.word is None else ""
    if error.word is None and not way_out and key in ("model", "gpus", "gpu"):
        way_out = f"write {load_words()['keys'][key]}{error.value_text} for {key}"
    if error.word is None and not way_out and (nearest is None or nearest.distance):
        words = _read_common()
        common = words.get(key.rpartition(".")[2]) or (not nearest and words.get(key.partition(".")[0]))
        way_out = f"write {common}" if common else ""
    if not way_out and nearest is None and error.word is None and "Did you mean" not in error.rule:
        way_out = _find_nearest(key, error.value_text)
    if not way_out and nearest is None:
        return error
    return SpecError(
        error.what, where=error.where, rule=error.rule, way_out=way_out or (nearest.text if nearest else "")
    )


def _find_nearest(key: str, assignment: str) -> str:
    """The way out for a misspelt key: the nearest dotted key, part or short word; empty if none is near."""
    for words in ({**dict.fromkeys((*job_keys(), *JobSpec.model_fields)), **load_words()["keys"]}, list_leaves()):
        if near := difflib.get_close_matches(key, words, n=1, cutoff=NEAR):
            return f"write {words[near[0]] or near[0]}{assignment} for {key}"
    return ""


def _find_misplaced(key: str, assignment: str) -> str:
    """The way out for a word of another part of a job: keys that end with it, or begin with it in its part.

    A key in a misspelt part is looked up in the part that is meant.
    """
    part, _, word = key.rpartition(".")
    if part and key in _read_common():
        return f"write {_read_common()[key]}"
    if part and part.partition(".")[0] not in JobSpec.model_fields:
        root, _, rest = key.partition(".")
        near = re.search(r"'(\w+)'", did_you_mean(root, JobSpec.model_fields))
        return f"write {near[1]}.{rest}{assignment} for {key}" if near and f"{near[1]}.{rest}" in job_keys() else ""
    keys = [candidate for candidate in job_keys() if candidate.rpartition(".")[2] == word]
    keys = [
        candidate for candidate in keys if not candidate.startswith(("scoring.", "roles."))
    ] or keys  # sizes of one role are rare
    stem = key.removesuffix("s")  # workload.num_prompt, and num_prompts_per_step
    keys = keys or [name for name in job_keys() if part and name.startswith((f"{stem}_", f"{stem}s_"))]
    return f"write {' or '.join(candidate + assignment for candidate in keys)}" if 0 < len(keys) <= MAX_MEANT else ""


def _find_hints(key: str, word: str | None) -> Iterator[_Hint]:
    for name in SOURCES:
        if load_identity(name).framework_name:
            continue
        table = load_table(name)
        stack = get_table_name(table.title)
        place = WITH_EXPORTS.index(stack) if stack in WITH_EXPORTS else len(WITH_EXPORTS)
        for ours, alternatives in table.rows.items():
            for distance, others, text in _find_row_hints(table, ours, alternatives, key, word):
                yield _Hint(distance, stack not in WITH_EXPORTS, others, (name != stack, ours, place), text)


def _find_row_hints(
    table: Table, ours: str, alternatives: tuple[Row, ...], key: str, word: str | None
) -> Iterator[tuple[int, int, str]]:
    """Distance, other keys and text of the hints for one of rlplan's keys."""
    for row in alternatives:
        if row.is_only_read:
            continue  # another row has the same key with its full meaning
        if word is None:
            yield from _find_key_hints(table, ours, row, key)
        elif ours == key and row.map is not None and word in row.map:
            yield 0, 0, f"write {ours}={format_value(row.map[word])} for {row.key}={word} of {table.title}"


def _find_key_hints(table: Table, ours: str, row: Row, key: str) -> Iterator[tuple[int, int, str]]:
    """Distance, other keys and text of the hints of a row for a key, matched in full or by its last words."""
    part, _, rest = key.rpartition(".")
    elsewhere = 2 * bool(part and not ours.startswith(f"{part}."))
    bounds = {key for term in (*row.least, *row.most) for key in term.split(" ")[::2]}
    others = len([key for key in row.keys if key not in bounds]) + len(row.when)
    text = f"write {ours} for {row.key} of {table.title}"
    text += "".join(f", times {factor}" for factor in row.times) + "".join(f", over {factor}" for factor in row.over)
    text += "".join(f", less {term}" for term in row.minus)
    if row.convert in SHARES:
        text += ", in bytes of KV cache (such as 20GiB), or auto"
    elif row.map:
        text += " (" + ", ".join(f"{theirs} is {format_value(value)}" for theirs, value in row.map.items()) + ")"
    if row.key in (key, rest):
        yield elsewhere, others, text
    elif row.key.rpartition(".")[2] == rest and (not part or part in JobSpec.model_fields or part in table.roots):
        yield 1 + elsewhere, others, text
    elif row.map is not None and key in row.map:
        yield 4, others, f"write {ours}={format_value(row.map[key])} for {row.key}={key} of {table.title}"
    elif key in row.when:
        yield 5, others, f"write {ours}: {key} of {table.title} goes with it"
    elif key.partition(".")[0] in table.roots and "." in key:
        yield 6, others, f"a configuration of {table.title} is read by `rlplan import FILE --hardware 8xH100`"
