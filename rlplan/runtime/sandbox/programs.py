"""What goes into a sandbox and what comes out, as plain values.

In: a program's source, and cases: what it reads, or a call of one of its functions. Out: what it printed or gave back.
Never in: what would have been right. Whoever judges compares outside (rewards/code_executor.py).
"""

from dataclasses import dataclass
from typing import Any, Protocol

from rlplan.units import MIB


@dataclass(frozen=True, slots=True)
class Case:
    """One run of the program. stdin: what it reads, as a program; call: an expression, the program being a module."""

    stdin: bytes = b""
    call: str | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a whole sandbox, but for the times: case_s is each case's by the clock, and each of its processes' of CPU.

    CPU of all processes together: one core's worth (tree_limits.py), or cpu_s where that cannot be had.

    memory_bytes: of all processes and files together. output_bytes: printed by one case; total_output_bytes: by all,
    for the driver holds it. file_bytes: of one file.
    """

    case_s: float = 4.0
    total_s: float = 30.0
    memory_bytes: int = 512 * MIB
    num_processes: int = 32
    output_bytes: int = MIB
    total_output_bytes: int = 8 * MIB
    file_bytes: int = 16 * MIB
    disk_bytes: int = 32 * MIB

    def cpu_s(self, num_cases: int) -> float:
        """Seconds of CPU of all processes of so many cases."""
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
    """How a case ended: `ok`, `error`, `timeout`, `output` (too much of it), `killed` or `missing`.

    output: printed, or the value given back, encoded (values.py). detail: the error's last line.
    """

    status: str
    output: bytes = b""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What a sandbox says of a program, one result a case.

    status: `done`; or why nothing is known of some cases: `timeout`, `memory`, `killed`: the program's doing;
    `broken`: the sandbox's own failure or the host's, that no program brings about (detail says what).
    """

    status: str
    cases: tuple[CaseResult, ...]
    detail: str = ""
    seconds: float = 0.0


class Sandbox(Protocol):
    """One way to run programs that nobody has read. name: as `rlplan run --sandbox` has it."""

    name: str

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
