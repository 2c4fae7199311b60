"""RequestTracker: the samples that an engine is still generating, and those that have finished.

In: requests, and finished samples one by one. Out: complete requests, in the outbox of their caller.
Left out: how samples are generated (rollout_engine.py).
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlplan.runtime.rollout.experience import Completion, FinishedRequest, RolloutRequest


class Outbox:
    """A queue of finished requests, filled by one thread and emptied by another."""

    def __init__(self) -> None:
        self._finished: list[FinishedRequest] = []
        self._changed = threading.Condition()
        self._failure: BaseException | None = None

    def put(self, request: FinishedRequest) -> None:
        with self._changed:
            self._finished.append(request)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Let `take` raise this error, because no further request will finish."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def take(self, at_least: int, max_wait_s: float | None) -> list[FinishedRequest]:
        """Return all finished requests once there are `at_least` many or `max_wait_s` has passed."""
        deadline = None if max_wait_s is None else time.monotonic() + max_wait_s
        with self._changed:
            while len(self._finished) < at_least:
                if self._failure is not None:
                    raise self._failure
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
            taken, self._finished = self._finished, []
            return taken


@dataclass
class _Open:
    request: RolloutRequest
    outbox: Outbox
    samples: dict[int, Completion] = field(default_factory=dict)


class RequestTracker:
    """See the module docstring. Not thread-safe. samples: receives each sample as it finishes; None if not needed."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self.samples: Outbox | None = None

    @property
    def num_open(self) -> int:
        return len(self._open)

    def enter(self, requests: Sequence[RolloutRequest], outbox: Outbox) -> list[tuple[str, int]]:
        """Register new requests; return (request id, index) of every sample, group by group."""
        for request in requests:
            assert request.id not in self._open, f"request {request.id} is already being worked on"
            self._open[request.id] = _Open(request, outbox)
        return [(request.id, index) for request in requests for index in range(request.num_samples)]

    def finish(self, request_id: str, index: int, completion: Completion) -> None:
        """Record one sample; put its request into the outbox when this was the last sample."""
        entry = self._open[request_id]
        entry.samples[index] = completion
        if self.samples is not None:
            self.samples.put(FinishedRequest(f"{request_id}/{index}", (completion,)))
        if len(entry.samples) == entry.request.num_samples:
            del self._open[request_id]
            entry.outbox.put(FinishedRequest(request_id, tuple(entry.samples[i] for i in sorted(entry.samples))))

    def drop(self, request_ids: Sequence[str]) -> list[tuple[str, int]]:
        """Drop requests and fail their waiting callers; return (id, index) of the samples that had not finished."""
        unfinished = []
        for entry in [self._open.pop(name) for name in request_ids if name in self._open]:
            name = entry.request.id
            unfinished += [(name, index) for index in range(entry.request.num_samples) if index not in entry.samples]
            entry.outbox.fail(RuntimeError(f"request {name} was dropped"))
        return unfinished

    def fail(self, error: BaseException) -> None:
        """Raise this error in all waiting callers and drop their requests."""
        for entry in self._open.values():
            entry.outbox.fail(error)
        self._open.clear()
