"""Reader of measured jobs: a partial job with a forced layout, and measurements of its phases and roles.

In: a YAML file such as rlplan/accuracy/points/*.yaml. Out: points, one for each measured value.
Left out: predictions (rl_steps/points.py).

    jobs:
    - id: verl-dapo-7b-h20-128
      job: {policy: Qwen/Qwen2.5-Math-7B, framework: verl, hardware: 16xhgx-h20, …}
      measured:
        seconds: {generate: 177.85, score: 53.92, train: 113.81, step: 356.3}
        peak: {policy_trainer: 61.5GiB}
      statistic: allocated
      source: https://…
      reliability: A
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from rlplan.accuracy.points import Measured, MeasuredPoint
from rlplan.spec.base import ByteCount, Spec, validate
from rlplan.spec.files.yaml import parse_yaml

PhaseName = Literal["generate", "score", "train", "sync", "switch", "refit", "step"]
Seconds = Annotated[float, Field(gt=0)]
TIME_KIND, PEAK_KIND = "phase_time", "role_peak"
"""Kinds of the points."""


class MeasuredValues(Spec):
    """The measurements of a job."""

    seconds: dict[PhaseName, Seconds] = Field(default_factory=dict)
    """Seconds of the phases of a steady-state step, and of the whole step."""
    peak: dict[str, ByteCount] = Field(default_factory=dict)
    """Peak bytes on one GPU by worker (`policy_trainer`, `rollout_engine`), or of all workers (`device`)."""


class MeasuredJob(Spec):
    """One job."""

    id: str = Field(min_length=1, max_length=280)
    job: dict[str, Any]
    """The keys of a job file, with a forced layout."""
    measured: MeasuredValues
    statistic: Literal["allocated", "reserved", "process"] = "allocated"
    """The quantity of a peak: bytes of tensors, bytes that torch reserved, or the driver's number for the process."""
    source: str
    reliability: str = "A"
    note: str = ""


class MeasuredJobs(Spec):
    """The jobs of a file."""

    jobs: tuple[MeasuredJob, ...]


def read_job_points(text: str, path: Path) -> tuple[MeasuredPoint, ...]:
    """The points of a YAML file. Raises: SpecError."""
    data = parse_yaml(text, where=str(path), what="the file of measured jobs")
    jobs = validate(MeasuredJobs, data, file=str(path), way_out="each has id, job, measured and source").jobs
    return tuple(point for job in jobs for point in _make_points(job))


def _make_points(measured: MeasuredJob) -> Iterator[MeasuredPoint]:
    values: list[tuple[str, str, float, str]] = [
        (TIME_KIND, phase, seconds, "s") for phase, seconds in measured.measured.seconds.items()
    ]
    values += [
        (PEAK_KIND, worker, float(size), f"bytes, max {_WORDS[measured.statistic]}")
        for worker, size in measured.measured.peak.items()
    ]
    policy = measured.job.get("policy")
    for kind, what, value, unit in values:
        yield MeasuredPoint(
            id=f"{measured.id}:{what}",
            kind=kind,
            model=policy.get("path") if isinstance(policy, dict) else policy,
            gpu=str(measured.job.get("hardware")),
            settings={"job": measured.job, "of": what},
            measured=Measured(value=value, unit=unit),
            source=measured.source,
            reliability=measured.reliability,
            notes=measured.note or None,
        )


_WORDS = {"allocated": "allocated", "reserved": "reserved", "process": "device used"}
"""The words of units for each statistic."""
