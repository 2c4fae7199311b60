"""Reading rollouts: those that a run kept (rollout_files.py), chosen by step, reward or truncation.

In: a run folder, which may be anybody's. Out: rollouts as plain values. The files are read in a child process with a
memory limit (data/tables.py). Left out: display.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlplan.errors import SpecError
from rlplan.planner.plan import Plan, read_run_plan
from rlplan.reading import MAX_RUN_BYTES, check_numbers, read_records
from rlplan.runtime.data.tables import read_table
from rlplan.runtime.run_folder.rollout_files import FOLDER, PER_TOKEN, REWARD_COLUMN, TEXTS, list_step_files


def choose_rollouts(
    run_folder: Path,
    steps: Sequence[int] = (),
    *,
    reward: str | None = None,
    count: int | None = None,
    is_best: bool = True,
    truncated_only: bool = False,
    with_tokens: bool = False,
) -> list[dict[str, Any]]:
    """Rollouts as rows of `rollouts/` (docs/runtime/files.md), with `rewards` by name and the `loss` of their step.

    steps: by default the last one that was kept. reward: name of the reward that ranks, by default the total.
    count: number of rollouts with the highest reward, or the lowest without `is_best`; None: all, in the run's order.
    with_tokens: whether columns with a value per token are read. `loss` is None for jobs that learn from rewards.
    Raises: SpecError, HostError.
    """
    plan, files = read_run_plan(run_folder), list_step_files(run_folder)
    if not files:
        raise _explain_missing(run_folder, plan)
    steps = steps or (max(files),)
    if missing := [step for step in steps if step not in files]:
        raise SpecError(
            f"the rollouts of step {missing[0]} are not there",
            where=str(run_folder / FOLDER),
            rule=f"it has those of {len(files)} steps, {min(files)} to {max(files)}; the oldest are deleted above "
            "metrics.max_rollout_bytes",
            way_out=f"rlplan rollouts {run_folder} --step {max(files)}",
        )
    losses = {} if plan.job.has_rollouts else _read_losses(run_folder)
    rows = (row for step in steps for row in _read_rows(files[step], losses.get(step), with_tokens=with_tokens))
    chosen: Iterator[dict[str, Any]] = (row for row in rows if row["is_truncated"] or not truncated_only)
    if reward is not None:
        chosen = _require_reward(chosen, reward, files[steps[0]])
    if count is None:
        return [*chosen]
    rank = heapq.nlargest if is_best else heapq.nsmallest
    return rank(count, chosen, key=lambda row: row["reward"] if reward is None else row["rewards"][reward])


def _require_reward(rows: Iterator[dict[str, Any]], reward: str, file: Path) -> Iterator[dict[str, Any]]:
    """Rows with a value of a reward. Raises: SpecError when no row has that column."""
    for row in rows:
        known = [name.removeprefix(REWARD_COLUMN) for name in row if name.startswith(REWARD_COLUMN)]
        if reward not in known:
            raise SpecError(
                f"no rollout has the reward {reward}",
                where=str(file),
                rule=f"the rewards are {', '.join(known)}" if known else "no reward judged these rollouts",
                way_out=f"--reward {known[0]}" if known else "leave out --reward",
            )
        if reward in row["rewards"]:
            yield row


def _read_rows(file: Path, loss: float | None, *, with_tokens: bool) -> Iterator[dict[str, Any]]:
    for number, row in read_table(file, left_out="" if with_tokens else PER_TOKEN):
        fault = row if isinstance(row, str) else _find_fault(row)
        if fault or isinstance(row, str):
            raise SpecError(
                f"row {number} is damaged: {fault}",
                where=str(file),
                rule="the file is as a run of this version of rlplan wrote it",
                way_out="choose another step with --step",
            )
        names = (name for name in row if name.startswith(REWARD_COLUMN) and row[name] is not None)
        yield row | {"rewards": {name.removeprefix(REWARD_COLUMN): row[name] for name in names}, "loss": loss}


_KINDS: dict[str, type] = {
    **dict.fromkeys(TEXTS, str),
    **dict.fromkeys(("step", "group", "num_turns", "num_tokens", "num_learned"), int),
    **dict.fromkeys(("reward", "advantage"), float),
    "is_truncated": bool,
    "turns": list,
}


def _find_fault(row: dict[str, Any]) -> str:
    """Describe what a row lacks; empty for a row as rollout_files.py writes it."""
    rewards = (name for name, value in row.items() if name.startswith(REWARD_COLUMN) and value is not None)
    kinds = _KINDS | dict.fromkeys(rewards, float)
    for name, kind in kinds.items():
        if type(row.get(name)) is not kind or (kind is float and not math.isfinite(row[name])):
            return f"{name} is missing, or no {kind.__name__}"
    for turn in row["turns"]:
        if not isinstance(turn, dict) or not all(isinstance(turn.get(name), str) for name in ("role", "text")):
            return "a turn has no role or no text"
    return ""


def _explain_missing(run_folder: Path, plan: Plan) -> SpecError:
    what, way_out = "the run has kept no rollouts", f"rlplan watch {run_folder} shows how far the run is"
    if (run_folder / "samples.jsonl").is_file():
        what = "the run was made by an earlier rlplan, which kept two rollouts of each step in samples.jsonl"
        way_out = f"read {run_folder / 'samples.jsonl'}, or run the job again"
    elif not plan.job.metrics.max_rollout_bytes:
        what, way_out = "the run was told to keep no rollouts", "run the job with metrics.max_rollout_bytes=10GiB"
    rule = "a run writes rollouts/step-NNNNNN.parquet when a step has its rewards"
    return SpecError(what, where=str(run_folder / FOLDER), rule=rule, way_out=way_out)


def _read_losses(run_folder: Path) -> dict[int, float]:
    path = run_folder / "metrics.jsonl"
    rows = read_records(path, path.name, check_numbers, limit=MAX_RUN_BYTES) if path.is_file() else ()
    return {row["step"]: row["policy/loss"] for row in rows if row.get("policy/loss") is not None}
