"""Comparison of predictions with measurements: the error of each point or the reason for none, and a summary by kind.

In: points. Out: an AccuracyReport, which `rlplan accuracy --json` prints.
Left out: predictions (the functions in PREDICTORS) and tables (the command line, benchmarks).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

from rlplan.accuracy import serving_points
from rlplan.accuracy.model_points import predict_parameters
from rlplan.accuracy.named_models import find_point_model
from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.predictions import CannotPredict, Prediction, Refusal
from rlplan.accuracy.rl_steps.points import predict_fit, predict_phase, predict_rl_step, predict_role_peak
from rlplan.accuracy.rl_steps.weight_sync import predict_sync
from rlplan.accuracy.settings_read import find_unread, list_assumed, watch_settings
from rlplan.accuracy.training import colocated
from rlplan.accuracy.training.points import (
    predict_largest,
    predict_peak,
    predict_score_peak,
    predict_score_steady,
    predict_steady,
)
from rlplan.accuracy.training.throughput import predict_throughput
from rlplan.errors import RlplanError, did_you_mean
from rlplan.planner.measured_errors import Stratum, find_error

SCHEMA_VERSION = 2
PREDICTORS: dict[str, Callable[[MeasuredPoint], Prediction]] = {
    "param_count": predict_parameters,
    "phase_time": predict_phase,
    "role_peak": predict_role_peak,
    **dict.fromkeys(serving_points.ENGINE_KINDS, serving_points.predict_engine),
    **dict.fromkeys(("serving_tpot", "serving_ttft", "throughput_infer"), serving_points.predict_latency),
    "trtllm_kv_capacity": serving_points.predict_capacity,
    "kv_saturation": serving_points.judge_saturation,
    "train_peak": predict_peak,
    "train_steady": predict_steady,
    **dict.fromkeys(("sleeping_engine_residual", "rollout_peak"), colocated.predict_engine),
    "max_model_size": predict_largest,
    "logprob_peak": predict_score_peak,
    "logprob_steady": predict_score_steady,
    "throughput_train": predict_throughput,
    "rl_step_time": predict_rl_step,
    "rl_fits": predict_fit,
    "weight_sync_time": predict_sync,
}
"""The predictor of each kind of point."""
UNPREDICTED = {
    "rl_colocated_residual": "what stays is the trainer's states and NCCL groups, which the point does not state",
    "inference_peak": "eager generation without an engine and without a trainer: a job cannot express that",
    "zero_model_states": "the ZeRO paper's arithmetic on a parameter count, which is no model that a job names",
}
"""Kinds that no job can express, with the reason. Their points stay in the table, so that the coverage counts them."""

PREDICTED, REFUSED = "predicted", "refused"


@dataclass(frozen=True)
class Comparison:
    """One point with its prediction."""

    id: str
    kind: str
    measured: float | str | tuple[float, float]
    """A number, a word, or a range."""
    predicted: float | str | None
    unit: str
    relative_error: float | None
    """Signed, (predicted - measured) / measured; 0 inside a range; 0 or 1 for a verdict."""
    status: str
    reason: str | None
    pair: str = ""
    """Model, GPU and format of a serving latency; empty for other kinds."""
    without_effect: dict[str, str] = field(default_factory=dict)
    """Settings that the prediction did not need, each with the reason."""
    assumed: dict[str, str] = field(default_factory=dict)
    """Values that the prediction assumed for settings that are not stated."""
    stratum: Stratum = field(default_factory=lambda: Stratum(is_moe=False))
    """The stratum of the point: dense or MoE, and who runs it."""
    quantity: str = ""
    """Kind of the measured quantity (MeasuredPoint.quantity)."""
    spread: float = 1.0
    """Factor of the assumed settings, as Prediction.spread."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval that contains nine of ten such measurements; None for verdicts and refusals."""
        if self.predicted is None or isinstance(self.predicted, str):
            return None
        low, high = find_error(self.quantity, self.stratum).interval(self.predicted)
        return low / self.spread, high * self.spread

    @property
    def is_inside(self) -> bool | None:
        """Whether the measured value, or part of the measured range, lies in the interval."""
        interval = self.interval
        if interval is None or isinstance(self.measured, str):
            return None
        least, most = self.measured if isinstance(self.measured, tuple) else (self.measured, self.measured)
        return least <= interval[1] and most >= interval[0]

    def as_json(self) -> dict[str, Any]:
        """The point as a mapping."""
        return {
            "id": self.id,
            "kind": self.kind,
            "measured": list(self.measured) if isinstance(self.measured, tuple) else self.measured,
            "predicted": self.predicted,
            "unit": self.unit,
            "relative_error": self.relative_error,
            "interval": None if (interval := self.interval) is None else list(interval),
            "status": self.status,
            "reason": self.reason,
            "without_effect": sorted(self.without_effect),
            "assumed": dict(sorted(self.assumed.items())),
        }


@dataclass(frozen=True)
class KindSummary:
    """The points of one kind; None where nothing was predicted."""

    n: int
    predicted: int
    median_abs: float | None
    """Median size of the relative errors."""
    max_abs: float | None
    bias: float | None
    """Mean of signed relative errors."""
    inside: float | None
    """Share of the points inside their intervals."""


@dataclass(frozen=True)
class PairSummary:
    """The latencies of one kind of one pair of model and GPU."""

    kind: str
    pair: str
    """Model, GPU and format."""
    n: int
    mean_abs: float
    """Mean size of the relative errors."""
    bias: float
    """Mean of signed relative errors."""


@dataclass(frozen=True)
class AccuracyReport:
    """Every point, in the order given."""

    points: tuple[Comparison, ...]

    @property
    def summary(self) -> dict[str, KindSummary]:
        """Each kind, in the order of its first point."""
        kinds = dict.fromkeys(point.kind for point in self.points)
        return {kind: _summarize([point for point in self.points if point.kind == kind]) for kind in kinds}

    @property
    def pairs(self) -> tuple[PairSummary, ...]:
        """Serving latencies by kind and pair, in the order of their first points."""
        errors: dict[tuple[str, str], list[float]] = {}
        for point in self.points:
            if point.pair and point.relative_error is not None:
                errors.setdefault((point.kind, point.pair), []).append(point.relative_error)
        return tuple(
            PairSummary(kind, pair, len(values), fmean(map(abs, values)), fmean(values))
            for (kind, pair), values in errors.items()
        )

    @property
    def without_effect(self) -> dict[tuple[str, str], tuple[str, ...]]:
        """Settings that no prediction needed, by kind of point and reason."""
        names_by_reason: dict[tuple[str, str], dict[str, None]] = {}
        for point in self.points:
            for name, why in point.without_effect.items():
                names_by_reason.setdefault((point.kind, why), {})[name] = None
        return {key: tuple(names) for key, names in names_by_reason.items()}

    @property
    def assumed(self) -> Counter[tuple[str, str, str]]:
        """Numbers of points by kind, setting and value that the predictions assumed."""
        return Counter((point.kind, *taken) for point in self.points for taken in point.assumed.items())

    def as_json(self) -> dict[str, Any]:
        """The report as `rlplan accuracy --json` prints it."""
        return {
            "schema_version": SCHEMA_VERSION,
            "points": [point.as_json() for point in self.points],
            "summary": {kind: vars(summary) for kind, summary in self.summary.items()},
            "pairs": [vars(pair) for pair in self.pairs],
            "without_effect": [
                {"kind": kind, "settings": list(names), "why": why}
                for (kind, why), names in self.without_effect.items()
            ],
        }


def compare(points: Iterable[MeasuredPoint]) -> AccuracyReport:
    """The comparison of every point. A point that cannot be predicted has a reason, and raises nothing."""
    return AccuracyReport(tuple(compare_point(point) for point in points))


def predict(point: MeasuredPoint) -> Prediction | Refusal:
    """The prediction of a point, or a refusal with the reason, such as a setting that no formula reads."""
    if point.kind in UNPREDICTED:
        return Refusal(UNPREDICTED[point.kind])
    if point.kind not in PREDICTORS:
        near = did_you_mean(point.kind, sorted((*PREDICTORS, *UNPREDICTED)))
        return Refusal(f"no formula predicts points of kind '{point.kind}'.{near}")
    point = watch_settings(point)
    try:
        answer = PREDICTORS[point.kind](point)
        return replace(answer, without_effect=find_unread(point), assumed=list_assumed(point))
    except CannotPredict as error:
        return Refusal(str(error))
    except RlplanError as error:
        return Refusal(error.what + (f" ({error.rule})" if error.rule else ""))


def compare_point(point: MeasuredPoint) -> Comparison:
    """The comparison of one point with its prediction."""
    answer = predict(point)
    error = relative_error(point, answer) if isinstance(answer, Prediction) else None
    if isinstance(answer, Prediction) and error is None:
        answer = Refusal(f"measured is {point.measured.value!r}, which no prediction can be compared with")
    return Comparison(
        id=point.id,
        kind=point.kind,
        measured=point.measured.value,
        predicted=answer.value if isinstance(answer, Prediction) else None,
        unit=point.measured.unit,
        relative_error=error,
        status=PREDICTED if isinstance(answer, Prediction) else REFUSED,
        reason=answer.reason if isinstance(answer, Refusal) else None,
        pair=_name_pair(point),
        without_effect=answer.without_effect if isinstance(answer, Prediction) else {},
        assumed=answer.assumed if isinstance(answer, Prediction) else {},
        stratum=_find_stratum(point, answer),
        spread=answer.spread if isinstance(answer, Prediction) else 1.0,
        quantity=point.quantity,
    )


def _find_stratum(point: MeasuredPoint, answer: Prediction | Refusal) -> Stratum:
    """The stratum of a point, by its prediction; by its model where the point is not predicted."""
    if isinstance(answer, Prediction) and answer.stratum is not None:
        return answer.stratum
    try:
        return Stratum(is_moe=find_point_model(point).experts is not None)
    except (CannotPredict, RlplanError):
        return Stratum(is_moe=False)


def _name_pair(point: MeasuredPoint) -> str:
    """The group of a serving latency: model, GPU and format in the source's words."""
    if not (point.kind.startswith("serving_") or point.kind == "throughput_infer"):
        return ""
    words = (point.model or "?", point.gpu or "?", str(point.settings.get("precision") or "bf16"))
    return "{} on {}, {}".format(*words)


def relative_error(point: MeasuredPoint, prediction: Prediction) -> float | None:
    """(predicted - measured) / measured; None where the two cannot be compared.

    The error is 0 within a measured range and counts from the nearest bound outside; a verdict has 0 or 1.

    >>> point = MeasuredPoint(id="a", kind="k", measured={"value": [4, 5], "unit": "GiB"})
    >>> relative_error(point, Prediction(4.5)), relative_error(point, Prediction(6.0))
    (0.0, 0.2)
    """
    if prediction.is_right is not None:
        return 0.0 if prediction.is_right else 1.0
    bounds = point.measured.bounds
    if isinstance(prediction.value, str) or bounds is None:
        return None
    low, high = min(bounds), max(bounds)
    nearest = min(max(prediction.value, low), high)
    if nearest == 0:
        return 0.0 if prediction.value == 0 else None
    error = (prediction.value - nearest) / abs(nearest)
    return error if math.isfinite(error) else None


def _summarize(points: list[Comparison]) -> KindSummary:
    errors = [point.relative_error for point in points if point.relative_error is not None]
    sizes = [abs(error) for error in errors]
    return KindSummary(
        n=len(points),
        predicted=len(errors),
        median_abs=median(sizes) if sizes else None,
        max_abs=max(sizes) if sizes else None,
        bias=fmean(errors) if errors else None,
        inside=fmean(judged)
        if (judged := [is_inside for point in points if (is_inside := point.is_inside) is not None])
        else None,
    )
