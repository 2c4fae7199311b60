"""A run that is watched: a frame that is redrawn in a terminal, a line for each new step in a pipe.

In: a plan, and how the run stands. Out: stdout. Left out: reading the run folder, waiting.
"""

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlplan.planner.plan import Plan
from rlplan.units import format_bytes, format_seconds
from rlplan_cli.render.running.progress import LiveDisplay
from rlplan_cli.render.terminal import NARROW, new_table, stdout

if TYPE_CHECKING:
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
"""Columns of a step, the metric of each, and how it is written."""
IN_A_NARROW_TERMINAL = 3
"""Of these columns; wider ones have them all."""


class WatchDisplay(LiveDisplay):
    """`show` takes how the run stands."""

    def __init__(self, plan: Plan, *, is_shown: bool) -> None:
        self.plan, self.is_shown = plan, is_shown
        self.num_steps = plan.job.workload.num_steps
        self.told: set[int] = set()

    def new_live(self) -> Live | None:
        is_live = self.is_shown and stdout.is_terminal
        return Live(console=stdout, auto_refresh=False, transient=True) if is_live else None

    def show(self, standing: "Standing") -> None:
        """The frame again, or the steps that are new."""
        if self.live is not None:
            self.live.update(self.frame(standing), refresh=True)
        elif self.is_shown:
            for row in standing.steps:
                if row["step"] > 0 and "step_s" in row and row["step"] not in self.told:
                    self.told.add(row["step"])
                    stdout.print(self._line(row))

    def show_end(self, standing: "Standing") -> None:
        """What stays on the screen when watching ends."""
        stdout.print(self.frame(standing))

    def frame(self, standing: "Standing") -> Group:
        """Where it is, its last steps, its processes, its alarms."""
        done, seconds = max(standing.step, 0), standing.seconds
        left = f", about {format_seconds(left_s)} left" if (left_s := self._left_s(standing)) else ""
        head = Text.assemble(
            (standing.state, COLORS.get(standing.state, "red")),
            f"  {self.plan.job.name}: step {done} of {self.num_steps} after {format_seconds(seconds)}{left}",
        )
        doing = f"  {standing.doing} ended last" * bool(standing.is_going_on and standing.doing)
        parts: list[Any] = [head, ProgressBar(total=self.num_steps, completed=done, width=min(stdout.width, 60))]
        parts += [Text(doing, style="dim")] * bool(doing)
        parts += [self._steps(standing), self._memory(standing)]
        parts += [Text(f"alarm: {alarm}", style="yellow") for alarm in [*standing.alarms][-SHOWN_ALARMS:]]
        return Group(*parts)

    def _left_s(self, standing: "Standing") -> float:
        """Seconds to the end at the pace of the last steps; 0 where that is not known."""
        took = [row["step_s"] for row in standing.steps if row["step"] > 0 and "step_s" in row]
        return sum(took) / len(took) * (self.num_steps - standing.step) if took and standing.is_going_on else 0.0

    def _steps(self, standing: "Standing") -> Table:
        metrics = [*COLUMNS.items()]
        if stdout.width < NARROW:
            metrics = metrics[:IN_A_NARROW_TERMINAL]
        heldout = [
            (f"held-out {one.title}", (one.metric, "{:.1%}" if one.is_share else "{:.4g}"))
            for one in self.plan.job.evaluations
            if any(one.metric in row for row in standing.steps)
        ]
        metrics += heldout[: 1 if stdout.width < NARROW else 2]
        table = new_table("step", *(name for name, _ in metrics), "took")
        for row in [*standing.steps][-SHOWN_STEPS:]:
            name = {0: "start", -1: "end"}.get(row["step"], str(row["step"]))
            cells = [form.format(row[key]) if key in row else "-" for _, (key, form) in metrics]
            table.add_row(name, *cells, format_seconds(row["step_s"]) if "step_s" in row else "-")
        return table

    def _memory(self, standing: "Standing") -> Table:
        """Of each process what it holds, what it held at most, and what the plan says that it holds at most."""
        table = new_table("process", "holds", "at most", "plan", "of the plan")
        for process in self.plan.ledger.processes:
            if process not in standing.peaks:
                continue
            planned, peak = self.plan.ledger.process_peak(process).num_bytes, standing.peaks[process]
            held = format_bytes(standing.held[process]) if process in standing.held else "-"
            share = Text(f"{peak / planned:.0%}", "red" if peak > planned else "")
            table.add_row(process, held, format_bytes(peak), format_bytes(planned), share)
        return table

    def _line(self, row: dict[str, Any]) -> str:
        shown = [f"{name} {form.format(row[key])}" for name, (key, form) in COLUMNS.items() if key in row]
        return "  ".join([f"step {row['step']}/{self.num_steps}", *shown, format_seconds(row["step_s"])])
