"""Ladder: what is changed, one thing at a time, when a rehearsal shows that a job needs more memory than was planned.

In: a job. Out: the next milder job and what was changed, until nothing is left. Left out: whether it fits (a rehearsal
says so) and anything that changes what is learned: lengths, mini-batches, models.
"""

from collections.abc import Iterator

from rlplan.errors import NoFeasiblePlanError, SpecError
from rlplan.planner.plan import Plan
from rlplan.planner.search import find_plan
from rlplan.spec.job import JobSpec
from rlplan.units import MIB

MAX_RUNGS = 6
"""Changes after which a run gives up: each costs a start of all processes."""


def next_plan(plan: Plan) -> tuple[str, Plan] | None:
    """(override that was made, plan with it), the mildest first; None when nothing is left.

    No copy for checkpoints and smaller micro-batches cost the least, then the optimizer on the host, then KV cache.
    Placement and ZeRO stage stay.
    """
    for change, job in _rungs(plan.job, plan.zero_stage):
        fixed = _with(job, "placement", placement=plan.schedule.placement.value)
        try:
            return change, find_plan(_with(fixed, "training", zero_stage=plan.zero_stage))
        except (NoFeasiblePlanError, SpecError):
            continue
    return None


def _rungs(job: JobSpec, zero_stage: int) -> Iterator[tuple[str, JobSpec]]:
    if job.checkpoints.every and job.checkpoints.writes != "waiting":
        yield "checkpoints.writes=waiting", _with(job, "checkpoints", writes="waiting")
    micro, tokens = job.workload.micro_batch_size_per_gpu, job.training.max_tokens_per_micro_batch
    if tokens is not None and tokens > job.workload.max_seq_len:
        fewer = max(tokens // 2, job.workload.max_seq_len)
        yield f"training.max_tokens_per_micro_batch={fewer}", _with(job, "training", max_tokens_per_micro_batch=fewer)
    if micro > 1 and tokens is None:
        change = f"workload.micro_batch_size_per_gpu={micro // 2}"
        yield change, _with(job, "workload", micro_batch_size_per_gpu=micro // 2)
    if not job.training.offloads_optimizer and zero_stage >= 2:
        yield "training.offloads_optimizer=true", _with(job, "training", offloads_optimizer=True)
    kv_cache = job.rollout.kv_cache_memory // 2 // MIB
    if kv_cache:
        change = f"rollout.kv_cache_memory={kv_cache}MiB"
        yield change, _with(job, "rollout", kv_cache_memory=kv_cache * MIB)


def _with(job: JobSpec, part: str, **changes: object) -> JobSpec:
    return job.model_copy(update={part: getattr(job, part).model_copy(update=changes)})
