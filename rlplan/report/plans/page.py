"""What a page about a plan says, before it becomes HTML: words and numbers under headings.

In: a ledger, and the timing of a step where it is known. Out: frozen, JSON-able values.
Left out: what is particular to a budget, a job's plan or a simulation (the other modules of this package), HTML.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlplan.memory.ledger import MemoryLedger, Peak
from rlplan.planner.answers.plan_results import phase_costs
from rlplan.report import style
from rlplan.timing.cost import Resource
from rlplan.timing.step import StepTiming
from rlplan.units import format_bytes
from rlplan.vocabulary import MemoryKind

PAGE_SCHEMA_VERSION = 1
NEGLIGIBLE = 0.001
"""The part of a phase below which a resource is not named."""


@dataclass(frozen=True)
class Tile:
    """An answer that a reader came for. mood: good | bad | quiet."""

    title: str
    value: str
    note: str
    mood: str = "quiet"


@dataclass(frozen=True)
class PhaseRow:
    """Seconds of a phase in a steady step, and what most of them wait for. parts: seconds by resource."""

    phase: str
    seconds: float
    share: float
    bound_by: str
    parts: dict[str, float]


@dataclass(frozen=True)
class ActionRow:
    """An action of a step. device_bytes: on the fullest GPU at its peak, at the expected and at the high end."""

    action: str
    phase: str
    start_s: float | None
    seconds: float | None
    bound_by: str
    device_bytes: int | None
    device_high_bytes: int | None
    host_bytes: int | None


@dataclass(frozen=True)
class KindRow:
    """Bytes of a kind at the fullest moment of a place."""

    kind: str
    color: str
    num_bytes: int
    processes: str
    provenance: str


@dataclass(frozen=True)
class Place:
    """A device or a host at its fullest moment. when: in words."""

    name: str
    action: str
    when: str
    num_bytes: int
    capacity_bytes: int | None
    kinds: tuple[KindRow, ...]


@dataclass(frozen=True)
class OtherRow:
    """What was not chosen, and why."""

    name: str
    verdict: str
    seconds: float | None
    reason: str


@dataclass(frozen=True)
class Page:
    """Everything that a page says. state: (mood, sentence). choices, facts: (term, words)."""

    title: str
    subtitle: str
    state: tuple[str, str]
    tiles: tuple[Tile, ...]
    choices: tuple[tuple[str, str], ...]
    phases: tuple[PhaseRow, ...]
    actions: tuple[ActionRow, ...]
    places: tuple[Place, ...]
    facts: tuple[tuple[str, str], ...] = ()
    facts_title: str = "Risks"
    others: tuple[OtherRow, ...] = ()
    remedies: tuple[OtherRow, ...] = ()
    schema_version: int = PAGE_SCHEMA_VERSION


WHEN = {"start": "while starting", "first": "in the first step", "steady": "in every step", "finish": "at the end"}


def phase_rows(timing: StepTiming | None) -> tuple[PhaseRow, ...]:
    """One row a phase, in the order in which they come; shares are of all seconds, also of those that overlap."""
    costs = phase_costs(timing) if timing else {}
    total = sum(cost.seconds for cost in costs.values())
    return tuple(
        PhaseRow(
            str(phase),
            cost.seconds,
            cost.seconds / total,
            style.name_of(cost.bound_by.value),
            {
                resource.value: seconds
                for resource, seconds in cost.parts.items()
                if seconds > NEGLIGIBLE * cost.seconds
            },
        )
        for phase, cost in costs.items()
    )


def action_rows(
    actions: Sequence[tuple[str, str]], ledger: MemoryLedger, timing: StepTiming | None
) -> tuple[ActionRow, ...]:
    """One row an action of a steady step. actions: (id, phase)."""
    times = {action.action_id: action for action in timing.actions} if timing else {}
    expected = _fullest([ledger.device_totals(device) for device in ledger.devices])
    high = _fullest([ledger.device_totals(device, "high") for device in ledger.devices])
    hosts = _fullest([ledger.host_totals(host) for host in ledger.hosts])
    rows = []
    for action, phase in actions:
        time = times.get(action)
        bound = time.cost.bound_by if time and time.cost.seconds else Resource.IDLE
        rows.append(
            ActionRow(
                action,
                phase,
                time.start_s if time else None,
                time.cost.seconds if time else None,
                "" if bound is Resource.IDLE else style.name_of(bound.value),
                expected.get(action),
                high.get(action),
                hosts.get(action),
            )
        )
    return tuple(rows)


def _fullest(places: Sequence[Mapping[tuple[str, str], int]]) -> dict[str, int]:
    """Of each action of a steady step the bytes of the fullest of those places."""
    totals: dict[str, int] = {}
    for place in places:
        for (moment, action), size in place.items():
            if moment == "steady":
                totals[action] = max(totals.get(action, 0), size)
    return totals


def place_of(name: str, peak: Peak, ledger: MemoryLedger, capacity: int | None) -> Place:
    """A device or host at its fullest moment, by kind."""
    holding = {(process, kind) for process, _, kind, _ in peak.rows}
    provenances: dict[MemoryKind, set[str]] = defaultdict(set)
    for row in ledger.rows:
        if (row.process, row.kind) in holding:
            provenances[row.kind].add(str(row.provenance))
    sizes: dict[MemoryKind, int] = defaultdict(int)
    holders: dict[MemoryKind, list[str]] = defaultdict(list)
    for process, _, kind, size in peak.rows:
        sizes[kind] += size
        holders[kind].append(f"{process} {format_bytes(size)}")
    kinds = tuple(
        KindRow(
            str(kind), style.KIND_COLORS[kind], size, ", ".join(holders[kind]), ", ".join(sorted(provenances[kind]))
        )
        for kind, size in sorted(sizes.items(), key=lambda item: -item[1])
    )
    return Place(name, peak.action_id, WHEN[peak.moment], peak.num_bytes, capacity, kinds)
