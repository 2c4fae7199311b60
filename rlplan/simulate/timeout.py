"""Timeout: SimPy's Timeout without what a simulated run does not need; a million of them are made.

In: a delay in seconds, what to call. Out: an event. Left out: checks; callbacks of others (the list may be shared).
"""

from collections.abc import Callable
from typing import Any

from simpy import Environment, Event
from simpy.events import NORMAL


class Timeout(Event):
    """Happens after `delay_s`, and calls `callbacks` then. Nothing may be added to these.

    >>> env, told = Environment(), []
    >>> _ = Timeout(env, 2.5, [lambda event: told.append((env.now, event.value))], "value")
    >>> env.run()
    >>> told
    [(2.5, 'value')]
    """

    def __init__(
        self, env: Environment, delay_s: float, callbacks: list[Callable[[Event], None]], value: Any = None
    ) -> None:
        self.env, self.callbacks, self._value, self._ok = env, callbacks, value, True
        env.schedule(self, NORMAL, delay_s)
