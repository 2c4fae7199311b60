"""Recovery: how a lost engine or scorer is restarted with its former state.

In: the process that was lost, and the action in which. Out: the same process with its libraries, its model, the weights
that the policy has now, and the requests that it had under way, from their beginnings.
Left out: whether it may be restarted (supervision.py); how its loss is detected (cluster/calls.py).

Where the engines' weights come from depends on how the schedule hands them over: in files (`save_weights`) the last
saved ones are whole and of the engines' version; through a channel the trainer is asked once more.
"""

import threading
from collections.abc import Callable

from rlplan.dataflow.schedule import Action
from rlplan.emit.execution import ExecutionSpec
from rlplan.errors import RunError
from rlplan.runtime.cluster.worker_group import WorkerGroup
from rlplan.runtime.driver.switches import Switches
from rlplan.runtime.rollout.fleet import Fleet
from rlplan.runtime.weight_sync.weight_sync_driver import WeightSync
from rlplan.vocabulary import ActionKind, Role

SELF_SUFFICIENT = (ActionKind.START_ENGINE, ActionKind.STOP_ENGINE)
"""Actions that load a process's model, so that nothing more has to be restored."""


class Recovery:
    """See the module docstring. trainers: held by the caller of what all ranks of the trainers do together."""

    def __init__(
        self,
        spec: ExecutionSpec,
        worker_group: WorkerGroup,
        fleet: Fleet,
        weight_sync: WeightSync,
        switches: Switches,
        folder_of: Callable[[Role], str],
        engine_folder: Callable[[], str],
    ) -> None:
        """folder_of: where a role's model is loaded from when the run starts. engine_folder: the same of engines."""
        self.spec, self.worker_group, self.fleet = spec, worker_group, fleet
        self.weight_sync, self.switches = weight_sync, switches
        self.folder_of, self.engine_folder = folder_of, engine_folder
        self.trainers = threading.Lock()

    @property
    def is_possible(self) -> bool:
        """Not where the trainer's states may be away while an engine sleeps: the weights could not be sent again."""
        return not any(action.kind is ActionKind.SLEEP_ENGINE for action in self.spec.schedule.step)

    def recover(self, process: str, action: Action, step: int) -> None:
        """Restart a lost process with its former state. Raises: RunError, LostProcessError where one is lost again."""
        timeout_s = self.spec.job.limits.start_timeout_s
        if process in self.fleet.processes:
            with self.fleet.changing:
                self._engine(self.fleet.engine_ranks(process), action, timeout_s)
            return
        if self.spec.schedule.layout("scorer", action.role).shares_frozen_weights:
            raise RunError(
                f"{process} is lost, and its share of the {action.role}'s weights with it",
                where=f"{action.id}, step {step}",
                rule="a rank that shares weights cannot rejoin its process group",
                way_out="start the run again",
            )
        self.worker_group.restart(process)
        for call in (("import_libraries",), ("start", self.folder_of(action.role))):
            self.worker_group.gather([self.worker_group.submit(process, *call)], timeout_s)

    def _engine(self, ranks: tuple[str, ...], action: Action, timeout_s: float) -> None:
        self.fleet.restart(ranks, timeout_s)
        self.weight_sync.forget()
        if action.kind in SELF_SUFFICIENT:
            return
        if any(other.kind is ActionKind.SAVE_WEIGHTS for other in self.spec.schedule.step):
            folder = self.engine_folder() if self.switches.saved is None else str(self.switches.saved)
            self.switches.check_saved(ranks, self.weight_sync.version)
            self.fleet.load([ranks], folder, self.weight_sync.version, timeout_s)
            self.fleet.submit_again(ranks, timeout_s)
            return
        self.fleet.load([ranks], self.engine_folder(), 0, timeout_s)
        with self.trainers, self.fleet.paused(timeout_s):  # no other thread asks the trainers for anything
            self.weight_sync.resend()
            self.fleet.submit_again(ranks, timeout_s)
