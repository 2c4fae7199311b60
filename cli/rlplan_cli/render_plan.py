"""A plan for GPUs in a terminal: what was chosen, its step in seconds by phase, and what came next.

In: a GpuPlan. Out: stdout. Left out: bytes action by action (render_gpu.py), why (render_explain.py).
"""

from collections.abc import Iterable

from rich.text import Text

from rlplan.planner.answers.plan_results import differences, phase_costs
from rlplan.planner.gpu_plan import Alternative, GpuPlan, Verdict
from rlplan.timing.cost import Cost
from rlplan.units import format_bytes, format_seconds
from rlplan_cli.render import NARROW, RESOURCES, fill, new_table, stdout
from rlplan_cli.render_gpu import describe_choice, describe_question, show_others

COLORS = {Verdict.FITS: "bold green", Verdict.IN_EXPECTATION: "bold yellow", Verdict.DOES_NOT_FIT: "bold red"}


def show_gpu_plan(plan: GpuPlan, *, top: int) -> None:
    """The choice, its step, its memory in a line, and the next best. top: how many of these."""
    show_headline(plan)
    show_phases(plan)
    _show_memory(plan)
    show_alternatives(plan, plan.runners_up[:top], title="Next best")
    show_alternatives(plan, plan.pareto, title="Time against headroom: nothing is better in both")
    show_others(plan)


def show_headline(plan: GpuPlan) -> None:
    """Verdict, step and speed; what was chosen; what was asked."""
    gpus = plan.setting.words
    stdout.print(
        Text.assemble(
            (plan.verdict.value, COLORS[plan.verdict]),
            f"  {plan.model_name}, {plan.job.algorithm.name}, {gpus}: ",
            (f"{format_seconds(plan.seconds)} a step", "bold"),
            f", {_speed(plan)}",
        )
    )
    if plan.shortage is not None:
        of, needed, room = plan.shortage
        stdout.print(f"  {of}: {format_bytes(needed)} needed, {format_bytes(room)} available", style="bold")
    stdout.print(f"  {describe_choice(plan)}", style="dim")
    stdout.print(f"  {describe_question(plan)}", style="dim")


def _speed(plan: GpuPlan) -> str:
    hours, price = plan.gpu_hours_per_million_tokens, plan.job.hardware.price_per_gpu_hour
    cost = f"{hours:.3g} GPU-hours" if price is None else f"${hours * price:.3g}"
    return f"{plan.tokens_per_s:,.0f} tokens/s with prompts, {cost} per million of them"


def show_phases(plan: GpuPlan) -> None:
    """A row a phase: seconds, share of the step, what binds, and what else takes time."""
    seconds = plan.seconds or 1.0
    names = ("phase", "seconds", "of the step", "bound by", "made of")
    table = new_table(*names, title="One steady step", left=("bound by", "made of"))
    room = stdout.width - sum(map(len, names[:3])) - len("device memory") - 3 * len(names)
    for phase, cost in phase_costs(plan.timing.step).items():
        share = f"{cost.seconds / seconds:.0%}"
        table.add_row(
            phase.value, format_seconds(cost.seconds), share, RESOURCES[cost.bound_by], fill(made_of(cost), room)
        )
    stdout.print(table)
    if plan.timing.step.idle_s:
        stdout.print(
            f"Generation runs beside training; the faster side waits {format_seconds(plan.timing.step.idle_s)} a step.",
            style="dim",
        )


def made_of(cost: Cost, limit: int = 3) -> list[str]:
    """`compute 12.1 s` and so on, largest first; what is below a hundredth is left out."""
    parts = sorted(cost.parts.items(), key=lambda item: -item[1])
    shown = [(resource, part) for resource, part in parts if part >= 0.01 * cost.seconds][:limit]
    return [f"{RESOURCES[resource]} {format_seconds(part)}" for resource, part in shown]


def _show_memory(plan: GpuPlan) -> None:
    peak, (low, high) = plan.binding, plan.interval()
    capacity = plan.binding_capacity
    words = (
        f"{format_bytes(peak.num_bytes)} of {format_bytes(capacity)} ({peak.num_bytes / capacity:.0%}) on the fullest "
        f"GPU, in {peak.action_id}; {format_bytes(low)} to {format_bytes(high)}"
    )
    if plan.kv is not None:
        words += f"; KV cache {format_bytes(plan.kv.kv_cache_memory_bytes)} a GPU"
    stdout.print(Text.assemble(("Memory: ", "bold"), words))


def show_alternatives(plan: GpuPlan, alternatives: Iterable[Alternative], *, title: str) -> None:
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
            f"{one.timing.seconds / plan.seconds - 1:+.1%}",
            format_bytes(one.headroom_bytes),
        ]
        if not is_narrow:
            cells.append(one.verdict.value)
        table.add_row(*cells, differences(one.choice, plan.choice, plan.job) or "the chosen one")
    stdout.print(table)
