"""A simulated run in a terminal: its steps against the formula, phases, utilisation, staleness.

In: a Plan and the SimulationResult. Out: stdout.
"""

from collections.abc import Mapping

from rich.text import Text

from rlplan.planner.answers.plan_results import phase_costs
from rlplan.planner.plan import Plan
from rlplan.simulate.result import SimulationResult
from rlplan.timing.cost import Cost
from rlplan.timing.step import StepTiming
from rlplan.units import format_rate, format_seconds
from rlplan.vocabulary import Phase
from rlplan_cli.render.plan import show_speed
from rlplan_cli.render.terminal import new_table, say, stdout


def show_simulation(plan: Plan, result: SimulationResult) -> None:
    """How steps vary, what they are made of, utilisation, staleness."""
    assert plan.timing is not None, "a simulated plan has its seconds"
    show_speed(plan)
    _show_steps(result)
    _show_part(result)
    _show_phases(plan.timing.step, phase_costs(plan.timing.step), result)
    _show_groups(result)
    _show_rollouts(result)


def _show_steps(result: SimulationResult) -> None:
    half, most = (format_seconds(result.step_quantile_s(share)) for share in (0.5, 0.95))
    stdout.print(
        Text.assemble(
            (f"{format_seconds(result.mean_step_s)} a step", "bold"),
            f" on average over {len(result.step_s)} simulated steps (seed {result.seed}), half of them within {half}, "
            f"95 % within {most}; {format_seconds(result.seconds)} and {_count(result.gpu_hours)} device-hours in all",
        )
    )


def _show_part(result: SimulationResult) -> None:
    if result.simulated_share < 1:
        share = f"{result.simulated_share:.1%} of the engines and prompts"
        say("Simulated", f"{share}, which stand for all; the slowest of all is slower")


def _show_phases(timing: StepTiming, costs: Mapping[Phase, Cost], result: SimulationResult) -> None:
    count = len(result.step_s)
    table = new_table("phase", "simulated", "formula", "of the step", title="Mean step")
    formula = {phase: cost.seconds for phase, cost in costs.items()}
    for phase, seconds in result.phase_s.items():
        mean = seconds / count
        if mean or phase in formula:
            share = f"{mean / result.mean_step_s:.0%}" if result.mean_step_s else "-"
            table.add_row(phase.value, format_seconds(mean), format_seconds(formula.get(phase, 0.0)), share)
    table.add_row("step", format_seconds(result.mean_step_s), format_seconds(timing.seconds), "")
    stdout.print(table)


def _show_groups(result: SimulationResult) -> None:
    table = new_table("group", "devices", "busy", "idle a step", title="Utilisation")
    for group in result.groups:
        waits = format_seconds(group.bubble_s / len(result.step_s))
        table.add_row(group.name, str(group.num_devices), f"{group.utilisation:.0%}", waits)
    stdout.print(table)


def _show_rollouts(result: SimulationResult) -> None:
    if not result.num_tokens:
        return
    rate = format_rate(result.num_tokens / result.seconds)
    say(
        "Rollouts",
        f"{result.num_tokens:,} response tokens ({rate}), {result.num_preemptions:,} preemptions, "
        f"at most {result.kv_use:.0%} of an engine's KV cache in use",
    )
    total = sum(result.token_staleness.values())
    ages = ", ".join(f"{age} old {count / total:.1%}" for age, count in result.token_staleness.items() if total)
    if set(result.token_staleness) != {0}:
        say("Staleness of trained tokens, in versions", f"{ages}; mean {result.mean_staleness:.2f}")


def _count(value: float) -> str:
    """Three digits, and no powers of ten."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
