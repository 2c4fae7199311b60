"""Builds the memory ledger of a schedule from one forecast per process, on any machine.

In: a Schedule, a forecast of each process. Out: a MemoryLedger.
Left out: the forecasts themselves (roles/); overlap of actions that the schedule orders; ranks that differ from the
representative one (uneven experts).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from rlplan.dataflow.schedule import HOST_DEVICE, Action, Schedule
from rlplan.memory.ledger import LedgerRow, MemoryLedger, RunPhase
from rlplan.memory.machine.machine import heap_bytes
from rlplan.memory.machine.spread import find_high_ends, spread
from rlplan.spec.hardware.profile import SourcedBytes
from rlplan.vocabulary import ActionKind, MemoryKind, Phase, Provenance, Role

Bytes = Mapping[MemoryKind, int]
PASSES = (ActionKind.TRAIN_FORWARD_BACKWARD, ActionKind.SCORE, ActionKind.OPTIMIZER_STEP)
"""Actions whose measured peaks differ from the predicted ones by a known factor."""


class Forecast(Protocol):
    """Predicts the bytes of one process by kind, on its device and on its host."""

    def predict_resident(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Bytes after the action."""
        ...

    def predict_peak(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Bytes at the process's peak inside the action."""
        ...

    def predict_loaded(self, action: Action) -> Bytes:
        """Bytes inside the action before the process repacks its weights; empty for a process that repacks none."""
        return {}

    def predict_host(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Bytes in the host's memory; empty where the device's memory is the host's."""
        return {}

    def predict_first_host(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Additional bytes in the host's memory that only the first of several equal processes holds."""
        return {}


@dataclass(frozen=True)
class Process:
    """One process, which may represent several equal ones."""

    name: str
    device: str
    role: Role
    usual: Forecast
    between: tuple[Forecast, Forecast] | None = None
    """Forecasts at the shortest and the longest sequence lengths; None where the bytes have no interval."""

    measured_factor: float = 1.0
    """Measured over predicted peaks of training and scoring passes, at the high end of their range."""

    host: str | None = None
    """The host whose memory the process uses too; None where the device's memory is the host's."""

    host_libraries: int = 0
    """Bytes of host memory for libraries, before the process allocates anything."""

    num_alike: int = 1
    """Equal processes on one host, this one included."""

    keeps_heap: bool = False
    """Whether holes in the heap stay until an action ends (`hardware.keeps_heap`)."""

    provenances: Mapping[MemoryKind, Provenance] = field(default_factory=dict)
    """Provenance of the kinds whose bytes come from a profile; every other kind is derived from the job."""


def predict_ledger(
    schedule: Schedule,
    processes: Iterable[Process],
    beside: Iterable[LedgerRow],
    empty: MemoryLedger,
    num_steps: int,
) -> MemoryLedger:
    """Predict the ledger of a schedule.

    processes: representatives; every other process of the schedule equals one of them. beside: rows of processes that
    run all the time. empty: a ledger with the capacities and without rows.
    """
    by_name = {process.name: process for process in processes}
    order, rows = list[tuple[RunPhase, str]](), list(beside)
    for run_phase, actions in _list_run_phases(schedule, num_steps):
        for action in actions:
            order.append((run_phase, action.id))
            for name in action.processes:
                if name in by_name:
                    rows += _build_rows(action, run_phase, by_name[name])
    for row in rows:
        sizes = (row.resident_bytes, row.peak_bytes, row.low_bytes, row.high_bytes, row.loaded_bytes)
        assert all(size is None or size >= 0 for size in sizes), f"a formula gives fewer than 0 bytes: {row}"
    return replace(empty, rows=tuple(rows), order=tuple(order), concurrent=schedule.concurrent)


def _list_run_phases(schedule: Schedule, num_steps: int) -> Iterator[tuple[RunPhase, tuple[Action, ...]]]:
    yield "start", schedule.start
    yield "first", tuple(action for action in schedule.step if action.runs_in_step(1))
    if num_steps > 1:
        yield "steady", schedule.step
    yield "finish", schedule.finish


def _build_rows(action: Action, run_phase: RunPhase, process: Process) -> Iterator[LedgerRow]:
    usual = process.usual
    resident, peak, loaded = (
        usual.predict_resident(action, run_phase),
        usual.predict_peak(action, run_phase),
        usual.predict_loaded(action),
    )
    if process.keeps_heap:  # only the peak: a worker trims its heap when an action ends
        peak = _add_holes(peak, resident)
    ends = process.between
    low, high = [forecast.predict_peak(action, run_phase) for forecast in ends] if ends else (peak, peak)
    factor = process.measured_factor if action.kind in PASSES else 1.0
    high_ends = find_high_ends(high, sum(peak.values()), factor)
    row = partial(
        LedgerRow,
        run_phase=run_phase,
        action_id=action.id,
        phase=action.phase,
        process=process.name,
        role=process.role,
        source=f"memory.{type(usual).__name__}",
        num_alike=process.num_alike,
    )
    for kind in MemoryKind:
        resident_bytes, peak_bytes = resident.get(kind, 0), peak.get(kind, 0)
        if resident_bytes or peak_bytes or high.get(kind, 0):  # some kinds appear only at the longest lengths
            has_interval = process.between is not None
            yield row(
                device=process.device,
                space="device",
                kind=kind,
                resident_bytes=resident_bytes,
                peak_bytes=peak_bytes,
                provenance=process.provenances.get(kind, Provenance.DERIVED),
                loaded_bytes=loaded.get(kind, 0),
                low_bytes=spread(kind, low.get(kind, 0))[0] if has_interval else None,
                high_bytes=high_ends.get(kind, 0) if has_interval else None,
                resident_high_bytes=spread(kind, resident_bytes)[1] if has_interval else None,
            )
    if process.host is not None:
        per_process = host_bytes(usual, action, run_phase, process.host_libraries)
        for number, sizes in ((process.num_alike, per_process), (1, usual.predict_first_host(action, run_phase))):
            for kind, size in sizes.items():
                yield row(
                    device=process.host,
                    space="host",
                    kind=kind,
                    resident_bytes=size,
                    peak_bytes=size,
                    provenance=Provenance.ASSUMED if kind is MemoryKind.PROCESS else Provenance.DERIVED,
                    num_alike=number,
                )


def host_bytes(forecast: Forecast, action: Action, run_phase: RunPhase, libraries: int) -> Bytes:
    """Bytes that one process takes of the host's memory, `libraries` included."""
    return {**forecast.predict_host(action, run_phase), MemoryKind.PROCESS: libraries}


def _add_holes(peak: Bytes, resident: Bytes) -> Bytes:
    kinds = set(peak) - {MemoryKind.PROCESS, MemoryKind.FRAGMENTATION}
    passing = sum(max(0, peak[kind] - resident.get(kind, 0)) for kind in kinds)
    holes = heap_bytes(passing, peak.get(MemoryKind.GRADIENTS, 0))
    return {**peak, MemoryKind.FRAGMENTATION: peak.get(MemoryKind.FRAGMENTATION, 0) + holes}


def build_constant_row(schedule: Schedule, process: str, size: SourcedBytes, host: str = HOST_DEVICE) -> LedgerRow:
    """The ledger row of a process that is no worker: a constant size on a host, from the start on."""
    return LedgerRow(
        run_phase="start",
        action_id=schedule.start[0].id,
        phase=Phase.START,
        process=process,
        device=host,
        role=Role.VERIFIER,
        kind=MemoryKind.PROCESS,
        space="host",
        resident_bytes=size.value,
        peak_bytes=size.value,
        provenance=size.provenance,
        source=size.source,
    )
