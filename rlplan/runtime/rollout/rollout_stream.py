"""RolloutStream: async generation, which runs ahead of the steps within the staleness bound.

In: requests of the n-th prompt, and AsyncRollouts. Out: the oldest complete groups, and measurements.
Left out: rewards and training (collector.py). Which groups may start and which a step waits for is decided by
simulate/staleness.py, so that a run does what was simulated.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rlplan.dataflow.schedule import AsyncRollouts
from rlplan.errors import RunError
from rlplan.runtime.checkpoints.manifest import StreamState
from rlplan.runtime.environments.conversations import MultiTurnRollouts
from rlplan.runtime.measure.memory_meter import Measurement
from rlplan.runtime.rollout.buffer import BufferedGroup, ExperienceBuffer
from rlplan.runtime.rollout.experience import FinishedRequest, RolloutRequest
from rlplan.runtime.rollout.fleet import Fleet
from rlplan.simulate.staleness import must_wait, num_allowed

COLLECT_S = 0.05
"""Seconds that an engine waits for finished requests before it returns none; also the period of new submissions."""


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """Settings of a stream."""

    num_prompts: int
    """Prompts per step."""

    num_steps: int
    """Steps of the run."""

    deadline_s: float
    """Time limit of each call and each wait."""

    can_replace: bool = False
    """Whether dynamic sampling may request more prompts than the steps take."""


class RolloutStream:
    """See the module docstring. One thread calls `run`, another one `take` and `pause_for_sync`.

    watch: makes a call to the engines, and repeats it after a lost engine was restarted.
    """

    def __init__(
        self,
        fleet: Fleet | MultiTurnRollouts,
        request_of: Callable[[int], RolloutRequest],
        async_rollouts: AsyncRollouts,
        settings: StreamSettings,
        buffer: ExperienceBuffer,
    ) -> None:
        self.fleet, self.request_of, self.async_rollouts, self.settings = fleet, request_of, async_rollouts, settings
        self.version = 0
        self._num_begun = self._num_replaced = 0
        self._again: list[int] = []
        self._open: dict[str, tuple[int, int]] = {}
        self.buffer = buffer
        self._measurements: list[Measurement] = []
        self._is_held = self._is_closed = False
        self._is_finished = not settings.can_replace
        self.watch: Callable[[Callable[[], Any]], Any] = lambda call: call()
        self._changed = threading.Condition()
        self._submitting = threading.Lock()

    def run(self) -> None:
        """Submit and collect requests until all steps' groups are complete, or the stream is closed."""
        while True:
            self._submit_next()
            with self._changed:
                if self._is_closed or (self._has_begun_all and not self._open and self._is_finished):
                    return
                if not self._open:  # wait for replaced groups, a new version or free capacity
                    self._changed.wait(COLLECT_S)
                    continue
            at_least = max(1, self.settings.num_prompts // 4)  # fewer remote calls, still well below a step's groups
            collect = partial(self.fleet.collect, COLLECT_S, at_least, self.settings.deadline_s)
            collected, measurements = self.watch(collect)
            with self._changed:
                for finished in collected:
                    number, version = self._open.pop(finished.id)
                    self.buffer.add(BufferedGroup(number, version, finished))
                self._measurements += measurements
                self._changed.notify_all()

    def take(self, count: int) -> list[tuple[int, FinishedRequest]]:
        """Take the `count` oldest complete groups, after waiting for running ones that would become too stale."""
        self._wait(lambda: self._is_ready(count), f"{count} complete groups")
        with self._changed:
            taken = [(group.number, group.finished) for group in self.buffer.take(count)]
            self._changed.notify_all()
            return taken

    def replace(self, num_groups: int) -> None:
        """Generate `num_groups` further groups, which replace taken groups with zero variance."""
        with self._changed:
            self._num_replaced += num_groups
            self._changed.notify_all()

    def finish(self) -> None:
        """Declare that no more groups will be replaced."""
        with self._changed:
            self._is_finished = True
            self._changed.notify_all()

    def stop_after(self, step: int) -> None:
        """Make this the last step; no more groups are started."""
        with self._changed:
            self.settings = replace(self.settings, num_steps=min(step, self.settings.num_steps))
            self._again, self._is_finished = [], True
            self._changed.notify_all()

    @property
    def _num_wanted(self) -> int:
        return self.settings.num_prompts * self.settings.num_steps + self._num_replaced

    @property
    def _has_begun_all(self) -> bool:
        return not self._again and self._num_begun >= self._num_wanted

    def state(self) -> tuple[StreamState, dict[str, Any]]:
        """State for a resumed run: the prompts to generate again, and the buffer with the complete groups."""
        with self._changed:
            again = sorted(number for number, _ in self._open.values())
            state = StreamState(
                num_begun=self._num_begun, num_replaced=self._num_replaced, again=(*self._again, *again)
            )
            return state, self.buffer.state()

    def start_after(self, step: int, num_replaced: int) -> None:
        """Continue after `step` synchronous steps of an earlier run, in which `num_replaced` groups were replaced."""
        self.version, self._num_begun = step, step * self.settings.num_prompts + num_replaced
        self._num_replaced = num_replaced

    def restore(self, state: StreamState, buffer: dict[str, Any], version: int) -> None:
        """Continue an earlier run after `version` weight syncs. Groups that were running are generated again.

        Buffered groups that would exceed this run's staleness bound, which may be tighter, are generated again too.
        """
        self.version, self._num_begun, self._num_replaced = version, state.num_begun, state.num_replaced
        self.buffer.restore(buffer)
        late = self.buffer.evict_late(version, self.settings.num_prompts, state.again)
        self._again = sorted([*state.again, *late])

    def take_measurements(self) -> list[Measurement]:
        """Return the engines' measurements since the last call."""
        with self._changed:
            taken, self._measurements = self._measurements, []
            return taken

    @contextmanager
    def pause_for_sync(self) -> Iterator[None]:
        """Context for a weight sync: engines are paused and no group starts; the version increases at the end.

        Unless rollouts may be interrupted, it first waits until all running groups have finished.
        """
        with self._changed:
            self._is_held = True
        with self._submitting:  # wait until a submission in progress has arrived
            pass
        if not self.async_rollouts.interrupts:
            self._wait(lambda: not self._open, "the end of running groups")
        with self.fleet.pause(self.settings.deadline_s):
            yield
        with self._changed:
            self.version += 1
            self._is_held = False
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _submit_next(self) -> None:
        with self._submitting:
            with self._changed:
                requests = [] if self._is_held else self._next_requests()
            if requests:
                self.watch(lambda: self.fleet.submit(requests, self.settings.deadline_s))

    def _next_requests(self) -> Sequence[RolloutRequest]:
        settings = self.settings
        allowed = num_allowed(self.version, self.async_rollouts.max_staleness, settings.num_prompts)
        last = min(allowed + self._num_replaced, self._num_wanted)
        requests: list[RolloutRequest] = []
        while (self._again or self._num_begun < last) and not self.buffer.would_be_full(len(self._open)):
            number = self._again.pop(0) if self._again else self._num_begun
            request = self.request_of(number)
            self._open[request.id] = (number, self.version)
            requests.append(request)
            self._num_begun = max(self._num_begun, number + 1)
        return requests

    def _is_ready(self, count: int) -> bool:
        begun = [*(version for _, version in self._open.values()), *self.buffer.versions_after(count)]
        late = must_wait(begun, self.version, self.async_rollouts.max_staleness, self.settings.num_prompts)
        return len(self.buffer) >= count and not late

    def _wait(self, is_over: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self.settings.deadline_s
        with self._changed:
            while not is_over():
                if self._is_closed or not self._changed.wait(min(1.0, max(0.0, deadline - time.monotonic()))):
                    self._raise_timeout(deadline, what)

    def _raise_timeout(self, deadline: float, what: str) -> None:
        if self._is_closed or time.monotonic() > deadline:
            raise RunError(
                f"waited in vain for {what}" + ("" if self._is_closed else f" ({self.settings.deadline_s:.0f} s)"),
                where=", ".join(self.fleet.processes),
                rule="async generation keeps up with the steps; every wait has a deadline (limits.action_timeout_s)",
                way_out="read the engine's log; raise the limit if rollouts really take that long",
            )
