"""EngineThread: the single thread of an engine, which runs calls in order and engine steps in between.

Everything that touches an engine runs in this thread. So the engine needs no lock, calls are answered while it
generates, and torch keeps one pool of threads.
In: functions to call; a `work` function that takes one engine step and returns whether there was one. Out: results.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class EngineThread:
    """See the module docstring. An error in `work` is raised to every later caller: the engine is broken by then."""

    def __init__(self, name: str, work: Callable[[], bool]) -> None:
        self._work = work
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def run(self, function: Callable[[], Any]) -> Any:
        """Call a function in the thread after earlier calls, or at once inside the thread; return its result."""
        if threading.current_thread() is self._thread:
            return function()
        future: Future[Any] = Future()
        self._calls.put((function, future))
        return future.result()

    def _loop(self) -> None:
        while True:
            is_idle = self.failure is not None or not self._work_once()
            # Answer all waiting calls before the next step; without work, block until a call arrives.
            while is_idle or not self._calls.empty():
                self._answer(*self._calls.get())
                is_idle = False

    def _work_once(self) -> bool:
        try:
            return self._work()
        except BaseException as error:
            self.failure = error
            return False

    def _answer(self, function: Callable[[], Any], future: "Future[Any]") -> None:
        """Run one call and set its result. After a failure, every call raises that failure."""
        try:
            if self.failure is not None:
                raise self.failure
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
