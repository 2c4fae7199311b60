"""A plan in a terminal: what was chosen, its step in seconds by phase and by action, and what came next.

In: a Plan. Out: stdout. Left out: bytes action by action (estimate.py), why (explain.py).
"""

from collections.abc import Iterable, Iterator
from itertools import groupby

from rich.text import Text

from rlplan.planner.answers.plan_results import (
    PARALLEL_AXES,
    differences,
    error_words,
    needed_words,
    peak_words,
    phase_costs,
)
from rlplan.planner.checks.trainers import NAMES
from rlplan.planner.cpu.candidates import ORDER_WORDS
from rlplan.planner.margins import SAME_SPEED
from rlplan.planner.measured_errors import step_interval
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Alternative, Remedy, Verdict
from rlplan.units import format_bytes, format_seconds
from rlplan_cli.render.terminal import (
    NARROW,
    fill,
    made_of,
    name_of,
    new_table,
    say,
    say_left_out,
    show_change,
    show_typed,
    stdout,
)

COLORS = {
    Verdict.FITS: "bold green",
    Verdict.IN_EXPECTATION: "bold yellow",
    Verdict.DOES_NOT_FIT: "bold red",
    Verdict.REFUSED: "bold red",
}


def show_plan(plan: Plan, *, top: int) -> None:
    """The choice, its step, its memory in a line, and the next best. top: how many of these."""
    show_headline(plan, *_speed(plan))
    _show_phases(plan)
    _show_actions(plan)
    peak = plan.binding
    words = (
        f"{fullness(plan)} on the fullest {'host' if plan.is_on_host else 'GPU'}, in {peak.action_id}{range_of(plan)}"
    )
    if plan.kv is not None:
        words += f"; KV cache {format_bytes(plan.kv.kv_cache_memory_bytes)} a rank of the engine"
    if needed := needed_words(plan):
        words += f"; {needed}"
    say("Memory", words)
    show_errors(plan)
    _show_alternatives(plan, plan.runners_up[:top], title="Next best")
    _show_alternatives(plan, plan.pareto, title="Pareto front: step time against headroom")
    show_others(plan)


def show_errors(plan: Plan) -> None:
    """The intervals of the step and of the peak, and what they are made from."""
    for name, words in (("Step", error_words(plan)), ("Peak", peak_words(plan))):
        if words:
            say(name, words)


def show_headline(plan: Plan, answer: str, rest: str = "", *, but: str = "") -> None:
    """The verdict with an answer in bold; what is too small; what was chosen; what was asked. but: limits a verdict."""
    stdout.print(
        Text.assemble(
            (plan.verdict.value + but, COLORS[plan.verdict]),
            f"  {plan.model_name}, {plan.job.algorithm.name}, {plan.devices}: ",
            (answer, "bold"),
            rest,
        )
    )
    for reason in plan.refusals:
        stdout.print(f"  {reason}", style="bold", markup=False)
    for short in plan.shortages:
        stdout.print(f"  {short.of}: {short.sizes}", style="bold", markup=False)
    for note in plan.notes:
        stdout.print(f"  {note}", markup=False)
    if plan.not_counted:
        stdout.print(f"  not counted: {'; '.join(plan.not_counted)}", style="bold", markup=False)
    stdout.print(f"  {choice_line(plan)}", style="dim")
    stdout.print(f"  {_question(plan)}", style="dim")


def show_speed(plan: Plan) -> None:
    """The headline with seconds and speed."""
    show_headline(plan, *_speed(plan))


def fullness(plan: Plan) -> str:
    """`74.8 GiB of 79.2 GiB (94%)`, at the binding peak."""
    size, capacity = plan.binding.num_bytes, plan.binding_capacity
    return f"{format_bytes(size)} of {format_bytes(capacity)} ({size / capacity:.0%})"


def range_of(plan: Plan) -> str:
    """The interval of the peak, where it has one."""
    low, high = plan.interval()
    return f"; {format_bytes(low)} to {format_bytes(high)}" if low < high else ""


def _speed(plan: Plan) -> tuple[str, str]:
    if plan.timing is None:
        return "no times", f": profile '{plan.job.hardware.profile}' lacks rates or latencies"
    dollars, hours = plan.dollars_per_million_tokens, plan.gpu_hours_per_million_tokens
    cost = f", {hours:.3g} GPU-hours per million tokens" if dollars is None else f", ${dollars:.3g} per million tokens"
    speed = f", {plan.tokens_per_s:,.0f} tokens/s with prompts"
    low, high = map(format_seconds, step_interval(plan) or (0.0, 0.0))
    return f"{format_seconds(plan.seconds)} a step", f" ({low} to {high}){speed}" + ("" if plan.is_on_host else cost)


def _question(plan: Plan) -> str:
    """What was asked, defaults included, in a line."""
    work, training = plan.job.workload, plan.job.training
    loss = training.logits
    words = [
        f"{work.num_prompts_per_step} x {work.num_samples_per_prompt} {_sequences(plan)} a step",
        work.tokens_in_words,
        f"{training.dtype.value}, {training.optimizer}, {loss} loss",
    ]
    if training.lora is not None:
        base = "nf4" if training.has_packed_base else training.stored_dtype(plan.job.backend).value
        words.append(f"LoRA rank {training.lora.rank} on {base}")
    if (ulysses := plan.choice.trainer.ulysses) > 1:
        words.append(f"{ulysses} ranks a sequence")
    return ", ".join(words)


def _sequences(plan: Plan, number: int = 2) -> str:
    """What a step is made of: rollouts, or answers that are given."""
    return ("rollout" if plan.job.has_rollouts else "sequence") + "s" * (number > 1)


def _trainer_name(plan: Plan) -> str:
    """The framework at its release with its trainer; of rlplan's own runtime the trainer alone."""
    release = plan.job.release
    return "trainer" if release.is_rlplan else f"{release.title} {release.version}, {NAMES[plan.job.backend]}"


def choice_line(plan: Plan) -> str:
    """What was chosen, in a line."""
    step, trainer, engine = plan.choice.arrangement, plan.choice.trainer, plan.choice.engine
    passes = f"{trainer.micro_batch} {_sequences(plan, trainer.micro_batch)} a pass"
    if trainer.max_tokens:
        passes = f"{trainer.max_tokens:,} tokens a pass"
    words = [
        f"{step.placement.value}: " if plan.job.has_rollouts else "",
        f"{_trainer_name(plan)} ZeRO-{trainer.zero_stage} on {step.num_training}, ",
        f"states shared by {size} of them, " if (size := plan.job.training.fsdp_size) else "",
        "".join(f"{name} {getattr(trainer, name)}, " for name in PARALLEL_AXES if getattr(trainer, name) > 1),
        passes,
        ", gradient checkpointing" * trainer.gradient_checkpointing,
        ", optimizer offloaded" * trainer.offloads_optimizer,
        ", parameters offloaded" * trainer.offloads_parameters,
        ", waiting roles offloaded" * (step.offloaded == "all"),
        ", frozen roles offloaded while they wait" * (step.offloaded == "frozen"),
        f", frozen roles on {step.num_scoring} {plan.device_word}s of their own" * (step.num_scoring > 0),
    ]
    if plan.job.has_rollouts:
        words.append(f"; engine tp {engine.tp}" + f", attention dp {engine.attention_dp}" * (engine.attention_dp > 1))
        words.append(f" x {plan.choice.engines}" + " with expert parallelism" * engine.has_expert_parallel)
        words.append(f" in {engine.quantization}" if engine.quantization else "")
        words.append(" with a base in 4 bits" if plan.job.rollout.base_path is not None else "")
        words.append(f", sleep level {engine.sleep_level}" * (engine.sleep_level > 0))
        words.append(", beside training" * (step.is_async))
    return "".join(words)


def _show_phases(plan: Plan) -> None:
    """A row a phase: seconds, share of the step, what binds, and what else takes time."""
    if plan.timing is None:
        return
    seconds, step = plan.seconds or 1.0, plan.timing.step
    names = ("phase", "seconds", "of the step", "bound by", "breakdown")
    table = new_table(*names, title="Steady step by phase", left=("bound by", "breakdown"))
    room = stdout.width - sum(map(len, names[:3])) - len("device memory") - 3 * len(names)
    for phase, cost in phase_costs(step).items():
        share, bound = f"{cost.seconds / seconds:.0%}", name_of(cost.bound_by, is_on_host=plan.is_on_host)
        parts = fill(made_of(cost, is_on_host=plan.is_on_host), room)
        table.add_row(phase.value, format_seconds(cost.seconds), share, bound, parts)
    stdout.print(table)
    count = plan.job.workload.num_steps
    run = format_seconds(plan.timing.run_s(plan.schedule, count))
    stdout.print(f"A run of {count} steps takes {run}, evaluations and checkpoints included.", style="dim")
    if step.idle_s:
        waits = f"Generation runs beside training; the faster side waits {format_seconds(step.idle_s)} a step."
        stdout.print(waits, style="dim")


def _show_actions(plan: Plan) -> None:
    """The schedule of a step; of mini-batches the first two, for the others are like the second."""
    every = ("action", "seconds", "processes", "after", "stream")
    names = every[: 3 if stdout.width < NARROW else 5]
    table = new_table(*names, title="Steady step by action", left=("after", "processes", "stream"))
    costs = plan.costs
    if plan.timing is not None:
        costs |= {one.action_id: one.cost for one in plan.timing.sometimes.actions}
    for action in plan.schedule.step:
        if (action.mini_batch or 0) > 1:
            continue
        cells = {
            "action": action.id if action.every == 1 else f"{action.id}, every {action.every}",
            "seconds": format_seconds(costs[action.id].seconds) if action.id in costs else "-",
            "after": ",\n".join(action.after) or "-",
            "processes": ",\n".join(_runs(action.processes)) or "driver",
            "stream": action.stream.value,
        }
        table.add_row(*(cells[name] for name in names))
    stdout.print(table)
    say_left_out(every[len(names) :])


def _runs(processes: tuple[str, ...]) -> Iterator[str]:
    """Processes by name; of three and more of one layout the first and the last."""
    for worker, of_worker in groupby(processes, lambda name: name.rpartition("/")[0]):
        names = list(of_worker)
        yield from names if len(names) < 3 else [f"{names[0]} to {names[-1].removeprefix(worker)}"]


def _show_alternatives(plan: Plan, alternatives: Iterable[Alternative], *, title: str) -> None:
    """A row a candidate: what differs from the chosen layout, its step, and the room that it leaves."""
    rows = list(alternatives)
    if not rows:
        return
    is_narrow = stdout.width < NARROW
    names = ["a step", "than chosen", "headroom", "verdict"]
    names = ["#", *names] if is_narrow else [*names, "what differs"]
    table, is_as_fast = new_table(*names, title=title, left=("verdict", "what differs")), False
    typed: list[tuple[str, str]] = []
    for one in rows:
        cells = ["-", "-", format_bytes(one.headroom_bytes)]
        if one.timing is not None and plan.seconds:
            more = one.seconds / plan.seconds - 1
            cells[:2] = [format_seconds(one.seconds), f"{more:+.1%}"]
            is_as_fast |= more < 0 and one.choice != plan.choice
        cells.append(one.verdict.value)
        differs = differences(one.choice, plan.choice, plan.job, plan.asked) or "the chosen layout"
        typed.append((str(len(typed) + 1), differs))
        table.add_row(*((typed[-1][0], *cells) if is_narrow else (*cells, differs)))
    stdout.print(table)
    if is_narrow:
        show_typed(typed)
    if is_as_fast:
        taken = f"their order is {ORDER_WORDS}" if plan.is_on_host else "the simplest of them is chosen"
        words = f"Layouts within {SAME_SPEED:.0%} are taken as equally fast; {taken}."
        stdout.print(words, style="dim")


def show_others(plan: Plan) -> None:
    """What was not chosen and why, and what would make it fit."""
    for considered in plan.considered:
        say(f"Not {considered.name}", considered.reason)
    if plan.remedies:
        stdout.print("Any one of these changes helps, what costs least in learning first:", style="bold")
        for remedy in plan.remedies:
            show_change(remedy.change, _meaning(remedy))
    elif not plan.fits and not plan.refusals:
        larger = "more memory" if plan.is_on_host else "larger GPUs"
        say("No single change", f"that was tried makes it fit: a smaller model, shorter lengths or {larger} would")


def _meaning(remedy: Remedy) -> str:
    """What it leads to and what it costs."""
    learns_less = f", and {remedy.learns_less}" if remedy.learns_less else ""
    costs = f", ${remedy.dollars:,.2f}" if remedy.dollars is not None else ""
    step = f", {format_seconds(remedy.seconds)} a step on {remedy.num_devices}" if remedy.seconds else ""
    return f"{remedy.verdict.value}, {format_bytes(remedy.peak_bytes)}{step}{costs}{learns_less}"
