"""Trace: ONE record for simulated and measured runs, joined with a prediction on the action's id.

In: spans (when an action ran) and memory samples (what a process held, by kind). Out: frozen values and JSONL.
Left out: learning metrics, which live in their own file so that seeded runs can be compared bit for bit.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TRACE_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Span:
    """One execution of one action on one process."""

    action_id: str
    step: int
    """RL step from 1; 0 while starting; -1 while finishing."""
    process: str
    device: str
    start_s: float
    """Since the trace began, as `end_s`."""
    end_s: float
    attempt: int = 1
    """From 1."""


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Bytes that a process held at an action."""

    action_id: str
    step: int
    process: str
    device: str
    role: str
    kind: str
    """A MemoryKind, or `total` for the whole process as the operating system sees it."""
    statistic: str
    """`resident` at the end of the action, `peak` inside it, `loaded` inside it before an engine on a CPU repacked its
    weights."""
    num_bytes: int
    at_s: float
    """Since the trace began."""
    attempt: int = 1


@dataclass
class Trace:
    """Spans and samples in the order in which they were recorded."""

    origin: str
    """`measured` | `predicted`."""
    spans: list[Span] = field(default_factory=list)
    samples: list[MemorySample] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Write the whole trace as JSONL: a header line, then one line a record."""
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
        """Read a trace; a torn last line (a killed run) is dropped, any other damage raises ValueError."""
        return _parse(path.read_text(encoding="utf-8").splitlines(), str(path))


def record_line(record: Span | MemorySample) -> str:
    """One JSONL line."""
    return json.dumps({"type": "span" if isinstance(record, Span) else "memory", **asdict(record)})


def _parse(lines: Iterable[str], name: str) -> Trace:
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    trace = Trace(origin="measured")
    for number, line in numbered:
        try:
            row: dict[str, Any] = json.loads(line)
            kind = row.pop("type")
            if kind == "trace":
                if row["schema_version"] != TRACE_SCHEMA_VERSION:
                    raise ValueError(f"schema version {row['schema_version']}, this is {TRACE_SCHEMA_VERSION}")
                trace.origin = row["origin"]
            elif kind == "span":
                trace.spans.append(Span(**row))
            else:
                trace.samples.append(MemorySample(**row))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number == numbered[-1][0] and not line.endswith("}"):
                break
            raise ValueError(f"{name}, line {number}: not a trace record ({error})") from error
    return trace
