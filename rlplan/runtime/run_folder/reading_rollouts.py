"""Reading rollouts: those that a run kept (rollout_files.py), chosen by step, reward or stop reason.

In: a run folder, which may be anybody's. Out: rollouts as plain values. The files are read in a child process with a
memory limit (data/tables.py). Left out: display.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlplan.errors import SpecError
from rlplan.planner.plan import read_run_plan
from rlplan.reading import MAX_RUN_BYTES, check_numbers, read_records
from rlplan.runtime.data.tables import read_table
from rlplan.runtime.run_folder.rollout_files import FOLDER, PER_TOKEN, REWARD_COLUMN, list_step_files

LEFT_OUT = rf"{'|'.join(PER_TOKEN)}|\w+_logprobs"
"""Columns with a value per token, which only JSON output shows."""


@dataclass(frozen=True)
class Wanted:
    """The rollouts to choose."""

    steps: tuple[int, ...] = ()
    """Steps; empty for the last one that was kept."""

    reward: str | None = None
    """Name of the reward that ranks rollouts; those without it are left out. None ranks by the total reward."""

    best: int | None = None
    """Number of rollouts with the highest reward; None without a limit."""

    worst: int | None = None
    """Number of rollouts with the lowest reward, if `best` is None."""

    is_truncated: bool = False
    """Whether to choose only rollouts that the length limit cut."""


def choose_rollouts(run_folder: Path, wanted: Wanted, *, with_tokens: bool = False) -> list[dict[str, Any]]:
    """Rollouts as rows of `rollouts/`, ranked if `best` or `worst` is set, otherwise in the run's order.

    with_tokens: whether the columns with a value per token are read too. Raises: SpecError, HostError.
    """
    files = list_step_files(run_folder)
    if not files:
        raise _explain_missing(run_folder)
    steps = wanted.steps or (max(files),)
    if missing := [step for step in steps if step not in files]:
        raise SpecError(
            f"the rollouts of step {missing[0]} are not there",
            where=str(run_folder / FOLDER),
            rule=f"it has those of {len(files)} steps, {min(files)} to {max(files)}; the oldest are deleted above "
            "metrics.max_rollout_bytes",
            way_out=f"rlplan rollouts {run_folder} --step {max(files)}",
        )
    rows = (row for step in steps for row in _read_rows(files[step], left_out="" if with_tokens else LEFT_OUT))
    chosen = (row for row in rows if row["is_truncated"] or not wanted.is_truncated)
    if wanted.reward is not None:
        chosen = _require_reward(chosen, REWARD_COLUMN + wanted.reward, files[steps[0]])
    key = "reward" if wanted.reward is None else REWARD_COLUMN + wanted.reward
    if wanted.best is not None:
        return heapq.nlargest(wanted.best, chosen, key=lambda row: row[key])
    if wanted.worst is not None:
        return heapq.nsmallest(wanted.worst, chosen, key=lambda row: row[key])
    return [*chosen]


def list_rewards(row: dict[str, Any]) -> dict[str, float]:
    """The rewards of a row by name, without those that left the rollout out."""
    names = (name for name in row if name.startswith(REWARD_COLUMN))
    return {name.removeprefix(REWARD_COLUMN): row[name] for name in names if row[name] is not None}


def _require_reward(rows: Iterator[dict[str, Any]], column: str, file: Path) -> Iterator[dict[str, Any]]:
    """Rows with a value of a reward. Raises: SpecError when no row has that column."""
    for row in rows:
        if column not in row:
            known = [name.removeprefix(REWARD_COLUMN) for name in row if name.startswith(REWARD_COLUMN)]
            raise SpecError(
                f"no rollout has the reward {column.removeprefix(REWARD_COLUMN)}",
                where=str(file),
                rule=f"the rewards are {', '.join(known)}" if known else "no reward judged these rollouts",
                way_out=f"--reward {known[0]}" if known else "leave out --reward",
            )
        if row[column] is not None:
            yield row


def _read_rows(file: Path, left_out: str) -> Iterator[dict[str, Any]]:
    for number, row in read_table(file, left_out=left_out):
        fault = row if isinstance(row, str) else _find_fault(row)
        if fault:
            raise SpecError(
                f"row {number} is damaged: {fault}",
                where=str(file),
                rule="the file is as a run of this version of rlplan wrote it",
                way_out="choose another step with --step",
            )
        assert not isinstance(row, str), "a text is a fault"
        yield row


_KINDS = {
    **dict.fromkeys(("step", "group", "num_turns", "num_tokens", "num_learned"), int),
    **dict.fromkeys(("id", "prompt_id", "source", "prompt", "truth", "text", "stop_reason", "failure"), str),
    **dict.fromkeys(("reward", "advantage"), float),
    "is_truncated": bool,
    "turns": list,
}


def _find_fault(row: dict[str, Any]) -> str:
    """Describe what a row lacks; empty for a row as rollout_files.py writes it."""
    kinds = _KINDS | {
        name: float for name, value in row.items() if name.startswith(REWARD_COLUMN) and value is not None
    }
    for name, kind in kinds.items():
        if type(row.get(name)) is not kind or (kind is float and not math.isfinite(row[name])):
            return f"{name} is missing, or no {kind.__name__}"
    for turn in row["turns"]:
        if not isinstance(turn, dict) or not all(isinstance(turn.get(name), str) for name in ("role", "text")):
            return "a turn has no role or no text"
    return ""


def _explain_missing(run_folder: Path) -> SpecError:
    plan = read_run_plan(run_folder)  # raises an error of its own for a folder that is no run's
    what, rule = "the run has kept no rollouts", "a run writes rollouts/step-NNNNNN.parquet when a step has its rewards"
    way_out = f"rlplan watch {run_folder} shows how far the run is"
    if (run_folder / "samples.jsonl").is_file():
        what = "the run was made by an earlier rlplan, which kept two rollouts of each step in samples.jsonl"
        way_out = f"read {run_folder / 'samples.jsonl'}, or run the job again"
    elif not plan.job.metrics.max_rollout_bytes:
        what, way_out = "the run was told to keep no rollouts", "run the job with metrics.max_rollout_bytes=10GiB"
    return SpecError(what, where=str(run_folder / FOLDER), rule=rule, way_out=way_out)


def read_losses(run_folder: Path) -> dict[int, float]:
    """The loss of each step, by which to judge a stage that learns from given answers. Raises: SpecError."""
    path = run_folder / "metrics.jsonl"
    rows = read_records(path, path.name, check_numbers, limit=MAX_RUN_BYTES) if path.is_file() else ()
    return {row["step"]: row["policy/loss"] for row in rows if row.get("policy/loss") is not None}
