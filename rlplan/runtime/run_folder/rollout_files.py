"""Rollout files: the rollouts of each step as Parquet, one row per rollout, in `rollouts/step-NNNNNN.parquet`.

A thread writes a step's file while the step trains; the driver waits for it before it commits the step's checkpoint.
So a checkpoint has the files of all its steps, and a resumed run writes later ones again. A file gets its name when it
is complete: a killed run leaves a whole file or none.

In: rollouts with rewards and advantages. Out: Parquet files; the oldest are deleted above the job's limit.
Left out: reading and choosing rollouts (reading_rollouts.py).
"""

import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from rlplan.runtime.rollout.experience import Completion, Rollout
from rlplan.runtime.run_folder.disk_errors import writing_file
from rlplan.spec.parts.conduct import MetricsSpec
from rlplan.vocabulary import Role

FOLDER = "rollouts"
REWARD_COLUMN = "reward/"
"""Beginning of the columns with one unweighted reward each; null where the reward left the rollout out."""
SCORE_COLUMNS = {Role.POLICY: "trainer_logprobs", Role.VALUE: "values"}
"""Columns of per-token scores by role; those of other roles have the role's name before `_logprobs`."""
POLICY, ENVIRONMENT = "policy", "environment"
"""Who wrote a turn."""
PER_TOKEN = ("prompt_tokens", "tokens", "versions", "logprobs", "advantages", *SCORE_COLUMNS.values())
"""Columns with a value per token, besides other roles' log-probs."""
ROWS_PER_GROUP = 256
"""Rows that a reader has to hold at once."""
_NAME = re.compile(r"step-(\d{6,9})\.parquet")

Decode = Callable[[Sequence[int]], str]


def list_step_files(run_folder: Path) -> dict[int, Path]:
    """Complete files of a run folder by step, in the order of the steps."""
    matches = [(_NAME.fullmatch(path.name), path) for path in (run_folder / FOLDER).glob("step-*.parquet")]
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


class RolloutFiles:
    """Writer of one run folder's rollouts. `settle` must follow each `begin`."""

    def __init__(self, run_folder: Path) -> None:
        self.run_folder = run_folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout-files")
        self._writing: Future[None] | None = None

    def begin(self, step: int, rollouts: Sequence[Rollout], settings: MetricsSpec, decode: Decode) -> None:
        """Start to write a step's rollouts. decode: text of tokens, for the turns of multi-turn rollouts."""
        self.settle()
        if settings.max_rollout_bytes:
            chosen = rollouts[: settings.max_rollouts_per_step]
            self._writing = self._thread.submit(self._write, step, chosen, settings.max_rollout_bytes, decode)

    def settle(self) -> None:
        """Wait until the file is written. Raises: RunError for a disk error."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def truncate_after(self, step: int) -> None:
        """Delete the files of later steps, and what a killed run left of a file."""
        self.settle()
        later = [path for number, path in list_step_files(self.run_folder).items() if number > step]
        for path in (*later, *(self.run_folder / FOLDER).glob("*.partial")):
            path.unlink()

    def close(self) -> None:
        """Wait for the last file; an error of it has been reported, or another one ends the run."""
        with suppress(Exception):
            self.settle()
        self._thread.shutdown()

    def _write(self, step: int, rollouts: Sequence[Rollout], max_bytes: int, decode: Decode) -> None:
        import pyarrow as pa
        import pyarrow.parquet

        pa.set_memory_pool(pa.system_memory_pool())  # the other pools keep what they have freed
        path = self.run_folder / FOLDER / f"step-{step:06d}.parquet"
        partial = path.with_suffix(".partial")
        with writing_file(path):
            path.parent.mkdir(exist_ok=True)
            try:
                with partial.open("wb") as file:
                    table = pa.table(make_columns(step, rollouts, decode))
                    pa.parquet.write_table(table, file, compression="zstd", row_group_size=ROWS_PER_GROUP)
                partial.replace(path)
            except OSError:
                with suppress(OSError):
                    partial.unlink()
                raise
            _delete_oldest(self.run_folder, max_bytes)


def _delete_oldest(run_folder: Path, max_bytes: int) -> None:
    """Delete the files of the oldest steps until the others take at most `max_bytes`; the newest always stays."""
    files = [*list_step_files(run_folder).values()]
    total = sum(path.stat().st_size for path in files)
    for path in files[:-1]:
        if total <= max_bytes:
            return
        total -= path.stat().st_size
        path.unlink()


def make_columns(step: int, rollouts: Sequence[Rollout], decode: Decode) -> dict[str, Any]:
    """Arrow arrays by column, with one value per rollout.

    They are built from buffers, because Arrow imports pandas to convert a Python list: 0.3 s and 50 MiB.
    """
    completions = [rollout.completion for rollout in rollouts]
    columns = {
        "step": _make_numbers([step] * len(rollouts), "i"),
        "id": _make_texts(rollout.id for rollout in rollouts),
        "prompt_id": _make_texts(rollout.prompt.id for rollout in rollouts),
        "source": _make_texts(rollout.prompt.source for rollout in rollouts),
        "group": _make_numbers([rollout.group for rollout in rollouts], "i"),
        "prompt": _make_texts(rollout.prompt.text for rollout in rollouts),
        "truth": _make_texts(rollout.prompt.answer for rollout in rollouts),
        "text": _make_texts(rollout.text or decode(rollout.completion.chosen) for rollout in rollouts),
        "turns": _make_turns([_list_turns(completion, decode) for completion in completions]),
        "reward": _make_numbers([rollout.reward for rollout in rollouts], "d"),
        "advantage": _make_numbers([rollout.advantage for rollout in rollouts], "d"),
        "num_turns": _make_numbers([completion.num_turns for completion in completions], "i"),
        "num_tokens": _make_numbers([len(completion.tokens) for completion in completions], "i"),
        "version": _make_numbers([_find_oldest_version(completion) for completion in completions], "i"),
        "stop_reason": _make_texts(completion.ended or completion.finish_reason for completion in completions),
        "is_truncated": _make_flags([completion.finish_reason == "length" for completion in completions]),
        "failure": _make_texts(rollout.failure for rollout in rollouts),
        "num_learned": _make_numbers([rollout.num_learned for rollout in rollouts], "i"),
        "prompt_tokens": _make_lists([rollout.prompt.tokens for rollout in rollouts], "i"),
        "tokens": _make_lists([completion.tokens for completion in completions], "i"),
        "versions": _make_lists([_list_versions(completion) for completion in completions], "i"),
        "logprobs": _make_lists([completion.logprobs for completion in completions], "f"),
        "advantages": _make_lists([rollout.advantages for rollout in rollouts], "f"),
    }
    for name in dict.fromkeys(name for rollout in rollouts for name in rollout.rewards):
        columns[REWARD_COLUMN + name] = _make_numbers([rollout.rewards.get(name) for rollout in rollouts], "d")
    for role in dict.fromkeys(role for rollout in rollouts for role in rollout.scores if role != Role.REWARD):
        scores = [rollout.scores.get(role, ()) for rollout in rollouts]
        columns[SCORE_COLUMNS.get(Role(role), f"{role}_logprobs")] = _make_lists(scores, "f")
    return columns


def _list_turns(completion: Completion, decode: Decode) -> list[tuple[str, str]]:
    """(who wrote it, text) of each turn, in order; empty for a response of one turn."""
    turns, start = list[tuple[str, str]](), 0
    for observed_start, observed_end in completion.observed:
        turns += [(POLICY, decode(completion.tokens[start:observed_start]))] * (start < observed_start)
        turns.append((ENVIRONMENT, decode(completion.tokens[observed_start:observed_end])))
        start = observed_end
    if turns and start < len(completion.tokens):
        turns.append((POLICY, decode(completion.tokens[start:])))
    return turns


def _list_versions(completion: Completion) -> list[int]:
    """The policy version of each token, [R]; empty for answers of the data set."""
    return [span.version for span in completion.spans for _ in range(span.start, span.end)]


def _find_oldest_version(completion: Completion) -> int | None:
    return min((span.version for span in completion.spans), default=None)


def _make_numbers(values: Sequence[float | None], code: str) -> Any:
    """A column of numbers. code: the type's code in `array`; None becomes null."""
    import pyarrow as pa

    numbers = array(code, (0 if value is None else value for value in values))
    kind = {"i": pa.int32(), "f": pa.float32(), "d": pa.float64()}[code]
    validity = _make_bits([value is not None for value in values]) if None in values else None
    return pa.Array.from_buffers(kind, len(numbers), [validity, pa.py_buffer(numbers)])


def _make_flags(values: Sequence[bool]) -> Any:
    import pyarrow as pa

    return pa.Array.from_buffers(pa.bool_(), len(values), [None, _make_bits(values)])


def _make_bits(values: Sequence[bool]) -> Any:
    """A buffer with one bit per value, the lowest bit first."""
    import pyarrow as pa

    digits = "".join("01"[value] for value in reversed(values))
    return pa.py_buffer(int(digits or "0", 2).to_bytes(len(values) // 8 + 1, "little"))


def _make_texts(texts: Iterable[str]) -> Any:
    """A column of texts. A character that UTF-8 lacks, half of a surrogate pair, becomes a question mark."""
    import pyarrow as pa

    encoded = [text.encode("utf-8", "replace") for text in texts]
    buffers = [None, pa.py_buffer(_make_offsets(encoded)), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers)


def _make_lists(lists: Sequence[Sequence[float]], code: str) -> Any:
    """A column of lists of numbers."""
    import pyarrow as pa

    offsets = _make_numbers(_make_offsets(lists), "i")
    return pa.ListArray.from_arrays(offsets, _make_numbers([*chain.from_iterable(lists)], code))


def _make_turns(turns: Sequence[Sequence[tuple[str, str]]]) -> Any:
    """A column of lists of {role, text}."""
    import pyarrow as pa

    roles, texts = zip(*chain.from_iterable(turns), strict=True) if any(turns) else ((), ())
    values = pa.StructArray.from_arrays([_make_texts(roles), _make_texts(texts)], names=["role", "text"])
    return pa.ListArray.from_arrays(_make_numbers(_make_offsets(turns), "i"), values)


def _make_offsets(parts: Sequence[Any]) -> "array[int]":
    return array("i", accumulate(map(len, parts), initial=0))
