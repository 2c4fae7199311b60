"""A plan for GPUs in a terminal: what was chosen, its step in seconds by phase, and what came next.

In: a Budget. Out: stdout. Left out: bytes action by action (render_budget.py), why (render_explain.py).
"""

from collections.abc import Iterable

from rich.text import Text

from rlplan.planner.answers.plan_results import differences, phase_costs
from rlplan.planner.budget import Alternative, Budget, Verdict
from rlplan.timing.cost import Cost, Resource
from rlplan.units import format_bytes, format_seconds
from rlplan_cli.render import NARROW, fill, new_table, stdout
from rlplan_cli.render_budget import describe_choice, describe_question, show_others

COLORS = {Verdict.FITS: "bold green", Verdict.IN_EXPECTATION: "bold yellow", Verdict.DOES_NOT_FIT: "bold red"}
WORDS = {
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


def show_gpu_plan(budget: Budget, *, top: int) -> None:
    """The choice, its step, its memory in a line, and the next best. top: how many of these."""
    show_headline(budget)
    show_phases(budget)
    _show_memory(budget)
    show_alternatives(budget, budget.runners_up[:top], title="Next best")
    show_alternatives(budget, budget.pareto, title="Time against headroom: nothing is better in both")
    show_others(budget)


def show_headline(budget: Budget) -> None:
    """Verdict, step and speed; what was chosen; what was asked."""
    gpus = budget.setting.words
    stdout.print(
        Text.assemble(
            (budget.verdict.value, COLORS[budget.verdict]),
            f"  {budget.spec.model}, {budget.spec.algorithm}, {gpus}: ",
            (f"{format_seconds(budget.timing.seconds)} a step", "bold"),
            f", {_speed(budget)}",
        )
    )
    if budget.shortage is not None:
        of, needed, room = budget.shortage
        stdout.print(f"  {of}: {format_bytes(needed)} needed, {format_bytes(room)} available", style="bold")
    stdout.print(f"  {describe_choice(budget)}", style="dim")
    stdout.print(f"  {describe_question(budget)}", style="dim")


def _speed(budget: Budget) -> str:
    hours, price = budget.gpu_hours_per_million_tokens, budget.spec.price_per_gpu_hour
    cost = f"{hours:.3g} GPU-hours" if price is None else f"${hours * price:.3g}"
    return f"{budget.tokens_per_s:,.0f} tokens/s with prompts, {cost} per million of them"


def show_phases(budget: Budget) -> None:
    """A row a phase: seconds, share of the step, what binds, and what else takes time."""
    seconds = budget.timing.seconds or 1.0
    names = ("phase", "seconds", "of the step", "bound by", "made of")
    table = new_table(*names, title="One steady step", left=("bound by", "made of"))
    room = stdout.width - sum(map(len, names[:3])) - len("device memory") - 3 * len(names)
    for phase, cost in phase_costs(budget.timing).items():
        share = f"{cost.seconds / seconds:.0%}"
        table.add_row(phase.value, format_seconds(cost.seconds), share, WORDS[cost.bound_by], fill(made_of(cost), room))
    stdout.print(table)
    if budget.timing.idle_s:
        stdout.print(
            f"Generation runs beside training; the faster side waits {format_seconds(budget.timing.idle_s)} a step.",
            style="dim",
        )


def made_of(cost: Cost, limit: int = 3) -> list[str]:
    """`compute 12.1 s` and so on, largest first; what is below a hundredth is left out."""
    parts = sorted(cost.parts.items(), key=lambda item: -item[1])
    shown = [(resource, part) for resource, part in parts if part >= 0.01 * cost.seconds][:limit]
    return [f"{WORDS[resource]} {format_seconds(part)}" for resource, part in shown]


def _show_memory(budget: Budget) -> None:
    peak, (low, high) = budget.binding, budget.interval()
    capacity = budget.binding_capacity
    words = (
        f"{format_bytes(peak.num_bytes)} of {format_bytes(capacity)} ({peak.num_bytes / capacity:.0%}) on the fullest "
        f"GPU, in {peak.action_id}; {format_bytes(low)} to {format_bytes(high)}"
    )
    if budget.kv is not None:
        words += f"; KV cache {format_bytes(budget.kv.kv_cache_memory_bytes)} a GPU"
    stdout.print(Text.assemble(("Memory: ", "bold"), words))


def show_alternatives(budget: Budget, alternatives: Iterable[Alternative], *, title: str) -> None:
    """A row a candidate: what differs from the chosen one, its step, and the room that it leaves."""
    rows = list(alternatives)
    if not rows:
        return
    is_narrow = stdout.width < NARROW
    names = ("a step", "slower by", "headroom", *(() if is_narrow else ("verdict",)), "what differs")
    table = new_table(*names, title=title, left=("verdict", "what differs"))
    for one in rows:
        cells = [
            format_seconds(one.timing.seconds),
            f"{one.timing.seconds / budget.timing.seconds - 1:+.1%}",
            format_bytes(one.headroom_bytes),
        ]
        if not is_narrow:
            cells.append(one.verdict.value)
        table.add_row(*cells, differences(one.candidate, budget.candidate) or "the chosen one")
    stdout.print(table)
