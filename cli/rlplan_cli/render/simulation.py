"""A simulated run in a terminal: its steps against the formula, phases, utilization, staleness.

In: a Plan and the SimulationResult. Out: stdout.
"""

from collections.abc import Mapping

from rich.text import Text

from rlplan.planner.answers.plan_results import sum_phase_costs
from rlplan.planner.plan import Plan
from rlplan.simulate.result import SimulationResult
from rlplan.timing.cost import Cost
from rlplan.timing.step import StepTiming
from rlplan.units import format_rate, format_seconds
from rlplan.vocabulary import Phase
from rlplan_cli.render.plan import show_speed
from rlplan_cli.render.terminal import show_fact, show_table, show_text


def show_simulation(plan: Plan, result: SimulationResult) -> None:
    """Show the variation of steps, their phases, utilization and staleness."""
    assert plan.timing is not None, "a simulated plan has its seconds"
    show_speed(plan)
    _show_steps(result)
    _show_part(result)
    _show_phases(plan.timing.step, sum_phase_costs(plan.timing.step), result)
    _show_groups(result)
    _show_rollouts(result)


def _show_steps(result: SimulationResult) -> None:
    half, most = (format_seconds(result.step_quantile_s(share)) for share in (0.5, 0.95))
    hours = _format_count(result.gpu_hours)
    between = ""
    if result.interval_s is not None:
        low, high = (format_seconds(seconds) for seconds in result.interval_s)
        between = f" (nine of ten measured steps: {low} to {high})"
    show_text(
        Text.assemble(
            (f"{format_seconds(result.mean_step_s)} per step", "bold"),
            f"{between} on average over {len(result.step_s)} simulated steps (seed {result.seed}): median {half}, "
            f"95th percentile {most}; {format_seconds(result.seconds)} and {hours} device-hours in total",
        )
    )


def _show_part(result: SimulationResult) -> None:
    if result.simulated_share < 1:
        share = f"{result.simulated_share:.1%} of the engines and prompts"
        show_fact("Simulated", f"{share} as a sample of all; the slowest of all would be slower")


def _show_phases(timing: StepTiming, costs: Mapping[Phase, Cost], result: SimulationResult) -> None:
    count, rows = len(result.step_s), list[tuple[str, ...]]()
    formula = {phase: cost.seconds for phase, cost in costs.items()}
    for phase, seconds in result.phase_s.items():
        mean = seconds / count
        if mean or phase in formula:
            share = f"{mean / result.mean_step_s:.0%}" if result.mean_step_s else "-"
            rows.append((phase.value, format_seconds(mean), format_seconds(formula.get(phase, 0.0)), share))
    rows.append(("step", format_seconds(result.mean_step_s), format_seconds(timing.seconds), ""))
    show_table(("phase", "simulated", "formula", "of the step"), rows, "Mean step")


def _show_groups(result: SimulationResult) -> None:
    count = len(result.step_s)
    rows = (
        (group.name, str(group.num_devices), f"{group.utilisation:.0%}", format_seconds(group.bubble_s / count))
        for group in result.groups
    )
    show_table(("group", "devices", "busy", "idle per step"), rows, "Utilization")


def _show_rollouts(result: SimulationResult) -> None:
    if not result.num_tokens:
        return
    rate = format_rate(result.num_tokens / result.seconds)
    show_fact(
        "Rollouts",
        f"{result.num_tokens:,} response tokens ({rate}), {result.num_preemptions:,} preemptions, "
        f"at most {result.kv_use:.0%} of an engine's KV cache in use",
    )
    total = sum(result.token_staleness.values())
    ages = ", ".join(f"{count / total:.1%} are {age} old" for age, count in result.token_staleness.items() if total)
    if set(result.token_staleness) != {0}:
        show_fact("Staleness of trained tokens, in weight versions", f"{ages}; mean {result.mean_staleness:.2f}")


def _format_count(value: float) -> str:
    """Format with three digits and without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
