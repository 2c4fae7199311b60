"""Events of a run for a progress display: started phases and actions, finished steps, alarms."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RunEvent:
    """One event of a run."""

    kind: str
    """`phase` or `alarm`, which `text` describes; `action` for a started action; `step` for a finished step."""

    step: int
    """Number of the step; 0 before the first."""

    text: str = ""
    """Text of a phase or alarm, or id of an action."""

    learning: dict[str, float] = field(default_factory=dict)
    """A step's metrics by name."""

    timings: dict[str, float] = field(default_factory=dict)
    """A step's seconds by name."""


Listener = Callable[[RunEvent], None]
