"""Tables of bytes per process and moment, so that scoring a candidate is one addition per moment.

In: forecasts, schedules. Out: RoleTable of a process, ScheduleMoments, BytesByMoment of a process, Fit of two parts.
Left out: the forecasts (memory/roles) and the candidates.

The moments are those of the ledger (memory/ledger.py): start, a steady step, finish. The first step is left out because
optimizer states appear during it, so it never exceeds a steady step. A waiting process keeps what it held after its
last action. At the beginning of a steady step that is the last action of the previous step.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import add, sub

from rlplan.dataflow.choice import Arrangement
from rlplan.dataflow.schedule import HOST_DEVICE, Action, Schedule
from rlplan.memory.ledger import PARTS, RunPhase
from rlplan.memory.machine.host import WORKER_HOST_BYTES
from rlplan.memory.machine.spread import sum_high_ends
from rlplan.memory.predict import PASSES, Forecast, host_bytes
from rlplan.memory.roles.engine import EngineOnGpu
from rlplan.planner.memo import Table, memoize
from rlplan.vocabulary import ActionKind, MemoryKind

ENGINE = "rollout_engine"
"""Name prefix of processes that generate."""
Slot = tuple[RunPhase, str, bool]
"""(run phase, action, whether the process is inside it): inside counts its peak, outside what it still holds."""
DEPENDS_ON_TOKENS = (ActionKind.TRAIN_FORWARD_BACKWARD, ActionKind.SCORE)
Held = tuple[int, int, int, int, bool]
"""(expected bytes, worst-case bytes, host bytes, host bytes of the first of equal processes, whether KV cache is
included)."""


class RoleTable:
    """Bytes of one process by action: expected, worst case, and on the host.

    usual: forecast at the longest response of a usual step. longest: makes the forecast at the maximum response length
    on demand; None if both are equal. states: table of the same process with other micro-batches, used where no passes
    run.
    """

    def __init__(
        self,
        usual: Forecast,
        longest: Callable[[], Forecast] | None = None,
        states: "RoleTable | None" = None,
        *,
        known: Table | None = None,
        measured_factor: float = 1.0,
    ) -> None:
        """known: table for results of memoized methods. measured_factor: as memory.predict.Process.measured_factor."""
        self.usual, self.states, self._longest, self._factor = usual, states, longest, measured_factor
        self.known: Table = {} if known is None else known

    @memoize
    def get_bytes(self, run_phase: RunPhase, action: Action, inside: bool) -> Held:
        """Get the bytes inside an action (`reduce_action`) or after it."""
        # outside of passes, the micro-batch size does not matter
        if self.states is not None and action.kind not in PASSES:
            return self.states.get_bytes(run_phase, action, inside)
        asks: Callable[[Forecast], Mapping[MemoryKind, int]] = (
            (lambda forecast: forecast.predict_peak(action, run_phase))
            if inside
            else (lambda forecast: forecast.predict_resident(action, run_phase))
        )
        usual = asks(self.usual)
        is_same = self._longest is None or not inside or action.kind not in PASSES
        longest = usual if is_same else asks(self.longest)
        high = sum_high_ends(longest)
        if inside and action.kind in PASSES:
            high = max(high, math.ceil(sum(usual.values()) * self._factor))
        host = sum(host_bytes(self.usual, action, run_phase, WORKER_HOST_BYTES).values())
        of_first = sum(self.usual.predict_first_host(action, run_phase).values())
        return sum(usual.values()), high, host, of_first, MemoryKind.KV_CACHE in usual

    @cached_property
    def longest(self) -> Forecast:
        """Forecast at the maximum response length."""
        return self._longest() if self._longest is not None else self.usual


def reduce_action(action: Action) -> Action:
    """Reduce an action to what a forecast reads: kind, role and, for scoring passes, which one it is.

    Actions of other mini-batches, groups and steps become equal.
    """
    is_named = action.kind is ActionKind.SCORE
    return Action(action.id if is_named else "", action.kind, action.role, action.phase, "", action.stream, ())


@dataclass(frozen=True, eq=False)
class ScheduleMoments:
    """Distinct moments of a schedule. Compared by identity: a memo keeps one object per equal schedule."""

    actions: Mapping[tuple[RunPhase, str], Action]
    places: tuple[tuple[str, Mapping[str, Slot]], ...]
    """(device, process -> slot) for each moment, for one device per group."""
    hosts: tuple[tuple[str, Mapping[str, Slot]], ...]
    """(host, process -> slot) for each moment of a host."""

    def locate_process(self, process: str) -> "ProcessMoments":
        """Locate a process at each moment."""
        slots: dict[tuple[RunPhase, Action, bool], int] = {}

        def find_slot(there: Mapping[str, Slot]) -> int:
            if (slot := there.get(process)) is None:
                return -1
            run_phase, name, inside = slot
            action = reduce_action(self.actions[run_phase, name])
            return slots.setdefault(("start" if run_phase == "start" else "steady", action, inside), len(slots))

        places = [find_slot(there) for _, there in self.places]
        hosts = [find_slot(there) for _, there in self.hosts]
        return ProcessMoments(tuple(slots), tuple(places), tuple(hosts))

    @cached_property
    def nothing(self) -> "BytesByMoment":
        """Zero bytes at every moment."""
        nothing = (0,) * len(self.places)
        return BytesByMoment(nothing, nothing, (0,) * len(self.hosts))


@dataclass(frozen=True)
class ProcessMoments:
    """Slots of one process at each moment of a schedule."""

    slots: tuple[tuple[RunPhase, Action, bool], ...]
    """Distinct slots as forecasts see them; after the start, all belong to a steady step."""
    places: tuple[int, ...]
    """Slot index at each moment of a device; -1 if the process is not there."""
    hosts: tuple[int, ...]
    """Slot index at each moment of a host."""


def list_schedule_moments(schedule: Schedule, hosts: Mapping[str, str]) -> ScheduleMoments:
    """List the moments of a schedule. hosts: host of each process."""
    devices = dict(schedule.processes)
    last: dict[str, Slot] = {}
    places: dict[tuple[str, tuple[tuple[str, Slot], ...]], None] = {}
    on_hosts: dict[tuple[str, tuple[tuple[str, Slot], ...]], None] = {}
    actions: dict[tuple[RunPhase, str], Action] = {}
    together: dict[tuple[str, str], set[str]] = {}
    for where, first, second in schedule.concurrent:
        together.setdefault((where, first), set()).add(second)
        together.setdefault((where, second), set()).add(first)
    # the step is walked twice: in the second pass, waiting processes hold what the previous step left
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
            # actions that may overlap hold their peaks at the same time
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
    """Bytes of several processes at every moment of a schedule."""

    expected: tuple[int, ...]
    """Expected bytes at device moments."""
    high: tuple[int, ...]
    """Worst-case bytes at device moments."""
    hosts: tuple[int, ...]
    """Bytes at host moments."""
    holds_kv: tuple[int, ...] = ()
    """Device moments at which the KV cache is allocated."""

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
    """Sum a process's bytes at every moment. num_equal: equal processes on its host.

    leaves_out: actions that count as what remains after them: a lower bound for any number of tokens.
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
    """Peak bytes without KV cache, and the bytes left; negative if it overflows."""

    expected: int
    high: int
    slack_expected: int
    slack_high: int
    room_expected: int
    """Minimum of free bytes while the KV cache is allocated."""
    room_high: int
    host: int
    """Bytes of the fullest host, including the driver's."""
    slack_host: int


@dataclass(frozen=True)
class Capacities:
    """Capacities at each moment of a schedule."""

    devices: tuple[int, ...]
    hosts: tuple[int, ...]
    driver: tuple[int, ...]
    """Bytes of the driver process at each host moment."""


def fit(first: BytesByMoment, other: BytesByMoment, there: Capacities) -> Fit:
    """Predict the fit of two parts of an arrangement together."""
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
    """Compute the minimum bytes that two parts leave on (a device, a host); negative if they do not fit."""
    own, others = (first.high, other.high) if at_high else (first.expected, other.expected)
    hosts = map(sub, map(sub, map(sub, there.hosts, there.driver), first.hosts), other.hosts)
    return min(map(sub, map(sub, there.devices, own), others)), min(hosts)


def list_capacities(
    moments: ScheduleMoments, capacity: int, host: int, driver: int, others: Mapping[str, int]
) -> Capacities:
    """List capacities at the moments of a schedule. driver: bytes on the first host. others: capacities that differ."""
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
    """Equal processes on its host, itself included."""
    copies: bool
    """Whether it keeps a copy of its states for checkpoints."""


@dataclass(frozen=True, eq=False)
class Side:
    """The processes that train and score, or those that generate.

    Compared by identity: a memo keeps one object for all arrangements that place them alike.
    """

    where: Arrangement
    """Arrangement without the other side's group sizes."""
    moments: ScheduleMoments
    processes: tuple[ProcessPlace, ...]
    generates_with: type[EngineOnGpu] = EngineOnGpu


@dataclass(frozen=True)
class ArrangementParts:
    """Parts shared by all candidates in an arrangement."""

    moments: ScheduleMoments
    schedule: Schedule
    capacities: Capacities
    others: Side
    """The side that trains and scores."""
    engines: Side
