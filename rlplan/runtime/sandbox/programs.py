"""What goes into a sandbox and what comes out, as plain values; and what all sandboxes have in common.

In: a program's source, and cases: what it reads, or a call of one of its functions. Out: what it printed or gave back.
Never in: what would have been right. The comparison is done outside (rewards/code_executor.py).
"""

import os
import queue
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rlplan.runtime.processes.machine_speed import scaled
from rlplan.units import MIB

CLOSE_S = 5.0
"""For programs at work to be ended; scaled."""


@dataclass(frozen=True, slots=True)
class Case:
    stdin: bytes = b""
    """What it reads, as a program."""

    call: str | None = None
    """An expression to evaluate, the program being a module; None runs it as a program."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a whole sandbox, where a field does not say otherwise.

    CPU of all processes together: one core's worth (tree_limits.py), or cpu_s where that cannot be had.
    """

    case_s: float = 4.0
    """Of each case by the clock, from when its process is up; and of CPU of each of its processes."""

    total_s: float = 30.0
    """By the clock, from when the first case is up."""

    memory_bytes: int = 512 * MIB
    """Of all processes and files together."""

    num_processes: int = 32
    output_bytes: int = MIB
    """Printed by one case."""

    total_output_bytes: int = 8 * MIB
    """Printed by all cases, for the driver holds it."""

    file_bytes: int = 16 * MIB
    disk_bytes: int = 32 * MIB
    """Of all files together."""

    def cpu_s(self, num_cases: int) -> float:
        return min(self.total_s, num_cases * self.case_s)


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Program:
    """A source and its cases, which each start it anew in one sandbox."""

    source: str
    cases: tuple[Case, ...]
    limits: Limits = DEFAULT_LIMITS


@dataclass(frozen=True, slots=True)
class CaseResult:
    status: str
    """`ok`, `error`, `timeout`, `output` (too much of it), `killed` or `missing`."""

    output: bytes = b""
    """What it printed, or the value that it gave back, encoded (values.py)."""

    detail: str = ""
    """The error's last line."""


@dataclass(frozen=True, slots=True)
class Report:
    status: str
    """`done`, or why some cases have no result: `timeout`, `memory`, `killed` (the program's doing), or `broken` (the
    sandbox's own failure or the host's, that no program brings about).
    """

    cases: tuple[CaseResult, ...]
    detail: str = ""
    """What happened; empty where the status says it all."""

    seconds: float = 0.0


class Sandbox(ABC):
    """One way to run untrusted programs, some at a time. name: as `rlplan run --sandbox` has it."""

    name: str
    cannot_hold: str
    """What gets past it, in words."""

    def __init__(self, num_slots: int, limits: Limits) -> None:
        """num_slots: programs at the same time."""
        self.limits = limits
        self.stop, self._keep = os.pipe()
        """A descriptor that hangs up when the sandbox is closed, which ends what runs."""
        self._is_closed = False
        self._num_slots, self._slots = num_slots, queue.SimpleQueue[int]()
        for slot in range(num_slots):
            self._slots.put(slot)

    def run(self, program: Program, *, stops_early: bool = False) -> Report:
        """Run a program to its end or its limits. stops_early: after the first case that does not end well.

        Safe to call from several threads; raises nothing of a program's.
        """
        slot = self._slots.get()
        try:
            if self._is_closed:
                return report_without_results(program, "broken", "it was closed")
            return self.run_in_slot(slot, program, stops_early=stops_early)
        finally:
            self._slots.put(slot)

    def close(self) -> None:
        """End what runs, and leave nothing behind."""
        if self._is_closed:
            return
        self._is_closed = True
        os.close(self._keep)
        with suppress(queue.Empty):
            for _ in range(self._num_slots):
                self._slots.get(timeout=scaled(CLOSE_S))
        self._slots.put(0)  # for callers that come after it was closed: they get a report that says so
        os.close(self.stop)
        self.clean()

    @abstractmethod
    def run_in_slot(self, slot: int, program: Program, *, stops_early: bool) -> Report:
        """Run a program in a slot that no other program has at the same time."""

    @abstractmethod
    def clean(self) -> None:
        """Remove what was kept between runs; no program runs any more."""


def report_without_results(program: Program, status: str, detail: str = "", seconds: float = 0.0) -> Report:
    """A report in which no case has a result."""
    return Report(status, tuple(CaseResult("missing") for _ in program.cases), detail, seconds)


Plain = Any
"""A value of Python's own types: None, bool, int, float, complex, str, bytes, list, tuple, set, dict."""
