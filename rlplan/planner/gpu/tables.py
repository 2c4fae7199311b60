"""Tables: bytes of each process at each moment of a schedule, so that a candidate is one addition a moment.

In: forecasts, schedules. Out: RoleTable of a process, ScheduleMoments, BytesByMoment of a process, Fit of two.
Left out: how a forecast counts (memory/roles), which candidates there are.

The moments are those of the ledger (memory/ledger.py): starting, a steady step, finishing. The first step is left out:
optimizer states appear during it, so that no moment of it is above the same moment of a steady step. Processes that
wait keep what they held after their last action, which for the first action of a steady step is the last of the one
before.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import add, sub

from rlplan.dataflow.choice import Arrangement
from rlplan.dataflow.schedule import HOST_DEVICE, Action, Schedule
from rlplan.memory.ledger import PARTS, RunPhase
from rlplan.memory.machine.host import WORKER_HOST_BYTES
from rlplan.memory.machine.spread import high_end
from rlplan.memory.predict import Forecast, host_bytes
from rlplan.memory.roles.engine import EngineOnGpu
from rlplan.planner.memo import Table, memoize
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
        *,
        known: Table | None = None,
    ) -> None:
        """known: for results of memoized methods."""
        self.usual, self.states, self._longest = usual, states, longest
        self.known: Table = {} if known is None else known

    @memoize
    def get_bytes(self, run_phase: RunPhase, action: Action, inside: bool) -> Held:
        """What is held inside an action (`reduce_action`), or after it."""
        if self.states is not None and action.kind not in DEPENDS_ON_GRADIENTS:
            return self.states.get_bytes(run_phase, action, inside)
        asks: Callable[[Forecast], Mapping[MemoryKind, int]] = (
            (lambda forecast: forecast.peak(action, run_phase))
            if inside
            else (lambda forecast: forecast.resident(action, run_phase))
        )
        usual = asks(self.usual)
        is_same = self._longest is None or not inside or action.kind not in DEPENDS_ON_GRADIENTS
        longest = usual if is_same else asks(self.longest)
        high = high_end(longest)
        host = sum(host_bytes(self.usual, action, run_phase, WORKER_HOST_BYTES).values())
        of_first = sum(self.usual.on_host_of_first(action, run_phase).values())
        return sum(usual.values()), high, host, of_first, MemoryKind.KV_CACHE in usual

    @cached_property
    def longest(self) -> Forecast:
        """At the longest response of all."""
        return self._longest() if self._longest is not None else self.usual


def reduce_action(action: Action) -> Action:
    """What a forecast may read of an action: its kind, its role and, of passes that score, which of them it is.

    Actions of other mini-batches, groups and steps are one to it.
    """
    is_named = action.kind is ActionKind.SCORE
    return Action(action.id if is_named else "", action.kind, action.role, action.phase, "", action.stream, ())


@dataclass(frozen=True, eq=False)
class ScheduleMoments:
    """The distinct moments of a schedule. Compared by identity: a memo has one for schedules that are equal."""

    actions: Mapping[tuple[RunPhase, str], Action]
    places: tuple[tuple[str, Mapping[str, Slot]], ...]
    """(device, process -> slot) of each moment of one device of each group."""
    hosts: tuple[tuple[str, Mapping[str, Slot]], ...]
    """(host, process -> slot) of each moment of a host."""

    def locate_process(self, process: str) -> "ProcessMoments":
        """Where a process is at each moment."""
        slots: dict[tuple[RunPhase, Action, bool], int] = {}

        def index_of(there: Mapping[str, Slot]) -> int:
            if (slot := there.get(process)) is None:
                return -1
            run_phase, name, inside = slot
            action = reduce_action(self.actions[run_phase, name])
            return slots.setdefault(("start" if run_phase == "start" else "steady", action, inside), len(slots))

        places = [index_of(there) for _, there in self.places]
        hosts = [index_of(there) for _, there in self.hosts]
        return ProcessMoments(tuple(slots), tuple(places), tuple(hosts))

    @cached_property
    def nothing(self) -> "BytesByMoment":
        """No bytes at any moment."""
        nothing = (0,) * len(self.places)
        return BytesByMoment(nothing, nothing, (0,) * len(self.hosts))


@dataclass(frozen=True)
class ProcessMoments:
    """Where one process is at each moment of a schedule."""

    slots: tuple[tuple[RunPhase, Action, bool], ...]
    """Its distinct slots, as forecasts see them: all after the start are in a steady step."""
    places: tuple[int, ...]
    """Index of its slot at each moment of a device; -1 where it is not there."""
    hosts: tuple[int, ...]
    """The same at each moment of a host."""


def list_schedule_moments(schedule: Schedule, hosts: Mapping[str, str]) -> ScheduleMoments:
    """The moments of a schedule. hosts: of each process."""
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
            for concurrent in (*(running for running in part if running.id in names), action):
                now |= dict.fromkeys(concurrent.processes, (run_phase, concurrent.id, True))
            for device in sorted({devices[process] for process in action.processes}):
                there = tuple((process, slot) for process, slot in now.items() if devices[process] == device)
                places[device, there] = None
            for host in set(hosts.values()):
                on_hosts[host, tuple((process, slot) for process, slot in now.items() if hosts[process] == host)] = None
            last |= dict.fromkeys(action.processes, (run_phase, action.id, False))
    return ScheduleMoments(
        actions,
        tuple((device, dict(there)) for device, there in places),
        tuple((host, dict(there)) for host, there in on_hosts),
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


def sum_process_bytes(
    moments: ProcessMoments, alike: int, table: RoleTable, *, leaves_out: tuple[ActionKind, ...] = ()
) -> BytesByMoment:
    """A process at every moment of a schedule. alike: processes like it on its host. leaves_out: actions that count as
    what is left after them: at least so much is held, however many tokens passes have.
    """
    sizes = [
        table.get_bytes(run_phase, action, inside and action.kind not in leaves_out)
        for run_phase, action, inside in moments.slots
    ]
    sizes.append((0, 0, 0, 0, False))
    return BytesByMoment(
        tuple([sizes[index][0] for index in moments.places]),
        tuple([sizes[index][1] for index in moments.places]),
        tuple([alike * sizes[index][2] + sizes[index][3] for index in moments.hosts]),
        tuple([place for place, index in enumerate(moments.places) if sizes[index][4]]),
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


def fit(first: BytesByMoment, other: BytesByMoment, there: Capacities) -> Fit:
    """What two parts of an arrangement need together."""
    expected, high = list(map(add, first.expected, other.expected)), list(map(add, first.high, other.high))
    slack, slack_high = [*map(sub, there.devices, expected)], [*map(sub, there.devices, high)]
    host = [*map(sum, zip(first.hosts, other.hosts, there.driver, strict=True))]
    kv = first.holds_kv or other.holds_kv
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


def compute_left(first: BytesByMoment, other: BytesByMoment, there: Capacities, *, at_high: bool) -> tuple[int, int]:
    """What two parts leave at least of a device, and of a host; below 0 where they do not fit together."""
    own, others = (first.high, other.high) if at_high else (first.expected, other.expected)
    hosts = map(sub, map(sub, map(sub, there.hosts, there.driver), first.hosts), other.hosts)
    return min(map(sub, map(sub, there.devices, own), others)), min(hosts)


def list_capacities(
    moments: ScheduleMoments, capacity: int, host: int, driver: int, others: Mapping[str, int]
) -> Capacities:
    """What there is at the moments of a schedule. driver: on the first host. others: where capacity differs."""
    return Capacities(
        tuple(others.get(device, capacity) for device, _ in moments.places),
        tuple(others.get(name, host) for name, _ in moments.hosts),
        tuple(driver if name == HOST_DEVICE else 0 for name, _ in moments.hosts),
    )


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """One process of a schedule's view."""

    name: str
    alike: int
    """Processes like it on its host, itself included."""
    copies: bool
    """Whether it copies its states for checkpoints, and the copy stays."""


@dataclass(frozen=True, eq=False)
class Side:
    """Those that train and score, or those that generate. Compared by identity: a memo has one for all arrangements in
    which they lie alike, whatever lies on the other side.
    """

    where: Arrangement
    """Without the sizes of the other side's groups."""
    moments: ScheduleMoments
    processes: tuple[ProcessPlace, ...]
    generates_with: type[EngineOnGpu] = EngineOnGpu


@dataclass(frozen=True)
class ArrangementParts:
    """An arrangement with what every candidate in it shares."""

    moments: ScheduleMoments
    schedule: Schedule
    capacities: Capacities
    others: Side
    """That trains and scores."""
    engines: Side
