"""Programs and reports as plain values, and the base class of all sandboxes.

In: a program's source and its cases: standard input, or a call of one of its functions. Out: printed text or values.
The expected results never enter a sandbox; rewards/code_executor.py compares outside.
"""

import os
import queue
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.units import MIB

CLOSE_S = 5.0
"""Seconds for running programs to end when a sandbox is closed; scaled by machine speed."""


@dataclass(frozen=True, slots=True)
class Case:
    stdin: bytes = b""
    """Standard input of the program."""

    call: str | None = None
    """Expression to evaluate with the program loaded as a module; None runs it as a script."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one sandbox.

    A control group gives all processes together one core of CPU (tree_limits.py). Without one, cpu_s limits their sum.
    """

    case_s: float = 4.0
    """Wall-clock limit of one case once its process is up, and CPU limit of each of its processes."""

    total_s: float = 30.0
    """Wall-clock limit of all cases, counted from when the first one is up."""

    memory_bytes: int = 512 * MIB
    """Memory of all processes and files in memory."""

    num_processes: int = 32
    output_bytes: int = MIB
    """Output of one case."""

    total_output_bytes: int = 8 * MIB
    """Output of all cases, which the driver holds in memory."""

    file_bytes: int = 16 * MIB
    """Size of one file."""

    disk_bytes: int = 32 * MIB
    """Size of all files together."""

    def cpu_s(self, num_cases: int) -> float:
        """CPU seconds that the process tree may use for this number of cases."""
        return min(self.total_s, num_cases * self.case_s)


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Program:
    """A source and its cases. All cases run in one sandbox, and each starts the program again."""

    source: str
    cases: tuple[Case, ...]
    limits: Limits = DEFAULT_LIMITS


@dataclass(frozen=True, slots=True)
class CaseResult:
    status: str
    """`ok`, `error`, `timeout`, `output` (too much of it), `killed` or `missing`."""

    output: bytes = b""
    """Printed text, or the encoded return value (values.py)."""

    detail: str = ""
    """Last line of the error."""


@dataclass(frozen=True, slots=True)
class Report:
    status: str
    """`done`, or why some cases have no result.

    The program caused `timeout`, `memory` and `killed`. `broken` is a failure of the sandbox or the host.
    """

    cases: tuple[CaseResult, ...]
    detail: str = ""
    """Cause in words; empty when the status is sufficient."""

    seconds: float = 0.0
    """Wall-clock time of the run."""


class Sandbox(ABC):
    """Base class of the sandboxes, which run untrusted programs in a fixed number of slots."""

    name: str
    """Its name in `rlplan run --sandbox`."""

    cannot_hold: str
    """Attacks that it does not stop, in words."""

    def __init__(self, num_slots: int, limits: Limits) -> None:
        """num_slots: programs that may run at the same time."""
        self.limits = limits
        self.stop, self._stop_writer = os.pipe()
        """A descriptor that hangs up when the sandbox is closed; each running program is then ended."""
        self._is_closed = False
        self._num_slots, self._slots = num_slots, queue.SimpleQueue[int]()
        for slot in range(num_slots):
            self._slots.put(slot)

    def run(self, program: Program, *, stops_early: bool = False) -> Report:
        """Run a program to its end or its limits. stops_early: stop after the first case that fails.

        Safe to call from several threads. Errors of the program are reported, never raised.
        """
        slot = self._slots.get()
        try:
            if self._is_closed:
                return report_without_results(program, "broken", "it was closed")
            return self.run_in_slot(slot, program, stops_early=stops_early)
        finally:
            self._slots.put(slot)

    def close(self) -> None:
        """End all running programs and remove everything that the sandbox created."""
        if self._is_closed:
            return
        self._is_closed = True
        os.close(self._stop_writer)
        with suppress(queue.Empty):
            for _ in range(self._num_slots):
                self._slots.get(timeout=scale_seconds(CLOSE_S))
        self._slots.put(0)  # later callers get a slot and a report that the sandbox is closed, instead of waiting
        os.close(self.stop)
        self.clean()

    @abstractmethod
    def run_in_slot(self, slot: int, program: Program, *, stops_early: bool) -> Report:
        """Run a program in a slot that no other program uses at the same time."""

    @abstractmethod
    def clean(self) -> None:
        """Remove state that is kept between runs. Called once, when no program runs any more."""


def report_without_results(program: Program, status: str, detail: str = "", seconds: float = 0.0) -> Report:
    """A report in which no case has a result."""
    return Report(status, tuple(CaseResult("missing") for _ in program.cases), detail, seconds)


Plain = Any
"""A value of built-in types only: None, bool, int, float, complex, str, bytes, list, tuple, set, dict."""
