"""Rollout files: the rollouts of each step as Parquet, one row per rollout, in `rollouts/step-NNNNNN.parquet`.

A thread writes a step's file while the step trains; the driver waits for it before it commits the step's checkpoint.
So a checkpoint has the files of all its steps, and a resumed run writes later ones again. A file gets its name when it
is complete: a killed run leaves a whole file or none.

In: rollouts with rewards and advantages. Out: Parquet files; the oldest are deleted above the job's limit.
Left out: reading and choosing rollouts (reading_rollouts.py).
"""

import io
import json
import re
from array import array
from collections.abc import Callable, Sequence
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
PER_TOKEN = r"(prompt_)?tokens|versions|advantages|values|(\w+_)?logprobs"
"""Regular expression of the columns with a value per token."""
TEXTS = ("id", "prompt_id", "source", "prompt", "truth", "text", "stop_reason", "failure")
"""Columns with texts, which Arrow would otherwise read as times where they look like one."""
POLICY, ENVIRONMENT = "policy", "environment"
"""Who wrote a turn."""
ROWS_PER_GROUP = 256
"""Rows per Parquet row group, which a reader must hold in memory at once."""
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
                    table = _make_table([_describe(rollout, step, decode) for rollout in rollouts], rollouts)
                    pa.parquet.write_table(table, file, compression="zstd", row_group_size=ROWS_PER_GROUP)
                partial.replace(path)
            except OSError:
                with suppress(OSError):
                    partial.unlink()
                raise
            kept = [*list_step_files(self.run_folder).values()]
            sizes = [kept_path.stat().st_size for kept_path in kept]
            for index, oldest in enumerate(kept[:-1]):  # the newest always stays
                if sum(sizes[index:]) > max_bytes:
                    oldest.unlink()


def _describe(rollout: Rollout, step: int, decode: Decode) -> dict[str, Any]:
    """A rollout's columns apart from those with a value per token."""
    prompt, completion = rollout.prompt, rollout.completion
    return {
        "step": step,
        "id": rollout.id,
        "prompt_id": prompt.id,
        "source": prompt.source,
        "group": rollout.group,
        "prompt": prompt.text,
        "truth": prompt.answer,
        "text": rollout.text or decode(completion.chosen),
        "turns": [{"role": role, "text": text} for role, text in _list_turns(completion, decode)],
        "reward": float(rollout.reward),
        **{REWARD_COLUMN + name: float(value) for name, value in rollout.rewards.items()},
        "advantage": float(rollout.advantage),
        "failure": rollout.failure,
        "num_turns": completion.num_turns,
        "num_tokens": len(completion.tokens),
        "num_learned": rollout.num_learned,
        "version": min((span.version for span in completion.spans), default=None),
        "stop_reason": completion.ended or completion.finish_reason,
        "is_truncated": completion.finish_reason == "length",
    }


def _make_table(rows: Sequence[dict[str, Any]], rollouts: Sequence[Rollout]) -> Any:
    """An Arrow table. Arrow reads the rows as JSON, because it imports pandas (50 MiB) to convert Python's lists."""
    import pyarrow as pa
    import pyarrow.json

    turn = pa.struct([("role", pa.string()), ("text", pa.string())])
    schema = [*((name, pa.string()) for name in TEXTS), ("turns", pa.list_(turn)), ("version", pa.int64())]
    # half of a surrogate pair, which UTF-8 lacks, becomes a question mark
    data = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode("utf-8", "replace")
    table = pa.json.read_json(
        io.BytesIO(data),
        # one block, because Arrow refuses a row that is larger than a block (1 MiB by default)
        read_options=pa.json.ReadOptions(use_threads=False, block_size=len(data) + 1),
        parse_options=pa.json.ParseOptions(explicit_schema=pa.schema(schema)),
    )
    completions = [rollout.completion for rollout in rollouts]
    columns: dict[str, tuple[str, Sequence[Sequence[float]]]] = {
        "prompt_tokens": ("i", [rollout.prompt.tokens for rollout in rollouts]),
        "tokens": ("i", [completion.tokens for completion in completions]),
        "versions": ("i", [_list_versions(completion) for completion in completions]),
        "logprobs": ("f", [completion.logprobs for completion in completions]),
        "advantages": ("f", [rollout.advantages for rollout in rollouts]),
    }
    names = {Role.POLICY: "trainer_logprobs", Role.VALUE: "values"}
    for role in dict.fromkeys(role for rollout in rollouts for role in rollout.scores if role != Role.REWARD):
        scores = [rollout.scores.get(role, ()) for rollout in rollouts]
        columns[names.get(Role(role), f"{role}_logprobs")] = ("f", scores)
    for name, (code, lists) in columns.items():
        table = table.append_column(name, _make_lists(lists, code))
    return table


def _list_turns(completion: Completion, decode: Decode) -> list[tuple[str, str]]:
    """(who wrote it, text) of each turn, in order; empty for a response of one turn."""
    turns, start = list[tuple[str, str]](), 0
    for observed_start, observed_end in completion.observed:
        turns += [(POLICY, decode(completion.tokens[start:observed_start]))] * (start < observed_start)
        turns.append((ENVIRONMENT, decode(completion.tokens[observed_start:observed_end])))
        start = observed_end
    return turns + [(POLICY, decode(completion.tokens[start:]))] * (bool(turns) and start < len(completion.tokens))


def _list_versions(completion: Completion) -> list[int]:
    """The policy version of each token, [R]; empty for answers of the data set."""
    return [span.version for span in completion.spans for _ in range(span.start, span.end)]


def _make_lists(lists: Sequence[Sequence[float]], code: str) -> Any:
    """A column of lists of numbers. code: their type in `array`, `i` or `f`."""
    import pyarrow as pa

    offsets, values = array("i", accumulate(map(len, lists), initial=0)), array(code, chain.from_iterable(lists))
    kind = {"i": pa.int32(), "f": pa.float32()}[code]
    return pa.ListArray.from_arrays(
        pa.Array.from_buffers(pa.int32(), len(offsets), [None, pa.py_buffer(offsets)]),
        pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)]),
    )
