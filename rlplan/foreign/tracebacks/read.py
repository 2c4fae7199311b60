"""Out-of-memory messages of torch, vLLM, Ray and the kernel: the phase, the allocation and the bytes.

In: text that was pasted from a console, with prefixes of ranks and actors, in whole or in part. Out: OutOfMemory. Left
out: what a job would need (explain.py). Messages and frames are in frames.yaml; the deepest known frame decides.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

from rlplan.containment import measure_budget, read_contained
from rlplan.reading import read_text
from rlplan.spec.files.yaml import parse_yaml
from rlplan.units import GIB, KIB, MIB, TIB
from rlplan.vocabulary import Phase, Role

MAX_BYTES = 64 << 20
MAX_FRAMES, MAX_LINE, MAX_MESSAGE = 400, 1_000, 3_000
"""Lines above a message that may be of its traceback, characters of a line, and characters of a message."""
_PREFIX = re.compile(
    r"(?m)^[ \t]*(?:\x1b\[[\d;]*m|\([\w.: /]+(?:pid|ip)=[^)]*\)|\[rank\d+\]:?|\d{4}-\d\d-\d\dT\S+Z)+ ?"
)
_SIZE = r"\d{1,20}(?:\.\d{1,20})?\s{0,4}(?:[KMGT]iB|bytes|GB)"
"""Bounded, because a search for any number of digits takes quadratic time on a line of digits."""
_OTHER = re.compile(r"(?<!this )\bProcess \d+ has\s+([\d.]+\s*[KMGT]iB)\s+memory in use")
_STRIDED = re.compile(r"empty_strided_\w+\(\(\w+, \d+, (\d+)\)")
_UNITS = {"KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB, "GB": GIB, "bytes": 1}
"""Bytes of a unit; Ray divides by 1024^3 and prints GB."""


@dataclass(frozen=True)
class OutOfMemory:
    """Facts of a text about a run that ran out of memory."""

    kind: str
    """Memory that ran out: gpu, engine (vLLM refuses to start) or host."""
    message: str
    phase: Phase | None = None
    """Phase of the step; None if the text has no known frame."""
    words: str = ""
    """The phase in words, such as `log-prob pass`."""
    role: Role | None = None
    """Role of the failed pass, where it is not the policy."""
    allocation: str = ""
    """The allocated tensor, such as `logits`; empty if no frame tells."""
    width: int = 0
    """Bytes of an element of a tensor that is as wide as the vocabulary; 0 for other tensors."""
    columns: int = 0
    """Width of the tensor in elements, if the text states it; 0 otherwise."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes that the text states: tried, total, free, process, other (processes), allocated, unused (by tensors); and
    tokens of vLLM's messages: asked, held."""
    stack: str = ""
    """Framework whose files are in the traceback."""

    def get(self, name: str) -> int:
        """A size by its name; 0 if the text does not state it."""
        return self.sizes.get(name, 0)

    @property
    def needed_bytes(self) -> int:
        """Bytes that the GPU would have needed; 0 if not stated."""
        has_sizes = self.get("tried") and self.get("total")
        return self.get("total") - self.get("free") + self.get("tried") if has_sizes else 0


@cache
def _load_frames() -> Mapping[str, Any]:
    path = Path(__file__).with_name("frames.yaml")
    text = path.read_text("utf-8").replace("SIZE", _SIZE)
    table: Mapping[str, Any] = parse_yaml(text, where=str(path), what="frames of tracebacks")
    return table


def read_out_of_memory(path: Path) -> OutOfMemory | None:
    """The first out-of-memory error of a file, which is read in a limited process; None if it has none. Raises:
    SpecError for an unreadable file."""
    return read_contained(
        lambda: find_out_of_memory(read_text(path, "the traceback", limit=MAX_BYTES)),
        path,
        cast("type[OutOfMemory | None]", OutOfMemory | None),
        measure_budget(path),
    )


def find_out_of_memory(text: str) -> OutOfMemory | None:
    """The first out-of-memory error of a text; None if it has none."""
    text, table = _PREFIX.sub("", text), _load_frames()
    matches = ((entry["kind"], re.search(entry["text"], text)) for entry in table["messages"])
    kind, match = next(((kind, match) for kind, match in matches if match), ("", None))
    if match is None:
        return None
    frames = text[: match.start()].splitlines()[-MAX_FRAMES:]
    facts = _read_frames(frames)
    if "phase" not in facts:  # some viewers show the newest line first, and Ray names its actor's method below
        facts |= _read_frames(text[match.end() :].splitlines()[:MAX_FRAMES][::-1])
    if kind == "engine":
        facts |= {"phase": Phase.START, "words": "start of the engine", "allocation": "the KV cache"}
    if strided := _STRIDED.search("\n".join(frames[-20:])):  # compiled code names no function
        facts |= {"columns": int(strided[1]), "width": 4, "allocation": "logits"}
    sizes = dict(_read_sizes(match, text[match.start() : match.start() + MAX_MESSAGE]))
    stacks = (name for name, pattern in table["stacks"].items() if re.search(pattern, text))
    return OutOfMemory(kind, " ".join(match[0].split()), **facts, sizes=sizes, stack=next(stacks, ""))


def _read_frames(lines: list[str]) -> dict[str, Any]:
    """Phase and allocation by the deepest lines that a pattern knows."""
    table, facts = _load_frames(), dict[str, Any]()
    for line in (line[:MAX_LINE] for line in reversed(lines)):
        if "allocation" not in facts and (entry := _match(table["allocations"], line)):
            facts |= {"allocation": entry["words"], "width": entry.get("width", 0)}
        if entry := _match(table["phases"], line):
            role = Role(entry["role"]) if "role" in entry else None
            return facts | {"phase": Phase(entry["phase"]), "words": entry["words"], "role": role}
    return facts


def _match(entries: list[Mapping[str, Any]], line: str) -> Mapping[str, Any] | None:
    return next((entry for entry in entries if re.search(entry["frames"], line)), None)


def _read_sizes(match: re.Match[str], message: str) -> Iterator[tuple[str, int]]:
    """Sizes that a message states, of any release of torch."""
    stated = {name: size for name, size in match.groupdict().items() if size}
    for name, pattern in _load_frames()["sizes"].items():
        if size_match := re.search(pattern, message):
            stated.setdefault(name, next(filter(None, size_match.groups())))
    sizes = {name: _parse(size) for name, size in stated.items()}
    if reserved := sizes.pop("reserved", 0):
        sizes["unused"] = max(0, reserved - sizes.get("allocated", 0))
    process_bytes = sum(map(_parse, _OTHER.findall(message)))
    # torch 2.1 to 2.4 names the process itself as it names others
    yield from ({"other" if "process" in sizes else "process": process_bytes} if process_bytes else {}).items()
    yield from sizes.items()


def _parse(size: str) -> int:
    """Bytes of a size, or a bare integer.

    >>> _parse("1.5 GiB"), _parse("8192")
    (1610612736, 8192)
    """
    number, *unit = re.findall(r"[\d.]+|[A-Za-z]+", size)
    return round(float(number) * _UNITS[unit[0]]) if unit else int(number)
