"""A progress bar for work that takes more than a second. It appears on stderr, in a terminal only, and is transient.

In: how much of the work is done. Out: stderr. Left out: runs, which have a display of their own (running/watching.py).
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rlplan_cli.render.terminal import stderr

if TYPE_CHECKING:
    from rich.progress import Progress

PATIENCE_S = 1.0
"""Seconds before the bar appears."""

Listener = Callable[[int, int, str], None]
"""Takes the number of finished parts, the number of all parts, and the name of the current one."""


@contextmanager
def waiting(text: str) -> Iterator[Listener]:
    """Show a bar after a second. It pulses until the listener gets the total."""
    progress: tuple[int, int | None, str] = (0, None, text)
    bars: list[Progress] = []

    def show() -> None:
        done, total, words = progress
        bar = _create_bar()
        bar.add_task(words, total=total, completed=done)
        bar.tasks[0].start_time = bar.get_time() - PATIENCE_S  # the work began before the bar
        bar.start()
        bars.append(bar)

    def report(done: int, total: int, now: str) -> None:
        nonlocal progress
        progress = done, total, f"{text}: {now}"[: stderr.width // 2]
        for bar in bars:
            bar.update(bar.task_ids[0], completed=done, total=total, description=progress[2])

    timer = threading.Timer(PATIENCE_S, show)
    timer.daemon = True
    if stderr.is_terminal:
        timer.start()
    try:
        yield report
    finally:
        timer.cancel()
        if timer.is_alive():
            timer.join()  # the timer is just starting the bar, which must be stopped below
        for bar in bars:
            bar.stop()


def _create_bar() -> "Progress":
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # short work needs no import

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=stderr, transient=True)
