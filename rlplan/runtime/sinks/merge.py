"""Merges a run folder's metrics and timings step by step, while they grow.

In: `metrics.jsonl` and `timings.jsonl`. Out: each step's numbers, once and in order, because loggers reject earlier
steps. Left out: sinks, and polling (follow.py).
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILES = ("metrics.jsonl", "timings.jsonl")

Numbers = dict[str, float]


class Tail:
    """Reader of a growing file's new lines; notices if the file is replaced or truncated."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at, self._inode = 0, -1

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return whether the file was replaced or truncated, and its new rows (then all of them)."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                began_again = self._inode not in (-1, status.st_ino) or status.st_size < self._at
                self._at = 0 if began_again else self._at
                self._inode = status.st_ino
                file.seek(self._at)
                data = file.read()
        except OSError:
            return False, []
        num_complete = data.rfind(b"\n") + 1
        self._at += num_complete
        return began_again, [json.loads(line) for line in data[:num_complete].splitlines()]


class File:
    """The numbers in one file for steps that have not been logged yet.

    newest: the last step in the file. ending: numbers of the run's end (step -1).
    """

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self._forget()

    def _forget(self) -> None:
        self.steps: dict[int, Numbers] = {}
        self.ending: Numbers = {}
        self.newest = -1

    def look(self, after: int) -> None:
        """Read new rows of steps after `after`. A replaced or truncated file is read from its beginning."""
        began_again, rows = self._tail.read()
        if began_again:
            self._forget()
        for row in rows:
            step, numbers = int(row["step"]), pick_numbers(row)
            self.newest = max(self.newest, step)
            if step > after:
                self.steps.setdefault(step, {}).update(numbers)
            elif step < 0:
                self.ending.update(numbers)


class Merge:
    """See the module docstring. after: the step that the run resumes from; steps up to it are not logged again."""

    def __init__(self, folder: Path, after: int = -1) -> None:
        self._files = [File(folder / name) for name in FILES]
        self._last, self._told = after, set[str]()

    def new(self, *, is_over: bool) -> Iterator[tuple[int, Numbers]]:
        """Yield the steps that all files have, or that they have passed; after the run's end, all steps.

        Numbers of the run's end are added to the last step, under names that this step has not used.
        """
        for file in self._files:
            file.look(self._last)
        complete = max(self._known) if is_over else min(file.newest for file in self._files)
        for step in sorted(step for step in self._known if self._last < step <= complete):
            yield self._tell(step)
        if is_over:
            ending = {name: value for file in self._files for name, value in file.ending.items()}
            new = {name: value for name, value in ending.items() if name not in self._told}
            if new:
                yield max(self._last, 0), new

    @property
    def _known(self) -> set[int]:
        # -1, so that there is a largest step before the first one
        return {-1} | {step for file in self._files for step in file.steps}

    def _tell(self, step: int) -> tuple[int, Numbers]:
        numbers = {name: value for file in self._files for name, value in file.steps.pop(step, {}).items()}
        self._last, self._told = step, set(numbers)
        return step, numbers


def pick_numbers(row: dict[str, Any]) -> Numbers:
    return {k: float(v) for k, v in row.items() if k != "step" and isinstance(v, int | float)}
