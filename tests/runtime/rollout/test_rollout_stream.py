"""The stream of rollouts: its bounds hold whatever the order in which the engines finish, replaced groups among them.

The engines' place is taken by a fleet that finishes requests in a random order and tells tokens' versions.
"""

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlplan.dataflow.schedule import AsyncRollouts
from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.runtime.rollout.buffer import ExperienceBuffer
from rlplan.runtime.rollout.experience import Completion, FinishedRequest, RolloutRequest, WeightSpan
from rlplan.runtime.rollout.rollout_stream import RolloutStream, StreamSettings

NUM_PROMPTS, NUM_STEPS = 3, 6


class Engines:
    """Finishes one of the open requests a call; a token is of the version under which it is finished."""

    processes = ("engine/0",)

    def __init__(self, seed: int) -> None:
        self.open: list[tuple[RolloutRequest, int]] = []
        self.version, self.most, self.random = 0, 0, random.Random(seed)
        self.lock = threading.Lock()

    def submit(self, requests: Sequence[RolloutRequest], timeout_s: float) -> None:
        with self.lock:
            self.open += [(request, self.version) for request in requests]

    def collect(self, max_wait_s: float, at_least: int, timeout_s: float) -> tuple[list[FinishedRequest], list[object]]:
        time.sleep(0.0005)
        with self.lock:
            if not self.open:
                return [], []
            request, begun = self.open.pop(self.random.randrange(len(self.open)))
            spans = (WeightSpan(begun, 0, 1), WeightSpan(self.version, 1, 2))
            return [FinishedRequest(request.id, (Completion((1, 2), (-1.0, -1.0), "stop", spans),))], []

    @contextmanager
    def pause(self, timeout_s: float) -> Iterator[None]:
        yield
        with self.lock:
            self.version += 1


def request(number: int) -> RolloutRequest:
    return RolloutRequest(f"generate/{number}", (1,), 1, 1.0, number, 2)


@pytest.mark.parametrize("max_staleness", [1, 2])
@pytest.mark.parametrize("refills", [0, 1])
@pytest.mark.parametrize("limits", [{}, {"capacity": NUM_PROMPTS}, {"max_in_memory": 1}])
@pytest.mark.parametrize("seed", range(3))
def test_every_step_gets_its_groups_and_none_is_too_old(
    max_staleness: int, refills: int, limits: dict[str, int], seed: int, tmp_path: Path
) -> None:
    engines, draw = Engines(seed), random.Random(seed)
    buffer = ExperienceBuffer(max_staleness, folder=tmp_path, **limits)
    settings = StreamSettings(NUM_PROMPTS, NUM_STEPS, scale_seconds(20.0), can_replace=refills > 0)
    stream = RolloutStream(engines, request, AsyncRollouts("generate", max_staleness, True), settings, buffer)  # type: ignore[arg-type]
    running = threading.Thread(target=stream.run)
    running.start()
    taken: list[int] = []
    for step in range(1, NUM_STEPS + 1):
        groups = stream.take(NUM_PROMPTS)
        for _ in range(refills):
            missing = draw.randrange(NUM_PROMPTS + 1)
            stream.replace(missing)
            groups += stream.take(missing)
        if step == NUM_STEPS:
            stream.finish()
        ages = [step - 1 - span.version for _, done in groups for each in done.completions for span in each.spans]
        assert max(ages) <= max_staleness
        taken += [number for number, _ in groups]
        with stream.pause_for_sync():
            pass
    running.join(scale_seconds(10))
    assert not running.is_alive()
    assert sorted(taken) == list(range(len(taken))), "no prompt is skipped or taken twice"
    assert len(buffer) == 0
    assert engines.open == []


@pytest.mark.parametrize("refills", [0, 1])
def test_a_run_that_stops_early_ends_what_is_under_way_and_begins_nothing_more(refills: int, tmp_path: Path) -> None:
    engines, buffer = Engines(0), ExperienceBuffer(2, folder=tmp_path)
    settings = StreamSettings(NUM_PROMPTS, 1000, scale_seconds(20.0), can_replace=refills > 0)
    stream = RolloutStream(engines, request, AsyncRollouts("generate", 2, True), settings, buffer)  # type: ignore[arg-type]
    running = threading.Thread(target=stream.run)
    running.start()
    for _ in range(2):
        stream.take(NUM_PROMPTS)
        with stream.pause_for_sync():
            pass
    stream.stop_after(2)
    running.join(scale_seconds(10))
    assert not running.is_alive()
    assert engines.open == []
    assert stream.state()[0].again == ()
