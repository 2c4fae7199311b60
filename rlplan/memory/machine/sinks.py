"""Sinks: bytes of the processes that hand metrics to other people's loggers, beside the driver on its host.

In: a job. Out: bytes. Left out: what a logger keeps of a long run.
"""

from rlplan.spec.resolved import ResolvedJob
from rlplan.units import MIB

SINK_PROCESS_BYTES = {"tensorboard": 16 * MIB, "wandb": 256 * MIB, "trackio": 256 * MIB}
"""tensorboard: an interpreter and nothing else (CPython 3.11, 14 MB resident). The other two: assumed, not measured."""


def sink_bytes(job: ResolvedJob) -> int:
    """Bytes of all sinks of a job.

    Counts: a process each. Source: SINK_PROCESS_BYTES. Assumes: packages beside tensorboard's sink take 256 MiB.

    >>> from types import SimpleNamespace as Some
    >>> sink_bytes(Some(metrics=Some(sinks=("tensorboard", "wandb")))) // MIB
    272
    """
    return sum(SINK_PROCESS_BYTES[sink] for sink in job.metrics.sinks)
