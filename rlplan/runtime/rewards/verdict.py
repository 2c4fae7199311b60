"""The reward of one response, or why there is none.

In: what a reward gave. Out: a finite number, or a RewardFailure with its reason: never a silent 0. A response that
exhausts its own limits has failed by its own doing: 0, noted (ExhaustedError), or a policy could learn to be left out.
"""

import math
from dataclasses import dataclass, field
from typing import Any

MAX_REASON = 300
"""Characters of a reason that are kept."""


class RewardFailure(Exception):  # noqa: N818  # a value of the run's, caught and counted, not an error of ours
    """A reward could not be computed. reason: for people, short."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason[:MAX_REASON])
        self.reason = reason[:MAX_REASON]


EXHAUSTED = ("timeout", "memory", "output", "killed")
"""Notes of responses that exhausted their limits: `killed` where one was ended without saying why."""


class ExhaustedError(Exception):
    """A response has exhausted a limit while it was judged. note: which, one of EXHAUSTED."""

    def __init__(self, note: str) -> None:
        super().__init__(note)
        self.note = note


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the rewards say of one response."""

    values: dict[str, float] = field(default_factory=dict)
    """Unweighted, by reward name."""

    failure: str = ""
    """Of the first reward that failed; then `values` are partial. Empty: none has."""

    notes: dict[str, int] = field(default_factory=dict)
    """How often something happened that is no failure, such as a program's timeout."""

    start_s: float = 0.0
    """When judging began, in seconds since 1970."""

    end_s: float = 0.0


def check_number(value: Any) -> float:
    """A reward as a number. Raises: RewardFailure for what is none, or not finite."""
    if isinstance(value, bool):
        return float(value)
    if not isinstance(value, int | float):
        raise RewardFailure(f"it gave {type(value).__name__}, not a number")
    try:
        number = float(value)
    except OverflowError:
        raise RewardFailure("it gave a number too large") from None
    if not math.isfinite(number):
        raise RewardFailure(f"it gave {number}")
    return number
