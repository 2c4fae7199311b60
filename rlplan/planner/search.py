"""Entry points of the planner: the best plan of a job, the plan that can run, and the next smaller plan when a
rehearsal needs more memory than planned.

In: a JobSpec, or a plan. Out: a Plan. Left out: whether a smaller plan fits (the rehearsal tells); how candidates are
compared (cpu/search.py, gpu/search.py).
"""

import math
from collections.abc import Iterator
from typing import Any

from rlplan.dataflow.build import build_schedule
from rlplan.errors import NoFeasiblePlanError, SpecError
from rlplan.memory.machine.host import KILLED_ABOVE
from rlplan.planner.cpu.candidates import list_choices
from rlplan.planner.executable import require_executable
from rlplan.planner.machine import open_search
from rlplan.planner.margins import HOST_COMPLICATIONS, drop_host_choices, find_assumed_host, has_complication
from rlplan.planner.memo import Memo
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Verdict
from rlplan.planner.setting import read_pools
from rlplan.spec.base import shorten_value
from rlplan.spec.fingerprints import take_fingerprints
from rlplan.spec.hardware.rates import format_bytes_per_s
from rlplan.spec.job import JobSpec
from rlplan.spec.parts.conduct import MAX_TIMEOUT_S
from rlplan.spec.resolved import LEAST_SECONDS, ResolvedJob
from rlplan.timing.network.cluster import assume_network_bytes_per_s
from rlplan.units import MIB, format_bytes, format_seconds
from rlplan.version import __version__

DEADLINE_FACTOR = 4.0
"""Ratio of deadline to predicted seconds. A factor of 2 covers prediction errors on unmeasured machines. Another factor
of 2 covers policies whose responses are much longer than stated, such as an untrained policy that generates up to the
length limit."""


def find_best_plan(
    asked: JobSpec, *, with_pareto: bool = False, with_others: bool = True, memo: Memo | None = None
) -> Plan:
    """Find the best plan of a job, whatever its verdict. If it does not fit in the worst case, add remedies, the
    mildest first.

    with_others: add the next best layouts; each takes a search. memo: shared with searches for similar jobs.

    Raises: SpecError (the job is wrong), NoFeasiblePlanError (no layout can be built).
    """
    memo = memo or Memo()
    search = open_search(asked, memo)
    plan = add_deadlines(search.run(with_others=with_others))
    updates: dict[str, Any] = {"fingerprints": take_fingerprints(plan.job)}
    if with_pareto:
        updates["pareto"] = search.restrict_to_plan(plan).find_pareto_front()
    if plan.verdict not in (Verdict.FITS, Verdict.REFUSED):  # more memory does not lift a refusal
        from rlplan.planner.remedies import list_remedies

        updates["remedies"] = list_remedies(plan, memo)
    uncorrected = plan.job.uncorrected_staleness
    updates["notes"] = (*plan.notes, *((uncorrected,) if uncorrected else ()), *list_assumptions(plan, memo))
    return plan.model_copy(update=updates)


def list_assumptions(plan: Plan, memo: Memo | None = None) -> Iterator[str]:
    """Describe what no profile states: the network between hosts, and a host memory size with the plan without it."""
    pools = () if plan.is_on_host else read_pools(plan.job)
    for pool in pools:
        if pool.node is None and (pool.num_hosts > 1 or len(pools) > 1):
            rate = format_bytes_per_s(assume_network_bytes_per_s(pool.gpu))
            yield f"assumes {rate} between hosts of {pool.gpus_per_host}x {pool.gpu.name}: no node profile states it"
    expected, high = plan.host_interval
    room = plan.host_capacity or 0
    if expected <= room and high > expected and high > KILLED_ABOVE * room:
        yield (
            f"a host's memory may run out: {format_bytes(expected)} to {format_bytes(high)} of {format_bytes(room)}; "
            f"at the high end Ray's object store is full, and Ray ends workers above {KILLED_ABOVE:.0%}. "
            "`ray start --object-store-memory` limits the store; otherwise offload less, or take more host memory"
        )
    node = find_assumed_host(plan.job)
    if node is None:
        return
    needed, assumed = format_bytes(plan.ledger.host_peak().num_bytes), format_bytes(node.host_memory.value)
    words = f"assumes hosts of {assumed} ({node.name}) and uses {needed}; hardware.host_memory sets another size"
    chosen = [(part, key) for part, key, _ in HOST_COMPLICATIONS if has_complication(plan.choice, key)]
    if chosen and all(getattr(getattr(plan.asked, part), key) == "auto" for part, key in chosen):
        words += f"; with nothing offloaded it {_predict_without_host(plan, memo)}"
    yield words


def _predict_without_host(plan: Plan, memo: Memo | None) -> str:
    """Verdict and step time of the job with nothing offloaded to the host."""
    try:
        other = open_search(drop_host_choices(plan.asked), memo).run(with_others=False)
    except NoFeasiblePlanError:
        return Verdict.DOES_NOT_FIT.value
    step = f", {format_seconds(other.seconds)} a step" if other.fit is not Verdict.DOES_NOT_FIT else ""
    return f"{other.fit.value}{step}"


def add_deadlines(plan: Plan) -> Plan:
    """Set the job's open deadlines to DEADLINE_FACTOR times the longest predicted action, at least LEAST_SECONDS.

    With async rollouts one side may wait for a whole step of the other side.
    """
    timing = plan.timing
    if timing is None:
        return plan
    # with async rollouts, an action may wait for a whole step of the other side
    waiting_s = plan.seconds if plan.schedule.async_rollouts else 0.0
    longest = {"start_timeout_s": 0.0, "action_timeout_s": waiting_s}
    for part in (timing.start, timing.step, timing.sometimes, timing.finish):
        for action in part.actions:
            key = "start_timeout_s" if action.action_id.startswith("start") else "action_timeout_s"
            longest[key] = max(longest[key], action.cost.seconds)
    deadlines = {
        key: min(MAX_TIMEOUT_S, max(LEAST_SECONDS[key], math.ceil(DEADLINE_FACTOR * seconds)))
        for key, seconds in longest.items()
        if getattr(plan.asked.limits, key) == "auto"
    }
    limits = plan.job.limits.model_copy(update=deadlines)
    return plan.model_copy(update={"job": plan.job.model_copy(update={"limits": limits})})


def find_plan(asked: JobSpec) -> Plan:
    """Find the best plan and require that it can run.

    Raises: SpecError (the job is wrong), NoFeasiblePlanError (nothing fits), EmitError (its framework refuses it).
    """
    return require_executable(find_best_plan(asked))


def check_schedule(plan: Plan, where: str) -> None:
    """Check that a plan's schedule follows from its job and was not edited afterwards. Raises: SpecError."""
    choices, _ = list_choices(plan.job)
    if any(build_schedule(plan.job, choice) == plan.schedule for choice in choices):
        return
    raise SpecError(
        "the schedule of the plan does not follow from its job"
        + (
            f" (it was made by rlplan {shorten_value(plan.rlplan_version)})"
            if plan.rlplan_version != __version__
            else ""
        ),
        where=f"{where}: schedule",
        rule="placement, layouts and actions follow from the job and must not be edited",
        way_out="change the job (placement.placement, training.zero_stage, …) and plan it again: rlplan plan JOB",
    )


MAX_FALLBACKS = 6
"""Changes after which a run gives up. Each one restarts all processes."""


def find_next_plan(plan: Plan) -> tuple[str, Plan] | None:
    """Find the next (override, plan with it), the mildest first; None if nothing is left.

    Skipping checkpoint copies and smaller micro-batches cost least. Offloading the optimizer is next, then less KV
    cache. Placement and ZeRO stage stay.
    """
    for change, job in _list_fallbacks(plan.job, plan.zero_stage):
        fixed = _update_part(job, "placement", placement=plan.schedule.placement.value)
        try:
            smaller = find_plan(_update_part(fixed, "training", zero_stage=plan.zero_stage))
        except (NoFeasiblePlanError, SpecError):
            continue
        # The settled job states every choice. The algorithm stays as the user wrote it: a run treats a stated
        # mismatch correction differently from one that `auto` chose.
        asked = smaller.asked.model_copy(update={"algorithm": plan.asked.algorithm})
        return change, smaller.model_copy(update={"asked": asked})
    return None


def _list_fallbacks(job: ResolvedJob, zero_stage: int) -> Iterator[tuple[str, ResolvedJob]]:
    if job.checkpoints.every and job.checkpoints.writes != "waiting":
        yield "checkpoints.writes=waiting", _update_part(job, "checkpoints", writes="waiting")
    tokens, longest = job.training.max_tokens_per_micro_batch, job.workload.max_seq_len
    least = job.sequences_per_unit * longest
    if tokens > least:
        fewer = max(tokens // 2, least)
        change = f"training.max_tokens_per_micro_batch={fewer}"
        smaller = _update_part(job, "workload", micro_batch_size_per_gpu=max(1, fewer // longest))
        yield change, _update_part(smaller, "training", max_tokens_per_micro_batch=fewer)
    if not job.training.offloads_optimizer:
        offloaded = _update_part(job, "training", offloads_optimizer=True)
        if not any(offloaded.training.combination(zero_stage).contradictions()):
            yield "training.offloads_optimizer=true", offloaded
    kv_cache = job.rollout.kv_cache_memory // 2 // MIB
    if kv_cache:
        change = f"rollout.kv_cache_memory={kv_cache}MiB"
        yield change, _update_part(job, "rollout", kv_cache_memory=kv_cache * MIB)


def _update_part(job: ResolvedJob, part: str, **changes: object) -> ResolvedJob:
    return job.model_copy(update={part: getattr(job, part).model_copy(update=changes)})
