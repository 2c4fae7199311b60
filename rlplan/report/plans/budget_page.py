"""The page of a plan for GPUs.

In: a Budget. Out: a Page. Left out: working anything out: the budget says it all.
"""

from rlplan.memory.ledger import Peak
from rlplan.planner.answers.plan_results import choice_words, differences
from rlplan.planner.budget import Alternative, Budget, Verdict
from rlplan.report import style
from rlplan.report.plans.page import OtherRow, Page, Place, Tile, action_rows, phase_rows, place_of
from rlplan.units import format_bytes, format_rate, format_seconds

_MOODS = {Verdict.FITS: "good", Verdict.IN_EXPECTATION: "quiet", Verdict.DOES_NOT_FIT: "bad"}
_SENTENCES = {
    Verdict.FITS: "Fits: every moment, at the high end of every interval, with the longest responses that are allowed.",
    Verdict.IN_EXPECTATION: "Fits in expectation only: with a usual step's longest response, not with the longest one.",
    Verdict.DOES_NOT_FIT: "Does not fit.",
}


def budget_page(budget: Budget) -> Page:
    """What the page of a budget says."""
    spec, setting = budget.spec, budget.setting
    work = spec.workload
    samples = f"{work.num_samples_per_prompt} sample{'s' * (work.num_samples_per_prompt > 1)}"
    rollouts = f"{work.num_prompts_per_step:,} prompts with {samples} each"
    shortage = ""
    if budget.shortage is not None:
        of, needed, room = budget.shortage
        shortage = f" Too small: {of}, {format_bytes(needed)} needed, {format_bytes(room)} available."
    actions = [(action.id, str(action.phase)) for action in budget.schedule.step]
    return Page(
        title=f"{spec.model} on {setting.num_gpus}x {setting.gpu.name}",
        subtitle=f"{spec.algorithm}, {rollouts}, at most {work.max_prompt_len:,} + {work.max_response_len:,} tokens "
        f"({work.response_lengths.kind} lengths). Predicted; nothing on this page was measured.",
        state=("good" if budget.verdict is Verdict.FITS else "bad", _SENTENCES[budget.verdict] + shortage),
        tiles=_tiles(budget),
        choices=_choices(budget),
        phases=phase_rows(budget.timing),
        actions=action_rows(actions, budget.ledger, budget.timing if budget.timing.seconds else None),
        places=_places(budget),
        facts=_risks(budget),
        others=tuple(_other(budget, other) for other in budget.runners_up)
        + tuple(OtherRow(one.placement.value, "", None, one.reason) for one in budget.considered),
        remedies=tuple(
            OtherRow(one.change, one.verdict.value, None, f"peak {format_bytes(one.peak_bytes)}")
            for one in budget.remedies
        ),
    )


def _tiles(budget: Budget) -> tuple[Tile, ...]:
    low, high = budget.interval()
    capacity, host = budget.setting.capacity, budget.ledger.host_peak()
    room = budget.setting.host_capacity
    host_note = f"{host.action_id}, {'host unknown' if room is None else 'of ' + format_bytes(room)}"
    peak = budget.binding
    tiles = [Tile("Verdict", budget.verdict.value, f"binds in {peak.action_id}", _MOODS[budget.verdict])]
    if budget.timing.seconds:
        slowest = max(phase_rows(budget.timing), key=lambda row: row.seconds)
        tiles += [
            Tile(
                "A steady step",
                format_seconds(budget.timing.seconds),
                f"{style.percent(slowest.share, 0)} {slowest.phase}, {slowest.bound_by}-bound",
            ),
            Tile(
                "Trained tokens",
                format_rate(budget.tokens_per_s),
                f"{budget.gpu_hours_per_million_tokens:.3g} GPU-hours a million",
            ),
        ]
    note = f"{format_bytes(low)} to {format_bytes(high)}, of {format_bytes(capacity)}"
    return (*tiles, Tile("Fullest GPU", format_bytes(peak.num_bytes), note, _MOODS[budget.verdict]),
            Tile("Fullest host", format_bytes(host.num_bytes), host_note))  # fmt: skip


def _choices(budget: Budget) -> tuple[tuple[str, str], ...]:
    """What was chosen, as it is typed, and what a rollout engine is started with."""
    step = budget.candidate.step
    groups = [(group.name, len(group.devices)) for group in budget.schedule.groups]
    devices = ", ".join(f"{count} GPUs {name}" for name, count in groups if count)
    rows = [("Devices", f"{devices}; trained: {', '.join(step.trained_roles)}")]
    if step.frozen_roles:
        rows[0] = ("Devices", f"{rows[0][1]}; frozen: {', '.join(step.frozen_roles)}")
    by_part: dict[str, list[str]] = {}
    for key, value in choice_words(budget.candidate).items():
        by_part.setdefault(key.partition(".")[0], []).append(f"{key}={value}")
    rows += [(part.capitalize(), " ".join(words)) for part, words in by_part.items()]
    if budget.kv is not None:
        kv = budget.kv
        size = f"kv_cache_memory_bytes={kv.kv_cache_memory_bytes} ({format_bytes(kv.kv_cache_memory_bytes)} a GPU)"
        rows.append(("For vLLM", f"{size}, max_num_seqs={kv.max_num_seqs}, tensor_parallel_size={kv.tp}"))
    return tuple(rows)


def _places(budget: Budget) -> tuple[Place, ...]:
    ledger = budget.ledger
    groups = [group for group in budget.schedule.groups if group.devices[0] in ledger.devices]
    many = len(groups) > 1
    places = [
        place_of(
            f"One GPU of {len(group.devices)}" + f", {group.name}" * many,
            ledger.device_peak(group.devices[0]),
            ledger,
            ledger.device_capacity,
        )
        for group in groups
    ]
    host: Peak = ledger.host_peak()
    return (*places, place_of("The fullest host", host, ledger, budget.setting.host_capacity))


def _risks(budget: Budget) -> tuple[tuple[str, str], ...]:
    rows = []
    if budget.kv is not None:
        kv = budget.kv
        rows.append(
            (
                "KV cache",
                (
                    f"holds {kv.num_tokens:,} tokens an engine; {kv.max_num_seqs} sequences ask for "
                    f"{format_bytes(kv.expected_bytes)} a GPU at the median, {format_bytes(kv.enough_bytes)} at P99; "
                    f"probability that some have to wait {style.percent(kv.preemption_risk)}"
                ),
            )
        )
    meets = f"a step meets a micro-batch too long to fit with probability {style.percent(budget.oom_risk)}"
    run = f"a run of {budget.spec.workload.num_steps} steps with {style.percent(budget.oom_risk_of_run)}"
    rows.append(("Lengths", f"{meets}, {run}"))
    disk = f"{format_bytes(budget.checkpoint_bytes)} a checkpoint to resume from"
    swap = f", {format_bytes(budget.swap_bytes)} of swapped states on each host" if budget.swap_bytes else ""
    rows.append(("Disk", disk + swap))
    if budget.candidate.step.max_staleness:
        rows.append(("Staleness", f"rollouts may be {budget.candidate.step.max_staleness} versions old"))
    return tuple(rows)


def _other(budget: Budget, other: Alternative) -> OtherRow:
    """A runner-up: in what it differs, and how much slower it is."""
    slower = other.timing.seconds - budget.timing.seconds
    return OtherRow(
        differences(other.candidate, budget.candidate) or "other devices of the scoring roles",
        other.verdict.value,
        other.timing.seconds,
        f"{format_seconds(abs(slower))} {'slower' if slower >= 0 else 'faster'}, "
        f"{format_bytes(max(0, other.headroom_bytes))} of headroom",
    )
