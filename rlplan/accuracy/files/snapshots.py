"""A torch memory snapshot as points: the peaks of each GPU, as far back as its trace goes.

In: a file that `torch.cuda.memory._dump_snapshot` wrote. Out: points with peak allocated and reserved bytes.
Left out: who allocated what. A snapshot does not say under which settings it was made: its points are not predicted.
Source: PyTorch 2.9 torch/cuda/memory.py, `_snapshot`: segments as they are at the end, and the events before.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlplan.accuracy.files.plain_pickle import NotPlainError, load_plain
from rlplan.accuracy.points import Measured, MeasuredPoint
from rlplan.errors import SpecError
from rlplan.reading import read_bytes

MAX_SNAPSHOT_BYTES = 256 << 20
MAX_VISITS = 20_000_000
"""Segments and events that are looked at: a file may name one list many times."""

_ALLOCATED = {"alloc": 1, "free_requested": -1}
_RESERVED = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


def is_snapshot(head: bytes) -> bool:
    """Whether a file begins like a pickle of protocol 2 to 5."""
    return len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5


def points_of_snapshot(path: Path) -> tuple[MeasuredPoint, ...]:
    """Peaks by device. Raises: SpecError; no code from the file is ever run."""
    try:
        peaks = _peaks(load_plain(read_bytes(path, "the snapshot", limit=MAX_SNAPSHOT_BYTES)))
    except NotPlainError as error:
        raise _broken(f"the snapshot cannot be read: {error}", path) from None
    if not peaks:
        raise _broken("the snapshot has no segments", path)
    return tuple(
        MeasuredPoint(
            id=f"{path.name}:device{device}:peak_{name}",
            kind="memory_snapshot",
            measured=Measured(value=value, unit=f"bytes max {name}"),
            source="torch memory snapshot",
            reliability="A",
        )
        for device, values in sorted(peaks.items())
        for name, value in zip(("allocated", "reserved"), values, strict=True)
    )


def _peaks(snapshot: Any) -> dict[int, tuple[int, int]]:
    """Peak allocated and reserved bytes of each device.

    Counts: what the segments hold at the end, undone event by event to the beginning of the trace.

    >>> events = [{"action": "alloc", "size": 8}, {"action": "free_requested", "size": 8}]
    >>> _peaks({"segments": [{"device": 0, "total_size": 32, "allocated_size": 4}], "device_traces": [events]})
    {0: (12, 32)}
    """
    segments, traces = _list(snapshot, "segments"), _list(snapshot, "device_traces")
    if len(segments) > MAX_VISITS or sum(len(trace) for trace in traces if isinstance(trace, list)) > MAX_VISITS:
        raise NotPlainError(f"more than {MAX_VISITS} segments or events")
    held: dict[int, list[int]] = {}
    for segment in segments:
        totals = held.setdefault(_whole(segment, "device"), [0, 0])
        totals[0] += _whole(segment, "allocated_size")
        totals[1] += _whole(segment, "total_size")
    return {
        device: (
            _peak(totals[0], _steps(traces, device, _ALLOCATED)),
            _peak(totals[1], _steps(traces, device, _RESERVED)),
        )
        for device, totals in held.items()
    }


def _peak(at_end: int, steps: Iterator[int]) -> int:
    level = peak = at_end
    for step in steps:
        level -= step
        peak = max(peak, level)
    return peak


def _steps(traces: list[Any], device: int, signs: dict[str, int]) -> Iterator[int]:
    """Changes by the events of a device, from the last to the first."""
    events = traces[device] if device < len(traces) else []
    if not isinstance(events, list):
        raise NotPlainError("a trace that is no list")
    for event in reversed(events):
        action = event.get("action") if isinstance(event, dict) else None
        if isinstance(action, str) and action in signs:
            yield signs[action] * _whole(event, "size")


def _list(value: Any, key: str) -> list[Any]:
    found = value.get(key, []) if isinstance(value, dict) else None
    if not isinstance(found, list):
        raise NotPlainError(f"no list of {key}")
    return found


def _whole(value: Any, key: str) -> int:
    found = value.get(key, 0) if isinstance(value, dict) else None
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < 1 << 62:
        raise NotPlainError(f"{key} is no number of bytes")
    return found


def _broken(what: str, path: Path) -> SpecError:
    return SpecError(
        what,
        where=str(path),
        rule="a file of torch.cuda.memory._dump_snapshot: lists, dicts, numbers and text, no code",
        way_out="dump it again, or give points as JSON",
    )
