"""Checkpoints of a rank on a GPU: the copy of its states lies in its host's memory, pinned, all the time.

In: a rank's forecast and the bytes that it saves. Out: the same forecast with the copy on the host.
Left out: what passes through the host where states are written without a copy: one tensor at a time.
"""

from rlplan.dataflow.schedule import Action
from rlplan.memory.ledger import RunPhase
from rlplan.memory.machine.host import pinned_bytes
from rlplan.memory.predict import Bytes, Forecast
from rlplan.memory.roles.gpu.process import add
from rlplan.vocabulary import MemoryKind


class StagedOnHost(Forecast):
    """See the module docstring, and `predict.Forecast`."""

    def __init__(self, rank: Forecast, saved_bytes: int) -> None:
        self.rank, self.staging = rank, pinned_bytes(saved_bytes)

    def resident(self, action: Action, run_phase: RunPhase) -> Bytes:
        """The rank's own."""
        return self.rank.resident(action, run_phase)

    def peak(self, action: Action, run_phase: RunPhase) -> Bytes:
        """The rank's own."""
        return self.rank.peak(action, run_phase)

    def on_host(self, action: Action, run_phase: RunPhase) -> Bytes:
        """The rank's own and the copy."""
        return add(self.rank.on_host(action, run_phase), {MemoryKind.CHECKPOINT_STAGING: self.staging})
