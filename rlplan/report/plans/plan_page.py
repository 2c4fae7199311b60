"""The page of a plan, on a CPU host or on GPUs.

In: a Plan. Out: a Page. Left out: computation; the plan holds all numbers.
"""

from rlplan.planner.answers.plan_results import (
    describe_needed_memory,
    describe_peak_error,
    describe_step_error,
    diff_choices,
    list_overrides,
)
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Alternative, Remedy, Verdict
from rlplan.report import style
from rlplan.report.plans.page import OtherRow, Page, Place, Tile, action_rows, describe_place, phase_rows
from rlplan.units import format_bytes, format_rate, format_seconds
from rlplan.vocabulary import format_name

_MOODS = {
    Verdict.FITS: "good",
    Verdict.IN_EXPECTATION: "quiet",
    Verdict.DOES_NOT_FIT: "bad",
    Verdict.REFUSED: "bad",
}
_SENTENCES = {
    Verdict.FITS: "Fits at every moment, even at the high end of the prediction and with the longest responses.",
    Verdict.IN_EXPECTATION: "Fits in expectation only: not at the high end of its interval, or not with the longest "
    "responses. emit and run refuse it unless limits.accepts_oom_risk is true.",
    Verdict.DOES_NOT_FIT: "Does not fit.",
    Verdict.REFUSED: "Refused by its framework.",
}


def plan_page(plan: Plan) -> Page:
    """Build the page of a plan."""
    work, step = plan.job.workload, plan.timing.step if plan.timing else None
    samples = f"{work.num_samples_per_prompt} sample{'s' * (work.num_samples_per_prompt > 1)}"
    rollouts = f"{work.num_prompts_per_step:,} prompts with {samples} each"
    shortage = " ".join(["", *plan.refusals])
    for short in plan.shortages:
        shortage += f" Too small: {short.of}, {short.sizes}."
    actions = [(action.id, str(action.phase)) for action in plan.schedule.step]
    return Page(
        title=f"{plan.model_name} on {plan.devices}",
        subtitle=f"{plan.job.algorithm.name}, {rollouts}, {work.tokens_in_words}. "
        "Predicted; nothing on this page was measured.",
        state=("good" if plan.verdict is Verdict.FITS else "bad", _SENTENCES[plan.verdict] + shortage),
        notes=(*plan.notes, *(f"Not counted: {words}." for words in plan.not_counted)),
        tiles=_tiles(plan),
        choices=_choices(plan),
        phases=phase_rows(step),
        actions=action_rows(actions, plan.ledger, step if plan.seconds else None),
        places=_places(plan),
        facts=_risks(plan),
        others=list_alternatives(plan),
        remedies=tuple(_remedy(remedy, plan.device_word) for remedy in plan.remedies),
    )


def _remedy(remedy: Remedy, device: str) -> OtherRow:
    """A change that would help: its step, its peak, and its effect on learning."""
    devices = f"on {remedy.num_devices} {device}{'s' * (remedy.num_devices > 1)}" * bool(remedy.seconds)
    words = (f"peak {format_bytes(remedy.peak_bytes)}", devices, remedy.learns_less)
    reason = ", ".join(word for word in words if word)
    return OtherRow(remedy.change, remedy.verdict.value, remedy.seconds or None, reason)


def list_alternatives(plan: Plan) -> tuple[OtherRow, ...]:
    """List the alternatives: the next best candidates, then rejected placements and stages with their reasons."""
    considered = (OtherRow(candidate.name, "", None, candidate.reason) for candidate in plan.considered)
    return (*(_other(plan, other) for other in plan.runners_up), *considered)


def _tiles(plan: Plan) -> tuple[Tile, ...]:
    (low, high), peak, host = plan.interval(), plan.binding, plan.ledger.host_peak()
    tiles = [Tile("Verdict", plan.verdict.value, f"binds in {format_name(peak.action_id)}", _MOODS[plan.verdict])]
    if plan.timing is not None and plan.seconds:
        slowest = max(phase_rows(plan.timing.step), key=lambda row: row.seconds)
        note = f"{style.format_percent(slowest.share, 0)} {slowest.phase}, {slowest.bound_by}-bound"
        hours = f"{plan.gpu_hours_per_million_tokens:.3g} {plan.device_word}-hours per million"
        tiles += [
            Tile("Steady step", format_seconds(plan.seconds), note),
            Tile("Trained tokens", format_rate(plan.tokens_per_s), hours),
        ]
    fullest = max((plan.ledger.process_peak(name) for name in plan.ledger.processes), key=lambda peak: peak.num_bytes)
    if not plan.is_on_host:
        note = f"{format_bytes(low)} to {format_bytes(high)}, of {format_bytes(plan.binding_capacity)}"
        tiles.append(Tile("Fullest GPU", format_bytes(peak.num_bytes), note, _MOODS[plan.verdict]))
    else:
        tiles.append(
            Tile(
                "Fullest process", format_bytes(fullest.num_bytes), f"{fullest.scope}, {format_name(fullest.action_id)}"
            )
        )
    room = plan.host_capacity
    note = f"{format_name(host.action_id)}, {'host unknown' if room is None else 'of ' + format_bytes(room)}"
    return (*tiles, Tile("Fullest host", format_bytes(host.num_bytes), note))


def _choices(plan: Plan) -> tuple[tuple[str, str], ...]:
    """Chosen settings as overrides that can be typed, and the arguments of the rollout engine."""
    groups = [(group.name, len(group.devices)) for group in plan.schedule.groups]
    devices = ", ".join(f"{count} {plan.device_word}s {name}" for name, count in groups if count)
    rows = [("Devices", f"{devices}; trained: {', '.join(plan.job.trained_roles)}")]
    if plan.job.frozen_roles:
        rows[0] = ("Devices", f"{rows[0][1]}; frozen: {', '.join(plan.job.frozen_roles)}")
    by_part: dict[str, list[str]] = {}
    for key, value in list_overrides(plan.choice, plan.job, plan.asked).items():
        by_part.setdefault(key.partition(".")[0], []).append(f"{key}={value}")
    rows += [(part.capitalize(), " ".join(words)) for part, words in by_part.items()]
    if plan.kv is not None:
        kv = plan.kv
        size = f"kv_cache_memory_bytes={kv.kv_cache_memory_bytes} ({format_bytes(kv.kv_cache_memory_bytes)} per rank)"
        dp = kv.attention_dp
        shared = f", data_parallel_size={dp}, enable_expert_parallel=True" if dp > 1 else ""
        limit = f"max_num_seqs={kv.max_num_seqs // dp}"
        rows.append(("For vLLM", f"{size}, {limit}, tensor_parallel_size={kv.tp}{shared}"))
    return tuple(rows)


def _places(plan: Plan) -> tuple[Place, ...]:
    ledger = plan.ledger
    groups = [group for group in plan.schedule.groups if group.devices[0] in ledger.devices]
    many = len(groups) > 1
    places = [
        describe_place(
            f"One GPU of {len(group.devices)}" + f", {group.name}" * many,
            ledger.device_peak(group.devices[0]),
            ledger,
            ledger.get_device_capacity(group.devices[0]),
        )
        for group in groups
    ]
    host = describe_place("The fullest host", ledger.host_peak(), ledger, plan.host_capacity)
    if not plan.is_on_host:
        return (*places, host)
    return (host, *(describe_place(name, ledger.process_peak(name), ledger, None) for name in ledger.processes))


def _risks(plan: Plan) -> tuple[tuple[str, str], ...]:
    rows = [
        ("Step time", describe_step_error(plan)),
        ("Peak of a GPU", describe_peak_error(plan)),
        ("GPU memory", describe_needed_memory(plan)),
    ]
    rows = [(name, words) for name, words in rows if words]
    if plan.kv is not None:
        kv = plan.kv
        rows.append(
            (
                "KV cache",
                (
                    f"holds {kv.num_tokens:,} tokens per engine; {kv.max_num_seqs} sequences need "
                    f"{format_bytes(kv.expected_bytes)} per rank at the median, {format_bytes(kv.enough_bytes)} at "
                    f"P99; probability that some have to wait: {style.format_percent(kv.preemption_risk)}"
                ),
            )
        )
    step_risk = f"probability that a micro-batch of a step is too long to fit: {style.format_percent(plan.oom_risk)}"
    run_risk = f"of a run of {plan.job.workload.num_steps} steps: {style.format_percent(plan.oom_risk_of_run)}"
    rows.append(("Lengths", f"{step_risk}, {run_risk}"))
    disk = f"{format_bytes(plan.checkpoint_bytes)} per checkpoint for resuming"
    swap = f", {format_bytes(plan.swap_bytes)} of swapped states on each host" if plan.swap_bytes else ""
    rows.append(("Disk", disk + swap))
    if plan.choice.arrangement.is_async:
        rows.append(("Staleness", f"rollouts may be {plan.job.placement.max_staleness} versions old"))
    return tuple(rows)


def _other(plan: Plan, other: Alternative) -> OtherRow:
    """A runner-up: its differences from the plan, and how much slower it is."""
    slower, room = other.seconds - plan.seconds, format_bytes(max(0, other.headroom_bytes))
    words = f"{format_seconds(abs(slower))} {'slower' if slower >= 0 else 'faster'}, " if other.timing else ""
    return OtherRow(
        diff_choices(other.choice, plan.choice, plan.job, plan.asked) or "other devices of the scoring roles",
        other.verdict.value,
        other.seconds if other.timing else None,
        f"{words}{room} of headroom",
    )
