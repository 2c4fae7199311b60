"""What a page about a plan says, before it becomes HTML: words and numbers under headings.

In: a ledger, and the timing of a step where it is known. Out: frozen, JSON-able values.
Left out: what is particular to a plan, a job's plan or a simulation (the other modules of this package), HTML.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlplan.memory.ledger import MemoryLedger, Peak, RunPhase
from rlplan.planner.answers.plan_results import phase_costs
from rlplan.report import style
from rlplan.timing.cost import Resource
from rlplan.timing.step import StepTiming
from rlplan.units import format_bytes
from rlplan.vocabulary import MemoryKind, words_of

PAGE_SCHEMA_VERSION = 1
NEGLIGIBLE = 0.001
"""The part of a phase below which a resource is not named."""


@dataclass(frozen=True)
class Tile:
    """An answer that a reader came for."""

    title: str
    """What is answered."""
    value: str
    """The answer."""
    note: str
    """A line under it."""
    mood: str = "quiet"
    """`good`, `bad` or `quiet`: its colour."""


@dataclass(frozen=True)
class PhaseRow:
    """A phase of a steady step."""

    phase: str
    """Its name."""
    seconds: float
    """Of all its actions."""
    share: float
    """Of the seconds of all phases, 0 to 1."""
    bound_by: str
    """The resource that most of the seconds wait for."""
    parts: dict[str, float]
    """Seconds by resource, without the negligible ones."""


@dataclass(frozen=True)
class ActionRow:
    """An action of a steady step."""

    action: str
    """Its id."""
    phase: str
    """Its phase's name."""
    start_s: float | None
    """From the beginning of the step; None where no seconds are known."""
    seconds: float | None
    """None where they are not known."""
    bound_by: str
    """The resource that it waits for; empty where it takes no time."""
    device_bytes: int | None
    """On the fullest GPU at its peak, as expected."""
    device_high_bytes: int | None
    """The same at the high end of the prediction."""
    host_bytes: int | None
    """On the fullest host at its peak, as expected."""


@dataclass(frozen=True)
class KindRow:
    """Bytes of a kind at the fullest moment of a place."""

    kind: str
    """Its name."""
    color: str
    """Of its bars, `#rrggbb`."""
    num_bytes: int
    """Of all processes together."""
    processes: str
    """Who holds it, each with its bytes, in words."""
    provenance: str
    """Where the numbers come from, in words."""


@dataclass(frozen=True)
class Place:
    """A device or a host at its fullest moment."""

    name: str
    """For people."""
    action: str
    """The id of the action in which it is fullest."""
    when: str
    """In which part of the run, in words."""
    num_bytes: int
    """Held then."""
    capacity_bytes: int | None
    """That there are; None where that is not known."""
    kinds: tuple[KindRow, ...]
    """What is held, the largest first."""


@dataclass(frozen=True)
class OtherRow:
    """What was not chosen, and why."""

    name: str
    """For people."""
    verdict: str
    """In a word; may be empty."""
    seconds: float | None
    """Of a step; None where they are not known."""
    reason: str
    """For people."""


@dataclass(frozen=True)
class Page:
    """Everything that a page says."""

    title: str
    """Of the page."""
    subtitle: str
    """The line under it."""
    state: tuple[str, str]
    """(mood, sentence): see `Tile.mood`."""
    tiles: tuple[Tile, ...]
    """The answers on top."""
    choices: tuple[tuple[str, str], ...]
    """What was chosen, as (term, words)."""
    phases: tuple[PhaseRow, ...]
    """Empty where no seconds are known."""
    actions: tuple[ActionRow, ...]
    """Of a steady step, in order."""
    places: tuple[Place, ...]
    """The fullest device and host."""
    facts: tuple[tuple[str, str], ...] = ()
    """(term, words) under `facts_title`."""
    facts_title: str = "Risks"
    """A heading."""
    others: tuple[OtherRow, ...] = ()
    """Layouts that were not chosen."""
    remedies: tuple[OtherRow, ...] = ()
    """What would make a plan fit that does not."""
    notes: tuple[str, ...] = ()
    """Lines below the verdict: what was assumed, what was left idle."""
    schema_version: int = PAGE_SCHEMA_VERSION
    """Of the page as JSON."""


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
            words_of(cost.bound_by.value),
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
                "" if bound is Resource.IDLE else words_of(bound.value),
                expected.get(action),
                high.get(action),
                hosts.get(action),
            )
        )
    return tuple(rows)


def _fullest(places: Sequence[Mapping[tuple[RunPhase, str], int]]) -> dict[str, int]:
    """Of each action of a steady step the bytes of the fullest of those places."""
    totals: dict[str, int] = {}
    for place in places:
        for (run_phase, action), size in place.items():
            if run_phase == "steady":
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
    return Place(name, peak.action_id, WHEN[peak.run_phase], peak.num_bytes, capacity, kinds)
