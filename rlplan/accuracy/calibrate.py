"""Calibration of a GPU profile's free constants to the user's own measurements, with the error on held-out samples.

In: samples, each a measurement and its prediction in seconds or bytes. Out: a Calibration: a profile with a few
constants of provenance `measured`, and the error of each fit. Left out: files and logs (rlplan/calibration.py), plans.

One number is fitted for each group; it scales or shifts all constants of the group. Five samples do not support more.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from statistics import fmean, median
from typing import Any

from rlplan.accuracy.compare import compare
from rlplan.accuracy.points import MeasuredPoint, Statistic
from rlplan.accuracy.settings import find_gpu
from rlplan.errors import SpecError
from rlplan.spec.hardware.profile import GpuProfile
from rlplan.units import format_bytes
from rlplan.vocabulary import Provenance

TRAINING, SERVING, CONTEXT = "training", "serving", "context"
GROUPS = {
    TRAINING: ("efficiencies.matmul", "efficiencies.matmul_8bit", "efficiencies.memory"),
    SERVING: tuple(
        f"serving.{name}" for name in ("matmul", "matmul_8bit", "matmul_4bit", "memory", "layer", "expert_layer")
    ),
    CONTEXT: ("overheads.context",),
}
"""Constants that are fitted together. Seconds of a group scale with its constants, apart from links between GPUs."""
OF_KIND = {
    "throughput_train": TRAINING,
    **dict.fromkeys(("serving_tpot", "throughput_infer"), SERVING),
    **dict.fromkeys(("train_peak", "rollout_peak", "sleeping_engine_residual"), CONTEXT),
}
LEAST = 5
"""Fewest samples of a group: the median of fewer is hardly more than one measurement."""


@dataclass(frozen=True)
class Sample:
    """One measurement beside its prediction."""

    id: str
    group: str
    gpu: str
    """Its profile's name."""
    model: str
    measured: float
    """Seconds; bytes of a process in the group `context`."""
    predicted: float


@dataclass(frozen=True)
class Fit:
    """The fit of one group."""

    group: str
    num_samples: int
    models: tuple[str, ...]
    """Models of the samples."""
    value: float
    """Factor on seconds; in the group `context`, bytes to add."""
    error_before: float
    """Mean relative error of the predictions without the fit."""
    error_after: float
    """Mean relative error with a fit to the other models; to the other samples where there is one model."""

    @property
    def is_better(self) -> bool:
        """Whether the fit reduces the error of held-out samples; only then is its value used."""
        return self.error_after < self.error_before

    def as_json(self) -> dict[str, Any]:
        """The fit with its constants, and whether it is used."""
        return asdict(self) | {"constants": list(GROUPS[self.group]), "is_used": self.is_better}


@dataclass(frozen=True)
class Calibration:
    """The calibrated profile, and its fits."""

    profile: GpuProfile
    fits: tuple[Fit, ...]
    unused: dict[str, int]
    """Numbers of measurements that no constant is fitted to, by reason."""

    def as_json(self) -> dict[str, Any]:
        """The fits, with the profile's name."""
        return {
            "schema_version": 1,
            "profile": self.profile.name,
            "fits": [fit.as_json() for fit in self.fits],
            "unused": self.unused,
        }


def make_samples(points: Iterable[MeasuredPoint]) -> tuple[list[Sample], dict[str, int]]:
    """Samples of measured points, and the number of unusable points by reason."""
    points = tuple(points)
    samples: list[Sample] = []
    unused: Counter[str] = Counter()
    for point, comparison in zip(points, compare(points).points, strict=True):
        sample = None if comparison.relative_error is None else _make_sample(point, comparison.relative_error)
        if sample is not None:
            samples.append(sample)
        else:
            unused[comparison.reason or f"no constant is fitted to {point.kind} in {point.measured.unit}"] += 1
    return samples, dict(unused)


def _make_sample(point: MeasuredPoint, error: float) -> Sample | None:
    group, gpu, bounds = OF_KIND.get(point.kind), find_gpu(point), point.measured.bounds
    if group is None or gpu is None or bounds is None or error <= -1:
        return None
    measured, size = fmean(bounds), point.measured.bytes_per_unit
    if group == CONTEXT:
        if size is None or (point.kind == "train_peak" and point.measured.statistic is not Statistic.PROCESS):
            return None
        return Sample(point.id, group, gpu.name, point.model or "?", measured * size, measured * size * (1 + error))
    seconds, error_s = (1 / measured, 1 / (1 + error)) if point.is_rate else (measured, 1 + error)
    return Sample(point.id, group, gpu.name, point.model or "?", seconds, seconds * error_s)


def calibrate(samples: Sequence[Sample], find: Callable[[str], GpuProfile], unused: dict[str, int]) -> Calibration:
    """The profile of the samples' GPU with fitted constants. find: gives a profile by name.

    Raises: SpecError for samples of two GPUs, for too few samples, and where no fit reduces the held-out error.
    """
    gpus = Counter(sample.gpu for sample in samples)
    if len(gpus) > 1:
        listed = ", ".join(f"{gpu} ({num})" for gpu, num in gpus.most_common())
        raise _refuse(
            f"measurements are of {listed}", "one kind of GPU: constants are a profile's", "name those of one"
        )
    groups = {group: [sample for sample in samples if sample.group == group] for group in GROUPS}
    enough = {group: own for group, own in groups.items() if len(own) >= LEAST}
    if not enough:
        counts = ", ".join(f"{len(own)} of {group}" for group, own in groups.items() if own) or "none"
        why = "; ".join(f"{num} unused: {reason}" for reason, num in list(unused.items())[:3])
        raise _refuse(
            f"measurements: {counts}" + (f" ({why})" if why else ""),
            f"a group needs {LEAST}: of {', '.join(dict.fromkeys(OF_KIND))}, or steps of runs and logs",
            f"measure {LEAST - max(map(len, groups.values()))} more settings",
        )
    fits = tuple(fit(own) for own in enough.values())
    few = {
        f"{len(own)} of {group}, {LEAST} are needed": len(own) for group, own in groups.items() if 0 < len(own) < LEAST
    }
    if not any(result.is_better for result in fits):
        errors = ", ".join(f"{result.group} {result.error_before:.1%} to {result.error_after:.1%}" for result in fits)
        raise _refuse(
            f"no fit reduces the error of held-out samples ({errors})",
            "a fit is kept only where it reduces that error",
            "keep the profile as it is",
        )
    profile = find(next(iter(gpus)))
    for result in fits:
        profile = _move_constants(profile, result) if result.is_better else profile
    return Calibration(profile, fits, unused | few)


def fit(samples: Sequence[Sample]) -> Fit:
    """The median ratio, or for bytes the median difference, and its held-out error.

    >>> steps = [Sample(str(n), TRAINING, "h100-sxm", "m", 1.2 + n / 100, 1.0) for n in range(5)]
    >>> result = fit(steps)
    >>> round(result.value, 2), round(result.error_before, 2), round(result.error_after, 2)
    (1.22, 0.18, 0.01)
    """
    models = tuple(dict.fromkeys(sample.model for sample in samples))
    keys = [sample.model for sample in samples] if len(models) > 1 else [str(n) for n, _ in enumerate(samples)]
    errors = []
    for key in dict.fromkeys(keys):
        value = _fit_value([sample for own, sample in zip(keys, samples, strict=True) if own != key])
        errors += [_compute_error(sample, value) for own, sample in zip(keys, samples, strict=True) if own == key]
    before = fmean(abs(sample.predicted / sample.measured - 1) for sample in samples)
    return Fit(samples[0].group, len(samples), models, _fit_value(samples), before, fmean(errors))


def _fit_value(samples: Sequence[Sample]) -> float:
    if samples[0].group == CONTEXT:
        return median(sample.measured - sample.predicted for sample in samples)
    return math.exp(median(math.log(sample.measured / sample.predicted) for sample in samples))


def _compute_error(sample: Sample, value: float) -> float:
    corrected = sample.predicted + value if sample.group == CONTEXT else sample.predicted * value
    return abs(corrected / sample.measured - 1)


def _move_constants(profile: GpuProfile, fit: Fit) -> GpuProfile:
    """The profile with a fit applied: efficiencies are divided, seconds multiplied, and bytes added."""
    source = (
        f"rlplan calibrate: {fit.num_samples} measurements of {', '.join(fit.models)[:200]}; held-out error "
        f"{fit.error_before:.1%} before, {fit.error_after:.1%} after"
    )
    origin = {"provenance": Provenance.MEASURED, "source": source, "date": datetime.now(UTC).date().isoformat()}
    for path in GROUPS[fit.group]:
        part_name, _, key = path.partition(".")
        part = getattr(profile, part_name)
        if part is None or getattr(part, key) is None:
            continue
        old = getattr(part, key)
        if fit.group == CONTEXT:
            value: float = max(0, round(old.value + fit.value))
        elif key in ("layer", "expert_layer"):
            value = float(f"{old.value * fit.value:.4g}")
        else:
            value = min(1.0, round(old.value / fit.value, 4))
        changed = part.model_copy(update={key: old.model_copy(update={"value": value, **origin})})
        profile = profile.model_copy(update={part_name: changed})
    return profile


def describe_value(fit: Fit) -> str:
    """The change of a fit in words."""
    if fit.group == CONTEXT:
        return f"{'+' if fit.value >= 0 else '-'}{format_bytes(abs(round(fit.value)))}"
    return f"{fit.value:.2f} times the seconds"


def _refuse(what: str, rule: str, way_out: str) -> SpecError:
    return SpecError(what, where="rlplan calibrate", rule=rule, way_out=way_out)
