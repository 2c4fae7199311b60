"""The live display of a run: a frame that is redrawn in a terminal, lines in a pipe.

In: a plan, and the run's standing or its events. Out: stdout for `rlplan watch`, stderr for `rlplan run`.
Left out: waiting.
"""

import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlplan.planner.plan import Plan
from rlplan.runtime.run_folder.following import Follower
from rlplan.units import format_bytes, format_seconds
from rlplan_cli.render.terminal import NARROW, new_table, note, stderr, stdout

if TYPE_CHECKING:
    from rlplan.runtime.driver.events import RunEvent
    from rlplan.runtime.run_folder.following import Standing

SHOWN_STEPS, SHOWN_ALARMS = 8, 3
COLORS = {"finished": "green", "running": "green", "starting": "yellow", "interrupted": "yellow"}
COLUMNS = {
    "reward": ("reward/mean", "{:.3f}"),
    "tokens/s": ("throughput/tokens_per_sec", "{:,.0f}"),
    "length": ("response_len/mean", "{:,.0f}"),
    "KL": ("kl/mean", "{:.5f}"),
    "entropy": ("policy/entropy", "{:.3f}"),
    "grad norm": ("policy/grad_norm", "{:.3g}"),
}
"""Metric and format of each column in the table of steps."""
GIVEN_COLUMNS = {
    "loss": ("policy/loss", "{:.4g}"),
    "tokens/s": COLUMNS["tokens/s"],
    "ranked right": ("policy/ranked_right_fraction", "{:.1%}"),
    "length": COLUMNS["length"],
    "KL": COLUMNS["KL"],
    "grad norm": COLUMNS["grad norm"],
}
"""The same for a job that learns from given answers, which no reward judges."""
NUM_NARROW_COLUMNS = 3
"""Number of these columns in a narrow terminal."""
STEP_NAMES = {0: "start", -1: "end"}


class WatchDisplay:
    """A context manager around a live frame; `show` takes the run's standing."""

    live: Live | None = None

    def __init__(self, plan: Plan, *, is_shown: bool) -> None:
        self.plan, self.is_shown = plan, is_shown
        self.num_steps = plan.job.workload.num_steps
        self.columns = COLUMNS if plan.job.has_rollouts else GIVEN_COLUMNS
        self.printed: set[int] = set()

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

    def new_live(self) -> Live | None:
        """The frame; None where lines are printed instead."""
        is_live = self.is_shown and stdout.is_terminal
        # transient: `show_end` prints the last frame once more, whole
        return Live(console=stdout, auto_refresh=False, transient=True) if is_live else None

    def show(self, standing: "Standing") -> None:
        """Redraw the frame, or print the new steps."""
        if self.live is not None:
            self.live.update(self.frame(standing), refresh=True)
        elif self.is_shown:
            for row in standing.steps:
                if row["step"] > 0 and "step_s" in row and row["step"] not in self.printed:
                    self.printed.add(row["step"])
                    stdout.print(self.format_step(row))

    def show_end(self, standing: "Standing") -> None:
        """Print the last frame, which stays on the screen."""
        stdout.print(self.frame(standing))

    def frame(self, standing: "Standing") -> Group:
        """State, last steps, memory of the processes, alarms."""
        done, seconds = max(standing.step, 0), standing.seconds
        left = f", about {format_seconds(left_s)} left" if (left_s := self._left_s(standing)) else ""
        head = Text.assemble(
            (standing.state, COLORS.get(standing.state, "red")),
            f"  {self.plan.job.name}: step {done} of {self.num_steps} after {format_seconds(seconds)}{left}",
        )
        doing = f"  last action: {standing.doing}" * bool(standing.is_going_on and standing.doing)
        parts: list[Any] = [head, ProgressBar(total=self.num_steps, completed=done, width=min(stdout.width, 60))]
        parts += [Text(doing, style="dim")] * bool(doing)
        parts += [self._steps(standing), self._memory(standing)]
        parts += [Text(f"alarm: {alarm}", style="yellow") for alarm in [*standing.alarms][-SHOWN_ALARMS:]]
        return Group(*parts)

    def format_step(self, row: dict[str, Any]) -> str:
        """One line with a step's metrics."""
        name = STEP_NAMES.get(row["step"], f"step {row['step']}/{self.num_steps}")
        metrics = [*self.columns.items(), *self._heldout([row])[:2]]
        shown = [f"{label} {form.format(row[key])}" for label, (key, form) in metrics if key in row]
        return "  ".join([name, *shown, format_seconds(row.get("step_s", 0.0))])

    def _left_s(self, standing: "Standing") -> float:
        """Seconds to the end at the pace of the last steps; 0 if unknown."""
        times = [row["step_s"] for row in standing.steps if row["step"] > 0 and "step_s" in row]
        return sum(times) / len(times) * (self.num_steps - standing.step) if times and standing.is_going_on else 0.0

    def _heldout(self, rows: list[dict[str, Any]]) -> list[tuple[str, tuple[str, str]]]:
        """Columns of the evaluations that have values."""
        return [
            (f"held-out {evaluation.title}", (evaluation.metric, "{:.1%}" if evaluation.is_share else "{:.4g}"))
            for evaluation in self.plan.job.evaluations
            if any(evaluation.metric in row for row in rows)
        ]

    def _steps(self, standing: "Standing") -> Table:
        is_narrow, rows = stdout.width < NARROW, [*standing.steps]
        recorded = [column for column in self.columns.items() if not rows or any(column[1][0] in row for row in rows)]
        metrics = recorded[: NUM_NARROW_COLUMNS if is_narrow else None]
        metrics += self._heldout(rows)[: 1 if is_narrow else 2]
        table = new_table("step", *(name for name, _ in metrics), "seconds")
        for row in rows[-SHOWN_STEPS:]:
            name = STEP_NAMES.get(row["step"], str(row["step"]))
            cells = [form.format(row[key]) if key in row else "-" for _, (key, form) in metrics]
            table.add_row(name, *cells, format_seconds(row["step_s"]) if "step_s" in row else "-")
        return table

    def _memory(self, standing: "Standing") -> Table:
        """Current and largest memory of each process, and its predicted peak."""
        table = new_table("process", "current", "peak", "predicted", "peak / predicted")
        for process in self.plan.ledger.processes:
            if process not in standing.peaks:
                continue
            predicted, peak = self.plan.ledger.process_peak(process).num_bytes, standing.peaks[process]
            current = format_bytes(standing.held[process]) if process in standing.held else "-"
            share = Text(f"{peak / predicted:.0%}", "red" if peak > predicted else "")
            table.add_row(process, current, format_bytes(peak), format_bytes(predicted), share)
        return table


class RunDisplay(WatchDisplay):
    """The display of `rlplan run`: `show_event` listens to a run, and each event may redraw the frame."""

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
