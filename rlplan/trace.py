"""Trace: the common record of simulated and measured runs, joined with predictions by action id.

In: spans (when an action ran) and memory samples (bytes of a process by kind). Out: frozen values and JSONL. Left out:
learning metrics, which have a file of their own so that seeded runs can be compared bit for bit.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlplan.reading import MAX_INTEGER, MAX_RUN_BYTES, read_records

TRACE_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Span:
    """One execution of one action on one process."""

    action_id: str
    step: int
    """RL step from 1; 0 during start-up, -1 during shutdown."""
    process: str
    device: str
    start_s: float
    """Seconds since the trace began, as `end_s`."""
    end_s: float
    attempt: int = 1
    """Number of the attempt, from 1."""


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Bytes that a process held during an action."""

    action_id: str
    step: int
    process: str
    device: str
    role: str
    kind: str
    """A MemoryKind, or `total` for the whole process as the operating system counts it."""
    statistic: str
    """`resident` at the end of the action, `peak` during it, or `loaded`: during it, before a CPU engine repacked its
    weights."""
    num_bytes: int
    at_s: float
    """Seconds since the trace began."""
    attempt: int = 1


@dataclass
class Trace:
    """Spans and samples in the order of recording."""

    origin: str
    """`measured` or `predicted`."""
    spans: list[Span] = field(default_factory=list)
    samples: list[MemorySample] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Write the whole trace as JSONL: a header line, then one line per record."""
        with path.open("w", encoding="utf-8") as file:
            for line in self.lines():
                file.write(line + "\n")

    def lines(self) -> Iterator[str]:
        """The JSONL lines of this trace."""
        yield json.dumps({"type": "trace", "schema_version": TRACE_SCHEMA_VERSION, "origin": self.origin})
        yield from map(record_line, self.spans)
        yield from map(record_line, self.samples)

    @staticmethod
    def read(path: Path) -> "Trace":
        """Read a trace; a torn last line (of a killed run) is skipped. Raises: SpecError for any other damage."""
        trace = Trace(origin="measured")
        for record in read_records(path, "the trace", _record, limit=MAX_RUN_BYTES):
            if isinstance(record, Span):
                trace.spans.append(record)
            elif isinstance(record, MemorySample):
                trace.samples.append(record)
            else:
                trace.origin = record
        return trace


def record_line(record: Span | MemorySample) -> str:
    """One JSONL line."""
    return json.dumps({"type": "span" if isinstance(record, Span) else "memory", **asdict(record)})


def _record(row: dict[str, Any]) -> Span | MemorySample | str:
    """A span, a sample, or the origin from the header. Raises: ValueError, KeyError, TypeError."""
    kind = row.pop("type")
    if kind == "trace":
        if row["schema_version"] != TRACE_SCHEMA_VERSION:
            raise ValueError(f"schema version {row['schema_version']}, this is {TRACE_SCHEMA_VERSION}")
        return str(row["origin"])
    record: type[Span | MemorySample] = Span if kind == "span" else MemorySample
    for name, value in row.items():
        if not isinstance(value, _TYPES[record.__annotations__[name]]) or isinstance(value, bool):
            raise ValueError(f"{name} is a {type(value).__name__}")
        if isinstance(value, int | float) and not abs(value) <= MAX_INTEGER:  # written so that NaN fails
            raise ValueError(f"{name} is not a number up to {MAX_INTEGER}")
    return record(**row)


_TYPES: dict[Any, type | tuple[type, ...]] = {str: str, int: int, float: (int, float)}
