"""Starter: the start actions of a run, from processes without libraries to loaded models.

In: the start actions of a schedule. Out: measurements. The recorder gets each process's memory before it loads a model.
"""

from dataclasses import dataclass
from pathlib import Path

from rlplan.dataflow.schedule import Action
from rlplan.emit.execution import ExecutionSpec
from rlplan.runtime.checkpoints.checkpointer import Checkpointer
from rlplan.runtime.checkpoints.finding import Resumption
from rlplan.runtime.cluster.worker_group import WorkerGroup
from rlplan.runtime.driver.switches import Switches
from rlplan.runtime.measure.memory_meter import Measurement
from rlplan.runtime.rollout.fleet import Fleet
from rlplan.runtime.run_folder.recorder import Recorder
from rlplan.runtime.weight_sync.weight_sync_driver import WeightSync
from rlplan.runtime.workers.typed_calls import SCORER, TRAINER, WORKER, bind_call
from rlplan.vocabulary import ActionKind, Role


@dataclass(frozen=True)
class Starter:
    """See the module docstring."""

    spec: ExecutionSpec
    worker_group: WorkerGroup
    recorder: Recorder
    fleet: Fleet
    weight_sync: WeightSync
    switches: Switches
    checkpoints: Checkpointer
    model_folder: Path
    """Folder of the start checkpoint."""

    resumption: Resumption | None
    """Checkpoint to resume from."""

    def start_trainer(self, action: Action, step: int) -> list[Measurement]:
        """Start all ranks of a trained role, and restore their states in a resumed run."""
        imported = self._import_libraries(action)
        port = self.spec.job.hardware.rendezvous_port if action.role is Role.POLICY else 0
        address = self.worker_group.rendezvous(action, port)
        world, folder = len(action.processes), self.model_folder_for_role(action.role)
        started = self.worker_group.everywhere(
            action, lambda rank: bind_call(TRAINER.start, rank, world, address, folder)
        )[1]
        prepared = self.checkpoints.prepare(action, self.resumption)
        return imported + started + prepared + self._prepare_weights(action)

    def start_engine(self, action: Action, step: int) -> list[Measurement]:
        """Start all engines, from the last saved weights if there are any. Step 0 also imports their libraries."""
        self.weight_sync.forget()
        imported = self._import_libraries(action) if step == 0 else []
        folder = self.engine_folder() if self.switches.saved is None else str(self.switches.saved)
        # The engine also needs the vision tower, which saved weights lack. It never restarts (planner/rules.py).
        if self.spec.job.takes_images:
            folder = self.spec.job.policy.path
        self.switches.check_saved(action.processes, self.weight_sync.version)
        version, timeout_s = self.weight_sync.version, self.worker_group.deadline_s(action)
        return imported + self.fleet.load(self.fleet.engines, folder, version, timeout_s)

    def start_scorer(self, action: Action, step: int) -> list[Measurement]:
        """Start all processes of a scored role, each with the full model or with a shard."""
        imported, folder = self._import_libraries(action), self.model_folder_for_role(action.role)
        if not self.spec.schedule.find_layout("scorer", action.role).shares_frozen_weights:
            return imported + self.worker_group.everywhere(action, lambda rank: bind_call(SCORER.start, folder))[1]
        address, config = self.worker_group.rendezvous(action, 0), self.spec.deepspeed[action.role]
        world = len(action.processes)
        started = self.worker_group.everywhere(
            action, lambda rank: bind_call(SCORER.start_share, rank, world, address, folder, config)
        )[1]
        return imported + started

    def model_folder_for_role(self, role: Role) -> str:
        """Folder that a role's model is loaded from: its own, or the start checkpoint."""
        return self.spec.job.roles.paths.get(role, str(self.model_folder))

    def engine_folder(self) -> str:
        """Folder that engines load the policy from before any update: the 4-bit base if the job names one."""
        return self.spec.job.rollout.base_path or self.model_folder_for_role(Role.POLICY)

    def _prepare_weights(self, action: Action) -> list[Measurement]:
        """Save a resumed run's policy for engines that start from a folder, unless a weight sync follows."""
        has_weight_sync = any(other.kind is ActionKind.SYNC_WEIGHTS for other in self.spec.schedule.start)
        if self.resumption is None or action.role is not Role.POLICY:
            return []
        if has_weight_sync:
            self.weight_sync.version -= 1  # the weight sync that follows restores the saved version number
            return []
        saving = next((a for a in self.spec.schedule.step if a.kind is ActionKind.SAVE_WEIGHTS), action)
        return self.switches.save_weights(saving, self.weight_sync.version, self.spec.job.policy.path)

    def _import_libraries(self, action: Action) -> list[Measurement]:
        """Import each process's libraries, and record its memory before it loads a model (the import baseline)."""
        _, measurements = self.worker_group.everywhere(action, lambda rank: bind_call(WORKER.import_libraries))
        for measurement in measurements:
            self.recorder.record_baseline(action.id, measurement.process, action.role.value, measurement.resident_bytes)
        return measurements
