"""Margins: memory reserved on each GPU, and the speed difference below which two layouts count as equally fast.

In: GPUs, jobs and choices. Out: bytes, sort keys, jobs with simpler layouts. Left out: intervals of predictions
(measured_errors.py) and the search itself (gpu/search.py).
"""

from collections.abc import Iterator

from rlplan.dataflow.choice import Choice
from rlplan.spec.hardware.catalogue import find_profile, find_usual_node
from rlplan.spec.hardware.profile import GpuProfile, NodeProfile
from rlplan.spec.job import JobSpec
from rlplan.spec.resolved import SettledJob
from rlplan.units import GIB, MIB
from rlplan.vocabulary import Provenance

RESERVE = 256 * MIB
"""Bytes reserved on each GPU. Public logs of one GPU model differ by about 40 MiB in total memory (rtx-4090.yaml).
Cluster monitors take an unknown amount."""
DISPLAY_RESERVE = GIB
"""Bytes reserved on a GPU that may drive a display. From memory: a desktop and a browser take 0.3 to 1.2 GiB."""

SAME_SPEED = 0.01
"""Relative difference in step time within which two layouts count as equally fast. It is below the median error of
every measured kind of GPU seconds (`rlplan accuracy`)."""


ENOUGH_ROOM = 0.1
"""Share of a GPU that is enough headroom in the worst case. More headroom does not justify more offloading or sharding:
otherwise a small model would offload its optimizer beside 20 GiB of unused memory."""


def get_reserve(gpu: GpuProfile) -> int:
    """Bytes of a GPU that every plan leaves free."""
    return DISPLAY_RESERVE if gpu.may_drive_display else RESERVE


def find_assumed_host(job: SettledJob) -> NodeProfile | None:
    """The node whose host memory its profile only assumes and the job does not state; else None."""
    if job.device_kind == "cpu" or job.hardware.host_memory is not None:
        return None
    profile = find_profile(job.hardware.profile, where="hardware.profile")
    node = profile if isinstance(profile, NodeProfile) else find_usual_node(job.load_gpu())
    return node if node is not None and node.host_memory.provenance is Provenance.ASSUMED else None


def rank_roominess(choice: Choice, headroom: int, capacity: int, seconds: float) -> tuple[object, ...]:
    """Sort key of layouts that fit in the worst case and are equally fast within SAME_SPEED, the best first.

    Most headroom wins, up to ENOUGH_ROOM of a GPU. Among equals, the layout with fewer COMPLICATIONS wins, then the
    faster one.
    """
    complications = [key for _, key, _ in COMPLICATIONS if has_complication(choice, key)]
    return -min(headroom, int(ENOUGH_ROOM * capacity)), len(complications), round(seconds, 9)


def drop_host_choices(job: JobSpec) -> JobSpec:
    """The job with nothing offloaded to the host by an open choice."""
    for part, key, value in HOST_COMPLICATIONS:
        if getattr(getattr(job, part), key) == "auto":
            job = job.model_copy(update={part: getattr(job, part).model_copy(update={key: value})})
    return job


HOST_COMPLICATIONS = (
    *(("training", "offloads_parameters", False), ("training", "offloads_optimizer", False)),
    ("placement", "offload", "none"),
)
"""Choices that use the host: (part of the job, key, value without it)."""
COMPLICATIONS = (
    *HOST_COMPLICATIONS,
    ("rollout", "attention_dp", 1),
    *(("training", axis, 1) for axis in ("pp", "cp", "ep", "tp", "ulysses")),
)
"""Choices that make a layout more complicated, in the order in which they are given up."""


def has_complication(choice: Choice, key: str) -> bool:
    """Whether a choice uses one of COMPLICATIONS."""
    if key == "offload":
        return choice.arrangement.offloaded != "none"
    if key == "attention_dp":
        return choice.engine.attention_dp > 1
    return int(getattr(choice.trainer, key)) > (0 if key.startswith("offloads") else 1)


def list_simpler_jobs(job: SettledJob, choice: Choice) -> Iterator[tuple[str, SettledJob]]:
    """List (key, job) with one entry of the choice removed, and all complications it lacks ruled out.

    Keys that the user fixed stay as they are.
    """
    there = [entry for entry in COMPLICATIONS if getattr(getattr(job, entry[0]), entry[1]) == "auto"]
    for given_up in there:
        if has_complication(choice, given_up[1]):
            other = job
            # absent complications are ruled out too, or the new search would trade one for another
            for part, key, value in there:
                if key == given_up[1] or not has_complication(choice, key):
                    other = other.model_copy(update={part: getattr(other, part).model_copy(update={key: value})})
            yield given_up[1], other
