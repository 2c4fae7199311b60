"""Events of a run for a display: what begins, what ended with which numbers, what is wrong while it goes on."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RunEvent:
    """Something to show. kind: `phase` (text says what begins), `action` (began), `step` (ended, with its numbers),
    `alarm` (text says what is wrong, while the run goes on).
    """

    kind: str
    step: int
    text: str = ""
    learning: dict[str, float] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)


Listener = Callable[[RunEvent], None]
