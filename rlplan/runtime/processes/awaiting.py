"""Awaiting: what is async is run to its end in this process's own loop; what is not is left as it is."""

import inspect
from functools import cache
from typing import Any


def awaited(value: Any) -> Any:
    """A value, or what a coroutine gives."""
    return _loop().run_until_complete(value) if inspect.isawaitable(value) else value


@cache
def _loop() -> Any:
    """The loop that serves all calls of a process: a client that a file keeps belongs to its loop."""
    import asyncio  # some 5 MB that most processes need not hold

    return asyncio.new_event_loop()
