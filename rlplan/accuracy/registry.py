"""Predictors by kind of point: who answers for `vllm_kv`, `train_peak` and the rest.

In: a function from a point to a Prediction. Out: the same function, registered for its kinds. A predictor that cannot
answer returns a Refusal, or raises CannotPredict with the reason; it never guesses.
Left out: the comparison (compare.py).

    @predicts("param_count")
    def predict_param_count(point: MeasuredPoint) -> Prediction: ...
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from rlplan.accuracy.points import MeasuredPoint
from rlplan.planner.measured_errors import Stratum


@dataclass(frozen=True)
class Prediction:
    """What the formulas say."""

    value: float | str
    """In the point's own unit, or a word where a word was measured."""
    is_right: bool | None = None
    """For verdicts, whether the word agrees (a verdict is right or wrong, not near)."""
    parts: dict[str, float] = field(default_factory=dict)
    """What the value is made of, in the same unit, for those who ask why."""
    without_effect: dict[str, str] = field(default_factory=dict)
    """Settings that it did not need, each with the reason (settings_read.py); predictors leave it empty."""
    assumed: dict[str, str] = field(default_factory=dict)
    """What it took for settings that are not stated; as `without_effect`."""
    stratum: Stratum | None = None
    """The stratum that decides the interval; None where the model alone decides it."""

    def __post_init__(self) -> None:
        """Refuse bytes, seconds and rates below zero: no measurement is negative, so a formula is wrong."""
        sizes = {"value": self.value} if isinstance(self.value, int | float) else {}
        for name, size in (sizes | self.parts).items():
            assert size >= 0, f"a formula gives {name} = {size}, below 0"


@dataclass(frozen=True)
class Refusal:
    """Why there is no prediction."""

    reason: str


class CannotPredict(Exception):  # noqa: N818
    """Raised by a predictor for a setting that is missing, broken or not modelled; compare.py makes it a Refusal."""


Predictor = Callable[[MeasuredPoint], Prediction | Refusal]
_PREDICTORS: dict[str, Predictor] = {}


def predicts(*kinds: str) -> Callable[[Predictor], Predictor]:
    """Registers a predictor for kinds of points. A kind has one predictor: a second one is a bug."""

    def register(predictor: Predictor) -> Predictor:
        for kind in kinds:
            assert kind not in _PREDICTORS, f"two predictors for {kind}"
            _PREDICTORS[kind] = predictor
        return predictor

    return register


def find_predictor(kind: str) -> Predictor | None:
    """Who predicts a kind; None where nobody does."""
    return _PREDICTORS.get(kind)


def known_kinds() -> tuple[str, ...]:
    """Every kind that has a predictor, in order."""
    return tuple(sorted(_PREDICTORS))
