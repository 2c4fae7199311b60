"""A run of three steps without engines: the real writers of a run folder, in one process, for faults at any call.

In: a plan. Out: a run folder, as `rlplan run` makes and resumes it: bundle, status, lines, checkpoints. What a step
computes is a few numbers; checkpoints are put together where they are asked for, not in a thread, so that each run
makes the same system calls in the same order.
"""

import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlplan.dataflow.schedule import Action
from rlplan.emit.bundle import read_bundle
from rlplan.emit.execution import execution_spec
from rlplan.errors import RlplanError
from rlplan.planner.plan import Plan, read_plan
from rlplan.runtime.checkpoints import checkpointer
from rlplan.runtime.checkpoints.finding import find_checkpoint
from rlplan.runtime.checkpoints.identity import describe_identity
from rlplan.runtime.checkpoints.manifest import RunState
from rlplan.runtime.checkpoints.tensor_file import Piece
from rlplan.runtime.data.prompt_sets import PromptSets
from rlplan.runtime.driver import launch
from rlplan.runtime.driver.player import Task
from rlplan.runtime.fault_tolerance.resuming import check_resumable, find_own_bundle
from rlplan.runtime.measure.memory_meter import Measurement
from rlplan.runtime.rewards.reward_pool import RewardPool
from rlplan.runtime.run_folder.recorder import Recorder
from rlplan.runtime.run_folder.run_lock import lock_run_folder
from rlplan.runtime.workers.trainer.state_saver import _write_with_receipt

NUM_STEPS = 3


class AtOnce:
    """A thread that does its work where it is started."""

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...], name: str, daemon: bool) -> None:
        self.start = partial(target, *args)

    def join(self, timeout: float | None = None) -> None: ...

    def is_alive(self) -> bool:
        return False


@dataclass
class Ranks:
    """A stand-in for the trainers' ranks that write a checkpoint."""

    step: int = 0

    def everywhere(self, action: Action, call: Callable[..., Any]) -> tuple[list[Any], list[Measurement]]:
        for rank in range(len(action.processes)):
            _, path, _ = call(rank)
            values = array("f", [float(self.step + rank)] * 64)
            facts = {"num_steps": self.step, "scaler": {}}
            _write_with_receipt(Path(path), [Piece("master/a@0", "F32", memoryview(values))], facts)
        return [], []

    def deadline_s(self, action: Action) -> float:
        return 1.0


def play(task: Task, recorder: Recorder, listener: object) -> None:
    """A replacement for `launch._run_with_fallbacks`."""
    checkpointer.threading = SimpleNamespace(Thread=AtOnce, Lock=threading.Lock)  # type: ignore[attr-defined]
    ranks = Ranks()
    checkpoints = checkpointer.Checkpointer(task.spec, ranks, recorder)  # type: ignore[arg-type]
    (action,) = [action for action in task.spec.schedule.step if action.kind in checkpointer.SAVING]
    if task.resumption is None:
        recorder.write_row("metrics.jsonl", {"step": 0})
    for step in range(task.resumption.step + 1 if task.resumption else 1, NUM_STEPS + 1):
        ranks.step = step
        checkpoints.save(action, step)
        recorder.record_host(step, None)
        for name in ("metrics.jsonl", "timings.jsonl", "prompts.jsonl"):
            recorder.write_row(name, {"step": step, "value": step / 7})
        checkpoints.commit(step, lambda step=step: (RunState(step=step, version=step + 1), []))  # type: ignore[misc]
    checkpoints.close()
    recorder.write_file("lengths.json", {"mean_response_len": 3})


def small_run(plan: Plan, prompts: PromptSets, folder: Path, *, resumes: bool) -> int:
    """The exit code that `rlplan run` would have. Raises: whatever is no message."""
    launch._run_with_fallbacks = play
    try:
        source = find_own_bundle(folder) if resumes else None
        spec = read_bundle(source) if source else execution_spec(plan)
        plan, identity = read_plan(source / "plan.json") if source else plan, describe_identity(spec.job)
        checkpoint = find_checkpoint(folder, identity) if resumes else None
        if checkpoint is not None:
            check_resumable(spec.job, checkpoint, is_async=False)
        with lock_run_folder(folder, is_resumed=resumes):
            task = Task(spec, plan, prompts, None, RewardPool(spec.job), resumption=checkpoint, identity=identity)
            if not resumes:
                task = launch.prepare_run_folder(task, folder, writes_bundle=True)
            launch.run_task(task, folder, lambda event: None)
    except RlplanError as error:
        return error.exit_code
    return 0
