"""Everything that is drawn in a terminal: tables on stdout, notes and errors on stderr; plain text in a pipe."""

import json
import sys
from collections import defaultdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlplan.errors import RlplanError
from rlplan.memory.ledger import LedgerRow, Peak
from rlplan.planner.plan import Plan
from rlplan.units import format_bytes
from rlplan.vocabulary import MemoryKind

stdout = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
stderr = Console(stderr=True, highlight=False)

SHORT = {
    MemoryKind.WEIGHTS: "weights",
    MemoryKind.GRADIENTS: "grads",
    MemoryKind.MASTER_WEIGHTS: "master",
    MemoryKind.OPTIMIZER: "adam",
    MemoryKind.ACTIVATIONS: "activ.",
    MemoryKind.LOGITS: "logits",
    MemoryKind.KV_CACHE: "KV",
    MemoryKind.PACKED_WEIGHTS: "packed",
    MemoryKind.COMM_BUFFERS: "comm",
    MemoryKind.SYNC_STAGING: "sync",
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
    """The four parts of an error on stderr."""
    stderr.print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)


def new_table(*columns: str, title: str = "") -> Table:
    """A table in the house style: first column left, the rest right."""
    table = Table(title=title or None, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index > 0)
    return table


def show_estimate(plan: Plan) -> None:
    """The verdict, the host's binding moment, and each process at its own peak."""
    show_verdict(plan)
    _show_process_peaks(plan)
    _show_phases(plan)


def show_verdict(plan: Plan) -> None:
    """One line: what is needed, what is there, and where the peak is."""
    ledger, peak = plan.ledger, plan.ledger.host_peak()
    share = peak.num_bytes / ledger.host_capacity
    where = f"{peak.action_id} ({_moment_words(peak)})"
    stdout.print(
        Text.assemble(
            ("fits  ", "bold green"),
            f"{plan.job.name}: {format_bytes(peak.num_bytes)} of {format_bytes(ledger.host_capacity)} "
            f"({share:.0%}) at the peak, in {where}; {plan.schedule.placement}, "
            f"{plan.job.hardware.num_devices} devices, ZeRO-{plan.zero_stage}",
        )
    )


def _moment_words(peak: Peak) -> str:
    return {"start": "starting", "first": "first step", "steady": "every later step", "finish": "finishing"}[
        peak.moment
    ]


def _show_process_peaks(plan: Plan) -> None:
    """A row a process, at its own peak; the columns are the kinds that occur."""
    peaks = [plan.ledger.process_peak(process) for process in plan.ledger.processes]
    kinds = [kind for kind in MemoryKind if any(row[2] is kind for peak in peaks for row in peak.rows)]
    narrow = stdout.width < 120
    table = new_table(
        "process",
        "peak",
        "in",
        *(SHORT.get(k, k.value) for k in kinds if not narrow),
        title="Each process at its own peak",
    )
    if narrow:
        table.add_column("made of", justify="left", no_wrap=False)
    for peak in peaks:
        sizes: dict[MemoryKind, int] = defaultdict(int)
        for _, _, kind, size in peak.rows:
            sizes[kind] += size
        largest = sorted(sizes.items(), key=lambda item: -item[1])
        detail = [", ".join(f"{SHORT.get(kind, kind)} {format_bytes(size)}" for kind, size in largest[:3])]
        cells = detail if narrow else [format_bytes(sizes[kind]) if sizes[kind] else "-" for kind in kinds]
        table.add_row(peak.scope, format_bytes(peak.num_bytes), peak.action_id, *cells)
    stdout.print(table)


def _show_phases(plan: Plan) -> None:
    """The host's total after and at the peak inside each action of a steady step."""
    moment = "steady" if any(row.moment == "steady" for row in plan.ledger.rows) else "first"
    table = new_table(
        "action",
        "phase",
        "process",
        "resident",
        "peak",
        "largest kinds at the peak",
        title="Per action of a step (the first step lacks Adam's moments until its optimizer step)",
    )
    table.columns[1].justify = table.columns[2].justify = table.columns[5].justify = "left"
    table.columns[5].no_wrap = False
    binding = plan.ledger.host_peak()
    groups: dict[tuple[str, str], list[LedgerRow]] = defaultdict(list)
    for row in plan.ledger.rows:
        if row.moment == moment:
            groups[(row.action_id, row.process)].append(row)
    for (action, process), rows in groups.items():
        total = sum(row.peak_bytes for row in rows)
        largest = sorted((row for row in rows if row.kind is not MemoryKind.PROCESS), key=lambda row: -row.peak_bytes)
        kinds = ", ".join(f"{SHORT.get(row.kind, row.kind)} {format_bytes(row.peak_bytes)}" for row in largest[:3])
        mark = " <" if binding.action_id == action and binding.moment == moment else ""
        table.add_row(
            action + mark,
            rows[0].phase.value,
            process,
            format_bytes(sum(row.resident_bytes for row in rows)),
            format_bytes(total),
            kinds,
        )
    stdout.print(table)
    stdout.print("< the binding action. Sources of every row: `rlplan estimate --json`.", style="dim")


def show_plan(plan: Plan) -> None:
    """What was chosen, the schedule of a step, and what was rejected."""
    show_verdict(plan)
    table = new_table("action", "after", "processes", "stream", "every", title="One step")
    for column in table.columns[1:4]:
        column.justify, column.no_wrap = "left", False
    for action in plan.schedule.step:
        table.add_row(
            action.id,
            ", ".join(action.after) or "-",
            ", ".join(action.processes) or "driver",
            action.stream.value,
            str(action.every),
        )
    stdout.print(table)
    if plan.rejected:
        rejected = new_table("rejected", "why", title="Not chosen")
        rejected.columns[1].justify, rejected.columns[1].no_wrap = "left", False
        for rejection in plan.rejected:
            rejected.add_row(f"{rejection.placement}, ZeRO-{rejection.zero_stage}", rejection.reason)
        stdout.print(rejected)
