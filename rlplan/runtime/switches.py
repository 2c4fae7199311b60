"""Switches: what happens between phases where trainer and engine take turns: who goes, who comes back, and with what.

In: an action and its step. Out: measurements. Left out: when each happens (the schedule says it).
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlplan.dataflow.schedule import Action
from rlplan.runtime.crew import Crew
from rlplan.runtime.workers.memory_meter import Measurement
from rlplan.spec.job import JobSpec
from rlplan.vocabulary import ActionKind


class Switches:
    """weights: the folder that an engine is started from; the last saved ones, or the start checkpoint."""

    def __init__(self, crew: Crew, run_folder: Path, job: JobSpec) -> None:
        self.crew, self.run_folder = crew, run_folder
        self.parks, self.sleep_level = job.placement.parks, job.rollout.sleep_level
        self.timeout_s = job.limits.action_timeout_s
        self.saved: Path | None = None

    def perform(self, action: Action) -> list[Measurement]:
        """Do one switch on all processes of the action."""
        method: tuple[Any, ...] = {
            ActionKind.STOP_ENGINE: ("stop",),
            ActionKind.SLEEP_ENGINE: ("sleep", self.sleep_level),
            ActionKind.WAKE_WEIGHTS: ("wake", ["weights"]),
            ActionKind.WAKE_KV_CACHE: ("wake", ["kv_cache"]),
            ActionKind.OFFLOAD_ROLE: ("offload", self.parks),
            ActionKind.RELOAD_ROLE: ("reload",),
        }[action.kind]
        return self._everywhere(action.processes, *method)

    def save_weights(self, action: Action, version: int, tokenizer_folder: str) -> list[Measurement]:
        """Write the policy into a folder of its own; the one before goes, for nobody will start from it again."""
        folder = self.run_folder / "weights" / f"version-{version}"
        measurements = self._everywhere(action.processes, "save", str(folder), tokenizer_folder)
        if self.saved is not None:
            shutil.rmtree(self.saved, ignore_errors=True)
        self.saved = folder
        return measurements

    def _everywhere(self, processes: Sequence[str], *call: Any) -> list[Measurement]:
        calls = [self.crew.perform(process, *call) for process in processes]
        return self.crew.measured(calls, self.timeout_s)[1]
