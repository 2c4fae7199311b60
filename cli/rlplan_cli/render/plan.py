"""A plan in a terminal: the layout, its step time by phase and by action, and the next best layouts.

In: a Plan. Out: stdout. Left out: bytes action by action (estimate.py), why (explain.py).
"""

from collections.abc import Iterable, Iterator
from itertools import groupby

from rich.text import Text

from rlplan.planner.answers.plan_results import (
    PARALLEL_AXES,
    describe_needed_memory,
    describe_peak_error,
    describe_step_error,
    diff_choices,
    sum_phase_costs,
)
from rlplan.planner.checks.trainers import NAMES
from rlplan.planner.cpu.candidates import ORDER_WORDS
from rlplan.planner.margins import SAME_SPEED
from rlplan.planner.measured_errors import predict_step_interval
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Alternative, Remedy, Verdict
from rlplan.units import format_bytes, format_seconds
from rlplan_cli.render.terminal import (
    NARROW,
    join_parts,
    list_parts,
    name_resource,
    new_table,
    show_fact,
    show_left_out,
    show_text,
    show_typed,
    stdout,
)

COLORS = {
    Verdict.FITS: "bold green",
    Verdict.IN_EXPECTATION: "bold yellow",
    Verdict.DOES_NOT_FIT: "bold red",
    Verdict.REFUSED: "bold red",
}


def show_plan(plan: Plan) -> None:
    """Show the tables of a plan: phases, actions, and the next best layouts."""
    _show_phases(plan)
    _show_actions(plan)
    words = f"on the fullest {'host' if plan.is_on_host else 'GPU'}"
    if plan.kv is not None:
        words += f"; KV cache {format_bytes(plan.kv.kv_cache_memory_bytes)} per engine rank"
    if needed := describe_needed_memory(plan):
        words += f"; {needed}"
    show_fact("Memory", words)
    show_errors(plan)
    _show_alternatives(plan, plan.runners_up, title="Next best")
    show_pareto(plan)
    show_considered(plan)


def show_pareto(plan: Plan) -> None:
    """Show the Pareto front of step time and headroom, if it was searched."""
    _show_alternatives(plan, plan.pareto, title="Pareto front: step time against headroom")


def show_errors(plan: Plan) -> None:
    """Show the ranges of step time and peak, and the measurements behind them."""
    for name, words in (("Step time", describe_step_error(plan)), ("Peak", describe_peak_error(plan))):
        if words:
            show_fact(name, words)


def show_headline(plan: Plan, answer: str, rest: str = "", *, but: str = "") -> None:
    """Show the verdict, shortages, notes, the layout and the workload.

    answer: printed in bold after the verdict. rest: its details. but: a limitation of the verdict.
    """
    head = (plan.verdict.value + but, COLORS[plan.verdict])
    subject = f"  {plan.model_name}, {plan.job.algorithm.name}, {plan.devices}: "
    show_text(Text.assemble(head, subject, (answer, "bold"), rest))
    lines = [(reason, "bold") for reason in plan.refusals]
    lines += [(f"{short.of}: {short.sizes}", "bold") for short in plan.shortages]
    lines += [(note, "") for note in plan.notes]
    if plan.not_counted:
        lines.append((f"not counted: {'; '.join(plan.not_counted)}", "bold"))
    lines += [(choice_line(plan), "dim"), (_describe_workload(plan), "dim")]
    for line, style in lines:
        show_text(Text(f"  {line}", style=style))


def show_speed(plan: Plan) -> None:
    """Show the headline with step time and throughput."""
    show_headline(plan, *format_speed(plan))


def format_fullness(plan: Plan) -> str:
    """Format the binding peak as `74.8 GiB of 79.2 GiB (94%)`."""
    size, capacity = plan.binding.num_bytes, plan.binding_capacity
    return f"{format_bytes(size)} of {format_bytes(capacity)} ({size / capacity:.0%})"


def format_peak_range(plan: Plan) -> str:
    """Format the range of the peak; empty if it has none."""
    low, high = plan.interval()
    return f", range {format_bytes(low)} to {format_bytes(high)}" if low < high else ""


def format_verdict(verdict: Verdict) -> Text:
    """A verdict as a colored cell of a table."""
    return Text(verdict.value, COLORS[verdict].removeprefix("bold "))


def name_loss(logits: str) -> str:
    """Name an implementation of the loss, a value of training.logits.

    >>> name_loss("by_rows"), name_loss("compiled_chunked")
    ('row-chunked loss', 'compiled-chunked loss')
    """
    return ("row-chunked" if logits == "by_rows" else logits.replace("_", "-")) + " loss"


def format_speed(plan: Plan) -> tuple[str, str]:
    """Format the step's time, and its range with throughput and cost."""
    if plan.timing is None:
        return "step time unknown", f": profile '{plan.job.hardware.profile}' lacks rates or latencies"
    dollars, hours = plan.dollars_per_million_tokens, plan.gpu_hours_per_million_tokens
    cost = f", {hours:.3g} GPU-hours per million tokens" if dollars is None else f", ${dollars:.3g} per million tokens"
    speed = f", {plan.tokens_per_s:,.0f} tokens/s (prompts included)"
    low, high = map(format_seconds, predict_step_interval(plan) or (0.0, 0.0))
    details = f" (range {low} to {high}){speed}" + ("" if plan.is_on_host else cost)
    return f"{format_seconds(plan.seconds)} per step", details


def _describe_workload(plan: Plan) -> str:
    """The workload and the training settings in one line, defaults included."""
    work, training = plan.job.workload, plan.job.training
    words = [
        f"{work.num_prompts_per_step} prompts x {work.num_samples_per_prompt} {_sequences(plan)} per step",
        work.tokens_in_words,
        f"{training.dtype.value}, {training.optimizer}, {name_loss(training.logits)}",
    ]
    if training.lora is not None:
        base = "nf4" if training.has_packed_base else training.stored_dtype(plan.job.backend).value
        words.append(f"LoRA rank {training.lora.rank} on {base}")
    return ", ".join(words)


def _sequences(plan: Plan, number: int = 2) -> str:
    """The word for a training sample: a generated rollout, or a sequence of the data set."""
    return ("rollout" if plan.job.has_rollouts else "sequence") + "s" * (number > 1)


def _trainer_name(plan: Plan) -> str:
    """The framework with its release and trainer; for rlplan's own runtime only `trainer`."""
    release = plan.job.release
    return "trainer" if release.is_rlplan else f"{release.title} {release.version}, {NAMES[plan.job.backend]}"


def choice_line(plan: Plan) -> str:
    """The chosen layout in one line."""
    step, trainer, engine = plan.choice.arrangement, plan.choice.trainer, plan.choice.engine
    batches = f"micro-batches of {trainer.micro_batch} {_sequences(plan, trainer.micro_batch)}"
    if trainer.max_tokens:
        batches = f"micro-batches of {trainer.max_tokens:,} tokens"
    words = [
        f"{_trainer_name(plan)} ZeRO-{trainer.zero_stage} on {_format_count(step.num_training, plan.device_word)}",
        f"states sharded over {size} of them" if (size := plan.job.training.fsdp_size) else "",
        *(f"{name} {getattr(trainer, name)}" for name in PARALLEL_AXES if getattr(trainer, name) > 1),
        batches,
        "gradient checkpointing" * trainer.gradient_checkpointing,
        "optimizer offloaded" * trainer.offloads_optimizer,
        "parameters offloaded" * trainer.offloads_parameters,
        "idle roles offloaded" * (step.offloaded == "all"),
        "idle frozen roles offloaded" * (step.offloaded == "frozen"),
        f"frozen roles on {_format_count(step.num_scoring, plan.device_word)} of their own" * (step.num_scoring > 0),
    ]
    line = ", ".join(filter(None, words))
    if not plan.job.has_rollouts:
        return line
    words = [
        f"{_format_count(plan.choice.engines, 'engine')}, tp {engine.tp}",
        f"attention dp {engine.attention_dp}" * (engine.attention_dp > 1),
        "expert parallelism" * engine.has_expert_parallel,
        f"{engine.quantization} weights" if engine.quantization else "",
        "4-bit base" if plan.job.rollout.base_path is not None else "",
        f"sleep level {engine.sleep_level}" * (engine.sleep_level > 0),
        "asynchronous" * step.is_async,
    ]
    return f"{step.placement.value}: {line}; {', '.join(filter(None, words))}"


def _format_count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


def _show_phases(plan: Plan) -> None:
    """Show seconds, share of the step, bottleneck and breakdown of each phase."""
    if plan.timing is None:
        return
    seconds, step = plan.seconds or 1.0, plan.timing.step
    names = ("phase", "seconds", "of the step", "bound by", "breakdown")
    table = new_table(*names, title="Steady step by phase", left=("bound by", "breakdown"))
    costs = sum_phase_costs(step)
    widest = max((len(format_seconds(cost.seconds)) for cost in costs.values()), default=0)
    widths = len("rollout"), max(widest, len("seconds")), len("of the step"), len("device memory")
    room = stdout.width - sum(widths) - 3 * len(names)
    for phase, cost in costs.items():
        share, bound = f"{cost.seconds / seconds:.0%}", name_resource(cost.bound_by, is_on_host=plan.is_on_host)
        parts = join_parts(list_parts(cost, is_on_host=plan.is_on_host), room)
        table.add_row(phase.value, format_seconds(cost.seconds), share, bound, parts)
    stdout.print(table)
    count = plan.job.workload.num_steps
    run = format_seconds(plan.timing.run_s(plan.schedule, count))
    show_text(Text(f"A run of {count} steps takes {run}, with evaluations and checkpoints.", style="dim"))
    if step.idle_s:
        idle = f"Generation overlaps with training; the faster side waits {format_seconds(step.idle_s)} per step."
        show_text(Text(idle, style="dim"))


def _show_actions(plan: Plan) -> None:
    """Show the schedule of a step, with only the first two mini-batches: the others are like the second."""
    all_names = ("action", "seconds", "processes", "after", "stream")
    names = all_names[: 3 if stdout.width < NARROW else 5]
    table = new_table(*names, title="Steady step by action", left=("after", "processes", "stream"))
    costs = plan.costs
    if plan.timing is not None:
        costs |= {action.action_id: action.cost for action in plan.timing.sometimes.actions}
    for action in plan.schedule.step:
        if (action.mini_batch or 0) > 1:
            continue
        cells = {
            "action": action.id if action.every == 1 else f"{action.id}, every {action.every}",
            "seconds": format_seconds(costs[action.id].seconds) if action.id in costs else "-",
            "after": ",\n".join(action.after) or "-",
            "processes": ",\n".join(_shorten_names(action.processes)) or "driver",
            "stream": action.stream.value,
        }
        table.add_row(*(cells[name] for name in names))
    stdout.print(table)
    show_left_out(all_names[len(names) :])


def _shorten_names(processes: tuple[str, ...]) -> Iterator[str]:
    """Names of processes; three or more of one worker are shortened to the first and the last."""
    for worker, group in groupby(processes, lambda name: name.rpartition("/")[0]):
        names = list(group)
        yield from names if len(names) < 3 else [f"{names[0]} to {names[-1].removeprefix(worker)}"]


def _show_alternatives(plan: Plan, alternatives: Iterable[Alternative], *, title: str) -> None:
    """Show step time, headroom and verdict of each layout, and its differences from the chosen one."""
    rows = list(alternatives)
    if not rows:
        return
    is_narrow = stdout.width < NARROW
    names = ["step time", "vs chosen", "headroom", "verdict"]
    names = ["#", *names] if is_narrow else [*names, "differences"]
    table, is_as_fast = new_table(*names, title=title, left=("verdict", "differences")), False
    typed: list[tuple[str, str]] = []
    for layout in rows:
        cells = ["-", "-", format_bytes(layout.headroom_bytes)]
        if layout.timing is not None and plan.seconds:
            more = layout.seconds / plan.seconds - 1
            cells[:2] = [format_seconds(layout.seconds), f"{more:+.1%}"]
            is_as_fast |= more < 0 and layout.choice != plan.choice
        cells.append(layout.verdict.value)
        differs = diff_choices(layout.choice, plan.choice, plan.job, plan.asked) or "the chosen layout"
        typed.append((str(len(typed) + 1), differs))
        table.add_row(*((typed[-1][0], *cells) if is_narrow else (*cells, differs)))
    stdout.print(table)
    if is_narrow:
        show_typed(typed)
    if is_as_fast:
        order = f"their order is {ORDER_WORDS}" if plan.is_on_host else "the simplest of them is chosen"
        words = f"Step times within {SAME_SPEED:.0%} count as equal; {order}."
        show_text(Text(words, style="dim"))


def show_considered(plan: Plan) -> None:
    """Show why other placements were not chosen."""
    for considered in plan.considered:
        show_fact(considered.name, considered.reason)


def describe_remedy(remedy: Remedy) -> str:
    """Describe the result and the cost of a remedy."""
    learns_less = f", and {remedy.learns_less}" if remedy.learns_less else ""
    costs = f", ${remedy.dollars:,.2f}" if remedy.dollars is not None else ""
    step = f", {format_seconds(remedy.seconds)} per step on {remedy.num_devices}" if remedy.seconds else ""
    return f"{remedy.verdict.value}, {format_bytes(remedy.peak_bytes)}{step}{costs}{learns_less}"
