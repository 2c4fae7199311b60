"""Cycle: a rehearsal of one step before step 1, which shows whether the plan fits into memory.

In: the action runner, a plan's ledger, each process's memory. Out: each process's peak, action by action.
Trainers take a step of the largest size and are reset. With time sharing, all switches run in the step's order. The
engine sleeps or stops, roles are offloaded and reloaded, and the engine wakes and receives the start weights.
Left out: generation and scoring, which run in the first evaluation and in step 1; records in the trace.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from rlplan.dataflow.schedule import Action
from rlplan.memory.ledger import MemoryLedger
from rlplan.runtime.driver.steps import ActionRunner
from rlplan.runtime.fault_tolerance.supervision import FREEING, check_freed
from rlplan.runtime.measure.memory_meter import Measurement, merge_measurements
from rlplan.runtime.workers.typed_calls import TRAINER, bind_call
from rlplan.vocabulary import ActionKind, Role

TRAINED = (ActionKind.TRAIN_FORWARD_BACKWARD, ActionKind.OPTIMIZER_STEP)
WAKING = (ActionKind.START_ENGINE, ActionKind.WAKE_WEIGHTS, ActionKind.WAKE_KV_CACHE)
SYNCING = (ActionKind.SAVE_WEIGHTS, ActionKind.SYNC_WEIGHTS)
SWITCHING = (ActionKind.STOP_ENGINE, ActionKind.SLEEP_ENGINE, ActionKind.OFFLOAD_ROLE, ActionKind.RELOAD_ROLE)


@dataclass
class Cycle:
    """See the module docstring. `play` updates the memory figures.

    A trainer's memory is that after the rehearsed step, although the trainer is reset: step 1 allocates as much again.
    """

    runner: ActionRunner
    ledger: MemoryLedger
    resident: dict[str, int]
    """Host memory of each process, in bytes."""

    on_device: dict[str, int]
    """Memory of each process on the device of its models, in bytes."""

    _trained: set[Role] = field(default_factory=set)

    @property
    def shares_time(self) -> bool:
        """Whether the step has switches that free memory (time sharing)."""
        return any(action.kind.value in FREEING for action in self.runner.spec.schedule.step)

    def play(self) -> Iterator[tuple[tuple[str, ...], dict[str, int]]]:
        """Rehearse the step; yield (ids of actions, peak of each process) for each training role and waking engine.

        Raises: RunError where an action frees less than planned; MisfitError where a GPU has too little memory.
        """
        for action in self.runner.spec.schedule.step:
            if action.kind is ActionKind.TRAIN_FORWARD_BACKWARD and action.role not in self._trained:
                yield self._rehearse_training(action.role)
            elif self.shares_time and action.kind in (*WAKING, *SYNCING, *SWITCHING):
                peaks = self._switch(action)
                if action.kind in WAKING:
                    yield (action.id,), peaks

    def _rehearse_training(self, role: Role) -> tuple[tuple[str, ...], dict[str, int]]:
        """Take the largest step that the plan allows on every rank of a role, then reset the role."""
        schedule, starter = self.runner.spec.schedule, self.runner.starter
        self._trained.add(role)
        (start,) = [a for a in schedule.start if a.kind is ActionKind.START_TRAINER and a.role is role]
        peaks = self._update_memory(starter.worker_group.everywhere(start, lambda rank: bind_call(TRAINER.rehearse))[1])
        folder = starter.model_folder_for_role(role)
        starter.worker_group.everywhere(start, lambda rank: bind_call(TRAINER.reset, folder))
        return tuple(a.id for a in schedule.step if a.kind in TRAINED and a.role is role), peaks

    def _switch(self, action: Action) -> dict[str, int]:
        """Run a switch and check that it frees the planned memory.

        Weight syncs run as in step 0, so that `controls.skip_sync_after_step` has no effect. Other switches run as in
        step 1, so that a starting engine does not import its libraries again.
        """
        before, step = dict(self.on_device), 0 if action.kind in SYNCING else 1
        peaks = self._update_memory(self.runner.find_handler(action)(action, step))
        check_freed(self.ledger, action, 0, before, self.on_device)
        return peaks

    def _update_memory(self, measurements: list[Measurement]) -> dict[str, int]:
        """Update each process's memory; return its peak on the device of its models."""
        peaks = {}
        for measurement in merge_measurements(measurements):
            process, device = measurement.process, measurement.device
            self.resident[process] = measurement.resident_bytes
            self.on_device[process] = device.held if device else measurement.resident_bytes
            peaks[process] = device.peak if device else measurement.peak_bytes
        return peaks
