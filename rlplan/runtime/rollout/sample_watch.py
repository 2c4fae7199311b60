"""SampleWatch: hears of every sample as it ends, while its request and its step are still being generated.

In: a fleet. Out: finished samples, to a listener, in a thread of their own. An engine that is lost ends the watch and
nothing else: whoever generates says so, and what was not heard is judged later.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlplan.errors import RlplanError
from rlplan.runtime.rollout.experience import FinishedRequest
from rlplan.runtime.rollout.fleet import Fleet

WAIT_S = 0.1
"""How long an engine waits for a sample before it answers with none."""


class SampleWatch:
    """See the module docstring. heard: called with a request of one sample, whose id ends with the sample's index."""

    def __init__(self, fleet: Fleet, heard: Callable[[FinishedRequest], None], timeout_s: float) -> None:
        self.fleet, self.heard, self.timeout_s = fleet, heard, timeout_s

    @contextmanager
    def watching(self) -> Iterator[None]:
        is_over = threading.Event()
        thread = threading.Thread(target=self._listen, args=(is_over,), name="samples", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join(self.timeout_s)

    def _listen(self, is_over: threading.Event) -> None:
        while not is_over.is_set():
            try:
                samples = self.fleet.finished_samples(WAIT_S, self.timeout_s)
            except RlplanError:
                return
            for sample in samples:
                self.heard(sample)
