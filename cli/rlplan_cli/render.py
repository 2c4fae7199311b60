"""Everything that is drawn in a terminal: tables on stdout, notes and errors on stderr; plain text in a pipe."""

import errno
import json
import os
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlplan.errors import RlplanError
from rlplan.memory.ledger import LedgerRow, Peak
from rlplan.planner.answers.plan_results import phase_costs
from rlplan.planner.plan import Plan
from rlplan.timing.cost import Cost, Resource
from rlplan.units import format_bytes, format_seconds
from rlplan.vocabulary import MemoryKind

PIPE_WIDTH = 120
"""Columns where nobody says how many there are: in a pipe or a file."""
NARROW = 112
"""Columns below which a table leaves out what another one or `--json` says too."""


class _Console(Console):
    """A console that prints what it is given, brackets and colons too: everything here may hold words of a user."""

    def on_broken_pipe(self) -> None:
        """The reader has gone. rich's own answer is exit code 1, which says that nothing fits; app.py has another."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def _console(*, is_stderr: bool) -> Console:
    stream = sys.stderr if is_stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    colors: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"  # rich would still write bold
    return _Console(
        stderr=is_stderr,
        highlight=False,
        markup=False,
        emoji=False,
        width=width,
        color_system=colors,
        soft_wrap=not stream.isatty(),
    )


stdout, stderr = _console(is_stderr=False), _console(is_stderr=True)

SHORT = {
    MemoryKind.WEIGHTS: "weights",
    MemoryKind.GRADIENTS: "grads",
    MemoryKind.MASTER_WEIGHTS: "master",
    MemoryKind.OPTIMIZER: "adam",
    MemoryKind.ACTIVATIONS: "activ.",
    MemoryKind.LOGITS: "logits",
    MemoryKind.KV_CACHE: "KV",
    MemoryKind.PACKED_WEIGHTS: "packed",
    MemoryKind.CUDA_GRAPHS: "graphs",
    MemoryKind.COMM_BUFFERS: "comm",
    MemoryKind.SYNC_STAGING: "sync",
    MemoryKind.CHECKPOINT_STAGING: "ckpt",
    MemoryKind.FRAGMENTATION: "slack",
    MemoryKind.PROCESS: "process",
}


def note(text: str) -> None:
    """One line on stderr."""
    print(text, file=sys.stderr)


def print_json(value: dict[str, Any]) -> None:
    """A library value on stdout."""
    print(json.dumps(value, indent=1))


def show_error(error: RlplanError) -> None:
    """The four parts of an error on stderr: whole lines in a pipe, indented ones in a terminal."""
    lines = f"error: {error}".split("\n")
    if stderr.is_terminal:
        lines = [
            textwrap.fill(line, stderr.width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
            for line in lines
        ]
    text = Text("\n".join(lines))
    text.stylize("bold red", 0, len("error:"))
    stderr.print(text, soft_wrap=True)


def new_table(*columns: str, title: str = "", left: tuple[str, ...] = ()) -> Table:
    """A table in the house style: the first column and those in `left` are text, which may wrap; the rest numbers."""
    table = Table(title=title or None, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for index, column in enumerate(columns):
        if column in left:
            table.add_column(column, justify="left", overflow="fold")
        else:
            table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def fill(parts: list[str], room: int) -> str:
    """Parts with commas between them, broken into lines between parts only."""
    text = ", ".join(part.replace(" ", "\xa0") for part in parts)
    return "\n".join(textwrap.wrap(text, max(room, 24))).replace("\xa0", " ")


def show_estimate(plan: Plan) -> None:
    """The verdict, the host's binding moment, and each process at its own peak."""
    show_verdict(plan)
    _show_process_peaks(plan)
    _show_phases(plan)


def show_verdict(plan: Plan) -> None:
    """One line: what is needed, what is there, and where the peak is; of GPUs the fullest, and their host."""
    ledger, host = plan.ledger, plan.ledger.host_peak()
    of_host = _fullness(host, ledger.host_capacity)
    words = f"{of_host[0]} at the peak, {of_host[1]}"
    if not ledger.shares_host_memory:
        gpu = ledger.fullest_device()
        fullness, where = _fullness(gpu, ledger.capacity_of(gpu.scope))
        words = f"{fullness} on the fullest GPU at the peak, {where}; {of_host[0]} of a host, {of_host[1]}"
    stdout.print(
        Text.assemble(
            ("fits  ", "bold green"),
            f"{plan.job.name}: {words}; {plan.schedule.placement}, "
            f"{plan.job.hardware.num_devices} devices, ZeRO-{plan.zero_stage}",
        )
    )


def _fullness(peak: Peak, capacity: int) -> tuple[str, str]:
    """How full it is at the peak, and when that is."""
    size = f"{format_bytes(peak.num_bytes)} of {format_bytes(capacity)} ({peak.num_bytes / capacity:.0%})"
    return size, f"in {peak.action_id} ({_moment_words(peak)})"


def _moment_words(peak: Peak) -> str:
    return {"start": "starting", "first": "first step", "steady": "every later step", "finish": "finishing"}[
        peak.moment
    ]


def _show_process_peaks(plan: Plan) -> None:
    """A row a process, at its own peak, with every kind that counts there."""
    peaks = [plan.ledger.process_peak(process) for process in plan.ledger.processes]
    names = ["process", "peak", "in", "made of"] if stdout.width >= NARROW else ["process", "peak", "made of"]
    table = new_table(*names, title="Each process at its own peak", left=("in", "made of"))
    widths = [max(len(peak.scope) for peak in peaks), 8]
    if "in" in names:
        widths.append(max(len(peak.action_id) for peak in peaks))
    room = stdout.width - sum(widths) - 3 * len(names)
    for peak in peaks:
        sizes: dict[MemoryKind, int] = defaultdict(int)
        for _, _, kind, size in peak.rows:
            sizes[kind] += size
        kinds = fill(_sizes(sizes), room)
        cells = [peak.action_id, kinds] if "in" in names else [kinds]
        table.add_row(peak.scope, format_bytes(peak.num_bytes), *cells)
    stdout.print(table)


def _sizes(sizes: Mapping[MemoryKind, int]) -> list[str]:
    """`KV 32.0 MiB` and so on, largest first."""
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    return [f"{SHORT.get(kind, kind)} {format_bytes(size)}" for kind, size in ordered if size]


def _show_phases(plan: Plan) -> None:
    """What each process of an action holds after it and at its peak inside it, in a steady step."""
    moment = "steady" if any(row.moment == "steady" for row in plan.ledger.rows) else "first"
    ledger, is_narrow = plan.ledger, stdout.width < NARROW
    binding = ledger.host_peak() if ledger.shares_host_memory else ledger.fullest_device()
    names = ["action", "phase", "process", "resident", "peak", "largest at the peak"]
    if is_narrow:
        names = [name for name in names if name not in ("phase", "largest at the peak")]
    table = new_table(*names, title="Each action of a step", left=("phase", "process", "largest at the peak"))
    groups: dict[tuple[str, str], list[LedgerRow]] = defaultdict(list)
    for row in ledger.rows:
        if row.moment == moment and (ledger.shares_host_memory or row.space == "device"):
            groups[(row.action_id, row.process)].append(row)
    for (action, process), rows in groups.items():
        sizes: dict[MemoryKind, int] = defaultdict(int)
        for row in rows:
            sizes[row.kind] += row.peak_bytes if row.kind is not MemoryKind.PROCESS else 0
        cells = {
            "action": action + (" <" if binding.action_id == action and binding.moment == moment else ""),
            "phase": rows[0].phase.value,
            "process": process,
            "resident": format_bytes(sum(row.resident_bytes for row in rows)),
            "peak": format_bytes(sum(row.peak_bytes for row in rows)),
            "largest at the peak": ", ".join(_sizes(sizes)[:2]),
        }
        table.add_row(*(cells[name] for name in names))
    stdout.print(table)
    stdout.print("< the binding action. Every row with its source: `rlplan estimate --json`.", style="dim")


def show_plan(plan: Plan) -> None:
    """What was chosen, the schedule of a step, and what was rejected."""
    show_verdict(plan)
    _show_step_time(plan)
    names = ["action", "seconds", "after", "processes", "stream"][: 4 if stdout.width < NARROW else 5]
    table = new_table(*names, title="One step", left=("after", "processes", "stream"))
    for action in plan.schedule.step:
        cells = {
            "action": action.id if action.every == 1 else f"{action.id}, every {action.every}",
            "seconds": "-" if (cost := _cost(plan, action.id)) is None else format_seconds(cost.seconds),
            "after": ",\n".join(action.after) or "-",
            "processes": ",\n".join(_runs(action.processes)) or "driver",
            "stream": action.stream.value,
        }
        table.add_row(*(cells[name] for name in names))
    stdout.print(table)
    if plan.rejected:
        rejected = new_table("rejected", "why", title="Not chosen", left=("why",))
        for rejection in plan.rejected:
            rejected.add_row(f"{rejection.placement}, ZeRO-{rejection.zero_stage}", rejection.reason)
        stdout.print(rejected)


def _runs(processes: tuple[str, ...]) -> Iterator[str]:
    """Processes by name; of three and more of one layout the first and the last."""
    for worker, of_worker in groupby(processes, lambda name: name.rpartition("/")[0]):
        names = list(of_worker)
        yield from names if len(names) < 3 else [f"{names[0]} to {names[-1].removeprefix(worker)}"]


RESOURCES = {
    Resource.COMPUTE: "compute",
    Resource.MEMORY: "device memory",
    Resource.LATENCY: "latency",
    Resource.DEVICE_LINK: "device link",
    Resource.NETWORK: "network",
    Resource.HOST_LINK: "host link",
    Resource.HOST: "host",
    Resource.DISK: "disk",
    Resource.IDLE: "waiting",
}
"""What a resource is called in a table."""
ON_A_HOST = RESOURCES | {
    Resource.COMPUTE: "products",
    Resource.MEMORY: "memory",
    Resource.HOST: "fresh memory",
    Resource.LATENCY: "Python and calls",
    Resource.NETWORK: "collectives",
}
"""The same where devices are a CPU host's."""


def _cost(plan: Plan, action_id: str) -> Cost | None:
    return plan.timing.cost("step", action_id) if plan.timing else None


def _show_step_time(plan: Plan) -> None:
    """Predicted seconds of a usual step and of the run, and a row a phase."""
    timing, work = plan.timing, plan.job.workload
    if timing is None:
        stdout.print(f"No times: profile '{plan.job.hardware.profile}' lacks rates or latencies.", style="dim")
        return
    usual = f"{work.usual_response_len} tokens" + (", the longest" if work.mean_response_len is None else "")
    stdout.print(
        f"Predicted: {format_seconds(timing.step.seconds)} a step with responses of {usual}; {work.num_steps} steps "
        f"with start and end {format_seconds(timing.run_s(plan.schedule, work.num_steps))}"
    )
    table = new_table("phase", "seconds", "of the step", "made of", title="A usual step, predicted", left=("made of",))
    names = ON_A_HOST if plan.ledger.shares_host_memory else RESOURCES
    for phase, cost in phase_costs(timing.step).items():
        parts = sorted(((part, names[name]) for name, part in cost.parts.items()), reverse=True)
        made = ", ".join(f"{name} {format_seconds(part)}" for part, name in parts if part >= 0.01 * cost.seconds)
        table.add_row(phase.value, format_seconds(cost.seconds), f"{cost.seconds / timing.step.seconds:.0%}", made)
    stdout.print(table)
