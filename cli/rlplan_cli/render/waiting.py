"""A progress bar for work that lasts more than a second: on stderr, in a terminal only, gone when the work is done.

In: how much of the work is done. Out: stderr. Left out: runs, which have a display of their own (progress.py).
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from rlplan_cli.render.terminal import stderr

PATIENCE_S = 1.0
"""What is done sooner needs no bar."""

Listener = Callable[[int, int, str], None]
"""Told how many parts are done, of how many, and what comes now."""


@contextmanager
def waiting(text: str) -> Iterator[Listener]:
    """A bar that appears after a second; it moves to and fro until the listener is told how much there is."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal)
    task = progress.add_task(text, total=None)
    timer = threading.Timer(PATIENCE_S, progress.start)
    timer.daemon = True
    timer.start()

    def listen(done: int, total: int, now: str) -> None:
        progress.update(task, completed=done, total=total, description=f"{text}: {now}"[: stderr.width // 2])

    try:
        yield listen
    finally:
        timer.cancel()
        progress.stop()
