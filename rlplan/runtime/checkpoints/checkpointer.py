"""Checkpointer: the driver collects what the ranks saved into one checkpoint and commits it.

A background thread assembles and commits the checkpoint while the next step runs. If it cannot be written, the run
logs an alarm and continues; the previous checkpoint stays valid.
In: the actions that save trained roles, and the run's state at the end of a step. Out: committed checkpoints.
Left out: how a rank writes its file (workers/trainer/state_saver.py), and the order of writes on disk (folder.py).
"""

import json
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlplan.dataflow.schedule import Action
from rlplan.emit.execution import ExecutionSpec
from rlplan.errors import RunError
from rlplan.runtime.checkpoints.finding import Resumption
from rlplan.runtime.checkpoints.folder import CheckpointFolder, write_durably, write_text_durably
from rlplan.runtime.checkpoints.identity import describe_identity
from rlplan.runtime.checkpoints.manifest import EXPERIENCE, RUN, Manifest, RoleStates, RunState, StoredFile, states_name
from rlplan.runtime.checkpoints.tensor_file import compute_digest
from rlplan.runtime.cluster.worker_group import WorkerGroup
from rlplan.runtime.measure.memory_meter import Measurement
from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.runtime.run_folder.disk_errors import disk_error
from rlplan.runtime.run_folder.recorder import Recorder
from rlplan.vocabulary import ActionKind

POLL_S, LOOK_S = 0.05, 1.0
"""Seconds between two checks for a receipt, and between two checks that its writer is alive."""
SAVING = (ActionKind.SAVE_STATES, ActionKind.WRITE_STATES)
SETTLE_S, CLOSE_S = 10.0, 1.0
"""Seconds that an ending run waits for a checkpoint in progress, and for one that is abandoned. Both are scaled."""


class Checkpointer:
    def __init__(self, spec: ExecutionSpec, worker_group: WorkerGroup, recorder: Recorder) -> None:
        self.spec, self.worker_group, self.recorder = spec, worker_group, recorder
        self.folder = CheckpointFolder(recorder.folder, spec.job.checkpoints.keep_last)
        self._staged: Path | None = None
        self._step = 0
        self._ranks: dict[str, list[Path]] = {}
        self._writers: dict[Path, str] = {}
        """The process that writes each file of the current checkpoint, or of the latest one."""
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._staging = threading.Lock()
        saves = any(action.kind in SAVING for action in spec.schedule.step)
        # taken at the start: a data file that changes during the run must not change the identity
        self._identity = describe_identity(spec.job) if saves else {}

    def prepare(self, action: Action, resumption: Resumption | None) -> list[Measurement]:
        """Load a role's states into its started trainer, and reserve memory for the copy that is saved."""
        measurements: list[Measurement] = []
        if resumption is not None:
            paths, facts = resumption.paths(action.role), resumption.facts(action.role)
            # 8-bit moments can only be loaded by the rank that wrote them, so each rank also gets its own file
            owns = [str((resumption.folder / name).resolve()) for name in self._names(action)]
            loaded = self.worker_group.everywhere(action, lambda rank: ("load_states", paths, owns[rank], facts))
            measurements += loaded[1]
        if any(other.kind is ActionKind.SAVE_STATES for other in self.spec.schedule.step):
            measurements += self.worker_group.everywhere(action, lambda rank: ("reserve_staging",))[1]
        return measurements

    def save(self, action: Action, step: int) -> list[Measurement]:
        """Have a role's ranks copy or write the states that a resumed run needs."""
        names = self._names(action)
        with self._staging:  # two roles may be saved at the same time, into one folder
            # the ranks may still write the previous checkpoint from staging memory, which this copy overwrites
            self.settle(self.worker_group.deadline_s(action))
            try:
                staged = self._stage(step)
            except OSError as error:
                self._alarm(step, error, self.folder.root)
                return []
            files = self._ranks[action.role.value] = [staged / name for name in names]
            self._writers |= zip(files, action.processes, strict=True)
        paths, waits = [str((staged / name).resolve()) for name in names], action.kind is ActionKind.WRITE_STATES
        return self.worker_group.everywhere(action, lambda rank: ("save_states", paths[rank], waits))[1]

    def commit(self, step: int, take: Callable[[], tuple[RunState, Any]]) -> None:
        """Commit what was saved during a finished step, in a thread. Does nothing if nothing was saved.

        take: returns the run's state and the rollout buffer.
        """
        if self._staged is None or self._step != step:
            return
        state, experience = take()
        staged, self._staged = self._staged, None
        arguments = (staged, dict(self._ranks), state, experience)
        self._ranks.clear()
        # a daemon, so that the process can exit while the disk hangs
        self._thread = threading.Thread(target=self._commit, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait until the checkpoint in progress is committed or has failed. timeout_s: None takes SETTLE_S."""
        if self._thread is not None:
            self._thread.join(scale_seconds(SETTLE_S) if timeout_s is None else timeout_s)
            if not self._thread.is_alive():
                self._thread = None

    def close(self) -> None:
        """Stop committing, and wait shortly for the thread."""
        self._is_closed = True
        self.settle(scale_seconds(CLOSE_S))

    def _alarm(self, step: int, error: Exception, place: Path) -> None:
        """Write an alarm. Raises: RunError when even the alarm cannot be written."""
        failure = disk_error(error, place)
        why = failure.what if failure else str(error) or type(error).__name__
        self.recorder.write_alarm(step, "checkpoint", f"no checkpoint of step {step}: {why}")

    def _stage(self, step: int) -> Path:
        if self._staged is None or self._step != step:
            self._staged, self._step = self.folder.stage(step), step
            self._ranks.clear()
            self._writers.clear()
        return self._staged

    def _names(self, action: Action) -> list[str]:
        count = len(action.processes)
        return [states_name(action.role.value, rank, count) for rank in range(count)]

    def _commit(self, staged: Path, ranks: dict[str, list[Path]], state: RunState, experience: Any) -> None:
        try:
            receipts = {role: self._receipts(paths) for role, paths in ranks.items()}
            files = {
                path.name: StoredFile.model_validate(receipt["file"])
                for role, paths in ranks.items()
                for path, receipt in zip(paths, receipts[role], strict=True)
            }
            write_durably(staged / RUN, state)
            write_text_durably(staged / EXPERIENCE, json.dumps(experience))
            files |= {name: compute_digest(staged / name) for name in (RUN, EXPERIENCE)}
            # a checkpoint contains exactly the files of its manifest
            for paths in ranks.values():
                for path in paths:
                    path.with_suffix(".receipt").unlink()
            self.recorder.sync()  # a checkpoint of a step must never be on the disk before the step's metrics
            if not self._is_closed:
                best = state.best_checkpoint.step if state.best_checkpoint else None
                self.folder.commit(staged, self._manifest(state.step, files, ranks, receipts), best)
        except Exception as error:  # an error raised in a thread would be lost
            if not self._is_closed:  # after close, a resumed run may already use a folder of this name
                shutil.rmtree(staged, ignore_errors=True)  # frees the space that a full disk needs
                with suppress(RunError):  # the next metrics line will fail too, and that ends the run
                    self._alarm(state.step, error, staged)

    def _manifest(
        self,
        step: int,
        files: dict[str, StoredFile],
        ranks: dict[str, list[Path]],
        receipts: dict[str, list[dict[str, Any]]],
    ) -> Manifest:
        roles = {
            role: RoleStates(
                files=tuple(path.name for path in paths),
                num_steps=receipts[role][0]["num_steps"],
                scaler=receipts[role][0]["scaler"],
            )
            for role, paths in ranks.items()
        }
        return Manifest(job=self.spec.job.name, step=step, identity=self._identity, files=files, roles=roles)

    def _receipts(self, paths: list[Path]) -> list[dict[str, Any]]:
        """Wait for the receipts of the ranks' files, and read them. Raises: _UnwrittenError."""
        deadline = time.monotonic() + self.spec.job.limits.action_timeout_s
        receipts = []
        for path in paths:
            receipt, writer = path.with_suffix(".receipt"), self._writers.get(path, "")
            next_look, is_gone = time.monotonic() + LOOK_S, False
            while self._is_closed or not receipt.exists():  # after close, a receipt may belong to the next run
                now = time.monotonic()
                if is_gone:
                    raise _UnwrittenError(f"{writer} is gone")
                if self._is_closed or now > deadline:
                    raise _UnwrittenError(
                        f"{path.name} did not appear (all hosts must see the run folder at the same path)"
                    )
                if now > next_look:
                    # not an error yet: the writer may have ended right after its receipt, so the loop looks once more
                    next_look, is_gone = now + LOOK_S, writer in self.worker_group.lost()
                time.sleep(POLL_S)
            receipts.append(_read(receipt))
        return receipts


def _read(receipt: Path) -> dict[str, Any]:
    """Read a rank's receipt for its file. Raises: _UnwrittenError."""
    text = receipt.read_text(encoding="utf-8")
    if not text:
        raise _UnwrittenError(f"the disk does not take {receipt.name}")
    facts: dict[str, Any] = json.loads(text)
    if facts["error"]:
        raise _UnwrittenError(facts["error"])
    return facts


class _UnwrittenError(Exception):
    """A rank could not write its file."""
