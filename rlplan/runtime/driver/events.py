"""Events of a run for a display: what begins, what ended with which numbers, what is wrong while it goes on."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RunEvent:
    kind: str
    """`phase`, `alarm` (`text` says what begins, or is wrong), `action` (began), `step` (ended, with its numbers)."""

    step: int
    """0 before the first."""

    text: str = ""
    """For people; of an action its id."""

    learning: dict[str, float] = field(default_factory=dict)
    """A step's metrics by name."""

    timings: dict[str, float] = field(default_factory=dict)
    """A step's seconds by name."""


Listener = Callable[[RunEvent], None]
