"""Margins: what is kept free on a GPU, and from where on a faster layout is no better.

In: GPUs, plans, jobs and choices. Out: bytes, jobs without what makes a layout complicated.
Left out: intervals (measured_errors.py), the search itself (gpu/search.py).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from rlplan.dataflow.choice import Choice
from rlplan.memory.ledger import LedgerRow
from rlplan.spec.hardware.catalogue import find_profile, usual_node
from rlplan.spec.hardware.profile import GpuProfile, NodeProfile
from rlplan.spec.job import JobSpec
from rlplan.spec.resolved import SettledJob
from rlplan.units import GIB, MIB
from rlplan.vocabulary import MemoryKind, Provenance

if TYPE_CHECKING:
    from rlplan.planner.plan import Plan

RESERVE = 256 * MIB
"""Of every GPU, left free. Totals of one model of GPU differ by some 40 MiB between public logs (rtx-4090.yaml), and
what monitors of a cluster hold is not ours to know."""
DISPLAY_RESERVE = GIB
"""Of a GPU that may drive a display. Recalled: a desktop and a browser hold 0.3 to 1.2 GiB."""

SAME_SPEED = 0.01
"""Share of a step within which two layouts of a job are equally fast as far as anybody knows: below the median error of
every kind of seconds on GPUs that was measured (rlplan accuracy)."""


ENOUGH_ROOM = 0.1
"""Share of a GPU that is room enough at the high end of every interval. More of it is no reason to take a layout that
offloads or cuts more: a small model would move its optimizer to the host beside 20 GiB that nobody uses."""


def get_reserve(gpu: GpuProfile) -> int:
    """Bytes of a GPU that no plan takes."""
    return DISPLAY_RESERVE if gpu.may_drive_display else RESERVE


def needed_bytes(plan: "Plan") -> int:
    """Of the fullest device at the high end, with a KV cache that holds one longest sequence: more of it fills the
    device because it is there, and makes rollouts faster.
    """
    kv, ledger = plan.kv, plan.ledger
    if kv is None or plan.is_on_host:
        return plan.row_interval()[1]
    more = max(0, kv.kv_cache_memory_bytes - kv.least_bytes)
    rows = tuple(_less(row, more) if row.kind is MemoryKind.KV_CACHE else row for row in ledger.rows)
    return plan.model_copy(update={"ledger": replace(ledger, rows=rows)}).row_interval()[1]


def _less(row: LedgerRow, num_bytes: int) -> LedgerRow:
    names = ("resident_bytes", "peak_bytes", "low_bytes", "high_bytes", "resident_high_bytes")
    sizes = {name: size for name in names if (size := getattr(row, name)) is not None}
    return replace(row, **{name: max(0, size - num_bytes) for name, size in sizes.items()})


def find_assumed_host(job: SettledJob) -> NodeProfile | None:
    """The machine whose memory is only assumed by its profile, and not stated by the job; else None."""
    if job.device_kind == "cpu" or job.hardware.host_memory is not None:
        return None
    profile = find_profile(job.hardware.profile, where="hardware.profile")
    node = profile if isinstance(profile, NodeProfile) else usual_node(job.load_gpu())
    return node if node is not None and node.host_memory.provenance is Provenance.ASSUMED else None


def rank_roominess(choice: Choice, headroom: int, capacity: int, seconds: float) -> tuple[object, ...]:
    """The order of layouts that surely fit and are as fast within SAME_SPEED, the best first.

    What leaves most room at the high end wins, up to ENOUGH_ROOM of a GPU; of those that leave as much, the one with
    fewer of COMPLICATIONS, then the faster one.
    """
    complications = [key for _, key, _ in COMPLICATIONS if has_complication(choice, key)]
    return -min(headroom, int(ENOUGH_ROOM * capacity)), len(complications), round(seconds, 9)


def drop_host_choices(job: JobSpec) -> JobSpec:
    """The job with nothing on the host that it leaves open."""
    for part, key, value in HOST_COMPLICATIONS:
        if getattr(getattr(job, part), key) == "auto":
            job = job.model_copy(update={part: getattr(job, part).model_copy(update={key: value})})
    return job


HOST_COMPLICATIONS = (
    *(("training", "offloads_parameters", False), ("training", "offloads_optimizer", False)),
    ("placement", "offload", "none"),
)
"""What a layout has on the host: (part of the job, key, without it)."""
COMPLICATIONS = (
    *HOST_COMPLICATIONS,
    ("rollout", "attention_dp", 1),
    *(("training", axis, 1) for axis in ("pp", "cp", "ep", "tp", "ulysses")),
)
"""What a layout is simpler without, in the order in which it is given up."""


def has_complication(choice: Choice, key: str) -> bool:
    """Whether a choice has one of COMPLICATIONS."""
    if key == "offload":
        return choice.arrangement.offloaded != "none"
    if key == "attention_dp":
        return choice.engine.attention_dp > 1
    return int(getattr(choice.trainer, key)) > (0 if key.startswith("offloads") else 1)


def list_simpler_jobs(job: SettledJob, choice: Choice) -> Iterator[tuple[str, SettledJob]]:
    """Jobs without one of a choice's complications each, and without those that it lacks, by the key that is given up.
    What the job says stays.
    """
    there = [
        complication
        for complication in COMPLICATIONS
        if getattr(getattr(job, complication[0]), complication[1]) == "auto"
    ]
    for given_up in there:
        if has_complication(choice, given_up[1]):
            other = job
            for part, key, value in there:
                if key == given_up[1] or not has_complication(choice, key):
                    other = other.model_copy(update={part: getattr(other, part).model_copy(update={key: value})})
            yield given_up[1], other
