"""Per-role tables: bytes of each role at each kind of action, so that a candidate is a few dozen additions.

In: forecasts, schedules. Out: RoleTable of a role's choice, Pattern of a schedule, Fit of a pattern with its tables.
Left out: how a forecast counts (memory/gpu), which candidates there are.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rlplan.dataflow.schedule import Action, Schedule
from rlplan.memory.gpu.predict import GpuForecast, host_bytes
from rlplan.memory.gpu.spread import spread
from rlplan.vocabulary import ActionKind, MemoryKind

Slot = tuple[ActionKind, bool]
"""A kind of action, and whether the process is inside it (its peak) or has left it (what it still holds)."""


class RoleTable:
    """Bytes of one process by slot: as expected, at the high end, and on the host. holds_kv: slots with a KV cache.

    Filled action by action: placements whose steps have the same actions share it. usual, longest: the process at two
    lengths. full: the same engine with a KV cache, None for other processes.
    """

    def __init__(self, usual: GpuForecast, longest: GpuForecast, full: GpuForecast | None = None) -> None:
        self.usual, self.longest, self.full = usual, longest, full
        self.expected: dict[Slot, int] = {}
        self.high: dict[Slot, int] = {}
        self.host: dict[Slot, int] = {}
        self.holds_kv: set[Slot] = set()

    def cover(self, actions: Iterable[Action], process: str) -> None:
        """Make sure that there is an entry for every action that the process takes part in."""
        for action in actions:
            inside, after = (action.kind, True), (action.kind, False)
            if process not in action.processes or inside in self.expected:
                continue
            usual = self.usual.peak(action, "steady")
            longest = usual if self.longest is self.usual else self.longest.peak(action, "steady")
            self.expected[inside] = sum(usual.values())
            self.high[inside] = sum(spread(kind, size)[1] for kind, size in longest.items())
            resident = self.usual.resident(action, "steady")
            self.expected[after] = sum(resident.values())
            self.high[after] = sum(spread(kind, size)[1] for kind, size in resident.items())
            self.host[inside] = self.host[after] = sum(host_bytes(self.usual, action, "steady").values())
            if self.full is not None:
                held = (self.full.peak(action, "steady"), self.full.resident(action, "steady"))
                slots = zip((inside, after), held, strict=True)
                self.holds_kv |= {slot for slot, kinds in slots if MemoryKind.KV_CACHE in kinds}


@dataclass(frozen=True)
class Pattern:
    """Who is in which slot at each moment of a steady step: on one device of each group, and everywhere."""

    moments: tuple[tuple[tuple[str, Slot], ...], ...]
    everywhere: tuple[tuple[tuple[str, Slot], ...], ...]


def pattern_of(schedule: Schedule) -> Pattern:
    """The pattern of a schedule's step, once everything has come up."""
    devices = dict(schedule.processes)
    last: dict[str, Slot] = {}
    for action in (*schedule.start, *schedule.step):
        last |= dict.fromkeys(action.processes, (action.kind, False))
    moments, everywhere = [], []
    for action in schedule.step:
        inside = dict.fromkeys(action.processes, (action.kind, True))
        for device in sorted({devices[process] for process in action.processes}):
            there = {process: slot for process, slot in (last | inside).items() if devices[process] == device}
            moments.append(tuple(there.items()))
        everywhere.append(tuple((last | inside).items()))
        last |= dict.fromkeys(action.processes, (action.kind, False))
    return Pattern(tuple(dict.fromkeys(moments)), tuple(dict.fromkeys(everywhere)))


@dataclass(frozen=True, slots=True)
class Fit:
    """Bytes without KV cache at the worst moment, and the least room that is left where the KV cache is there.

    host: bytes of the fullest host, the driver's part left out.
    """

    expected: int
    high: int
    room_expected: int
    room_high: int
    host: int


def fit(
    pattern: Pattern,
    tables: Mapping[str, RoleTable],
    capacity: int,
    hosts: Mapping[str, tuple[str, int]],
    lacking: Mapping[str, int] | None = None,
) -> Fit:
    """Adds up the tables over a pattern. hosts: of each process its host, and how many on it are like it.

    lacking: bytes by which a process's device is smaller than `capacity`; they count as taken.
    """
    most = most_high = 0
    room = room_high = capacity
    for moment in pattern.moments:
        expected = high = max((lacking or {}).get(process, 0) for process, _ in moment) if lacking else 0
        has_kv = False
        for process, slot in moment:
            table = tables[process]
            expected += table.expected[slot]
            high += table.high[slot]
            has_kv = has_kv or slot in table.holds_kv
        most, most_high = max(most, expected), max(most_high, high)
        if has_kv:
            room, room_high = min(room, capacity - expected), min(room_high, capacity - high)
    return Fit(most, most_high, room, room_high, _fullest_host(pattern, tables, hosts))


def _fullest_host(pattern: Pattern, tables: Mapping[str, RoleTable], hosts: Mapping[str, tuple[str, int]]) -> int:
    most = 0
    for moment in pattern.everywhere:
        held: dict[str, int] = {}
        for process, slot in moment:
            host, num_alike = hosts[process]
            held[host] = held.get(host, 0) + tables[process].host[slot] * num_alike
        most = max(most, *held.values())
    return most
