"""A plan in a terminal: the verdict, one step on one GPU of each group, the binding moment by kind, and the risks."""

from collections import defaultdict
from typing import TYPE_CHECKING

from rich.text import Text

from rlplan.memory.ledger import LedgerRow, MemoryLedger
from rlplan.memory.logits import loss_named
from rlplan.planner.answers.plan_results import WAYS
from rlplan.planner.gpu_plan import GpuPlan, KvReport, Remedy, Verdict
from rlplan.units import GIB, format_bytes, format_seconds
from rlplan.vocabulary import MemoryKind
from rlplan_cli.render import NARROW, SHORT, new_table, stdout

if TYPE_CHECKING:
    from rlplan.runtime.trace_estimate import TraceEstimate

MAX_NARROW_PROCESSES = 3
"""Columns of processes that a narrow terminal has room for; of more, their sums are shown."""
_COLORS = {Verdict.FITS: "bold green", Verdict.IN_EXPECTATION: "bold yellow", Verdict.DOES_NOT_FIT: "bold red"}


def show_gpu_estimate(plan: GpuPlan) -> None:
    """Everything that a person wants to know first; the rest is in `--json`."""
    _show_verdict(plan)
    for group in plan.schedule.groups:
        device = group.devices[0]
        if device in plan.ledger.devices:
            _show_step(plan, device, len(group.devices), group.name)
    _show_binding(plan)
    _show_risks(plan)
    show_others(plan)
    stdout.print("Bold: in the action; dim: waiting. Every row with its interval and source: --json.", style="dim")


def _show_verdict(plan: GpuPlan) -> None:
    peak, capacity = plan.binding, plan.binding_capacity
    low, high = plan.interval()
    gpus = plan.setting.words
    stdout.print(
        Text.assemble(
            (plan.verdict.value, _COLORS[plan.verdict]),
            f"  {plan.model_name}, {plan.job.algorithm.name}, {gpus}: {format_bytes(peak.num_bytes)} of "
            f"{format_bytes(capacity)} ({peak.num_bytes / capacity:.0%}) at the peak, in {peak.action_id}; "
            f"{format_bytes(low)} to {format_bytes(high)}",
        )
    )
    if plan.shortage is not None:
        of, needed, room = plan.shortage
        stdout.print(f"  {of}: {format_bytes(needed)} needed, {format_bytes(room)} available", style="bold")
    stdout.print(f"  {describe_choice(plan)}", style="dim")
    stdout.print(f"  {describe_question(plan)}", style="dim")


def describe_question(plan: GpuPlan) -> str:
    """What was asked, defaults included, in a line."""
    work, training = plan.job.workload, plan.job.training
    loss = loss_named(training.logits, plan.job.target).value
    words = [
        f"{work.num_prompts_per_step} x {work.num_samples_per_prompt} rollouts a step",
        f"{work.max_prompt_len:,} + {work.max_response_len:,} tokens ({work.response_lengths.kind} lengths)",
        f"{training.dtype.value}, {training.optimizer}, {loss} loss",
    ]
    if training.lora is not None:
        base = "nf4" if training.has_packed_base else training.dtype.value
        words.append(f"LoRA rank {training.lora.rank} on {base}")
    if (ulysses := plan.choice.trainer.ulysses) > 1:
        words.append(f"{ulysses} ranks a sequence")
    if any(model.vision for model in plan.setting.models.values()):
        words.append("images not counted")
    return ", ".join(words)


TRAINERS = {"rlplan": "trainer", "fsdp2": "FSDP2", "megatron": "Megatron"}


def describe_choice(plan: GpuPlan) -> str:
    """What was chosen, in a line."""
    step, trainer, engine = plan.choice.arrangement, plan.choice.trainer, plan.choice.engine
    ways = [f"{name} {getattr(trainer, name)}" for name in WAYS if getattr(trainer, name) > 1]
    passes = f"{trainer.micro_batch} rollout{'s' * (trainer.micro_batch > 1)} a pass"
    if trainer.max_tokens:
        passes = f"{trainer.max_tokens:,} tokens a pass"
    words = [
        f"{step.placement.value}: " if plan.job.has_rollouts else "",
        f"{TRAINERS[plan.job.target]} ZeRO-{trainer.zero_stage} on {step.num_training}, ",
        "".join(f"{word}, " for word in ways),
        passes,
        ", gradient checkpointing" * trainer.gradient_checkpointing,
        ", optimizer offloaded" * trainer.offloads_optimizer,
        ", parameters offloaded" * trainer.offloads_parameters,
        ", waiting roles on the host" * (step.offloaded == "all"),
        ", frozen roles on the host while they wait" * (step.offloaded == "frozen"),
        f", frozen roles on {step.num_scoring} GPUs of their own" * (step.num_scoring > 0),
    ]
    if plan.job.has_rollouts:
        words.append(f"; engine tp {engine.tp} x {step.num_generation // engine.tp}")
        words.append(" with whole experts" * engine.has_expert_parallel)
        words.append(f" in {engine.quantization}" if engine.quantization else "")
        words.append(f", asleep at level {engine.sleep_level} in between" * (engine.sleep_level > 0))
        words.append(", beside training" * (step.is_async))
    return "".join(words)


def _show_step(plan: GpuPlan, device: str, num_alike: int, group: str) -> None:
    """A row an action, a column a process: what it holds then, inside the action or waiting."""
    processes = [name for name, place in plan.shown_schedule.processes if place == device]
    title = f"One step on one GPU of {num_alike} alike" + ("" if group == "shared" else f" ({group})") + _unit()
    is_compact = stdout.width < NARROW and len(processes) > MAX_NARROW_PROCESSES
    names = ("in it", "waiting") if is_compact else tuple(map(_short_name, processes))
    table = new_table("action", *names, "together", title=title)
    held: dict[str, int] = {}
    binding, repeats = plan.binding, _repeats(plan)
    for moment, action in plan.ledger.order:
        rows = [row for row in _rows(plan.ledger, moment, action) if row.device == device]
        inside: dict[str, int] = defaultdict(int)
        after: dict[str, int] = defaultdict(int)
        for row in rows:
            inside[row.process] += row.peak_bytes
            after[row.process] += row.resident_bytes
        if rows and moment == "steady" and action not in repeats:
            waiting = {name: held.get(name, 0) for name in processes if name not in inside}
            total = sum(inside.values()) + sum(waiting.values())
            if is_compact:
                cells = [Text(_size(sum(inside.values())), "bold"), Text(_size(sum(waiting.values())), "dim")]
            else:
                cells = [
                    Text(_size(inside[name]), "bold") if name in inside else Text(_size(waiting[name]), "dim")
                    for name in processes
                ]
            is_binding = (binding.scope, binding.moment, binding.action_id) == (device, moment, action)
            table.add_row(action + " <" * is_binding, *cells, _size(total), style="reverse" * is_binding)
        held |= after
    stdout.print(table)


def _repeats(plan: GpuPlan) -> set[str]:
    """Actions of the third and every further mini-batch, which hold what those of the second do."""
    return {action.id for action in plan.schedule.step if (action.mini_batch or 0) > 1}


def _rows(ledger: MemoryLedger, moment: str, action: str) -> list[LedgerRow]:
    return [row for row in ledger.rows if row.moment == moment and row.action_id == action and row.space == "device"]


def _show_binding(plan: GpuPlan) -> None:
    """The binding moment: a row a kind, a column a process."""
    peak = plan.binding
    processes = list(dict.fromkeys(process for process, _, _, _ in peak.rows))
    when = {"start": "while starting", "first": "first step", "steady": "every step", "finish": "at the end"}[
        peak.moment
    ]
    title = f"The binding moment: {peak.action_id}, {when}{_unit()}"
    is_compact = stdout.width < NARROW and len(processes) > MAX_NARROW_PROCESSES
    table = new_table("kind", *(() if is_compact else map(_short_name, processes)), "together", title=title)
    sizes: dict[str, dict[str, int]] = defaultdict(dict)
    for process, _, kind, size in peak.rows:
        sizes[SHORT.get(kind, kind.value)][process] = size
    for name, cells in sorted(sizes.items(), key=lambda item: -sum(item[1].values())):
        shown = [] if is_compact else [_size(cells[one]) if one in cells else "-" for one in processes]
        table.add_row(name, *shown, _size(sum(cells.values())))
    stdout.print(table)


def _unit() -> str:
    return ", in GiB" if stdout.width < NARROW else ""


def _size(num_bytes: int) -> str:
    """Bytes with their unit where there is room, else the number alone."""
    return f"{num_bytes / GIB:.2f}" if stdout.width < NARROW else format_bytes(num_bytes)


def _short_name(process: str) -> str:
    name = process.removesuffix("/0").removeprefix("scorer/").replace("rollout_engine", "engine")
    return (
        name.replace("policy_trainer", "trainer").replace("value_trainer", "value") if stdout.width < NARROW else name
    )


def _show_risks(plan: GpuPlan) -> None:
    """KV cache, lengths, host and disk, one line each."""
    kv, setting = plan.kv, plan.setting
    if kv is not None:
        _say(
            "KV cache",
            f"{format_bytes(kv.kv_cache_memory_bytes)} a GPU = {kv.num_tokens:,} tokens an engine; its "
            f"{kv.max_num_seqs} sequences ask for {format_bytes(kv.expected_bytes)}, "
            f"{format_bytes(kv.enough_bytes)} at P99; {_room(kv)}. "
            f"vLLM: kv_cache_memory_bytes={kv.kv_cache_memory_bytes}, max_num_seqs={kv.max_num_seqs}",
        )
    if plan.oom_risk:
        _say(
            "Lengths",
            f"a step meets a micro-batch too long to fit with probability {plan.oom_risk:.1%}, a run of "
            f"{plan.job.workload.num_steps} steps with {plan.oom_risk_of_run:.0%}",
        )
    host = plan.ledger.host_peak()
    is_known = setting.host_capacity is not None
    room = format_bytes(setting.host_capacity or 0) if is_known else "an unknown amount (no node profile: not checked)"
    hosts = setting.num_hosts
    _say(
        "Host",
        f"{format_bytes(host.num_bytes)} of {room} on each of {hosts} host{'s' * (hosts > 1)}, in {host.action_id}; "
        f"a checkpoint to resume from takes {format_bytes(plan.checkpoint_bytes)} on disk"
        + (f", swapped states {format_bytes(plan.swap_bytes)} on each" if plan.swap_bytes else ""),
    )


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
        table.add_row(SHORT.get(kind, kind.value), format_bytes(size), "the trace" if traced else "formulas")
    stdout.print(table)
    stdout.print("Activations here are logits and temporaries too. Rollouts and scoring are not in this.", style="dim")


def _room(kv: KvReport) -> str:
    """What happens when all sequences at once reach their full length."""
    if kv.preemption_risk < 0.5:
        return f"some have to wait in {kv.preemption_risk:.0%} of such batches"
    return f"{int(kv.max_num_seqs * kv.kv_cache_memory_bytes / kv.enough_bytes)} of them fit at once, the others wait"


def _say(head: str, text: str) -> None:
    stdout.print(Text.assemble((f"{head}: ", "bold"), text))


def _remedy(remedy: Remedy) -> str:
    trains_less = ", and trains adapters only" if "lora" in remedy.change else ""
    costs = f", ${remedy.dollars:,.2f}" if remedy.dollars is not None else ""
    step = f"{format_seconds(remedy.seconds)} a step on {remedy.num_gpus}{costs}"
    return f"  {remedy.change}  ({remedy.verdict.value}, {format_bytes(remedy.peak_bytes)}, {step}{trains_less})"


def show_others(plan: GpuPlan) -> None:
    """Placements that were not chosen, and what would make it fit."""
    for considered in plan.considered:
        _say(f"Not {considered.placement.value}", considered.reason)
    if plan.remedies:
        changes = "\n".join(_remedy(remedy) for remedy in plan.remedies)
        stdout.print(Text.assemble(("Each of these lines alone helps, cheapest first:\n", "bold"), changes))
    elif plan.verdict is Verdict.DOES_NOT_FIT:
        _say("No single change", "that was tried makes it fit: a smaller model, shorter lengths or larger GPUs would")
