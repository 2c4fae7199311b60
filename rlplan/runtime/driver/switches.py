"""Switches between phases of time sharing: sleep, wake, offload, reload and stop. Also saves weights for restarts.

In: an action. Out: measurements. Left out: when each switch happens (the schedule).
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from rlplan.dataflow.schedule import Action
from rlplan.runtime.cluster.worker_group import WorkerGroup
from rlplan.runtime.measure.memory_meter import Measurement
from rlplan.runtime.weight_sync.weight_verification import check_weights
from rlplan.runtime.workers.typed_calls import ENGINE, TRAINER, bind_call
from rlplan.spec.resolved import ResolvedJob
from rlplan.vocabulary import ActionKind


class Switches:
    """See the module docstring. saved: folder of the last saved weights, or None. checksums: their checksums."""

    def __init__(self, worker_group: WorkerGroup, run_folder: Path, job: ResolvedJob) -> None:
        self.worker_group, self.run_folder, self.job = worker_group, run_folder, job
        self.saved: Path | None = None
        self.checksums: dict[str, int] = {}

    def run_switch(self, action: Action) -> list[Measurement]:
        """Run one switch on all processes of the action."""
        call = {
            ActionKind.STOP_ENGINE: bind_call(ENGINE.stop),
            ActionKind.SLEEP_ENGINE: bind_call(ENGINE.sleep, self.job.rollout.sleep_level),
            ActionKind.WAKE_WEIGHTS: bind_call(ENGINE.wake, ["weights"]),
            ActionKind.WAKE_KV_CACHE: bind_call(ENGINE.wake, ["kv_cache"]),
            ActionKind.OFFLOAD_ROLE: bind_call(TRAINER.offload, self.job.placement.offload),
            ActionKind.RELOAD_ROLE: bind_call(TRAINER.reload),
        }[action.kind]
        return self.worker_group.everywhere(action, lambda rank: call)[1]

    def save_weights(self, action: Action, version: int, tokenizer_folder: str) -> list[Measurement]:
        """Write the policy into a folder per version, and remove the previous version's folder."""
        folder = self.run_folder / "weights" / f"version-{version}"
        written, measurements = self.worker_group.everywhere(
            action, lambda rank: bind_call(TRAINER.save, str(folder), tokenizer_folder)
        )
        (self.checksums,) = [checksums for checksums in written if checksums is not None]
        if self.saved is not None:  # only now, because a lost engine would have been restored from it until here
            shutil.rmtree(self.saved, ignore_errors=True)
        self.saved = folder
        return measurements

    def check_saved(self, processes: Sequence[str], version: int) -> None:
        """Compare the saved weights, as the engine processes read them, with the trainer's. Raises: RunError."""
        if self.saved is None:
            return
        read_checksums = bind_call(ENGINE.file_checksums, str(self.saved))
        calls = [self.worker_group.submit(process, *read_checksums) for process in processes]
        checksums = self.worker_group.gather(calls, self.job.limits.action_timeout_s)
        for process, read in zip(processes, checksums, strict=True):
            check_weights(self.checksums, read, process, version, self.job)
