"""A weight sync that has to be done again because an engine was lost in it: the version counts once."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlplan.dataflow.schedule import AsyncRollouts
from rlplan.runtime.driver.steps import ActionRunner
from rlplan.runtime.fault_tolerance.supervision import LostProcessError
from rlplan.runtime.rollout.buffer import ExperienceBuffer
from rlplan.runtime.rollout.rollout_stream import RolloutStream, StreamSettings
from tests.runtime.rollout.test_rollout_stream import request


class LostOnResume:
    """Engines of which one is lost, once, when it is to go on after new weights."""

    processes = ("engine/0",)
    num_pauses = 0

    @contextmanager
    def pause(self, timeout_s: float) -> Iterator[None]:
        yield
        self.num_pauses += 1
        if self.num_pauses == 1:
            raise LostProcessError("engine/0 is gone, in resume", process="engine/0")


def test_an_engine_that_is_lost_with_its_new_weights_does_not_make_two_versions_of_one(tmp_path: Path) -> None:
    settings, asynchronous = StreamSettings(1, 3, 1.0), AsyncRollouts("generate", 1, True)
    stream = RolloutStream(LostOnResume(), request, asynchronous, settings, ExperienceBuffer(1, folder=tmp_path))  # type: ignore[arg-type]
    versions = [0]
    runner = ActionRunner.__new__(ActionRunner)
    runner.stream, runner._handed_over = stream, None
    runner.job = SimpleNamespace(controls=SimpleNamespace(skip_sync_after_step=0))  # type: ignore[assignment]
    runner.recovery = SimpleNamespace(trainers=threading.Lock())  # type: ignore[assignment]
    sync = SimpleNamespace(sync=lambda action: versions.append(versions[-1] + 1) or [], verified=None)
    runner.weight_sync, runner.recorder = sync, SimpleNamespace(facts={})  # type: ignore[assignment]

    with pytest.raises(LostProcessError):
        runner._sync_weights(None, 1)  # type: ignore[arg-type]
    runner._sync_weights(None, 1)  # type: ignore[arg-type]
    assert (versions[-1], stream.version) == (1, 1)
    runner._sync_weights(None, 2)  # type: ignore[arg-type]
    assert (versions[-1], stream.version) == (2, 2)
