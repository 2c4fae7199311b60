"""From a schedule on GPUs and what its processes hold to the ledger: one device of each group stands for all alike.

In: a Schedule, forecasts of each process at short, usual and longest lengths, capacities. Out: a MemoryLedger.
Left out: ranks that differ (the first pipeline stage, uneven experts).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rlplan.dataflow.schedule import DRIVER_PROCESS, HOST_DEVICE, Action, Schedule
from rlplan.memory.ledger import LedgerRow, MemoryLedger, RunPhase
from rlplan.memory.machine.spread import spread
from rlplan.memory.roles.gpu.process import Bytes
from rlplan.units import GIB
from rlplan.vocabulary import MemoryKind, Phase, Provenance, Role

WORKER_HOST_BYTES = 4 * GIB
"""Host memory of a worker process with CUDA's and torch's libraries, before it holds anything. Assumed: CPU builds of
the same workers measure 0.4 to 0.9 GiB (hardware_profiles/node/cpu-host.yaml); CUDA's libraries map some 3 GiB more."""
DRIVER_HOST_BYTES = 2 * GIB
"""The driver with Ray's own processes. Measured without a GPU: about 1 GiB; assumed: twice that with more workers."""


class GpuForecast(Protocol):
    """Bytes of one process on its GPU and on its host, by kind."""

    def resident(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Held on the GPU when the action has ended."""
        ...

    def peak(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Held on the GPU at the peak inside the action."""
        ...

    def on_host(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Held in the host's memory when the action has ended."""
        ...


@dataclass(frozen=True)
class GpuProcess:
    """One process that stands for all alike. short, usual, longest: the same process at three lengths.

    num_alike: processes like it on one host. host: where they run.
    """

    name: str
    device: str
    host: str
    role: Role
    short: GpuForecast
    usual: GpuForecast
    longest: GpuForecast
    num_alike: int


def predict_gpu_ledger(
    schedule: Schedule,
    processes: Sequence[GpuProcess],
    capacity: int,
    host_capacity: int,
    rollout_buffer: int = 0,
    capacities: Mapping[str, int] | None = None,
) -> MemoryLedger:
    """The whole ledger of a schedule. processes: those that stand for all; others of the schedule are like one of them.

    host_capacity: bytes of a host; rollout_buffer: of a step's rollouts.

    capacities: of devices and hosts that have another one.
    """
    order: list[tuple[RunPhase, str]] = []
    rows = [_driver_row(schedule, DRIVER_HOST_BYTES + rollout_buffer)]
    by_name = {process.name: process for process in processes}
    parts: tuple[tuple[RunPhase, tuple[Action, ...]], ...] = (
        ("start", schedule.start),
        ("first", schedule.step),
        ("steady", schedule.step),
        ("finish", schedule.finish),
    )
    for run_phase, actions in parts:
        for action in actions:
            order.append((run_phase, action.id))
            for name in action.processes:
                if name in by_name:
                    rows += _rows(action, run_phase, by_name[name])
    return MemoryLedger(
        tuple(rows),
        capacity,
        host_capacity,
        shares_host_memory=False,
        order=tuple(order),
        concurrent=schedule.concurrent,
        capacities=tuple((capacities or {}).items()),
    )


def host_bytes(forecast: GpuForecast, action: Action, run_phase: RunPhase) -> Bytes:
    """What one process takes of the host's memory, its libraries included."""
    return dict(forecast.on_host(action, run_phase)) | {MemoryKind.PROCESS: WORKER_HOST_BYTES}


def _rows(action: Action, run_phase: RunPhase, process: GpuProcess) -> Iterator[LedgerRow]:
    resident = process.usual.resident(action, run_phase)
    low, peak, high = (forecast.peak(action, run_phase) for forecast in (process.short, process.usual, process.longest))
    row = _empty_row(action, run_phase, process)
    for kind in MemoryKind:
        if resident.get(kind, 0) or peak.get(kind, 0) or high.get(kind, 0):
            yield replace(
                row,
                kind=kind,
                resident_bytes=resident.get(kind, 0),
                peak_bytes=peak.get(kind, 0),
                provenance=_PROVENANCES.get(kind, Provenance.DERIVED),
                low_bytes=spread(kind, low.get(kind, 0))[0],
                high_bytes=spread(kind, high.get(kind, 0))[1],
                resident_high_bytes=spread(kind, resident.get(kind, 0))[1],
            )
    for kind, size in host_bytes(process.usual, action, run_phase).items():
        provenance = Provenance.ASSUMED if kind is MemoryKind.PROCESS else Provenance.DERIVED
        on_host = replace(row, device=process.host, space="host", kind=kind, provenance=provenance)
        yield replace(on_host, resident_bytes=size, peak_bytes=size)


_PROVENANCES = dict.fromkeys(
    (MemoryKind.CONTEXT, MemoryKind.COMM_BUFFERS, MemoryKind.CUDA_GRAPHS, MemoryKind.FRAGMENTATION), Provenance.ASSUMED
)


def _empty_row(action: Action, run_phase: RunPhase, process: GpuProcess) -> LedgerRow:
    """What all rows of a process in an action share."""
    return LedgerRow(
        run_phase=run_phase,
        action_id=action.id,
        phase=action.phase,
        process=process.name,
        device=process.device,
        role=process.role,
        kind=MemoryKind.PROCESS,
        space="device",
        resident_bytes=0,
        peak_bytes=0,
        provenance=Provenance.DERIVED,
        source=f"memory.gpu.{type(process.usual).__name__}",
        num_alike=process.num_alike,
    )


def _driver_row(schedule: Schedule, num_bytes: int) -> LedgerRow:
    first = schedule.start[0]
    return LedgerRow(
        run_phase="start",
        action_id=first.id,
        phase=Phase.START,
        process=DRIVER_PROCESS,
        device=HOST_DEVICE,
        role=Role.VERIFIER,
        kind=MemoryKind.PROCESS,
        space="host",
        resident_bytes=num_bytes,
        peak_bytes=num_bytes,
        provenance=Provenance.ASSUMED,
        source="memory.gpu.predict",
    )
