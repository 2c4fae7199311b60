"""A progress bar for work that lasts more than a second: on stderr, in a terminal only, gone when the work is done.

In: how much of the work is done. Out: stderr. Left out: runs, which have a display of their own (progress.py).
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rlplan_cli.render.terminal import stderr

if TYPE_CHECKING:
    from rich.progress import Progress

PATIENCE_S = 1.0
"""What is done sooner needs no bar."""

Listener = Callable[[int, int, str], None]
"""Told how many parts are done, of how many, and what comes now."""


@contextmanager
def waiting(text: str) -> Iterator[Listener]:
    """A bar that appears after a second; it moves to and fro until the listener is told how much there is."""
    told: tuple[int, int | None, str] = (0, None, text)
    bars: list[Progress] = []

    def show() -> None:
        done, total, words = told
        bar = _bar()
        bar.add_task(words, total=total, completed=done)
        bar.tasks[0].start_time = bar.get_time() - PATIENCE_S  # of the work, which began before the bar
        bar.start()
        bars.append(bar)

    def listen(done: int, total: int, now: str) -> None:
        nonlocal told
        told = done, total, f"{text}: {now}"[: stderr.width // 2]
        for bar in bars:
            bar.update(bar.task_ids[0], completed=done, total=total, description=told[2])

    timer = threading.Timer(PATIENCE_S, show)
    timer.daemon = True
    if stderr.is_terminal:
        timer.start()
    try:
        yield listen
    finally:
        timer.cancel()
        if timer.is_alive():
            timer.join()  # it is about to show the bar
        for bar in bars:
            bar.stop()


def _bar() -> "Progress":
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # what is done in a second needs none

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=stderr, transient=True)
