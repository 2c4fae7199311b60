"""Fallbacks shrink a plan step by step when a rehearsal run needs more memory than planned.

In: a plan. Out: the next milder plan and its override, until none is left. Left out: whether it fits (the rehearsal
tells) and changes that affect learning: lengths, mini-batches, models.
"""

from collections.abc import Iterator

from rlplan.errors import NoFeasiblePlanError, SpecError
from rlplan.planner.plan import Plan
from rlplan.planner.search import find_plan
from rlplan.spec.resolved import ResolvedJob
from rlplan.units import MIB

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
