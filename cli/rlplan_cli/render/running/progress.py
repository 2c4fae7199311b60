"""The display of `rlplan run`: the frame of `rlplan watch` in a terminal, a line per event outside of one.

In: RunEvents, the run folder. Out: stderr.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.live import Live

from rlplan.planner.plan import Plan
from rlplan.runtime.run_folder.following import Follower
from rlplan_cli.render.running.watching import WatchDisplay
from rlplan_cli.render.terminal import note, stderr

if TYPE_CHECKING:
    from rlplan.runtime.driver.events import RunEvent


class RunDisplay(WatchDisplay):
    """A context manager whose `show_event` listens to a run."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        super().__init__(plan, is_shown=True)
        self.folder = folder
        self.started = time.monotonic()
        self.follower: Follower | None = None

    def new_live(self) -> Live | None:
        """A frame that is refreshed by events."""
        return Live(console=stderr, auto_refresh=False, transient=True) if stderr.is_terminal else None

    def show_event(self, event: "RunEvent") -> None:
        """Show one event."""
        if event.kind == "phase":
            self._show_line(f"{event.text} ...")
        elif event.kind == "alarm":
            self._show_line(f"alarm: {event.text}")
        elif event.kind == "step" and self.live is None:
            self._show_line(self.format_step({**event.learning, **event.timings, "step": event.step}))
        if self.live is not None:
            # The folder is read as by `rlplan watch`, so both show the same.
            self.follower = self.follower or Follower(self.folder)
            self.show(self.follower.read_new())

    def _show_line(self, text: str) -> None:
        if self.live is not None:
            self.live.console.print(text, style="dim")
        else:
            note(f"[{time.monotonic() - self.started:6.1f} s] {text}")
