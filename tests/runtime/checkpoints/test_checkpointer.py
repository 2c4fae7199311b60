"""A checkpoint that is put together in a thread, where its writer is lost or its run begins again."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlplan.runtime.checkpoints import checkpointer
from rlplan.runtime.checkpoints.checkpointer import Checkpointer
from rlplan.runtime.checkpoints.folder import CheckpointFolder
from rlplan.runtime.checkpoints.manifest import RunState
from rlplan.runtime.driver.steps import ActionRunner
from rlplan.vocabulary import ActionKind, Role
from tests.waiting import wait_until

ACTION = SimpleNamespace(role=Role.POLICY, processes=("policy_trainer/0",), kind=ActionKind.SAVE_STATES)


class Ranks:
    """A trainer that never writes its file."""

    def __init__(self) -> None:
        self.gone: list[str] = []
        self.paths: list[Path] = []

    def everywhere(self, action, call):  # type: ignore[no-untyped-def]
        self.paths.append(Path(call(0)[1]))
        return [], []

    def deadline_s(self, action: object) -> float:
        return 5.0

    def lost(self) -> list[str]:
        return self.gone


def begun(folder: Path, ranks: Ranks, alarms: list[tuple[int, str, str]]) -> Checkpointer:
    """A checkpointer in whose thread step 3 waits for the trainer's file."""
    job = SimpleNamespace(checkpoints=SimpleNamespace(keep_last=2), limits=SimpleNamespace(action_timeout_s=600.0))
    spec = SimpleNamespace(job=job, schedule=SimpleNamespace(step=()))
    recorder = SimpleNamespace(folder=folder, write_alarm=lambda *message: alarms.append(message))
    checkpoints = Checkpointer(spec, ranks, recorder)  # type: ignore[arg-type]
    checkpoints.save(ACTION, 3)  # type: ignore[arg-type]
    checkpoints.commit(3, lambda: (RunState(step=3, version=1), []))
    return checkpoints


def test_a_checkpoint_whose_writer_is_gone_is_given_up_long_before_the_deadline(tmp_path: Path) -> None:
    ranks, alarms = Ranks(), list[tuple[int, str, str]]()
    checkpoints = begun(tmp_path, ranks, alarms)
    checkpoints.settle(0.2)
    assert alarms == []
    ranks.gone = ["policy_trainer/0"]
    wait_until(lambda: alarms, 10)
    assert alarms == [(3, "checkpoint", "no checkpoint of step 3: policy_trainer/0 is gone")]
    assert not ranks.paths[0].parent.exists()


def test_a_checkpoint_that_was_given_up_takes_nothing_from_the_run_that_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where its thread wakes up after the other run has begun the same step."""
    ranks, alarms = Ranks(), list[tuple[int, str, str]]()
    with monkeypatch.context() as slow:
        slow.setattr(checkpointer, "POLL_S", 2.0)
        slow.setattr(checkpointer, "scale_seconds", lambda seconds: 0.0)
        before = begun(tmp_path, ranks, alarms)
        thread = before._thread
        time.sleep(0.2)  # it waits for the file by now
        before.close()
    assert thread is not None
    assert thread.is_alive()
    staged = tmp_path / "checkpoints" / ".step-000003"
    CheckpointFolder(tmp_path, keep_last=2).stage(3)
    receipt = staged / ranks.paths[0].with_suffix(".receipt").name
    receipt.write_text('{"error": "of the other run"}')
    thread.join(10)
    assert not thread.is_alive()
    assert (receipt.read_text(), alarms) == ('{"error": "of the other run"}', [])


def test_a_runner_that_is_closed_ends_the_checkpoint_that_it_writes() -> None:
    closed: list[str] = []
    runner = ActionRunner.__new__(ActionRunner)
    for name in ("checkpoints", "collector", "weight_sync"):
        setattr(runner, name, SimpleNamespace(close=lambda name=name: closed.append(name)))
    runner.close()
    assert closed == ["checkpoints", "collector", "weight_sync"]
