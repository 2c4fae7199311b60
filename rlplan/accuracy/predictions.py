"""The answer for a point: a prediction, or a refusal with the reason.

In: nothing. Out: values that predictors and compare.py share. A predictor without an answer raises CannotPredict; it
never guesses.
"""

from dataclasses import dataclass, field

from rlplan.planner.measured_errors import Stratum


@dataclass(frozen=True)
class Prediction:
    """The predicted value of a point."""

    value: float | str
    """Number in the point's unit, or a word where a word was measured."""
    is_right: bool | None = None
    """Whether a verdict agrees; None for numbers."""
    parts: dict[str, float] = field(default_factory=dict)
    """Parts of the value in the same unit, by kind of memory or phase."""
    without_effect: dict[str, str] = field(default_factory=dict)
    """Settings that were not needed, each with the reason. compare.py fills it in; predictors leave it empty."""
    assumed: dict[str, str] = field(default_factory=dict)
    """Values assumed for settings that are not stated; filled in like `without_effect`."""
    stratum: Stratum | None = None
    """The stratum that decides the interval; None where the model alone decides it."""
    spread: float = 1.0
    """Factor in both directions by which other plausible values of the assumed settings change the value."""

    def __post_init__(self) -> None:
        """Refuse negative bytes, seconds and rates: no measurement is negative, so a formula is wrong."""
        sizes = {"value": self.value} if isinstance(self.value, int | float) else {}
        for name, size in (sizes | self.parts).items():
            assert size >= 0, f"a formula gives {name} = {size}, below 0"


@dataclass(frozen=True)
class Refusal:
    """A missing prediction, with the reason."""

    reason: str


class CannotPredict(Exception):  # noqa: N818
    """Raised by a predictor for a setting that is missing, broken or not modelled; compare.py makes it a Refusal."""
