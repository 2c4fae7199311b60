"""An explanation tells why a plan was chosen, what came next, which choices were rejected and what would improve it.

In: a Plan. Out: a frozen Explanation that serializes to JSON. Left out: rendering (the command line).
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlplan.errors import SpecError
from rlplan.planner.answers.changes import Change, Listener, Outcome, ask, describe_bottleneck
from rlplan.planner.answers.families import list_families, list_more_devices, list_what_ifs
from rlplan.planner.answers.plan_results import diff_choices, list_overrides, sum_phase_costs
from rlplan.planner.cpu.candidates import ORDER_WORDS
from rlplan.planner.machine import Search, open_search
from rlplan.planner.memo import Memo
from rlplan.planner.plan import AGAIN, Plan
from rlplan.planner.plan_parts import Alternative, Verdict
from rlplan.spec.base import shorten_value
from rlplan.spec.job import JobSpec
from rlplan.timing.cost import Cost
from rlplan.timing.step import StepTiming
from rlplan.units import format_bytes, format_seconds
from rlplan.version import __version__
from rlplan.vocabulary import format_name

EXPLANATION_SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Slack:
    """A resource that is not the bottleneck."""

    resource: str
    seconds: float
    grows: float
    """Factor by which its seconds could grow before it becomes the bottleneck."""


@dataclass(frozen=True)
class PhaseBottleneck:
    """Bottleneck of one phase of a steady step."""

    phase: str
    seconds: float
    share: float
    """Share of the step's seconds."""
    bound_by: str
    bound_s: float
    slack: tuple[Slack, ...]
    """Other resources that take time, the largest first."""


@dataclass(frozen=True)
class MemoryBottleneck:
    """The memory peak."""

    device: str
    """The fullest device, or the host whose memory the devices share."""
    action_id: str
    """Action during which the peak occurs."""
    num_bytes: int
    """Expected bytes at the peak."""
    capacity_bytes: int
    """Capacity of the device in bytes."""
    headroom_bytes: int
    """Bytes left on the fullest device in the worst case."""
    largest: str
    """Kind and process of the largest ledger row."""
    largest_bytes: int
    """Bytes of that row."""
    host_bytes: int
    """Bytes used on the fullest host."""
    host_headroom_bytes: int | None
    """Bytes left on that host; None if unknown, or if the host itself is the bottleneck."""


@dataclass(frozen=True)
class RunnerUp:
    """Another layout that was scored."""

    differs: str
    """Overrides that lead to this layout."""
    seconds: float
    slower_s: float
    """Additional seconds per step over the chosen layout."""
    phases: dict[str, float]
    """Additional seconds by phase."""
    headroom_bytes: int
    verdict: Verdict
    why: str


@dataclass(frozen=True)
class Explanation:
    """Content of `rlplan explain`."""

    verdict: Verdict
    seconds: float
    chosen: dict[str, str]
    phases: tuple[PhaseBottleneck, ...]
    memory: MemoryBottleneck
    why_not: str
    runners_up: tuple[RunnerUp, ...]
    families: tuple[Outcome, ...]
    """Choices that the search rejected."""
    what_ifs: tuple[Outcome, ...]
    """Usual what-ifs."""
    asked: tuple[Outcome, ...]
    """What-ifs of the user."""
    not_counted: tuple[str, ...] = ()
    """Parts of the job that the prediction ignores, as listed in the plan."""

    def as_json(self) -> dict[str, Any]:
        """JSON for other tools."""
        return {
            "schema_version": EXPLANATION_SCHEMA_VERSION,
            "verdict": self.verdict.value,
            "seconds": self.seconds,
            "chosen": self.chosen,
            "phases": [asdict(phase) for phase in self.phases],
            "memory": asdict(self.memory),
            "why_not": self.why_not,
            "not_counted": list(self.not_counted),
            "runners_up": [asdict(runner_up) | {"verdict": runner_up.verdict.value} for runner_up in self.runners_up],
            "families": [outcome.as_json() for outcome in self.families],
            "what_ifs": [outcome.as_json() for outcome in self.what_ifs],
            "asked": [outcome.as_json() for outcome in self.asked],
        }


def explain(
    plan: Plan,
    asked: Sequence[Change] = (),
    *,
    more_devices: bool = False,
    listen: Listener | None = None,
    memo: Memo | None = None,
) -> Explanation:
    """Explain a plan. asked: the user's what-ifs; more_devices: also multiples of the GPUs; memo: that of its search.

    Each change is a separate search; `listen` is called before each.
    """
    memo = memo or Memo()
    spec, search = _fix_devices(plan), open_search(plan.asked, memo).restrict_to_plan(plan)
    _check_current(plan, search)
    families, what_ifs = list(list_families(plan)), list(list_what_ifs(plan))
    questions = [*asked, *(list_more_devices(plan) if more_devices else ())]
    total, done = len(families) + len(what_ifs) + len(questions), 0

    def answer(changes: Sequence[Change], *, finds_way_out: bool = False) -> tuple[Outcome, ...]:
        nonlocal done
        outcomes = []
        for change in changes:
            if listen is not None:
                listen(done, total, change.typed)
            outcomes.append(ask(spec, change, finds_way_out=finds_way_out, memo=memo))
            done += 1
        return tuple(outcomes)

    return Explanation(
        verdict=plan.verdict,
        seconds=plan.seconds,
        chosen=list_overrides(plan.choice, plan.job, plan.asked),
        phases=tuple(
            _explain_phase(name, cost, plan.seconds)
            for name, cost in _list_costs(plan.timing.step if plan.timing else None).items()
        ),
        memory=_explain_memory(plan),
        why_not=next(iter(plan.refusals), "") or describe_bottleneck(plan),
        runners_up=tuple(_explain_runner_up(alternative, plan) for alternative in plan.runners_up),
        families=answer(families, finds_way_out=True),
        what_ifs=answer(what_ifs),
        asked=answer(questions),
        not_counted=plan.not_counted,
    )


def _fix_devices(plan: Plan) -> JobSpec:
    """Fix the devices that the objective chose, so that changes are compared on the same GPUs."""
    asked = plan.asked
    if asked.objective not in ("gpus", "cost") or asked.hardware.generation is not None:
        return asked
    changes: dict[str, object] = {"objective": "step_time"}
    if asked.hardware.num_devices != plan.num_devices:
        fewer = {"num_devices": plan.num_devices, "num_hosts": "auto"}
        changes["hardware"] = asked.hardware.model_copy(update=fewer)
    return asked.model_copy(update=changes)


def _check_current(plan: Plan, search: Search) -> None:
    """Check that today's formulas still give the plan's step time. Raises: SpecError if they do not."""
    now = search.predict_step_s(plan.choice, plan.kv.kv_cache_memory_bytes if plan.kv else 0)
    # a relative tolerance absorbs the order of additions, not a changed formula
    if not math.isclose(now, plan.seconds, rel_tol=1e-6):
        raise SpecError(
            f"the plan states {format_seconds(plan.seconds)} a step, the current prediction is {format_seconds(now)}",
            where="the plan: timing",
            rule=f"the plan was made by rlplan {shorten_value(plan.rlplan_version)}, this is {__version__}: "
            "a formula, a profile or the model changed since",
            way_out=AGAIN,
        )


def _list_costs(timing: StepTiming | None) -> dict[str, Cost]:
    """Costs by phase name; empty if no seconds are known."""
    return {} if timing is None else {phase.value: cost for phase, cost in sum_phase_costs(timing).items()}


def _explain_phase(name: str, cost: Cost, step: float) -> PhaseBottleneck:
    bound = cost.parts[cost.bound_by]
    parts = sorted(cost.parts.items(), key=lambda item: -item[1])
    slack = tuple(Slack(key.value, part, bound / part) for key, part in parts if key is not cost.bound_by and part)
    return PhaseBottleneck(name, cost.seconds, cost.seconds / step if step else 0.0, cost.bound_by.value, bound, slack)


def _explain_memory(plan: Plan) -> MemoryBottleneck:
    peak, host = plan.binding, plan.ledger.host_peak()
    is_apart = plan.host_capacity is not None and not plan.is_on_host
    process, _, kind, size = peak.rows[0]
    return MemoryBottleneck(
        device=peak.scope,
        action_id=peak.action_id,
        num_bytes=peak.num_bytes,
        capacity_bytes=plan.binding_capacity,
        headroom_bytes=plan.headroom_bytes,
        largest=f"{format_name(kind)} of {process}",
        largest_bytes=size,
        host_bytes=host.num_bytes,
        host_headroom_bytes=plan.ledger.get_host_capacity(host.scope) - host.num_bytes if is_apart else None,
    )


def _explain_runner_up(alternative: Alternative, plan: Plan) -> RunnerUp:
    chosen, other = _list_costs(plan.timing.step if plan.timing else None), _list_costs(alternative.timing)
    phases = {
        name: (other[name].seconds if name in other else 0.0) - (chosen[name].seconds if name in chosen else 0.0)
        for name in dict.fromkeys((*chosen, *other))
    }
    slower = alternative.seconds - plan.seconds
    return RunnerUp(
        differs=diff_choices(alternative.choice, plan.choice, plan.job, plan.asked),
        seconds=alternative.seconds,
        slower_s=slower,
        phases={name: seconds for name, seconds in phases.items() if seconds},
        headroom_bytes=alternative.headroom_bytes,
        verdict=alternative.verdict,
        why=_explain_loss(alternative, plan, slower, phases),
    )


def _explain_loss(alternative: Alternative, plan: Plan, slower: float, phases: dict[str, float]) -> str:
    if alternative.verdict.rank > plan.fit.rank:
        lack = (
            ""
            if alternative.headroom_bytes >= 0
            else f": {format_bytes(-alternative.headroom_bytes)} too much at the high end"
        )
        return f"{alternative.verdict.value}{lack}"
    name, most = max(phases.items(), key=lambda item: item[1], default=("", 0.0))
    if slower < 0:
        taken = f"ties follow the order {ORDER_WORDS}" if plan.is_on_host else "the simpler layout is taken"
        return f"{-slower / plan.seconds:.1%} faster, which counts as equal: {taken}"
    if slower == 0 or most <= 0:
        return "equally fast; the layout with less memory or fewer options is taken"
    less = sum(seconds for seconds in phases.values() if seconds < 0)
    saved = f", {format_seconds(-less)} less elsewhere" if less < -0.01 * most else ""
    return f"{name} takes {format_seconds(most)} more{saved}"
