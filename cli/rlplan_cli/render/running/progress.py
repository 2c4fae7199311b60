"""The live display of a run: phase, step, reward, tokens/s and memory against plan; plain lines outside a terminal.

In: RunEvents. Out: stderr.
"""

import time
from abc import ABC, abstractmethod
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from rlplan.planner.plan import Plan
from rlplan.units import format_bytes, format_seconds
from rlplan_cli.render.terminal import note, stderr

if TYPE_CHECKING:
    from rlplan.runtime.driver.events import RunEvent


class LiveDisplay(ABC):
    """A context manager around a live frame, where there is a terminal for one."""

    live: Live | None = None

    @abstractmethod
    def new_live(self) -> Live | None:
        """The frame; None where plain lines are printed."""

    def __enter__(self) -> Self:
        self.live = self.new_live()
        if self.live is not None:
            self.live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.__exit__(kind, error, trace)
            self.live = None


class RunDisplay(LiveDisplay):
    """Hand its `show` to the run as the listener."""

    def __init__(self, plan: Plan) -> None:
        self.evaluations = [one for one in plan.job.evaluations if not one.passes_of]  # a line has room for means
        self.num_steps = plan.job.workload.num_steps
        self.predicted_bytes = plan.ledger.host_peak().num_bytes
        self.started = time.monotonic()
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=stderr,
        )
        self.task: TaskID = self.progress.add_task("starting", total=self.num_steps)
        self.latest: dict[str, str] = {}

    def new_live(self) -> Live | None:
        return Live(self._frame(), console=stderr, refresh_per_second=4, transient=True) if stderr.is_terminal else None

    def show(self, event: "RunEvent") -> None:
        """One event."""
        if event.kind == "phase":
            self._say(f"{event.text} ...")
        elif event.kind == "alarm":
            self._say(f"alarm: {event.text}")
        elif event.kind == "action":
            self.progress.update(self.task, description=f"{event.text:<24}")
        else:
            self._step(event)
        if self.live is not None:
            self.live.update(self._frame())

    def _step(self, event: "RunEvent") -> None:
        if event.step > 0:
            self.progress.update(self.task, completed=event.step)
        numbers = {**event.learning, **event.timings}
        parts = {
            "reward": numbers.get("reward/mean"),
            "kl": numbers.get("kl/mean"),
            "entropy": numbers.get("policy/entropy"),
            "tokens/s": numbers.get("throughput/tokens_per_sec"),
        } | {f"held-out {one.title}": numbers.get(one.metric) for one in self.evaluations}
        forms = {"tokens/s": "{:,.0f}", "kl": "{:.5f}"} | {
            f"held-out {one.title}": "{:.1%}" for one in self.evaluations if one.is_share
        }
        self.latest |= {k: forms.get(k, "{:.3f}").format(v) for k, v in parts.items() if v is not None}
        memory = numbers.get("memory/host_total_bytes")
        if memory:
            self.latest["memory"] = f"{format_bytes(memory)} (plan: at most {format_bytes(self.predicted_bytes)})"
        if self.live is None:
            self._say(self._line(event, parts, forms))

    def _line(self, event: "RunEvent", parts: dict[str, float | None], forms: dict[str, str]) -> str:
        name = {0: "started", -1: "finished"}.get(event.step, f"step {event.step}/{self.num_steps}")
        numbers = [f"{k} {forms.get(k, '{:.3f}').format(v)}" for k, v in parts.items() if v is not None]
        return "  ".join([f"{name:<12}", *numbers, format_seconds(event.timings.get("step_s", 0.0))])

    def _say(self, text: str) -> None:
        if self.live is not None:
            self.live.console.print(text, style="dim")
        else:
            note(f"[{time.monotonic() - self.started:6.1f} s] {text}")

    def _frame(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        grid.add_row(self.progress)
        grid.add_row("   ".join(f"{key} {value}" for key, value in self.latest.items()))
        return grid
