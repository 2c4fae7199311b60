"""An estimate in a terminal: the verdict, what is held action by action, the binding moment by kind, and the risks.

In: a Plan, or what was traced. Out: stdout. Left out: seconds (plan.py).
"""

from collections import defaultdict
from typing import TYPE_CHECKING

from rich.text import Text

from rlplan.memory.ledger import LedgerRow
from rlplan.planner.answers.plan_results import needed_words
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import KvReport
from rlplan.units import GIB, format_bytes
from rlplan.vocabulary import MemoryKind, words_of
from rlplan_cli.render.plan import fullness, range_of, show_headline, show_others
from rlplan_cli.render.terminal import NARROW, fill, new_table, say, say_left_out, sizes_of, stdout

if TYPE_CHECKING:
    from rlplan.runtime.measure.trace_estimate import TraceEstimate

CELL = 13
"""Columns of a terminal that a size takes in a table."""
WHEN = {"start": "while starting", "first": "first step", "steady": "every step", "finish": "at the end"}


def show_estimate(plan: Plan) -> None:
    """Everything that a person wants to know first; the rest is in `--json`."""
    show_headline(plan, fullness(plan), f" at the peak, in {plan.binding.action_id}{range_of(plan)}")
    if plan.is_on_host:
        _show_step(plan, "the host", plan.ledger.processes, "")
    for group in () if plan.is_on_host else plan.schedule.groups:
        device = group.devices[0]
        if device in plan.ledger.devices:
            words = "one GPU" + ("" if group.name == "shared" else f" for {group.name}")
            words += f" (all {len(group.devices)} hold the same)" if len(group.devices) > 1 else ""
            processes = tuple(name for name, place in plan.shown_schedule.processes if place == device)
            _show_step(plan, words, processes, device)
    _show_binding(plan)
    _show_process_peaks(plan)
    _show_risks(plan)
    show_others(plan)
    stdout.print("Bold: active in the action; dim: idle. Every row with its interval and source: --json.", style="dim")


def _show_step(plan: Plan, where: str, processes: tuple[str, ...], device: str) -> None:
    """A row an action, a column a process: what it holds then, inside the action or waiting. device: empty for all."""
    is_compact = 28 + CELL * (len(processes) + 1) > stdout.width
    names = ("active", "idle") if is_compact else tuple(map(_short_name, processes))
    table = new_table("action", *names, "total", title=f"Memory in one step, {where}{_unit()}")
    repeats = {action.id for action in plan.schedule.step if (action.mini_batch or 0) > 1}
    held: dict[str, int] = {}
    binding, here = plan.binding, _rows_by_moment(plan, device)
    steady = "steady" if any(run_phase == "steady" for run_phase, _ in here) else "first"
    for run_phase, action in plan.ledger.order:
        inside: dict[str, int] = defaultdict(int)
        after: dict[str, int] = defaultdict(int)
        for row in here[run_phase, action]:
            inside[row.process] += row.peak_bytes
            after[row.process] += row.resident_bytes
        if inside and run_phase == steady and action not in repeats:
            waiting = {name: held.get(name, 0) for name in processes if name not in inside}
            total = sum(inside.values()) + sum(waiting.values())
            if is_compact:
                cells = [Text(_size(sum(inside.values())), "bold"), Text(_size(sum(waiting.values())), "dim")]
            else:
                cells = [
                    Text(_size(inside[name]), "bold") if name in inside else Text(_size(waiting[name]), "dim")
                    for name in processes
                ]
            is_here = device in ("", binding.scope) and (binding.run_phase, binding.action_id) == (run_phase, action)
            table.add_row(action + " <" * is_here, *cells, _size(total), style="reverse" * is_here)
        held |= after
    stdout.print(table)


def _rows_by_moment(plan: Plan, device: str) -> dict[tuple[str, str], list[LedgerRow]]:
    """Rows of one GPU's memory, or of the whole host's, by moment and action."""
    rows: dict[tuple[str, str], list[LedgerRow]] = defaultdict(list)
    for row in plan.ledger.rows:
        if not device or (row.device == device and row.space == "device"):
            rows[row.run_phase, row.action_id].append(row)
    return rows


def _show_binding(plan: Plan) -> None:
    """What is held at the peak: a row a kind, a column a process."""
    peak = plan.binding
    processes = list(dict.fromkeys(process for process, _, _, _ in peak.rows))
    title = f"At the peak: {peak.action_id}, {WHEN[peak.run_phase]}{_unit()}"
    is_compact = 10 + CELL * (len(processes) + 1) > stdout.width
    table = new_table("kind", *(() if is_compact else map(_short_name, processes)), "total", title=title)
    sizes: dict[str, dict[str, int]] = defaultdict(dict)
    for process, _, kind, size in peak.rows:
        cells = sizes[words_of(kind)]
        cells[process] = cells.get(process, 0) + size
    for name, cells in sorted(sizes.items(), key=lambda item: -sum(item[1].values())):
        shown = [] if is_compact else [_size(cells[one]) if one in cells else "-" for one in processes]
        table.add_row(name, *shown, _size(sum(cells.values())))
    stdout.print(table)


def _show_process_peaks(plan: Plan) -> None:
    """A row a process, at its own peak, with every kind that counts there."""
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
        table.add_row(peak.scope, format_bytes(peak.num_bytes), *cells, fill(sizes_of(sizes), room))
    stdout.print(table)
    say_left_out(["in (the action of the peak)"] * ("in" not in names))


def _unit() -> str:
    return ", in GiB" if stdout.width < NARROW else ""


def _size(num_bytes: int) -> str:
    """Bytes with their unit where there is room, else the number alone."""
    return f"{num_bytes / GIB:.2f}" if stdout.width < NARROW else format_bytes(num_bytes)


def _short_name(process: str) -> str:
    name = process.removeprefix("scorer/").replace("rollout_engine", "engine").replace("policy_trainer", "trainer")
    return name.removesuffix("/0").replace("value_trainer", "value")


def _show_risks(plan: Plan) -> None:
    """KV cache, lengths, host and disk, one line each."""
    kv = plan.kv
    if needed := needed_words(plan):
        say("GPU", needed)
    if kv is not None:
        say(
            "KV cache",
            f"{format_bytes(kv.kv_cache_memory_bytes)} a rank = {kv.num_tokens:,} tokens an engine; its "
            f"{kv.max_num_seqs} sequences need {format_bytes(kv.expected_bytes)}, "
            f"{format_bytes(kv.enough_bytes)} at P99; {_room(kv)}. "
            f"vLLM: kv_cache_memory_bytes={kv.kv_cache_memory_bytes}, max_num_seqs={kv.max_num_seqs}",
        )
    if plan.oom_risk:
        say(
            "Lengths",
            f"probability that a micro-batch of a step is too long to fit: {plan.oom_risk:.1%}, a run of "
            f"{plan.job.workload.num_steps} steps with {plan.oom_risk_of_run:.0%}",
        )
    host, count = plan.ledger.host_peak(), plan.job.hardware.num_hosts
    room = "an unknown amount (no node profile: not checked)"
    if plan.host_capacity is not None:
        room = format_bytes(plan.ledger.host_capacity_of(host.scope))
    each = f" on each of {count} hosts" if count > 1 else ""
    disk = f"a checkpoint to resume from takes {format_bytes(plan.checkpoint_bytes)} on disk"
    swap = f", swapped states {format_bytes(plan.swap_bytes)} on each host" if plan.swap_bytes else ""
    say("Host", f"{format_bytes(host.num_bytes)} of {room}{each}, in {host.action_id}; {disk}{swap}")


def show_trace(estimate: "TraceEstimate") -> None:
    """The training peak of one GPU, by kind."""
    fits = "fits" if estimate.num_bytes <= estimate.capacity else "does not fit"
    stdout.print(
        f"{fits}  {estimate.model} on {estimate.num_gpus}x {estimate.gpu}: {format_bytes(estimate.num_bytes)} of "
        f"{format_bytes(estimate.capacity)} while training; {estimate.num_parameters:,} parameters, ZeRO-"
        f"{estimate.zero_stage}, {estimate.num_tokens:,} tokens a pass, "
        f"{'gradient checkpointing, ' * estimate.gradient_checkpointing}"
        f"{estimate.loss} loss"
    )
    table = new_table("kind", "one GPU", "from", title="The training peak", left=("from",))
    for kind, size in sorted(estimate.rows.items(), key=lambda item: -item[1]):
        traced = kind is MemoryKind.ACTIVATIONS
        table.add_row(words_of(kind), format_bytes(size), "the trace" if traced else "formulas")
    stdout.print(table)
    stdout.print("Activations here are logits and temporaries too. Rollouts and scoring are not in this.", style="dim")


def _room(kv: KvReport) -> str:
    """What happens when all sequences at once reach their full length."""
    if kv.preemption_risk < 0.5:
        return f"some have to wait in {kv.preemption_risk:.0%} of such batches"
    return f"{int(kv.max_num_seqs * kv.kv_cache_memory_bytes / kv.enough_bytes)} of them fit at once, the others wait"
