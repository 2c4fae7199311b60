"""The thread that an engine lives in."""

import threading

import pytest

from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.runtime.workers.engine.engine_thread import EngineThread


def test_calls_are_heard_while_it_works_and_run_in_its_thread() -> None:
    done: list[int] = []
    is_enough = threading.Event()

    def work() -> bool:
        done.append(len(done))
        if len(done) > 50:
            is_enough.set()
        return not is_enough.is_set()

    thread = EngineThread("test", work)
    names = {thread.run(lambda: threading.current_thread().name) for _ in range(3)}
    assert names == {"test"}
    assert is_enough.wait(scale_seconds(10))


def test_a_call_that_fails_fails_its_caller_alone() -> None:
    thread = EngineThread("test", lambda: False)
    with pytest.raises(ZeroDivisionError):
        thread.run(lambda: 1 // 0)
    assert thread.run(lambda: 3) == 3


def test_after_work_has_failed_every_caller_hears_of_it() -> None:
    may_work = threading.Event()

    def work() -> bool:
        if may_work.is_set():
            raise ValueError("broken")
        return False

    thread = EngineThread("test", work)
    thread.run(may_work.set)
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            thread.run(lambda: 1)
