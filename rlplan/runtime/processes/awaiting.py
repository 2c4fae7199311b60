"""Calls of functions that may be async, from synchronous code."""

import inspect
from functools import cache
from typing import Any


def run_awaitable(value: Any) -> Any:
    """The value itself, or the result of an awaitable."""
    return _get_loop().run_until_complete(value) if inspect.isawaitable(value) else value


@cache
def _get_loop() -> Any:
    """The event loop for all calls of a process: an async client in a user's file is bound to its first loop."""
    import asyncio  # about 5 MB, which most processes do not need

    return asyncio.new_event_loop()
