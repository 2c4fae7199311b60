"""Search: the first candidate in order of preference whose peak fits.

In: a JobSpec. Out: a Plan, or NoFeasiblePlanError that says which row binds and what would fit.
"""

from pathlib import Path

from rlplan.dataflow.build import build_step_graph
from rlplan.dataflow.placements import place
from rlplan.dataflow.schedule import build_schedule
from rlplan.errors import NoFeasiblePlanError
from rlplan.memory.ledger import MemoryLedger, Peak
from rlplan.memory.predict import predict_ledger
from rlplan.planner.candidates import Candidate, list_candidates
from rlplan.planner.plan import Plan, Rejection, read_plan
from rlplan.spec.hardware import HardwareProfile
from rlplan.spec.job import JobSpec, load_job
from rlplan.spec.model import ModelSpec
from rlplan.units import format_bytes
from rlplan.vocabulary import MemoryKind


def find_plan(job: JobSpec) -> Plan:
    """The plan for a job. Raises: SpecError (the job is wrong), NoFeasiblePlanError (nothing fits)."""
    model, profile = job.load_model(), job.load_profile()
    candidates, impossible = list_candidates(job)
    rejected = list(impossible)
    nearest: tuple[Plan, Peak, int] | None = None
    for candidate in candidates:
        plan = _build(job, model, profile, candidate)
        overflow = _overflow(plan.ledger)
        if overflow is None:
            return plan.model_copy(update={"rejected": tuple(rejected)})
        peak, available = overflow
        rejected.append(_rejection(candidate, peak, available))
        if nearest is None or peak.num_bytes < nearest[1].num_bytes:
            nearest = (plan, peak, available)
    if nearest is None:
        raise _nothing_possible(rejected)
    raise _nothing_fits(*nearest)


def plan_from_file(path: Path, overrides: tuple[str, ...] = ()) -> Plan:
    """The plan in a plan file, or the plan found for a job file. Raises: SpecError, NoFeasiblePlanError."""
    if path.suffix == ".json":
        return read_plan(path)
    return find_plan(load_job(path, overrides))


def _build(job: JobSpec, model: ModelSpec, profile: HardwareProfile, candidate: Candidate) -> Plan:
    groups, layouts = place(job, candidate.placement, candidate.zero_stage)
    schedule = build_schedule(build_step_graph(job), candidate.placement, groups, layouts)
    return Plan(job=job, schedule=schedule, ledger=predict_ledger(job, model, profile, schedule))


def _overflow(ledger: MemoryLedger) -> tuple[Peak, int] | None:
    """The peak that does not fit, with what is available; None when all fit."""
    peaks = [(ledger.host_peak(), ledger.host_capacity)]
    if not ledger.shares_host_memory:
        peaks += [(ledger.device_peak(device), ledger.device_capacity) for device in ledger.devices]
    return next(((peak, available) for peak, available in peaks if peak.num_bytes > available), None)


def _rejection(candidate: Candidate, peak: Peak, available: int) -> Rejection:
    process, role, kind, size = peak.rows[0]
    return Rejection(
        placement=candidate.placement,
        zero_stage=candidate.zero_stage,
        reason=f"{peak.scope} needs {format_bytes(peak.num_bytes)} in {peak.action_id}, {format_bytes(available)} "
        f"available; largest: {kind} of {role} in {process}, {format_bytes(size)}",
        scope=peak.scope,
        needed_bytes=peak.num_bytes,
        available_bytes=available,
    )


def _nothing_possible(rejected: list[Rejection]) -> NoFeasiblePlanError:
    reasons = "; ".join(f"{rejection.placement}: {rejection.reason}" for rejection in rejected)
    return NoFeasiblePlanError(
        "no layout can be built for this job",
        where="placement.placement, training.zero_stage, hardware.num_devices",
        rule=reasons,
        way_out="leave placement.placement and training.zero_stage on auto, or change hardware.num_devices",
    )


def _nothing_fits(plan: Plan, peak: Peak, available: int) -> NoFeasiblePlanError:
    process, role, kind, size = peak.rows[0]
    placement = plan.schedule.placement
    return NoFeasiblePlanError(
        f"{peak.scope} needs {format_bytes(peak.num_bytes)} in {peak.action_id} ({peak.moment}), "
        f"{format_bytes(available)} available ({placement}, {plan.job.hardware.num_devices} devices, "
        f"zero_stage={plan.zero_stage})",
        where=f"largest: {kind} of {role} in {process}, {format_bytes(size)}",
        rule="the sum over all processes stays within the memory of hardware.memory or the profile",
        way_out=_way_out(plan, kind, peak.num_bytes - available),
    )


def _way_out(plan: Plan, kind: MemoryKind, missing: int) -> str:
    workload, rollout = plan.job.workload, plan.job.rollout
    remedies = {
        MemoryKind.KV_CACHE: f"lower rollout.kv_cache_memory (now {format_bytes(rollout.kv_cache_memory)})",
        MemoryKind.ACTIVATIONS: f"lower workload.micro_batch_size_per_gpu (now {workload.micro_batch_size_per_gpu})",
        MemoryKind.LOGITS: f"lower workload.micro_batch_size_per_gpu (now {workload.micro_batch_size_per_gpu})",
    }
    first = remedies.get(kind, "use fewer processes (hardware.num_devices) or a smaller model")
    return f"{first}, or give the job {format_bytes(missing)} more memory (hardware.memory)"
