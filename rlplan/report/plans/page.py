"""Content of a page about a plan before it becomes HTML: words and numbers under headings.

In: a ledger, and the timing of a step where it is known. Out: frozen, JSON-able values.
Left out: the specifics of plans and simulations (the other modules of this package), HTML.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlplan.memory.ledger import MemoryLedger, Peak, RunPhase
from rlplan.planner.answers.plan_results import sum_phase_costs
from rlplan.report import style
from rlplan.timing.cost import Resource
from rlplan.timing.step import StepTiming
from rlplan.units import format_bytes
from rlplan.vocabulary import MemoryKind, format_name

PAGE_SCHEMA_VERSION = 1
NEGLIGIBLE = 0.001
"""Resources with a smaller share of a phase are not named."""


@dataclass(frozen=True)
class Tile:
    """One main result."""

    title: str
    """Name of the result."""
    value: str
    """Value in words."""
    note: str
    """A line under the value."""
    mood: str = "quiet"
    """`good`, `bad` or `quiet`; decides the colour."""


@dataclass(frozen=True)
class PhaseRow:
    """A phase of a steady step."""

    phase: str
    """Name of the phase."""
    seconds: float
    """Seconds of all its actions."""
    share: float
    """Share of the seconds of all phases, 0 to 1."""
    bound_by: str
    """Resource that most of the seconds wait for."""
    parts: dict[str, float]
    """Seconds by resource, without negligible ones."""


@dataclass(frozen=True)
class ActionRow:
    """An action of a steady step."""

    action: str
    """Id of the action."""
    phase: str
    """Name of its phase."""
    start_s: float | None
    """Seconds from the beginning of the step; None where no seconds are known."""
    seconds: float | None
    """Duration; None where it is not known."""
    bound_by: str
    """Resource that it waits for; empty where it takes no time."""
    device_bytes: int | None
    """Expected peak of the fullest GPU."""
    device_high_bytes: int | None
    """Peak of the fullest GPU at the high end of the prediction."""
    host_bytes: int | None
    """Expected peak of the fullest host."""


@dataclass(frozen=True)
class KindRow:
    """Bytes of one kind at the peak of a device or host."""

    kind: str
    """Name of the kind."""
    color: str
    """Colour of its bars, `#rrggbb`."""
    num_bytes: int
    """Bytes of all processes together."""
    processes: str
    """Processes that hold it, each with its bytes, in words."""
    provenance: str
    """Provenance of the numbers, in words."""


@dataclass(frozen=True)
class Place:
    """A device or a host at its peak."""

    name: str
    """Name for the reader."""
    action: str
    """Id of the action in which the peak occurs."""
    when: str
    """Part of the run, in words."""
    num_bytes: int
    """Bytes at the peak."""
    capacity_bytes: int | None
    """Available bytes; None where they are not known."""
    kinds: tuple[KindRow, ...]
    """Bytes by kind, the largest first."""


@dataclass(frozen=True)
class OtherRow:
    """An alternative that was not chosen, with the reason."""

    name: str
    """Name for the reader."""
    verdict: str
    """Verdict in a word; may be empty."""
    seconds: float | None
    """Seconds of a step; None where they are not known."""
    reason: str
    """Reason for the reader."""


@dataclass(frozen=True)
class Page:
    """Content of a page."""

    title: str
    """Title of the page."""
    subtitle: str
    """Line under the title."""
    state: tuple[str, str]
    """(mood, sentence); for the mood see `Tile.mood`."""
    tiles: tuple[Tile, ...]
    """Main results at the top."""
    choices: tuple[tuple[str, str], ...]
    """Chosen settings, as (term, words)."""
    phases: tuple[PhaseRow, ...]
    """Phases of a steady step; empty where no seconds are known."""
    actions: tuple[ActionRow, ...]
    """Actions of a steady step, in order."""
    places: tuple[Place, ...]
    """The fullest device and host."""
    facts: tuple[tuple[str, str], ...] = ()
    """(term, words) under `facts_title`."""
    facts_title: str = "Risks"
    """Heading of the facts."""
    others: tuple[OtherRow, ...] = ()
    """Layouts that were not chosen."""
    remedies: tuple[OtherRow, ...] = ()
    """Changes that would make the plan fit."""
    notes: tuple[str, ...] = ()
    """Lines below the verdict: assumptions, idle devices."""
    schema_version: int = PAGE_SCHEMA_VERSION
    """Version of the page as JSON."""


WHEN = {"start": "at the start", "first": "in the first step", "steady": "in every step", "finish": "at the end"}


def phase_rows(timing: StepTiming | None) -> tuple[PhaseRow, ...]:
    """Make one row per phase, in order; shares are of all seconds, including concurrent ones."""
    costs = sum_phase_costs(timing) if timing else {}
    total = sum(cost.seconds for cost in costs.values())
    return tuple(
        PhaseRow(
            str(phase),
            cost.seconds,
            cost.seconds / total,
            format_name(cost.bound_by.value),
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
    """Make one row per action of a steady step. actions: (id, phase)."""
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
                "" if bound is Resource.IDLE else format_name(bound.value),
                expected.get(action),
                high.get(action),
                hosts.get(action),
            )
        )
    return tuple(rows)


def _fullest(places: Sequence[Mapping[tuple[RunPhase, str], int]]) -> dict[str, int]:
    """Bytes of the fullest place in each action of a steady step."""
    totals: dict[str, int] = {}
    for place in places:
        for (run_phase, action), size in place.items():
            if run_phase == "steady":
                totals[action] = max(totals.get(action, 0), size)
    return totals


def describe_place(name: str, peak: Peak, ledger: MemoryLedger, capacity: int | None) -> Place:
    """Describe a device or host at its peak, by kind."""
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
