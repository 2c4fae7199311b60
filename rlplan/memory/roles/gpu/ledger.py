"""What processes on GPUs hold, one of each group for all alike, beside the driver on the first host.

In: a Schedule, forecasts at three lengths, capacities. Out: a MemoryLedger. The rows are made in memory/predict.py.
"""

from collections.abc import Iterable

from rlplan.dataflow.layouts import RoleLayout
from rlplan.dataflow.schedule import DRIVER_PROCESS, Schedule
from rlplan.memory.ledger import MemoryLedger
from rlplan.memory.machine.host import DRIVER_HOST_BYTES, WORKER_HOST_BYTES
from rlplan.memory.predict import Forecast, Process, predict_ledger, row_beside
from rlplan.spec.hardware.profile import SourcedBytes
from rlplan.vocabulary import MemoryKind, Provenance

_PROVENANCES = dict.fromkeys(
    (MemoryKind.CONTEXT, MemoryKind.COMM_BUFFERS, MemoryKind.CUDA_GRAPHS, MemoryKind.FRAGMENTATION), Provenance.ASSUMED
)


def gpu_process(
    layout: RoleLayout, host: str, num_alike: int, forecasts: tuple[Forecast, Forecast, Forecast]
) -> Process:
    """The first process of a layout. forecasts: of it at short, usual and longest lengths."""
    (name, device), (short, usual, longest) = layout.processes[0], forecasts
    return Process(
        name,
        device,
        layout.role,
        usual,
        between=(short, longest),
        host=host,
        host_libraries=WORKER_HOST_BYTES,
        num_alike=num_alike,
        provenances=_PROVENANCES,
    )


def predict_gpu_ledger(
    schedule: Schedule, processes: Iterable[Process], empty: MemoryLedger, num_steps: int, rollout_buffer: int = 0
) -> MemoryLedger:
    """The whole ledger of a schedule. empty: without rows, with the capacities; rollout_buffer: bytes."""
    size = DRIVER_HOST_BYTES + rollout_buffer
    driver = SourcedBytes(value=size, provenance=Provenance.ASSUMED, source="memory.host")
    return predict_ledger(schedule, processes, [row_beside(schedule, DRIVER_PROCESS, driver)], empty, num_steps)
