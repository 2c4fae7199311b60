"""Decoding of the values that a program returns: built-in types only, so no code of the program runs in the driver.

In: bytes from the sandbox, which the program may have forged. Out: plain values, or an UnreadableValueError.
runner.py encodes: `n`, `t`, `f`, `i<hex>;`, `d<hex float>;`, `c<hex float>,<hex float>;`, `s<length>:`, `b<length>:`,
and `l`, `u`, `e`, `m` with a count and that many items (list, tuple, set, dict of pairs).
"""

from collections import Counter
from collections.abc import Sequence

from rlplan.runtime.sandbox.programs import Plain

MAX_DEPTH = 100
MAX_ALIKE = 64
"""Most distinct keys of one set or dict with the same hash; 50,000 of them would block the driver for 30 s."""


class UnreadableValueError(ValueError):
    """Bytes that encode no value."""


def decode(data: bytes) -> Plain:
    """Decode one value. Raises: UnreadableValueError."""
    try:
        value, end = _read(data, 0, 0)
    except (IndexError, ValueError, TypeError, OverflowError, MemoryError) as error:
        raise UnreadableValueError(str(error)) from None
    if end != len(data):
        raise UnreadableValueError(f"{len(data) - end} bytes after the value")
    return value


def _read(data: bytes, at: int, depth: int) -> tuple[Plain, int]:
    if depth > MAX_DEPTH:
        raise UnreadableValueError(f"nested more than {MAX_DEPTH} deep")
    kind = data[at : at + 1]
    if kind in _SINGLE:
        return _SINGLE[kind], at + 1
    stop = data.index(b":" if kind in b"sb" else b";", at)
    text = data[at + 1 : stop].decode("ascii")
    if kind == b"i":
        return int(text, 16), stop + 1
    if kind == b"d":
        return float.fromhex(text), stop + 1
    if kind == b"c":
        real, imaginary = text.split(",")
        return complex(float.fromhex(real), float.fromhex(imaginary)), stop + 1
    size, start = int(text), stop + 1
    if not 0 <= size <= len(data) - start:
        raise UnreadableValueError("a length exceeds the data")
    if kind in (b"s", b"b"):
        raw = data[start : start + size]
        return raw.decode("utf-8", "surrogatepass") if kind == b"s" else raw, start + size
    return _read_items(data, kind, size, start, depth)


def _read_items(data: bytes, kind: bytes, size: int, at: int, depth: int) -> tuple[Plain, int]:
    items = []
    for _ in range(size * (2 if kind == b"m" else 1)):
        value, at = _read(data, at, depth + 1)
        items.append(value)
    if kind in b"em":
        refuse_crowd(items[:: 2 if kind == b"m" else 1])
    if kind == b"m":
        return dict(zip(items[::2], items[1::2], strict=True)), at
    return _MANY[kind](items), at


def refuse_crowd(keys: Sequence[Plain]) -> None:
    """Reject keys chosen to collide in a hash table; equal keys count once. Raises: UnreadableValueError."""
    counts = Counter(map(hash, keys)) if len(keys) > MAX_ALIKE else {}
    crowds: dict[int, list[Plain]] = {value: [] for value, count in counts.items() if count > MAX_ALIKE}
    for key in keys if crowds else ():
        crowd = crowds.get(hash(key))
        if crowd is not None and key not in crowd:
            crowd.append(key)
            if len(crowd) > MAX_ALIKE:
                raise UnreadableValueError("too many keys have the same hash")


_SINGLE = {b"n": None, b"t": True, b"f": False}
_MANY = {b"l": list, b"u": tuple, b"e": set}
