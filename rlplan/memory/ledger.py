"""MemoryLedger: bytes resident after and at the peak inside each Action, per process, role and kind.

A row belongs to one (run phase, action, process, role, kind). `resident_bytes` count after the action. `peak_bytes`
count at the process's peak inside the action, so that a process's rows add up to its peak. A process that takes no part
in an action has no row for it, and keeps the bytes that were resident after its last action.

In: rows made by `memory.predict`. Out: totals per device, host and process, and the binding moment.
Left out: the prediction of bytes (the other modules of this package) and measured bytes (trace.py).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Literal

from rlplan.dataflow.schedule import Beside, Part
from rlplan.vocabulary import MemoryKind, Phase, Provenance, Role

RunPhase = Literal["start", "first", "steady", "finish"]
"""Phase of the run: start, first step (Adam's moments appear in its optimizer step), steady steps, finish."""

PARTS: dict[RunPhase, Part] = {"start": "start", "first": "step", "steady": "step", "finish": "finish"}
"""The part of a schedule whose actions run in each phase."""

Bound = Literal["low", "expected", "high"]
"""The end of each row's interval that a total uses."""

LEDGER_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """Bytes of one kind that one process holds for one role, after and inside one action. See the module docstring."""

    run_phase: RunPhase
    action_id: str
    """Id of the action in the schedule."""

    phase: Phase
    process: str
    """Name of the process, such as `policy_trainer/0`."""

    device: str
    """Device of the process: `cpu:0`, `gpu:3`."""

    role: Role
    kind: MemoryKind
    space: Literal["device", "host"]
    """`device` for memory that a GPU would hold (on a CPU profile it is the host's), `host` for all other memory."""

    resident_bytes: int
    """Bytes after the action."""

    peak_bytes: int
    """Bytes at the process's peak inside the action."""

    provenance: Provenance
    source: str
    """The forecaster that computed the bytes."""

    loaded_bytes: int = 0
    """Bytes before repacking: weights that a CPU engine repacks while it starts."""

    low_bytes: int | None = None
    """Lower bound of the peak; None where the peak is as certain as its source."""

    high_bytes: int | None = None
    """Upper bound of the peak; None where the peak is as certain as its source."""

    num_alike: int = 1
    """Equal processes of one host that the row represents, this one included."""

    resident_high_bytes: int | None = None
    """Upper bound of `resident_bytes`; None where they are as certain as their source."""

    def get_resident(self, bound: Bound) -> int:
        """Resident bytes, as expected or at their upper bound. They have no lower bound."""
        return self.resident_bytes if bound != "high" or self.resident_high_bytes is None else self.resident_high_bytes

    def get_peak(self, bound: Bound) -> int:
        """Peak bytes, as expected or at a bound."""
        other = {"low": self.low_bytes, "expected": None, "high": self.high_bytes}[bound]
        return self.peak_bytes if other is None else other


Times = Callable[[LedgerRow], int]
"""How often a row counts in a total; 0 for a row of another device or host."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest total of a device, process or host: its moment and its rows."""

    scope: str
    """Name of the device, process or host."""

    run_phase: RunPhase
    action_id: str
    num_bytes: int
    rows: tuple[tuple[str, Role, MemoryKind, int], ...]
    """(process, role, kind, bytes), largest first."""


@dataclass(frozen=True)
class MemoryLedger:
    """All rows of a schedule, with the capacity of each device and of the host."""

    rows: tuple[LedgerRow, ...]
    device_capacity: int
    """Bytes of each device."""

    host_capacity: int
    """Bytes of each host."""

    shares_host_memory: bool
    """Whether the devices' memory is the host's (a CPU profile), so that the host's total includes every row."""

    order: tuple[tuple[RunPhase, str], ...]
    """Every action with its run phase, in the schedule's order."""

    concurrent: tuple[Beside, ...] = ()
    """Pairs of actions that may run at once, with their part. The peaks of a pair add up."""

    capacities: tuple[tuple[str, int], ...] = ()
    """(name, bytes) of devices and hosts that differ from the default capacities."""

    host_of_device: tuple[tuple[str, str], ...] = ()
    """(device, host) where a device shares a host's memory. Devices that are not listed belong to the only host."""

    schema_version: int = LEDGER_SCHEMA_VERSION

    def get_device_capacity(self, device: str) -> int:
        """Capacity of a device in bytes."""
        return dict(self.capacities).get(device, self.device_capacity)

    def get_host_capacity(self, host: str) -> int:
        """Capacity of a host in bytes."""
        return dict(self.capacities).get(host, self.host_capacity)

    def find_rows(self, process: str) -> tuple[LedgerRow, ...]:
        """The rows of a process. A process without rows of its own equals the first rank of its layout, whose rows are
        returned."""
        first = f"{process.rpartition('/')[0]}/0"
        return self._by_process.get(process) or self._by_process.get(first, ())

    @cached_property
    def _by_process(self) -> dict[str, tuple[LedgerRow, ...]]:
        rows: dict[str, list[LedgerRow]] = defaultdict(list)
        for row in self.rows:
            rows[row.process].append(row)
        return {process: tuple(of_process) for process, of_process in rows.items()}

    def process_peak(self, process: str) -> Peak:
        """The largest sum of one process's rows inside any action: on its device, or on the host if it has none."""
        by_moment: dict[tuple[RunPhase, str], list[LedgerRow]] = defaultdict(list)
        rows = self._by_process.get(process, ())
        space = "device" if any(row.space == "device" for row in rows) else "host"
        for row in rows:
            if row.space == space:
                by_moment[(row.run_phase, row.action_id)].append(row)
        moment, largest = max(by_moment.items(), key=lambda item: sum(row.peak_bytes for row in item[1]))
        return _build_peak(process, moment, [(row, row.peak_bytes) for row in largest])

    def device_peak(self, device: str, bound: Bound = "expected") -> Peak:
        """The largest total of the `device` rows on one device over all moments."""
        # A dictionary on the instance, because an lru_cache would hash the whole ledger for each call.
        if (device, bound) not in self._device_peaks:
            self._device_peaks[device, bound] = self._find_device_peak(device, bound)
        return self._device_peaks[device, bound]

    @cached_property
    def _device_peaks(self) -> dict[tuple[str, Bound], Peak]:
        return {}

    def _find_device_peak(self, device: str, bound: Bound) -> Peak:
        totals, own_moments = self.device_totals(device, bound), self._find_actions(device)
        # An action of another device has the total of this device's concurrent actions; one of those is the moment.
        moments = [
            moment
            for moment in self._moments
            if moment.place in own_moments or own_moments.isdisjoint(self._find_concurrent(moment.place))
        ]
        largest = max(moments, key=lambda moment: (totals[moment.place], moment.place[0] == "steady"))
        return _build_peak(device, largest.place, largest.count_rows(_count_on_device(device), bound))

    def phase_peak(self, phase: Phase, action: str = "") -> Peak | None:
        """The largest total of any device inside the actions of one phase; None if it has none on a device.

        action: a part of the actions' ids; it counts only if the phase has such an action.
        """
        actions = {(row.run_phase, row.action_id) for row in self.rows if row.phase is phase and row.space == "device"}
        actions = {moment for moment in actions if action in moment[1]} or actions
        peaks = (
            _build_peak(device, moment.place, moment.count_rows(_count_on_device(device)))
            for device in self.devices
            for moment in self._moments
            if moment.place in actions
        )
        return max(peaks, key=lambda peak: peak.num_bytes, default=None)

    def find_fullest_device(self) -> Peak:
        """The peak of the device with the least room, as expected. A steady step wins a tie."""
        peaks = (self.device_peak(device) for device in self.devices)
        return max(
            peaks, key=lambda peak: (peak.num_bytes - self.get_device_capacity(peak.scope), peak.run_phase == "steady")
        )

    @cached_property
    def fullest(self) -> Peak:
        """The binding peak: of the device with the least room, or on a CPU profile of the fullest host."""
        return self.host_peak() if self.shares_host_memory else self.find_fullest_device()

    def host_peak(self, only: str = "") -> Peak:
        """The largest total of a host's memory over all moments. On a CPU profile every row counts.

        only: name of the one host to consider; empty for all.
        """
        hosts = (only,) if only else self.hosts
        totals = {host: self._sum_moments(self._count_on_host(host)) for host in hosts}
        _, at, host = max(
            ((sizes[at], -at, host) for host, sizes in totals.items() for at in range(len(sizes))), key=itemgetter(0, 1)
        )
        return _build_peak(host, self._moments[-at].place, self._moments[-at].count_rows(self._count_on_host(host)))

    def device_totals(self, device: str, bound: Bound = "expected") -> dict[tuple[RunPhase, str], int]:
        """Bytes of the `device` rows on one device at each moment, waiting processes included.

        An action of another device may overlap several consecutive actions of this one. It gets the largest of their
        totals, not their sum.
        """
        totals = dict(zip(self.order, self._sum_moments(_count_on_device(device), bound), strict=True))
        active = self._find_actions(device)
        concurrent = {at: active.intersection(self._find_concurrent(at)) for at in self.order if at not in active}
        return totals | {at: max(map(totals.__getitem__, others)) for at, others in concurrent.items() if others}

    def _find_actions(self, device: str) -> set[tuple[RunPhase, str]]:
        return {(row.run_phase, row.action_id) for row in self.rows if row.device == device}

    def host_totals(self, host: str) -> dict[tuple[RunPhase, str], int]:
        """Bytes of one host's memory at each moment."""
        return dict(zip(self.order, self._sum_moments(self._count_on_host(host)), strict=True))

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that hold anything, in order: one, unless groups of devices have hosts of their own."""
        return tuple(dict.fromkeys(host for row in self.rows if (host := self._find_host(row))))

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that hold anything, in order."""
        return tuple(sorted({row.device for row in self.rows if row.space == "device"}))

    @property
    def processes(self) -> tuple[str, ...]:
        """The processes that hold anything, in order of appearance."""
        return tuple(dict.fromkeys(row.process for row in self.rows))

    @cached_property
    def _shared_hosts(self) -> dict[str, str]:
        return dict(self.host_of_device)

    def _find_host(self, row: LedgerRow) -> str:
        """The host in whose memory a row counts; empty for a device's own memory."""
        if self.shares_host_memory:
            return self._shared_hosts.get(row.device, "host")
        return row.device if row.space == "host" else ""

    def _count_on_host(self, host: str) -> Times:
        return lambda row: row.num_alike if self._find_host(row) == host else 0

    def _sum_moments(self, times: Times, bound: Bound = "expected") -> list[int]:
        """The total at each moment."""
        # Cached: a waiting process has the same rows at many moments.
        sums: dict[tuple[int, bool], int] = {}

        def total(rows: list[LedgerRow], is_active: bool) -> int:
            if (key := (id(rows), is_active)) not in sums:
                sums[key] = sum(size for _, size in _count_rows(rows, is_active, times, bound))
            return sums[key]

        return [sum(total(rows, is_active) for rows, is_active in moment.processes) for moment in self._moments]

    @cached_property
    def _moments(self) -> list["_Moment"]:
        """Each moment in order, with the rows that count then, process by process.

        A process counts its peak in its own action and in concurrent ones. Otherwise it counts what is resident after
        its last action.
        """
        by_place: dict[tuple[RunPhase, str], dict[str, list[LedgerRow]]] = defaultdict(lambda: defaultdict(list))
        for row in self.rows:
            by_place[(row.run_phase, row.action_id)][row.process].append(row)
        last: dict[str, list[LedgerRow]] = {}  # each process's rows of its last action
        result = []
        for moment in self.order:
            active = {
                process: rows
                for other in [*self._find_concurrent(moment), moment]
                for process, rows in by_place[other].items()
            }
            waiting = [(rows, False) for process, rows in last.items() if process not in active]
            result.append(_Moment(moment, [*((rows, True) for rows in active.values()), *waiting]))
            last.update(by_place[moment])
        return result

    def _find_concurrent(self, moment: tuple[RunPhase, str]) -> list[tuple[RunPhase, str]]:
        part = PARTS[moment[0]]
        pairs = [pair[1:] for pair in self.concurrent if pair[0] == part and moment[1] in pair[1:]]
        return [(moment[0], first if second == moment[1] else second) for first, second in pairs]


@dataclass(frozen=True, slots=True)
class _Moment:
    place: tuple[RunPhase, str]
    processes: list[tuple[list[LedgerRow], bool]]
    """Rows of each process, and whether the process is active."""

    def count_rows(self, times: Times, bound: Bound = "expected") -> list[tuple[LedgerRow, int]]:
        return [pair for rows, is_active in self.processes for pair in _count_rows(rows, is_active, times, bound)]


def _count_rows(rows: list[LedgerRow], is_active: bool, times: Times, bound: Bound) -> Iterator[tuple[LedgerRow, int]]:
    for row in rows:
        if number := times(row):
            yield row, number * (row.get_peak(bound) if is_active else row.get_resident(bound))


def _count_on_device(device: str) -> Times:
    return lambda row: row.device == device and row.space == "device"


def _build_peak(scope: str, moment: tuple[RunPhase, str], counted: list[tuple[LedgerRow, int]]) -> Peak:
    sums: dict[tuple[str, Role, MemoryKind], int] = defaultdict(int)
    for row, size in counted:
        sums[(row.process, row.role, row.kind)] += size
    rows = sorted(((*key, size) for key, size in sums.items() if size), key=lambda item: -item[3])
    return Peak(scope, moment[0], moment[1], sum(row[3] for row in rows), tuple(rows))
