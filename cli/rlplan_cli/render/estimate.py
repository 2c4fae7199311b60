"""An estimate in a terminal: the verdict, memory by action, the peak by kind, and the risks.

In: a Plan or a TraceEstimate. Out: stdout. Left out: seconds (plan.py).
"""

from collections import defaultdict
from typing import TYPE_CHECKING

from rich.text import Text

from rlplan.memory.ledger import LedgerRow
from rlplan.planner.answers.plan_results import describe_needed_memory
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import KvReport
from rlplan.units import GIB, format_bytes
from rlplan.vocabulary import MemoryKind, format_name
from rlplan_cli.render.plan import name_loss, show_considered
from rlplan_cli.render.terminal import (
    NARROW,
    join_parts,
    list_sizes,
    new_table,
    show_fact,
    show_left_out,
    show_text,
    stdout,
)

if TYPE_CHECKING:
    from rlplan.runtime.measure.trace_estimate import TraceEstimate

CELL = 13
"""Characters of a size in a table, with its padding."""
WHEN = {"start": "while starting", "first": "first step", "steady": "every step", "finish": "at the end"}


def show_estimate(plan: Plan) -> None:
    """Show the tables of an estimate; the rest is in `--json`."""
    if plan.is_on_host:
        _show_step(plan, "the host", plan.ledger.processes, "")
    for group in () if plan.is_on_host else plan.schedule.groups:
        device = group.devices[0]
        if device in plan.ledger.devices:
            words = "one GPU" + ("" if group.name == "shared" else f" for {group.name}")
            words += f" (all {len(group.devices)} alike)" if len(group.devices) > 1 else ""
            processes = tuple(name for name, place in plan.shown_schedule.processes if place == device)
            _show_step(plan, words, processes, device)
    _show_binding(plan)
    _show_process_peaks(plan)
    _show_risks(plan)
    show_considered(plan)
    words = "Bold: active in the action; dim: idle. --json has every row with its range and source."
    show_text(Text(words, style="dim"))


def _show_step(plan: Plan, where: str, processes: tuple[str, ...], device: str) -> None:
    """Show the memory of each process in each action, active or idle. device: empty for the host."""
    is_compact = 28 + CELL * (len(processes) + 1) > stdout.width
    names = ("active", "idle") if is_compact else tuple(map(_short_name, processes))
    table = new_table("action", *names, "total", title=f"Memory in one step, {where}{_unit()}")
    repeats = {action.id for action in plan.schedule.step if (action.mini_batch or 0) > 1}
    resident: dict[str, int] = {}
    binding, rows = plan.binding, _rows_by_moment(plan, device)
    steady = "steady" if any(run_phase == "steady" for run_phase, _ in rows) else "first"
    for run_phase, action in plan.ledger.order:
        active: dict[str, int] = defaultdict(int)
        after: dict[str, int] = defaultdict(int)
        for row in rows[run_phase, action]:
            active[row.process] += row.peak_bytes
            after[row.process] += row.resident_bytes
        if active and run_phase == steady and action not in repeats:
            idle = {name: resident.get(name, 0) for name in processes if name not in active}
            total = sum(active.values()) + sum(idle.values())
            if is_compact:
                cells = [Text(_size(sum(active.values())), "bold"), Text(_size(sum(idle.values())), "dim")]
            else:
                cells = [
                    Text(_size(active[name]), "bold") if name in active else Text(_size(idle[name]), "dim")
                    for name in processes
                ]
            is_here = device in ("", binding.scope) and (binding.run_phase, binding.action_id) == (run_phase, action)
            table.add_row(action + " <" * is_here, *cells, _size(total), style="reverse" * is_here)
        resident |= after
    stdout.print(table)


def _rows_by_moment(plan: Plan, device: str) -> dict[tuple[str, str], list[LedgerRow]]:
    """Rows of one GPU's memory, or of the host's, by run phase and action."""
    rows: dict[tuple[str, str], list[LedgerRow]] = defaultdict(list)
    for row in plan.ledger.rows:
        if not device or (row.device == device and row.space == "device"):
            rows[row.run_phase, row.action_id].append(row)
    return rows


def _show_binding(plan: Plan) -> None:
    """Show the memory at the peak by kind and process."""
    peak = plan.binding
    processes = list(dict.fromkeys(process for process, _, _, _ in peak.rows))
    title = f"At the peak: {peak.action_id}, {WHEN[peak.run_phase]}{_unit()}"
    is_compact = 10 + CELL * (len(processes) + 1) > stdout.width
    table = new_table("kind", *(() if is_compact else map(_short_name, processes)), "total", title=title)
    sizes: dict[str, dict[str, int]] = defaultdict(dict)
    for process, _, kind, size in peak.rows:
        cells = sizes[format_name(kind)]
        cells[process] = cells.get(process, 0) + size
    for name, cells in sorted(sizes.items(), key=lambda item: -sum(item[1].values())):
        shown = [] if is_compact else [_size(cells[process]) if process in cells else "-" for process in processes]
        table.add_row(name, *shown, _size(sum(cells.values())))
    stdout.print(table)


def _show_process_peaks(plan: Plan) -> None:
    """Show each process's own peak with its kinds of memory."""
    peaks = [plan.ledger.process_peak(process) for process in plan.ledger.processes]
    names = ["process", "peak", "in", "breakdown"] if stdout.width >= NARROW else ["process", "peak", "breakdown"]
    table = new_table(*names, title="Peak of each process", left=("in", "breakdown"))
    widths = [max(len(peak.scope) for peak in peaks), 8]
    if "in" in names:
        widths.append(max(len(peak.action_id) for peak in peaks))
    room = stdout.width - sum(widths) - 3 * len(names)
    for peak in peaks:
        sizes: dict[MemoryKind, int] = defaultdict(int)
        for _, _, kind, size in peak.rows:
            sizes[kind] += size
        cells = [peak.action_id] if "in" in names else []
        table.add_row(peak.scope, format_bytes(peak.num_bytes), *cells, join_parts(list_sizes(sizes), room))
    stdout.print(table)
    show_left_out(["in (the action of the peak)"] * ("in" not in names))


def _unit() -> str:
    return ", in GiB" if stdout.width < NARROW else ""


def _size(num_bytes: int) -> str:
    """Format bytes; in a narrow terminal without the unit, which the title has."""
    return f"{num_bytes / GIB:.2f}" if stdout.width < NARROW else format_bytes(num_bytes)


def _short_name(process: str) -> str:
    name = process.removeprefix("scorer/").replace("rollout_engine", "engine").replace("policy_trainer", "trainer")
    return name.removesuffix("/0").replace("value_trainer", "value")


def _show_risks(plan: Plan) -> None:
    """Show KV cache, lengths, host and disk, one line each."""
    kv = plan.kv
    if needed := describe_needed_memory(plan):
        show_fact("GPU", needed)
    if kv is not None:
        show_fact(
            "KV cache",
            f"{format_bytes(kv.kv_cache_memory_bytes)} per rank, {kv.num_tokens:,} tokens per engine; "
            f"{kv.max_num_seqs} sequences need {format_bytes(kv.expected_bytes)} on average, "
            f"{format_bytes(kv.enough_bytes)} at P99; {_describe_room(kv)} "
            f"(kv_cache_memory_bytes={kv.kv_cache_memory_bytes} max_num_seqs={kv.max_num_seqs})",
        )
    if plan.oom_risk:
        show_fact(
            "Lengths",
            f"probability that a micro-batch is too long to fit: {plan.oom_risk:.1%} per step, "
            f"{plan.oom_risk_of_run:.0%} in a run of {plan.job.workload.num_steps} steps",
        )
    host, count = plan.ledger.host_peak(), plan.job.hardware.num_hosts
    room = " (its size is unknown without a node profile, so it is not checked)"
    if plan.host_capacity is not None:
        room = f" of {format_bytes(plan.ledger.get_host_capacity(host.scope))}"
    hosts = f" on each of {count} hosts" if count > 1 else ""
    disk = f"a checkpoint takes {format_bytes(plan.checkpoint_bytes)} on disk"
    swap = f", swapped states {format_bytes(plan.swap_bytes)} on each host" if plan.swap_bytes else ""
    high = plan.host_interval[1]
    most = f", with a full object store {format_bytes(high)}," if high > host.num_bytes else ""
    show_fact("Host", f"peak {format_bytes(host.num_bytes)}{most}{room}{hosts}, in {host.action_id}; {disk}{swap}")


def show_trace(estimate: "TraceEstimate") -> None:
    """Show the training peak of one GPU by kind."""
    fits = "fits" if estimate.num_bytes <= estimate.capacity else "does not fit"
    words = (
        f"{fits}  {estimate.model} on {estimate.num_gpus}x {estimate.gpu}: training peak "
        f"{format_bytes(estimate.num_bytes)} of {format_bytes(estimate.capacity)}; "
        f"{estimate.num_parameters:,} parameters, ZeRO-{estimate.zero_stage}, "
        f"micro-batches of {estimate.num_tokens:,} tokens, "
        f"{'gradient checkpointing, ' * estimate.gradient_checkpointing}{name_loss(estimate.loss)}"
    )
    show_text(Text(words))
    table = new_table("kind", "one GPU", "source", title="Training peak", left=("source",))
    for kind, size in sorted(estimate.rows.items(), key=lambda item: -item[1]):
        traced = kind is MemoryKind.ACTIVATIONS
        table.add_row(format_name(kind), format_bytes(size), "trace" if traced else "formulas")
    stdout.print(table)
    words = "Activations include logits and temporaries. Rollouts and scoring are not included."
    show_text(Text(words, style="dim"))


def _describe_room(kv: KvReport) -> str:
    """Whether all sequences fit when they reach their full length."""
    if kv.preemption_risk < 0.5:
        return f"the cache overflows in {kv.preemption_risk:.0%} of batches"
    num_fitting = int(kv.max_num_seqs * kv.kv_cache_memory_bytes / kv.enough_bytes)
    return f"{num_fitting} of {kv.max_num_seqs} sequences fit at once; the rest queue"
