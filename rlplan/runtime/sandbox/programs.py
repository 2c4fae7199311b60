"""What goes into a sandbox and what comes out, as plain values.

In: a program's source, and cases: what it reads, or a call of one of its functions. Out: what it printed or gave back.
Never in: what would have been right. Whoever judges compares outside (rewards/code_executor.py).
"""

from dataclasses import dataclass
from typing import Any, Protocol

from rlplan.units import MIB


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


class Sandbox(Protocol):
    """One way to run programs that nobody has read. name: as `rlplan run --sandbox` has it."""

    name: str

    @property
    def cannot_hold(self) -> str:
        """What gets past it, in words."""

    def run(self, program: Program, *, stops_early: bool = False) -> Report:
        """Run a program to its end or its limits. stops_early: after the first case that does not end well.

        Safe to call from several threads; raises nothing of a program's.
        """

    def close(self) -> None:
        """Leave nothing behind."""


def unknown(program: Program, status: str, detail: str = "", seconds: float = 0.0) -> Report:
    """A report in which no case has a result."""
    return Report(status, tuple(CaseResult("missing") for _ in program.cases), detail, seconds)


Plain = Any
"""A value of Python's own types: None, bool, int, float, complex, str, bytes, list, tuple, set, dict."""
