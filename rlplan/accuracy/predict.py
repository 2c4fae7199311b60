"""The shared part of all predictors: the plan of a job with a forced layout, and the measured part of it.

In: a job as a mapping. Out: its Plan, from the search that `rlplan plan` runs; bytes and seconds from the plan's own
ledger and timing. Left out: turning a point into a job (the readers), errors (compare.py).
"""

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from rlplan.accuracy.points import MeasuredPoint, Statistic
from rlplan.accuracy.predictions import CannotPredict, Prediction
from rlplan.accuracy.settings import unit_bytes
from rlplan.memory.ledger import LedgerRow, RunPhase
from rlplan.planner.machine import open_search
from rlplan.planner.measured_errors import find_stratum
from rlplan.planner.plan import Plan
from rlplan.planner.serving import Served, ServedLoad, serve, serve_load
from rlplan.spec.base import validate
from rlplan.spec.job import JobSpec
from rlplan.vocabulary import ActionKind, MemoryKind, Phase, Role

NOT_TENSORS = (MemoryKind.CONTEXT, MemoryKind.PROCESS)
"""Memory of a process beside the tensors of its framework."""
TRAINS = (ActionKind.TRAIN_FORWARD_BACKWARD, ActionKind.OPTIMIZER_STEP)


def plan_point_job(job: Mapping[str, Any]) -> Plan:
    """The plan of a job, whatever its verdict. Raises: RlplanError for a wrong job, or one without any layout."""
    return _plan_text(json.dumps(job, sort_keys=True))


@lru_cache(maxsize=512)
def _plan_text(text: str) -> Plan:
    return open_search(validate_job(json.loads(text))).run(with_others=False, may_leave_idle=False)


def validate_job(job: Mapping[str, Any]) -> JobSpec:
    """The validated job of a mapping. Raises: SpecError."""
    return validate(JobSpec, JobSpec.expand_short_forms(job), file="the point's job", way_out="correct the point")


def forget_plans() -> None:
    """Clear the cached plans, after a change of constants that plans depend on."""
    for cache in (_plan_text, _serve_text, _simulate_text):
        cache.cache_clear()


def serve_job(job: Mapping[str, Any]) -> Served:
    """The engine of a serving job, as in `rlplan estimate`. Raises: RlplanError for a wrong job."""
    return _serve_text(json.dumps(job, sort_keys=True))


@lru_cache(maxsize=64)
def _serve_text(text: str) -> Served:
    return serve(validate_job(json.loads(text)))


def simulate_load(job: Mapping[str, Any]) -> ServedLoad:
    """The engine's latencies with the job's concurrent requests, as in `rlplan simulate`. Raises: RlplanError."""
    return _simulate_text(json.dumps(job, sort_keys=True))


@lru_cache(maxsize=64)
def _simulate_text(text: str) -> ServedLoad:
    return serve_load(validate_job(json.loads(text)))


def find_actions(plan: Plan, *kinds: ActionKind, role: Role = Role.POLICY) -> tuple[str, ...]:
    """Ids of a step's actions of the given kinds and role."""
    return tuple(action.id for action in plan.schedule.step if action.kind in kinds and action.role is role)


def peak_in_training(plan: Plan, statistic: Statistic, *, is_first: bool = False) -> dict[MemoryKind, int]:
    """Bytes by kind of a rank of the policy trainer at its peak in training, as a statistic counts them.

    is_first: of the first step, which allocates the optimizer states.
    """
    kinds = (ActionKind.OPTIMIZER_STEP,) if statistic is Statistic.MEAN_ALLOCATED else TRAINS
    moments = [
        _find_bytes(plan, action, statistic, "first" if is_first else "steady") for action in find_actions(plan, *kinds)
    ]
    return max(moments, key=lambda sizes: sum(sizes.values()))


def held_between_steps(plan: Plan, statistic: Statistic) -> dict[MemoryKind, int]:
    """Bytes by kind of a rank of the policy trainer after a step."""
    action = find_actions(plan, ActionKind.OPTIMIZER_STEP)[-1]
    return _find_bytes(plan, action, statistic, "steady", is_resident=True)


def held_by_scorer(plan: Plan, role: Role, statistic: Statistic, *, is_resident: bool = False) -> dict[MemoryKind, int]:
    """Bytes by kind of a rank of a frozen role while it scores, or after (is_resident)."""
    [action, *_] = find_actions(plan, ActionKind.SCORE, role=role)
    return _find_bytes(plan, action, statistic, "steady", process=f"scorer/{role}/0", is_resident=is_resident)


def _find_bytes(
    plan: Plan,
    action: str,
    statistic: Statistic,
    run_phase: RunPhase,
    *,
    process: str = f"{Role.POLICY}_trainer/0",
    is_resident: bool = False,
) -> dict[MemoryKind, int]:
    rows = plan.ledger.find_rows(process)
    sizes = _sum_by_kind(
        (row for row in rows if (row.run_phase, row.action_id) == (run_phase, action)), is_resident=is_resident
    )
    if statistic is Statistic.PROCESS:
        return sizes
    started = _sum_by_kind((row for row in rows if row.run_phase == "start"), is_resident=True)
    sizes = {kind: size for kind, size in sizes.items() if kind not in NOT_TENSORS}
    # torch's statistics exclude NCCL's communicators, which exist from the start
    if (communicators := started.get(MemoryKind.COMM_BUFFERS, 0)) and MemoryKind.COMM_BUFFERS in sizes:
        sizes[MemoryKind.COMM_BUFFERS] -= communicators
    if statistic is not Statistic.RESERVED:
        sizes.pop(MemoryKind.FRAGMENTATION, None)
    return sizes


def held_on_device(plan: Plan, action: str, run_phase: RunPhase, *, is_resident: bool = False) -> dict[MemoryKind, int]:
    """Bytes by kind of all processes on the first device during an action, or after it (is_resident).

    A process without a part in the action holds what it held after its last one.
    """
    device = plan.ledger.devices[0]
    last: dict[str, list[LedgerRow]] = {}
    for moment in plan.ledger.order:
        active: dict[str, list[LedgerRow]] = {}
        for row in plan.ledger.rows:
            if (row.run_phase, row.action_id) == moment and row.space == "device" and row.device == device:
                active.setdefault(row.process, []).append(row)
        if moment == (run_phase, action):
            waiting = (rows for process, rows in last.items() if process not in active)
            processes = [_sum_by_kind(rows, is_resident=is_resident) for rows in active.values()]
            processes += [_sum_by_kind(rows, is_resident=True) for rows in waiting]
            return {kind: sum(sizes.get(kind, 0) for sizes in processes) for sizes in processes for kind in sizes}
        last |= active
    raise AssertionError(f"{action} is no action of {run_phase}")


def held_by_engine(plan: Plan, kind: ActionKind, *, is_resident: bool = False) -> dict[MemoryKind, int]:
    """Bytes by kind of a rank of a rollout engine in an action of a steady-state step, or after it (is_resident)."""
    [action, *_] = find_actions(plan, kind)
    rows = [row for row in plan.ledger.find_rows("rollout_engine/0") if row.action_id == action]
    usual = [row for row in rows if row.run_phase == "steady"]
    return _sum_by_kind(usual or [row for row in rows if row.run_phase == "first"], is_resident=is_resident)


def context_of_process(plan: Plan) -> int:
    """Bytes of the CUDA context of the policy trainer; an engine in the same process has no other."""
    started = (row for row in plan.ledger.find_rows(f"{Role.POLICY}_trainer/0") if row.run_phase == "start")
    return _sum_by_kind(started, is_resident=True).get(MemoryKind.CONTEXT, 0)


def _sum_by_kind(rows: Iterable[LedgerRow], *, is_resident: bool) -> dict[MemoryKind, int]:
    sizes: dict[MemoryKind, int] = {}
    for row in rows:
        if row.space == "device":
            size = row.resident_bytes if is_resident else row.peak_bytes
            sizes[row.kind] = max(sizes.get(row.kind, 0), size)
    return sizes


def predict_bytes(point: MeasuredPoint, sizes: Mapping[MemoryKind, int], plan: Plan) -> Prediction:
    """The prediction for bytes by kind, in the point's unit."""
    unit = unit_bytes(point)
    parts = {kind.value: size / unit for kind, size in sizes.items() if size}
    return Prediction(sum(sizes.values()) / unit, parts=parts, stratum=find_stratum(plan, point.quantity))


def predict_seconds(plan: Plan) -> float:
    """Seconds of a steady-state step. Raises: CannotPredict for a profile without rates."""
    if plan.timing is None:
        raise CannotPredict(f"no rates of {plan.devices} are known")
    return plan.seconds


def phase_seconds(plan: Plan) -> dict[Phase, float]:
    """Seconds of each phase of a steady-state step. Raises: CannotPredict for a profile without rates."""
    if plan.timing is None:
        raise CannotPredict(f"no rates of {plan.devices} are known")
    seconds_by_phase: dict[Phase, float] = {}
    for action in plan.timing.step.actions:
        seconds_by_phase[action.phase] = seconds_by_phase.get(action.phase, 0.0) + action.cost.seconds
    return {phase: seconds for phase, seconds in seconds_by_phase.items() if seconds}


def device_peak(plan: Plan) -> dict[MemoryKind, int]:
    """Bytes by kind of the fullest GPU at its peak."""
    sizes: dict[MemoryKind, int] = {}
    for _, _, kind, size in plan.binding.rows:
        sizes[kind] = sizes.get(kind, 0) + size
    return sizes


def worker_peak(plan: Plan, worker: str, statistic: Statistic) -> dict[MemoryKind, int]:
    """Bytes by kind of a rank of a worker, such as `policy_trainer`, at its peak in a steady-state step.

    Raises: CannotPredict for a worker that the job lacks.
    """
    process = f"{worker}/0"
    actions = {row.action_id for row in plan.ledger.find_rows(process) if row.run_phase == "steady"}
    if not actions:
        known = sorted({name.rpartition("/")[0] for name in plan.ledger.processes})
        raise CannotPredict(f"the job has no worker {worker!r}: {', '.join(known)}")
    moments = [_find_bytes(plan, action, statistic, "steady", process=process) for action in actions]
    return max(moments, key=lambda sizes: sum(sizes.values()))
