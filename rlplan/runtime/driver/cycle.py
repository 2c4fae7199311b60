"""Cycle: what is done of a step before step 1, so that a plan that does not fit is known before anything is learned.

In: what performs actions, a plan's ledger, what each process holds now. Out: each process's peak, action by action.
Trainers take their largest step and begin anew. Where phases share memory in time, all switches are done in the step's
order: the engine sleeps or stops, roles come and go, and the engine wakes with the start weights sent to it.
Left out: generation and scores, which the first evaluation and step 1 show; records in the trace.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from rlplan.dataflow.schedule import Action
from rlplan.memory.ledger import MemoryLedger
from rlplan.runtime.driver.steps import ActionRunner
from rlplan.runtime.fault_tolerance.supervision import FREEING, check_freed
from rlplan.runtime.measure.memory_meter import Measurement, merged
from rlplan.vocabulary import ActionKind, Role

TRAINED = (ActionKind.TRAIN_FORWARD_BACKWARD, ActionKind.OPTIMIZER_STEP)
WAKING = (ActionKind.START_ENGINE, ActionKind.WAKE_WEIGHTS, ActionKind.WAKE_KV_CACHE)
HANDING_OVER = (ActionKind.SAVE_WEIGHTS, ActionKind.SYNC_WEIGHTS)
SWITCHING = (ActionKind.STOP_ENGINE, ActionKind.SLEEP_ENGINE, ActionKind.OFFLOAD_ROLE, ActionKind.RELOAD_ROLE)


@dataclass
class Cycle:
    """resident: bytes of the host that each process holds; on_device: where its models lie. Both change on the way.

    A trainer counts as holding what it held after its step, though it has begun anew: so it is from step 1 on.
    """

    runner: ActionRunner
    ledger: MemoryLedger
    resident: dict[str, int]
    on_device: dict[str, int]
    _trained: set[Role] = field(default_factory=set)

    @property
    def shares_time(self) -> bool:
        return any(action.kind.value in FREEING for action in self.runner.spec.schedule.step)

    def play(self) -> Iterator[tuple[tuple[str, ...], dict[str, int]]]:
        """(ids of actions, the peak of each process in them): of each role that trains, and of engines that wake.

        Raises: RunError where an action frees less than planned; MisfitError where a GPU has too little memory.
        """
        for action in self.runner.spec.schedule.step:
            if action.kind is ActionKind.TRAIN_FORWARD_BACKWARD and action.role not in self._trained:
                yield self._train(action.role)
            elif self.shares_time and action.kind in (*WAKING, *HANDING_OVER, *SWITCHING):
                peaks = self._switch(action)
                if action.kind in WAKING:
                    yield (action.id,), peaks

    def _train(self, role: Role) -> tuple[tuple[str, ...], dict[str, int]]:
        """The largest step that the plan allows for, on every rank of a role, and back to the start."""
        schedule, starter = self.runner.spec.schedule, self.runner.starter
        self._trained.add(role)
        (start,) = [a for a in schedule.start if a.kind is ActionKind.START_TRAINER and a.role is role]
        peaks = self._note(starter.worker_group.everywhere(start, lambda rank: ("rehearse",))[1])
        folder = starter.model_folder_for_role(role)
        starter.worker_group.everywhere(start, lambda rank: ("reset", folder))
        return tuple(a.id for a in schedule.step if a.kind in TRAINED and a.role is role), peaks

    def _switch(self, action: Action) -> dict[str, int]:
        """What an action of a step does; freed is what the start had taken.

        An engine that starts has its libraries already, as in step 1; `controls.skip_sync_after_step` is of real steps.
        """
        before, step = dict(self.on_device), 0 if action.kind in HANDING_OVER else 1
        peaks = self._note(self.runner.find_handler(action)(action, step))
        check_freed(self.ledger, action, 0, before, self.on_device)
        return peaks

    def _note(self, measurements: list[Measurement]) -> dict[str, int]:
        """The peak of each process where its models lie; what it holds afterwards is kept."""
        peaks = {}
        for whole in merged(measurements):
            self.resident[whole.process] = whole.resident_bytes
            self.on_device[whole.process] = whole.device.held if whole.device else whole.resident_bytes
            peaks[whole.process] = whole.device.peak if whole.device else whole.peak_bytes
        return peaks
