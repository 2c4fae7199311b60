"""EngineThread: the one thread of an engine: it runs calls in order, and engine steps in between.

Everything that touches an engine happens in it, so that nothing of the engine's needs a lock, calls are heard while it
generates, and torch keeps one team of threads.
In: functions to call; a `work` function that does a bit of work and says whether there was any. Out: their results.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class EngineThread:
    """See the module docstring. An error in `work` is given to every later caller: the engine is broken by then."""

    def __init__(self, name: str, work: Callable[[], bool]) -> None:
        self._work = work
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def run(self, function: Callable[[], Any]) -> Any:
        """The function's result, called in the thread after what was asked before. In the thread itself: at once."""
        if threading.current_thread() is self._thread:
            return function()
        future: Future[Any] = Future()
        self._calls.put((function, future))
        return future.result()

    def _loop(self) -> None:
        while True:
            is_idle = self.failure is not None or not self._work_once()
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
        """Do one call. After a failure nothing is done any more."""
        try:
            if self.failure is not None:
                raise self.failure
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
