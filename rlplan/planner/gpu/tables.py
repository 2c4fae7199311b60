"""Tables: bytes of each process at each moment of a schedule, so that a candidate is one addition a moment.

In: forecasts, schedules. Out: RoleTable of a process, ScheduleMoments, BytesByMoment of a process, Fit of two.
Left out: how a forecast counts (memory/roles/gpu), which candidates there are.

The moments are those of the ledger (memory/ledger.py): starting, a steady step, finishing. The first step is left out:
optimizer states appear during it, so that no moment of it is above the same moment of a steady step. Processes that
wait keep what they held after their last action, which for the first action of a steady step is the last of the one
before.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from operator import add, sub

from rlplan.dataflow.schedule import HOST_DEVICE, Action, Schedule
from rlplan.memory.ledger import PARTS, RunPhase
from rlplan.memory.machine.host import WORKER_HOST_BYTES
from rlplan.memory.machine.spread import spread
from rlplan.memory.predict import Forecast, host_bytes
from rlplan.records import dataclass
from rlplan.vocabulary import ActionKind, MemoryKind

ENGINE = "rollout_engine"
"""How processes are named that generate."""
Slot = tuple[RunPhase, str, bool]
"""A run phase, an action, and whether the process is inside it (its peak) or has left it (what it still holds)."""
DEPENDS_ON_TOKENS = (ActionKind.TRAIN_FORWARD_BACKWARD, ActionKind.SCORE)
DEPENDS_ON_GRADIENTS = (*DEPENDS_ON_TOKENS, ActionKind.OPTIMIZER_STEP)
"""Actions whose peak is known only when the way of all gradients was followed."""
Held = tuple[int, int, int, int, bool]
"""Bytes of a process as expected, at the high end, on its host, there as the first of those that are alike; whether the
KV cache is among them."""


class RoleTable:
    """Bytes of one process by action: as expected, at the high end, on the host.

    usual: at the longest response of a usual step. longest: makes the same at the longest of all, which is asked where
    that matters; None where both are one. states: the table of the same process with other passes, which holds as much
    where no passes are.
    """

    def __init__(
        self,
        usual: Forecast,
        longest: Callable[[], Forecast] | None = None,
        states: "RoleTable | None" = None,
    ) -> None:
        self.usual, self.states, self._longest = usual, states, longest
        self._known: dict[tuple[object, ...], Held] = {}

    def at(self, run_phase: RunPhase, action: Action, *, inside: bool) -> Held:
        """What is held inside an action, or after it."""
        key = run_phase == "start", action.kind, inside
        if (found := self._known.get(key)) is None:
            if self.states is not None and action.kind not in DEPENDS_ON_GRADIENTS:
                found = self.states.at(run_phase, action, inside=inside)
            else:
                found = self._count(run_phase, action, inside=inside)
            self._known[key] = found
        return found

    @cached_property
    def longest(self) -> Forecast:
        """At the longest response of all."""
        return self._longest() if self._longest is not None else self.usual

    def _count(self, run_phase: RunPhase, action: Action, *, inside: bool) -> Held:
        asks: Callable[[Forecast], Mapping[MemoryKind, int]] = (
            (lambda forecast: forecast.peak(action, run_phase))
            if inside
            else (lambda forecast: forecast.resident(action, run_phase))
        )
        usual = asks(self.usual)
        is_same = self._longest is None or not inside or action.kind not in DEPENDS_ON_GRADIENTS
        longest = usual if is_same else asks(self.longest)
        high = sum(spread(kind, size)[1] for kind, size in longest.items())
        host = sum(host_bytes(self.usual, action, run_phase, WORKER_HOST_BYTES).values())
        of_first = sum(self.usual.on_host_of_first(action, run_phase).values())
        return sum(usual.values()), high, host, of_first, MemoryKind.KV_CACHE in usual


@dataclass(frozen=True)
class ScheduleMoments:
    """The distinct moments of a schedule."""

    actions: Mapping[tuple[RunPhase, str], Action]
    places: tuple[tuple[str, Mapping[str, Slot]], ...]
    """(device, process -> slot) of each moment of one device of each group."""
    hosts: tuple[tuple[str, Mapping[str, Slot]], ...]
    """(host, process -> slot) of each moment of a host."""
    kinds: Mapping[str, int]
    """Process -> number of processes like it on its host."""

    @cached_property
    def by_process(self) -> dict[str, "ProcessMoments"]:
        """Of each process where it is at each moment."""
        return {process: self._moments_of(process) for process in self.kinds}

    def _moments_of(self, process: str) -> "ProcessMoments":
        slots: dict[Slot, int] = {}
        places = [
            slots.setdefault(slot, len(slots)) if (slot := there.get(process)) else -1 for _, there in self.places
        ]
        hosts = [slots.setdefault(slot, len(slots)) if (slot := there.get(process)) else -1 for _, there in self.hosts]
        known = tuple((run_phase, self.actions[run_phase, name], inside) for run_phase, name, inside in slots)
        return ProcessMoments(known, tuple(places), tuple(hosts))

    def with_kinds(self, kinds: Mapping[str, int]) -> "ScheduleMoments":
        """The same where another number of processes is alike on each host."""
        other = replace(self, kinds=kinds)
        other.__dict__["by_process"] = self.by_process
        return other


@dataclass(frozen=True)
class ProcessMoments:
    """Where one process is at each moment of a schedule."""

    slots: tuple[tuple[RunPhase, Action, bool], ...]
    """Its distinct slots."""
    places: tuple[int, ...]
    """Index of its slot at each moment of a device; -1 where it is not there."""
    hosts: tuple[int, ...]
    """The same at each moment of a host."""


def moments_of_schedule(schedule: Schedule, hosts: Mapping[str, tuple[str, int]]) -> ScheduleMoments:
    """The moments of a schedule. hosts: of each process its host, and how many on it are like it."""
    devices = dict(schedule.processes)
    last: dict[str, Slot] = {}
    places: dict[tuple[str, tuple[tuple[str, Slot], ...]], None] = {}
    on_hosts: dict[tuple[str, tuple[tuple[str, Slot], ...]], None] = {}
    actions: dict[tuple[RunPhase, str], Action] = {}
    together: dict[tuple[str, str], set[str]] = {}
    for where, first, second in schedule.concurrent:
        together.setdefault((where, first), set()).add(second)
        together.setdefault((where, second), set()).add(first)
    # twice through a step: the second time its first actions find everybody where the step before has left them
    parts: tuple[tuple[RunPhase, tuple[Action, ...]], ...] = (
        ("start", schedule.start),
        ("steady", schedule.step),
        ("steady", schedule.step),
        ("finish", schedule.finish),
    )
    for run_phase, part in parts:
        for action in part:
            actions[run_phase, action.id] = action
            now = dict(last)
            names = together.get((PARTS[run_phase], action.id), ())
            for one in (*(one for one in part if one.id in names), action):
                now |= dict.fromkeys(one.processes, (run_phase, one.id, True))
            for device in sorted({devices[process] for process in action.processes}):
                there = tuple((process, slot) for process, slot in now.items() if devices[process] == device)
                places[device, there] = None
            for host in {host for host, _ in hosts.values()}:
                on_hosts[host, tuple((process, slot) for process, slot in now.items() if hosts[process][0] == host)] = (
                    None
                )
            last |= dict.fromkeys(action.processes, (run_phase, action.id, False))
    return ScheduleMoments(
        actions,
        tuple((device, dict(there)) for device, there in places),
        tuple((host, dict(there)) for host, there in on_hosts),
        {process: alike for process, (_, alike) in hosts.items()},
    )


@dataclass(frozen=True, slots=True)
class BytesByMoment:
    """Bytes of some processes at every moment of a schedule."""

    expected: tuple[int, ...]
    """Of devices, as expected."""
    high: tuple[int, ...]
    """Of devices, at the high end."""
    hosts: tuple[int, ...]
    """Of hosts."""
    holds_kv: tuple[int, ...] = ()
    """Moments of devices at which the KV cache is there."""

    def __add__(self, other: "BytesByMoment") -> "BytesByMoment":
        return BytesByMoment(
            tuple(map(add, self.expected, other.expected)),
            tuple(map(add, self.high, other.high)),
            tuple(map(add, self.hosts, other.hosts)),
            self.holds_kv or other.holds_kv,
        )


def bytes_by_moment(
    moments: ScheduleMoments, process: str, table: RoleTable, *, leaves_out: tuple[ActionKind, ...] = ()
) -> BytesByMoment:
    """A process at every moment of a schedule. leaves_out: actions that count as what is left after them: at least so
    much is held, however many tokens passes have.
    """
    mine = moments.by_process[process]
    held = [
        table.at(run_phase, action, inside=inside and action.kind not in leaves_out)
        for run_phase, action, inside in mine.slots
    ]
    held.append((0, 0, 0, 0, False))
    alike = moments.kinds[process]
    return BytesByMoment(
        tuple([held[index][0] for index in mine.places]),
        tuple([held[index][1] for index in mine.places]),
        tuple([alike * held[index][2] + held[index][3] for index in mine.hosts]),
        tuple([place for place, index in enumerate(mine.places) if held[index][4]]),
    )


@dataclass(frozen=True, slots=True)
class Fit:
    """Bytes without KV cache at the worst moment of a schedule, and what is left of capacity; below 0 where it
    overflows.
    """

    expected: int
    high: int
    slack_expected: int
    slack_high: int
    room_expected: int
    """The least that is left at the moments where the KV cache is there."""
    room_high: int
    host: int
    """The fullest host, with what the driver holds."""
    slack_host: int


@dataclass(frozen=True)
class Capacities:
    """Bytes that there are at each moment of a schedule."""

    devices: tuple[int, ...]
    hosts: tuple[int, ...]
    driver: tuple[int, ...]
    """What the driver holds on each host beside the roles."""


def fit(one: BytesByMoment, other: BytesByMoment, there: Capacities) -> Fit:
    """What two parts of an arrangement need together."""
    expected, high = list(map(add, one.expected, other.expected)), list(map(add, one.high, other.high))
    slack, slack_high = [*map(sub, there.devices, expected)], [*map(sub, there.devices, high)]
    host = [*map(sum, zip(one.hosts, other.hosts, there.driver, strict=True))]
    kv = one.holds_kv or other.holds_kv
    return Fit(
        max(expected),
        max(high),
        min(slack),
        min(slack_high),
        min((slack[index] for index in kv), default=0),
        min((slack_high[index] for index in kv), default=0),
        max(host),
        min(map(sub, there.hosts, host)),
    )


def left_of(one: BytesByMoment, other: BytesByMoment, there: Capacities, *, at_high: bool) -> tuple[int, int]:
    """What two parts leave at least of a device, and of a host; below 0 where they do not fit together."""
    mine, others = (one.high, other.high) if at_high else (one.expected, other.expected)
    hosts = map(sub, map(sub, map(sub, there.hosts, there.driver), one.hosts), other.hosts)
    return min(map(sub, map(sub, there.devices, mine), others)), min(hosts)


def capacities_of(
    moments: ScheduleMoments, capacity: int, host: int, driver: int, others: Mapping[str, int]
) -> Capacities:
    """What there is at the moments of a schedule. driver: on the first host. others: where capacity differs."""
    return Capacities(
        tuple(others.get(device, capacity) for device, _ in moments.places),
        tuple(others.get(name, host) for name, _ in moments.hosts),
        tuple(driver if name == HOST_DEVICE else 0 for name, _ in moments.hosts),
    )


@dataclass(frozen=True)
class ArrangementParts:
    """An arrangement with what every candidate in it shares."""

    moments: ScheduleMoments
    schedule: Schedule
    capacities: Capacities
    without_engines: int
    """One number for all arrangements that differ in the size of their engines' group alone."""
    of_engines: int
    """One number for all arrangements whose engines lie alike on hosts."""

    @cached_property
    def others(self) -> tuple[str, ...]:
        """Processes that train and score."""
        return tuple(name for name, _ in self.schedule.processes if not name.startswith(ENGINE))

    @cached_property
    def engines(self) -> tuple[str, ...]:
        """Processes that generate."""
        return tuple(name for name, _ in self.schedule.processes if name.startswith(ENGINE))

    @cached_property
    def nothing(self) -> BytesByMoment:
        """No bytes at every moment."""
        nothing = (0,) * len(self.moments.places)
        return BytesByMoment(nothing, nothing, (0,) * len(self.moments.hosts))
