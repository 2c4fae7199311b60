"""Search on a CPU host: the fastest choice whose peak fits, by predicted seconds of a step.

In: a JobSpec. Out: a Plan, or NoFeasiblePlanError that says which row binds and what would fit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlplan import __version__
from rlplan.dataflow.build import build_schedule
from rlplan.dataflow.choice import Choice
from rlplan.errors import NoFeasiblePlanError, SpecError
from rlplan.memory.generation import kv_bytes_per_token, num_kv_blocks
from rlplan.memory.ledger import MemoryLedger, Peak
from rlplan.memory.predict import predict_ledger
from rlplan.planner.candidates import list_choices
from rlplan.planner.plan import Plan, Rejection, read_plan
from rlplan.planner.remedies import list_remedies
from rlplan.planner.resolve import resolve
from rlplan.spec.base import shorten
from rlplan.spec.fingerprints import take_fingerprints
from rlplan.spec.job import JobSpec
from rlplan.spec.job_file import load_job
from rlplan.spec.model import ModelSpec
from rlplan.spec.resolved import ResolvedJob, on_a_cpu_host
from rlplan.timing.cpu import predict_job
from rlplan.units import MIB, ceil_div, format_bytes, format_seconds


def find_plan(asked: JobSpec) -> Plan:
    """The plan for a job, on a CPU host or (planner/executable.py) on GPUs.

    Raises: SpecError (the job is wrong), NoFeasiblePlanError (nothing fits), EmitError (it would not run).
    """
    if asked.device_kind == "cuda":
        from rlplan.planner.executable import find_plan_on_gpus

        return find_plan_on_gpus(asked)
    model, job = asked.load_model(), on_a_cpu_host(asked)
    result = _search(job, model)
    if isinstance(result, Plan):
        return result
    if result.nearest is None:
        raise _nothing_possible(result.rejected)
    plan, peak, available = result.nearest

    def fits(other: ResolvedJob) -> bool:
        try:
            return isinstance(_search(other, model), Plan)
        except SpecError:
            return False  # a KV cache too small for one sequence, say

    raise _nothing_fits(plan, peak, available, list_remedies(job, peak.num_bytes, fits))


@dataclass(frozen=True)
class _NoPlan:
    """nearest: the plan with the smallest overflow, its peak and what is available; None when none could be built."""

    rejected: tuple[Rejection, ...]
    nearest: tuple[Plan, Peak, int] | None


def _search(job: ResolvedJob, model: ModelSpec) -> Plan | _NoPlan:
    """Raises: SpecError where the KV cache holds no longest sequence."""
    choices, impossible = list_choices(job)
    if _missing_kv_cache(job, model):
        raise _small_kv_cache(job, model)
    build = _builder(job, model)
    rejected = list(impossible)
    nearest: tuple[Plan, Peak, int] | None = None
    fitting: list[tuple[Choice, Plan]] = []
    for candidate in choices:
        plan = build(candidate)
        overflow = _overflow(plan.ledger)
        if overflow is None:
            fitting.append((candidate, plan))
            continue
        peak, available = overflow
        rejected.append(_rejection(candidate, peak, available))
        if nearest is None or peak.num_bytes < nearest[1].num_bytes:
            nearest = (plan, peak, available)
    if not fitting:
        return _NoPlan(tuple(rejected), nearest)
    fastest = min(_step_s(plan) for _, plan in fitting)
    choice, best = next((one, plan) for one, plan in fitting if _step_s(plan) <= fastest * (1 + AS_FAST))
    rejected += [_slower(candidate, plan, best) for candidate, plan in fitting if plan is not best]
    decided = resolve(job, choice, job.rollout.kv_cache_memory)
    found = {"job": decided, "rejected": tuple(rejected), "fingerprints": take_fingerprints(job)}
    return best.model_copy(update=found)


AS_FAST = 0.01
"""Steps that differ by less are taken to be as fast: predictions miss by more (docs/timing.md), and one that holds less
is then better."""


def _step_s(plan: Plan) -> float:
    """Predicted seconds of a step; all alike without rates, so that the order of candidates decides."""
    return plan.timing.step.seconds if plan.timing else 0.0


def _slower(candidate: Choice, plan: Plan, best: Plan) -> Rejection:
    reason = "fits too, is as fast, and comes after in the order of preference"
    if plan.timing and _step_s(plan) > _step_s(best) * (1 + AS_FAST):
        mine, other = format_seconds(_step_s(plan)), format_seconds(_step_s(best))
        reason = f"fits, but a step takes {mine} instead of {other} (predicted)"
    return Rejection(placement=candidate.arrangement.placement, zero_stage=candidate.trainer.zero_stage, reason=reason)


def plan_from_file(path: Path, overrides: tuple[str, ...] = ()) -> Plan:
    """The plan in a plan file, or the plan found for a job file. Raises: SpecError, NoFeasiblePlanError."""
    if path.suffix == ".json":
        if overrides:
            raise SpecError(
                f"override '{overrides[0]}' cannot change the plan {path}",
                where="command line",
                rule="overrides go with a job file; a plan is run as it stands",
                way_out="plan the job again with the override",
            )
        return read_plan(path)
    return find_plan(load_job(path, overrides))


def check_schedule(plan: Plan, where: str) -> None:
    """A plan's schedule is one that its job gives: none that was changed afterwards is run. Raises: SpecError."""
    choices, _ = list_choices(plan.job)
    if any(build_schedule(plan.job, choice) == plan.schedule for choice in choices):
        return
    raise SpecError(
        "the schedule of the plan is none that its job gives"
        + (f" (it was made by rlplan {shorten(plan.rlplan_version)})" if plan.rlplan_version != __version__ else ""),
        where=f"{where}: schedule",
        rule="placement, layouts and actions follow from the job, and are not edited",
        way_out="change the job (placement.placement, training.zero_stage, …) and plan it again: rlplan plan JOB",
    )


def _builder(job: ResolvedJob, model: ModelSpec) -> Callable[[Choice], Plan]:
    """What makes the plan of a choice: its schedule, bytes and seconds."""
    others, profile = job.load_role_models(), job.load_profile()

    def build(choice: Choice) -> Plan:
        schedule = build_schedule(job, choice)
        ledger = predict_ledger(job, model, profile, schedule, others)
        timing = predict_job(job, model, profile, schedule, others)
        return Plan(job=job, schedule=schedule, ledger=ledger, timing=timing)

    return build


def _overflow(ledger: MemoryLedger) -> tuple[Peak, int] | None:
    """The peak that does not fit, with what is available; None when all fit."""
    peaks = [(ledger.host_peak(host), ledger.host_capacity) for host in ledger.hosts]
    if not ledger.shares_host_memory:
        peaks += [(ledger.device_peak(device), ledger.device_capacity) for device in ledger.devices]
    return next(((peak, available) for peak, available in peaks if peak.num_bytes > available), None)


def _rejection(candidate: Choice, peak: Peak, available: int) -> Rejection:
    process, role, kind, size = peak.rows[0]
    return Rejection(
        placement=candidate.arrangement.placement,
        zero_stage=candidate.trainer.zero_stage,
        reason=f"{peak.scope} needs {format_bytes(peak.num_bytes)} in {peak.action_id}, {format_bytes(available)} "
        f"available; largest: {kind} of {role} in {process}, {format_bytes(size)}",
        scope=peak.scope,
        needed_bytes=peak.num_bytes,
        available_bytes=available,
    )


def _missing_kv_cache(job: ResolvedJob, model: ModelSpec) -> int:
    """Blocks that are missing for one longest sequence beside vLLM's own (v1/core/block_pool.py, `null_block`)."""
    rollout = job.rollout
    blocks = num_kv_blocks(model, rollout.dtype.num_bytes, rollout.block_size, rollout.kv_cache_memory)
    return max(0, ceil_div(job.workload.max_seq_len, rollout.block_size) + 1 - blocks)


def _small_kv_cache(job: ResolvedJob, model: ModelSpec) -> SpecError:
    rollout, length = job.rollout, job.workload.max_seq_len
    needed = ceil_div(length, rollout.block_size) + 1
    least = needed * rollout.block_size * kv_bytes_per_token(model, rollout.dtype.num_bytes)
    return SpecError(
        f"rollout.kv_cache_memory = {format_bytes(rollout.kv_cache_memory)} holds "
        f"{needed - _missing_kv_cache(job, model)} blocks of {rollout.block_size} tokens, "
        f"one sequence of {length} tokens takes {needed}",
        where="rollout.kv_cache_memory",
        rule="the KV cache holds at least one longest sequence and one spare block",
        way_out=f"rollout.kv_cache_memory={ceil_div(least, MIB)}MiB or more",
    )


def _nothing_possible(rejected: tuple[Rejection, ...]) -> NoFeasiblePlanError:
    reasons = "; ".join(f"{rejection.placement}: {rejection.reason}" for rejection in rejected)
    return NoFeasiblePlanError(
        "no layout can be built for this job",
        where="placement.placement, training.zero_stage, hardware.num_devices",
        rule=reasons,
        way_out="leave placement.placement and training.zero_stage on auto, or change hardware.num_devices",
    )


def _nothing_fits(plan: Plan, peak: Peak, available: int, remedies: tuple[str, ...]) -> NoFeasiblePlanError:
    process, role, kind, size = peak.rows[0]
    placement = plan.schedule.placement
    return NoFeasiblePlanError(
        f"{peak.scope} needs {format_bytes(peak.num_bytes)} in {peak.action_id} ({peak.moment}), "
        f"{format_bytes(available)} available ({placement}, {plan.job.hardware.num_devices} devices, "
        f"zero_stage={plan.zero_stage})",
        where=f"largest: {kind} of {role} in {process}, {format_bytes(size)}",
        rule="the sum over all processes stays within the memory of hardware.memory or the profile",
        way_out=f"each of these alone makes it fit: {', '.join(remedies)}"
        if remedies
        else "no single change that was tried makes it fit: a smaller model, shorter lengths or more devices would",
    )
