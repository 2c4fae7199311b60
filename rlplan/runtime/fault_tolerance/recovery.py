"""Recovery: restarts a lost engine or scorer with its former state.

In: the lost process, and the action in which it was lost. Out: the same process with its libraries, its model, the
policy's current weights, and its open requests, which start over.
Left out: whether it may be restarted (supervision.py); detecting the loss (cluster/worker_group.py).

The source of an engine's weights depends on the schedule. With `save_weights` it is the last saved folder, which has
the engines' version. With weight sync through a channel the trainer sends all weights again.
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
from rlplan.runtime.workers.typed_calls import SCORER, WORKER, bind_call
from rlplan.vocabulary import ActionKind, Role

SELF_SUFFICIENT = (ActionKind.START_ENGINE, ActionKind.STOP_ENGINE)
"""Actions that load an engine's model anyway, so that recovery need not restore it."""


class Recovery:
    """See the module docstring. trainers: lock for calls to the trainers, which must reach all ranks in one order."""

    def __init__(
        self,
        spec: ExecutionSpec,
        worker_group: WorkerGroup,
        fleet: Fleet,
        weight_sync: WeightSync,
        switches: Switches,
        model_folder_for_role: Callable[[Role], str],
        engine_folder: Callable[[], str],
    ) -> None:
        """model_folder_for_role, engine_folder: return the folder that a role's model, or the engines', starts from."""
        self.spec, self.worker_group, self.fleet = spec, worker_group, fleet
        self.weight_sync, self.switches = weight_sync, switches
        self.model_folder_for_role, self.engine_folder = model_folder_for_role, engine_folder
        self.trainers = threading.Lock()

    @property
    def is_possible(self) -> bool:
        """Whether the schedule allows restarts; with sleeping engines the trainer's states may be offloaded."""
        return not any(action.kind is ActionKind.SLEEP_ENGINE for action in self.spec.schedule.step)

    def recover(self, process: str, action: Action, step: int) -> None:
        """Restart a lost process with its former state. Raises: RunError; LostProcessError if one is lost again."""
        timeout_s = self.spec.job.limits.start_timeout_s
        if process in self.fleet.processes:
            with self.fleet.changing:
                self._engine(self.fleet.engine_ranks(process), action, timeout_s)
            return
        if self.spec.schedule.find_layout("scorer", action.role).shares_frozen_weights:
            raise RunError(
                f"{process} is lost, and its shard of the {action.role}'s weights with it",
                where=f"{action.id}, step {step}",
                rule="a rank with sharded weights cannot rejoin its process group",
                way_out="start the run again",
            )
        self.worker_group.restart(process)
        for call in (
            bind_call(WORKER.import_libraries),
            bind_call(SCORER.start, self.model_folder_for_role(action.role)),
        ):
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
        # version 0: these are the initial weights, and `resend` brings the current ones
        self.fleet.load([ranks], self.engine_folder(), 0, timeout_s)
        with self.trainers, self.fleet.pause(timeout_s):  # no other thread may call the trainers meanwhile
            self.weight_sync.resend()
            self.fleet.submit_again(ranks, timeout_s)
