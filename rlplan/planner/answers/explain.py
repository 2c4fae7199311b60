"""Explanation: why a plan is as it is, what came next, what was left aside, and what would change it.

In: a GpuPlan. Out: an Explanation, frozen and JSON-able. Left out: drawing (the command line).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlplan.planner.answers.changes import Change, Listener, Outcome, ask, headroom, what_binds
from rlplan.planner.answers.families import list_families, list_more_gpus, list_what_ifs
from rlplan.planner.answers.plan_results import choice_words, differences, phase_costs
from rlplan.planner.answers.sensitivity import Layout, Sensitivity, list_sensitivities
from rlplan.planner.gpu_plan import Alternative, GpuPlan, Verdict
from rlplan.spec.job import JobSpec
from rlplan.timing.cost import Cost
from rlplan.units import format_bytes, format_seconds

EXPLANATION_SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Slack:
    """A resource that does not bind. grows: times that its seconds could grow before it did."""

    resource: str
    seconds: float
    grows: float


@dataclass(frozen=True)
class PhaseWhy:
    """One phase of a steady step. share: of the step. slack: what takes time beside what binds, most first."""

    phase: str
    seconds: float
    share: float
    bound_by: str
    bound_s: float
    slack: tuple[Slack, ...]


@dataclass(frozen=True)
class MemoryWhy:
    """The fullest moment. headroom_bytes: left on the fullest GPU at the high end of the interval.

    largest: kind and process of its largest row. host_headroom_bytes: None where the host is not known.
    """

    device: str
    action_id: str
    num_bytes: int
    capacity_bytes: int
    headroom_bytes: int
    largest: str
    largest_bytes: int
    host_bytes: int
    host_headroom_bytes: int | None


@dataclass(frozen=True)
class RunnerUp:
    """Another layout that was rated. differs: what leads to it, as it is typed. phases: seconds more in each phase."""

    differs: str
    seconds: float
    slower_s: float
    phases: dict[str, float]
    headroom_bytes: int
    verdict: Verdict
    why: str


@dataclass(frozen=True)
class Explanation:
    """Everything. families: what the search left aside; what_ifs: what one would ask next; asked: what was asked."""

    verdict: Verdict
    seconds: float
    chosen: dict[str, str]
    phases: tuple[PhaseWhy, ...]
    memory: MemoryWhy
    why_not: str
    runners_up: tuple[RunnerUp, ...]
    families: tuple[Outcome, ...]
    what_ifs: tuple[Outcome, ...]
    asked: tuple[Outcome, ...]
    sensitivities: tuple[Sensitivity, ...]

    @property
    def is_stable(self) -> bool:
        """Whether the chosen layout stays the best whatever uncertain constant is another."""
        return not any(better for one in self.sensitivities for better in one.better)

    def as_json(self) -> dict[str, Any]:
        """Everything, JSON-able."""
        return {
            "schema_version": EXPLANATION_SCHEMA_VERSION,
            "verdict": self.verdict.value,
            "seconds": self.seconds,
            "chosen": self.chosen,
            "phases": [asdict(phase) for phase in self.phases],
            "memory": asdict(self.memory),
            "why_not": self.why_not,
            "runners_up": [asdict(one) | {"verdict": one.verdict.value} for one in self.runners_up],
            "families": [one.as_json() for one in self.families],
            "what_ifs": [one.as_json() for one in self.what_ifs],
            "asked": [one.as_json() for one in self.asked],
            "sensitivities": [one.as_json() for one in self.sensitivities],
            "is_stable": self.is_stable,
        }


def explain(
    budget: GpuPlan, asked: Sequence[Change] = (), *, more_gpus: bool = False, listen: Listener | None = None
) -> Explanation:
    """Why a plan is as it is. asked: changes to try beside the usual ones; more_gpus: and multiples of the GPUs.

    Every change is a search of its own; listen hears of each.
    """
    spec = _as_chosen(budget)
    families, what_ifs = list(list_families(budget)), list(list_what_ifs(budget))
    questions = [*asked, *(list_more_gpus(budget) if more_gpus else ())]
    total, done = len(families) + len(what_ifs) + len(questions), 0

    def answer(changes: Sequence[Change], *, finds_way_out: bool = False) -> tuple[Outcome, ...]:
        nonlocal done
        outcomes = []
        for change in changes:
            if listen is not None:
                listen(done, total, change.typed)
            outcomes.append(ask(spec, change, finds_way_out=finds_way_out))
            done += 1
        return tuple(outcomes)

    of_families = answer(families, finds_way_out=True)
    return Explanation(
        verdict=budget.verdict,
        seconds=budget.seconds,
        chosen=choice_words(budget.choice, budget.job),
        phases=tuple(
            _phase(phase.value, cost, budget.seconds) for phase, cost in phase_costs(budget.timing.step).items()
        ),
        memory=_memory(budget),
        why_not=what_binds(budget),
        runners_up=tuple(_runner_up(one, budget) for one in budget.runners_up),
        families=of_families,
        what_ifs=answer(what_ifs),
        asked=answer(questions),
        sensitivities=list_sensitivities(budget, _rivals(budget, of_families)),
    )


def _as_chosen(budget: GpuPlan) -> JobSpec:
    """The job that changes are asked of: where the objective took some of the GPUs, these are all there are."""
    setting, asked = budget.setting, budget.asked
    if asked.objective not in ("gpus", "cost") or setting.has_pools:
        return asked
    changes: dict[str, object] = {"objective": "step_time"}
    if asked.hardware.num_devices != setting.num_gpus:
        fewer = {"num_devices": setting.num_gpus, "num_hosts": "auto"}
        changes["hardware"] = asked.hardware.model_copy(update=fewer)
    return asked.model_copy(update=changes)


def _phase(name: str, cost: Cost, step: float) -> PhaseWhy:
    bound = cost.parts[cost.bound_by]
    rest = sorted(cost.parts.items(), key=lambda item: -item[1])
    slack = tuple(Slack(key.value, part, bound / part) for key, part in rest if key is not cost.bound_by and part)
    return PhaseWhy(name, cost.seconds, cost.seconds / step if step else 0.0, cost.bound_by.value, bound, slack)


def _memory(budget: GpuPlan) -> MemoryWhy:
    peak, ledger = budget.binding, budget.ledger
    host = ledger.host_peak()
    room = None if budget.setting.host_capacity is None else ledger.host_capacity_of(host.scope)
    process, _, kind, size = peak.rows[0]
    return MemoryWhy(
        device=peak.scope,
        action_id=peak.action_id,
        num_bytes=peak.num_bytes,
        capacity_bytes=budget.binding_capacity,
        headroom_bytes=headroom(budget),
        largest=f"{kind} of {process}",
        largest_bytes=size,
        host_bytes=host.num_bytes,
        host_headroom_bytes=None if room is None else room - host.num_bytes,
    )


def _runner_up(one: Alternative, budget: GpuPlan) -> RunnerUp:
    mine = {phase.value: cost.seconds for phase, cost in phase_costs(budget.timing.step).items()}
    other = {phase.value: cost.seconds for phase, cost in phase_costs(one.timing).items()}
    phases = {name: other.get(name, 0.0) - mine.get(name, 0.0) for name in dict.fromkeys((*mine, *other))}
    slower = one.timing.seconds - budget.seconds
    return RunnerUp(
        differs=differences(one.choice, budget.choice, budget.job),
        seconds=one.timing.seconds,
        slower_s=slower,
        phases={name: seconds for name, seconds in phases.items() if seconds},
        headroom_bytes=one.headroom_bytes,
        verdict=one.verdict,
        why=_why_it_lost(one, budget, slower, phases),
    )


def _why_it_lost(one: Alternative, budget: GpuPlan, slower: float, phases: dict[str, float]) -> str:
    if one.verdict.rank > budget.verdict.rank:
        lack = "" if one.headroom_bytes >= 0 else f": {format_bytes(-one.headroom_bytes)} too much at the high end"
        return f"{one.verdict.value}{lack}"
    name, most = max(phases.items(), key=lambda item: item[1])
    if slower <= 0 or most <= 0:
        return "as good; the simpler one is taken"
    less = sum(seconds for seconds in phases.values() if seconds < 0)
    saved = f", {format_seconds(-less)} less elsewhere" if less < -0.01 * most else ""
    return f"{name} takes {format_seconds(most)} more{saved}"


def _rivals(budget: GpuPlan, families: Sequence[Outcome]) -> list[Layout]:
    """Layouts that fit at least as well as the chosen one, from the runners-up and the families."""
    rivals = [(one.choice, one.kv_cache) for one in budget.runners_up if one.verdict.rank <= budget.verdict.rank]
    for one in families:
        if one.budget is not None and one.budget.verdict.rank <= budget.verdict.rank:
            kv = one.budget.kv
            rivals.append((one.budget.choice, kv.kv_cache_memory_bytes if kv else 0))
    return rivals
