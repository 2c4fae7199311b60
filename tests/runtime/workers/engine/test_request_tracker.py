"""Requests under way, and those who wait for them."""

import threading

import pytest

from rlplan.runtime.rollout.experience import Completion, RolloutRequest
from rlplan.runtime.workers.engine.request_tracker import Outbox, RequestTracker


def request(name: str, num_samples: int) -> RolloutRequest:
    return RolloutRequest(name, (1, 2), num_samples, 1.0, 0, 8)


def completion(token: int) -> Completion:
    return Completion((token,), (-0.5,), "stop")


def test_a_request_comes_out_once_its_last_sample_has_ended_in_the_samples_order() -> None:
    tracker, outbox = RequestTracker(), Outbox()
    assert tracker.enter([request("a", 2), request("b", 1)], outbox) == [("a", 0), ("a", 1), ("b", 0)]
    tracker.finish("a", 1, completion(11))
    assert outbox.take(1, 0.0) == []
    tracker.finish("b", 0, completion(20))
    tracker.finish("a", 0, completion(10))
    finished = outbox.take(2, 0.0)
    assert [f.id for f in finished] == ["b", "a"]
    assert [c.tokens for c in finished[1].completions] == [(10,), (11,)]
    assert tracker.num_open == 0


def test_each_waits_for_its_own_requests() -> None:
    tracker, first, two = RequestTracker(), Outbox(), Outbox()
    tracker.enter([request("a", 1)], first)
    tracker.enter([request("b", 1)], two)
    tracker.finish("b", 0, completion(1))
    assert [f.id for f in two.take(1, 0.0)] == ["b"]
    assert first.take(1, 0.0) == []


def test_waiting_callers_are_told_when_the_engine_has_failed() -> None:
    tracker, outbox = RequestTracker(), Outbox()
    tracker.enter([request("a", 1)], outbox)
    timer = threading.Timer(0.05, lambda: tracker.fail(RuntimeError("the engine is broken")))
    timer.start()
    with pytest.raises(RuntimeError, match="broken"):
        outbox.take(1, 10.0)


def test_two_open_requests_never_share_a_name() -> None:
    tracker = RequestTracker()
    tracker.enter([request("a", 1)], Outbox())
    with pytest.raises(AssertionError, match="already"):
        tracker.enter([request("a", 1)], Outbox())
