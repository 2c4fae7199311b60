"""The reward of one response, or the reason why it has none.

A failure never becomes a silent 0. A response that exhausts its own limits does score 0, with a note (ExhaustedError);
otherwise a policy could learn to exhaust them and be left out of training.

In: the value of a reward. Out: a finite number, or a RewardFailure with its reason.
"""

import math
from dataclasses import dataclass, field
from typing import Any

MAX_REASON = 300
"""Most characters of a reason; the rest is cut off."""


class RewardFailure(Exception):  # noqa: N818  # an expected outcome that the run counts, not a bug
    """A reward could not be computed. reason: a short text for the user. is_late: whether it missed its deadline."""

    def __init__(self, reason: str, *, is_late: bool = False) -> None:
        super().__init__(reason[:MAX_REASON])
        self.reason, self.is_late = reason[:MAX_REASON], is_late


EXHAUSTED = ("timeout", "memory", "output", "killed")
"""Notes on responses that exhausted a limit; `killed` means that the process ended without a reason."""


class ExhaustedError(Exception):
    """A response exhausted a limit while it was judged. note: the limit, one of EXHAUSTED."""

    def __init__(self, note: str) -> None:
        super().__init__(note)
        self.note = note


@dataclass(frozen=True, slots=True)
class Verdict:
    """Rewards of one response."""

    values: dict[str, float] = field(default_factory=dict)
    """Unweighted rewards by name."""

    failure: str = ""
    """Reason of the first reward that failed, in which case `values` are partial; empty without a failure."""

    notes: dict[str, int] = field(default_factory=dict)
    """Counts of events that are not failures, such as a program's timeout."""

    start_s: float = 0.0
    """Start of judging, in seconds since 1970."""

    end_s: float = 0.0
    """End of judging, in seconds since 1970."""


def check_number(value: Any) -> float:
    """A reward as a finite number. Raises: RewardFailure for any other value."""
    if isinstance(value, bool):
        return float(value)
    if not isinstance(value, int | float):
        raise RewardFailure(f"it returned {type(value).__name__}, not a number")
    try:
        number = float(value)
    except OverflowError:
        raise RewardFailure("it returned a number that is too large") from None
    if not math.isfinite(number):
        raise RewardFailure(f"it returned {number}")
    return number
