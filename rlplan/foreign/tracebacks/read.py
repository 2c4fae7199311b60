"""Out-of-memory messages of torch, vLLM, Ray and the kernel: the phase, the allocation and the bytes.

In: text that was pasted from a console, with prefixes of ranks and actors, in whole or in part. Out: OutOfMemory. Left
out: what a job would need (explain.py). The deepest known frame above the message decides (frames.yaml).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rlplan.reading import read_text
from rlplan.spec.files.yaml import parse_yaml
from rlplan.units import GIB, parse_bytes
from rlplan.vocabulary import Phase, Role

MAX_BYTES = 64 << 20
MAX_FRAMES = 400
"""Lines above a message that may belong to its traceback."""
MAX_LINE = 1_000
"""Characters of a line that are searched for a frame."""
_PREFIX = re.compile(
    r"(?m)^[ \t]*(?:\x1b\[[\d;]*m|\([\w.: /]+(?:pid|ip)=[^)]*\)|\[rank\d+\]:?|\d{4}-\d\d-\d\dT\S+Z)+ ?"
)
_SIZE = r"(\d+(?:\.\d+)?\s*(?:[KMGT]iB|bytes|[MGT]B))"
_TORCH = re.compile(r"(?:(?:CUDA|HIP|XPU|NPU) out of memory\.|OutOfMemoryError:)\s+Tried to allocate\s+" + _SIZE)
_BARE = re.compile(
    r"CUDA [Ee]rror: out of memory|CUBLAS_STATUS_ALLOC_FAILED|Cuda failure \d* ?'out of memory'|"
    r"Not enough memory\. Please try|cudaErrorMemoryAllocation"
)
_ENGINE = re.compile(
    r"No available memory for the cache blocks|max seq len \((?P<asked>\d+)\)[^.]{0,200}?(?:KV cache \((?P<held>\d+)\)|"
    r"(?P<needed>[\d.]+ ?GiB)[^.]{0,9}KV\s+cache is needed, which is larger than the available KV cache memory "
    r"\((?P<left>[\d.]+ ?GiB))|Free memory on device[^(]{0,30}\((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup"
)
_RAY = re.compile(
    r"killed due to (?:the node running low on memory|memory pressure)|(?P<used>[\d.]+)GB / (?P<total>[\d.]+)GB "
    r"\([\d.]+\), which exceeds"
)
_RAY_SIZES = re.compile(r"was (?P<used>[\d.]+)GB / (?P<total>[\d.]+)GB")
_KILLED = re.compile(
    r"Out of memory: Killed process|oom[-_]kill|exit ?code:? *:?\s*(?:-9|137)|exited with code (?:-9|137)|\bSIGKILL\b|"
    r"(?m:^|[\"' ])Killed(?m:[\"' ]*$)"
)
_PARTS = {
    "total_bytes": rf"total capac?i?ty of\s+{_SIZE}|{_SIZE}\s+total\s+capacity",
    "free_bytes": rf"of which\s+{_SIZE}\s+is free|{_SIZE}\s+free[;,)]",
    "process_bytes": rf"this process has\s+{_SIZE}\s+memory in use",
    "allocated_bytes": rf"allocated memory\s+{_SIZE}\s+is allocated|{_SIZE}\s+already\s+allocated",
    "unused_bytes": rf"and\s+{_SIZE}\s+is reserved",
    "reserved_bytes": rf"{_SIZE}\s+(?:reserved\s+in\s+total|cached)",
}
_OTHER = re.compile(rf"(?<!this )\bProcess \d+ has\s+{_SIZE}\s+memory in use")
_STRIDED = re.compile(r"empty_strided_\w+\(\(\w+, \d+, (\d+)\)")
_FRAME = re.compile(r'File "|^\s*at |\.py:\d+|ray::')
_UNITS = {"KiB": 1 << 10, "MB": 10**6, "GB": 10**9, "bytes": 1}


@dataclass(frozen=True)
class OutOfMemory:
    """Facts of a text about a run that ran out of memory."""

    kind: str
    """Where memory ran out: gpu, engine (vLLM refuses to start) or host."""
    message: str
    """The part of the text that says so."""
    phase: Phase | None = None
    """Phase of the step; None if the text has no known frame."""
    words: str = ""
    """The phase in words, such as `log-prob pass`."""
    role: Role | None = None
    """Role whose pass it was, where it is not the policy's."""
    allocation: str = ""
    """The allocated tensor, such as `logits`; empty if no frame tells."""
    width: int = 0
    """Bytes of an element of a tensor that is as wide as the vocabulary; 0 for other allocations."""
    columns: int = 0
    """Entries of the vocabulary on the rank, where the text states the tensor's shape; 0 otherwise."""
    tried_bytes: int = 0
    """Bytes of the failed allocation; 0 if not stated, as every size below."""
    total_bytes: int = 0
    """Bytes of the GPU, or of the host."""
    free_bytes: int = 0
    process_bytes: int = 0
    """Bytes of the process that failed, those outside of torch included."""
    other_bytes: int = 0
    """Bytes of other processes on the GPU."""
    allocated_bytes: int = 0
    """Bytes of live tensors."""
    unused_bytes: int = 0
    """Bytes that torch's allocator keeps without a tensor in them."""
    stack: str = ""
    """Framework whose files are in the traceback."""
    tokens: tuple[int, int] | None = None
    """Longest sequence that vLLM was asked for, and the longest that its KV cache holds."""
    num_frames: int = 0

    @property
    def needed_bytes(self) -> int:
        """Bytes that the GPU would have needed; 0 if not stated."""
        return self.total_bytes - self.free_bytes + self.tried_bytes if self.tried_bytes and self.total_bytes else 0


@cache
def _load_frames() -> Mapping[str, Any]:
    path = Path(__file__).with_name("frames.yaml")
    table: Mapping[str, Any] = parse_yaml(path.read_text("utf-8"), where=str(path), what="frames of tracebacks")
    return table


def read_out_of_memory(path: Path) -> OutOfMemory | None:
    """The first out-of-memory error of a text; None if it has none. Raises: SpecError for an unreadable file."""
    return find_out_of_memory(read_text(path, "the traceback", limit=MAX_BYTES))


def find_out_of_memory(text: str) -> OutOfMemory | None:
    """The first out-of-memory error of a text; None if it has none."""
    text = _PREFIX.sub("", text)
    kinds = (("gpu", _TORCH), ("engine", _ENGINE), ("gpu", _BARE), ("host", _RAY), ("host", _KILLED))
    matches = ((kind, pattern, match) for kind, pattern in kinds if (match := pattern.search(text)))
    if (first := next(matches, None)) is None:
        return None
    kind, pattern, match = first
    facts: dict[str, Any] = {"kind": kind, "message": " ".join(match[0].split())}
    frames = text[: match.start()].splitlines()[-MAX_FRAMES:]
    facts |= _read_frames(frames)
    if "phase" not in facts:  # some viewers show the newest line first, and Ray names its actor's method below
        facts |= _read_frames(text[match.end() :].splitlines()[:MAX_FRAMES][::-1])
    if pattern is _TORCH:
        facts |= _read_torch(text[match.start() : match.start() + 3000], match[1])
    elif kind == "engine":
        facts |= _read_engine(match)
    elif kind == "host" and (sizes := _RAY_SIZES.search(text)):
        facts |= {"total_bytes": round(float(sizes["total"]) * GIB)}  # Ray divides by 1024^3
    if strided := _STRIDED.search("\n".join(frames[-20:])):
        facts |= {"columns": int(strided[1]), "width": 4, "allocation": "logits"}
    stacks = (name for name, pattern in _load_frames()["stacks"].items() if re.search(pattern, text))
    return OutOfMemory(**facts, stack=next(stacks, ""))


def _read_frames(lines: list[str]) -> dict[str, Any]:
    """Phase and allocation by the deepest lines that a pattern knows."""
    table, facts = _load_frames(), dict[str, Any]()
    facts["num_frames"] = sum(_FRAME.search(line[:MAX_LINE]) is not None for line in lines)
    for line in (line[:MAX_LINE] for line in reversed(lines)):
        if "allocation" not in facts and (entry := _match(table["allocations"], line)):
            facts |= {"allocation": entry["words"], "width": entry.get("width", 0)}
        if entry := _match(table["phases"], line):
            role = Role(entry["role"]) if "role" in entry else None
            return facts | {"phase": Phase(entry["phase"]), "words": entry["words"], "role": role}
    return facts


def _match(entries: list[Mapping[str, Any]], line: str) -> Mapping[str, Any] | None:
    return next((entry for entry in entries if re.search(entry["frames"], line)), None)


def _read_torch(text: str, tried: str) -> dict[str, int]:
    """Bytes of torch's message, of any release."""
    end = re.search(r"See documentation|PYTORCH_\w*ALLOC_CONF", text)
    text = text[: end.start()] if end else text
    sizes = {"tried_bytes": _parse(tried)}
    for name, pattern in _PARTS.items():
        if match := re.search(pattern, text):
            sizes[name] = _parse(next(filter(None, match.groups())))
    sizes["other_bytes"] = sum(_parse(size) for size in _OTHER.findall(text))
    if (reserved := sizes.pop("reserved_bytes", 0)) > sizes.get("allocated_bytes", 0):
        sizes["unused_bytes"] = reserved - sizes.get("allocated_bytes", 0)
    if "process_bytes" not in sizes and sizes["other_bytes"]:  # torch 2.1 to 2.4 names the process itself so
        sizes["process_bytes"], sizes["other_bytes"] = sizes["other_bytes"], 0
    return sizes


def _parse(size: str) -> int:
    number, unit = re.findall(r"[\d.]+|[A-Za-z]+", size)
    return round(float(number) * _UNITS[unit]) if unit in _UNITS else parse_bytes(f"{number}{unit}")


def _read_engine(match: re.Match[str]) -> dict[str, Any]:
    """Facts of vLLM's refusals to start."""
    facts: dict[str, Any] = {"phase": Phase.START, "words": "start of the engine", "allocation": "the KV cache"}
    groups = match.groupdict()
    if groups["needed"]:
        facts |= {"tried_bytes": _parse(groups["needed"]), "free_bytes": _parse(groups["left"])}
    if groups["held"]:
        facts["tokens"] = int(groups["asked"]), int(groups["held"])
    if groups["free"]:
        facts |= {
            name: round(float(groups[key]) * GIB) for name, key in (("free_bytes", "free"), ("total_bytes", "total"))
        }
    return facts
