"""Remedies: what to change in a job that needs too much memory, each tried before it is named.

In: a job, what it needs, and a function that says whether a job fits. Out: overrides that can be typed as they stand.
Left out: changes that change what is learned, such as the mini-batch size or the lengths.
"""

from collections.abc import Callable, Iterator

from rlplan.spec.resolved import ResolvedJob
from rlplan.units import MIB, ceil_div


def list_remedies(job: ResolvedJob, needed_bytes: int, fits: Callable[[ResolvedJob], bool]) -> tuple[str, ...]:
    """Overrides, each of which makes the job fit by itself: the mildest of its kind."""
    memory = ceil_div(needed_bytes, MIB)
    kinds = (
        [("checkpoints.writes=waiting", _with(job, "checkpoints", writes="waiting"))] if job.checkpoints.every else [],
        [
            (f"rollout.kv_cache_memory={size}MiB", _with(job, "rollout", kv_cache_memory=size * MIB))
            for size in _halves(job.rollout.kv_cache_memory // MIB)
        ],
        [
            (f"workload.micro_batch_size_per_gpu={size}", _with_passes(job, size))
            for size in _halves(job.workload.micro_batch_size_per_gpu)
        ],
        [
            (f"hardware.num_devices={count}", _with(job, "hardware", num_devices=count))
            for count in _halves(job.hardware.num_devices)
        ],
        [(f"hardware.memory={memory}MiB", _with(job, "hardware", memory=memory * MIB))],
    )
    return tuple(filter(None, (next((text for text, other in kind if fits(other)), "") for kind in kinds)))


def _halves(value: int) -> Iterator[int]:
    while value > 1:
        value //= 2
        yield value


def _with(job: ResolvedJob, part: str, **changes: object) -> ResolvedJob:
    return job.model_copy(update={part: getattr(job, part).model_copy(update=changes)})


def _with_passes(job: ResolvedJob, size: int) -> ResolvedJob:
    """With passes of so many of the longest sequences."""
    smaller = _with(job, "workload", micro_batch_size_per_gpu=size)
    return _with(smaller, "training", max_tokens_per_micro_batch=size * job.workload.max_seq_len)
