"""Per-role tables: bytes of each role at each kind of action, so that a candidate is a few dozen additions.

In: forecasts, schedules. Out: RoleTable of a role's choice, Pattern of a schedule, Fit of a pattern with its tables.
Left out: how a forecast counts (memory/gpu), which candidates there are.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rlplan.dataflow.schedule import Action, Schedule
from rlplan.memory.gpu.predict import GpuForecast, peak_with_slack
from rlplan.memory.gpu.spread import spread
from rlplan.vocabulary import ActionKind, MemoryKind

Slot = tuple[ActionKind, bool]
"""A kind of action, and whether the process is inside it (its peak) or has left it (what it still holds)."""


@dataclass(frozen=True)
class RoleTable:
    """Bytes of one process by slot: as expected, and at the high end. holds_kv: slots in which the KV cache is there."""

    expected: Mapping[Slot, int]
    high: Mapping[Slot, int]
    holds_kv: frozenset[Slot] = frozenset()


def role_table(
    usual: GpuForecast, longest: GpuForecast, actions: tuple[Action, ...], process: str, full: GpuForecast | None = None
) -> RoleTable:
    """The table of one process over the actions that it takes part in. full: the same engine with a KV cache."""
    expected: dict[Slot, int] = {}
    high: dict[Slot, int] = {}
    holds_kv = set()
    for action in actions:
        if process not in action.processes:
            continue
        inside, after = (action.kind, True), (action.kind, False)
        expected[inside] = sum(peak_with_slack(usual, action, "steady").values())
        high[inside] = sum(
            spread(kind, size)[1] for kind, size in peak_with_slack(longest, action, "steady").items()
        )
        expected[after] = high[after] = sum(usual.resident(action, "steady").values())
        if full is not None:
            held = (full.peak(action, "steady"), full.resident(action, "steady"))
            holds_kv |= {slot for slot, kinds in zip((inside, after), held, strict=True) if MemoryKind.KV_CACHE in kinds}
    return RoleTable(expected, high, frozenset(holds_kv))


@dataclass(frozen=True)
class Pattern:
    """Who is in which slot at each moment of a steady step, on one device of each group."""

    moments: tuple[tuple[tuple[str, Slot], ...], ...]


def pattern_of(schedule: Schedule) -> Pattern:
    """The pattern of a schedule's step, once everything has come up."""
    devices = dict(schedule.processes)
    last: dict[str, Slot] = {}
    for action in (*schedule.start, *schedule.step):
        last |= {process: (action.kind, False) for process in action.processes}
    moments = []
    for action in schedule.step:
        inside = {process: (action.kind, True) for process in action.processes}
        for device in sorted({devices[process] for process in action.processes}):
            there = {process: slot for process, slot in (last | inside).items() if devices[process] == device}
            moments.append(tuple(there.items()))
        last |= {process: (action.kind, False) for process in action.processes}
    return Pattern(tuple(dict.fromkeys(moments)))


@dataclass(frozen=True, slots=True)
class Fit:
    """Bytes without KV cache at the worst moment, and the least room that is left where the KV cache is there."""

    expected: int
    high: int
    room_expected: int
    room_high: int


def fit(pattern: Pattern, tables: Mapping[str, RoleTable], capacity: int) -> Fit:
    """Adds up the tables over a pattern."""
    most = most_high = 0
    room = room_high = capacity
    for moment in pattern.moments:
        expected = high = 0
        has_kv = False
        for process, slot in moment:
            table = tables[process]
            expected += table.expected[slot]
            high += table.high[slot]
            has_kv = has_kv or slot in table.holds_kv
        most, most_high = max(most, expected), max(most_high, high)
        if has_kv:
            room, room_high = min(room, capacity - expected), min(room_high, capacity - high)
    return Fit(most, most_high, room, room_high)

