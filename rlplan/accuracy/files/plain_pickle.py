"""Plain values of a pickle, read without ever importing or calling what it names.

In: bytes of pickle protocol 2 to 5. Out: None, booleans, numbers, text, bytes, lists, tuples and dicts.
Left out, and refused: classes, functions, persistent ids, buffers, sets. This is a reader of our own, a loop over the
few instructions that build plain values; Python's `pickle` module is not used, so there is nothing to escape from.

Source of the instructions: CPython 3.11 Lib/pickletools.py.
"""

import struct
from typing import Any

MAX_INSTRUCTIONS = 50_000_000
"""More than a snapshot of a hundred thousand events has."""
MAX_DEPTH = 1_000
MAX_HELD_BYTES = 1 << 29
"""Of all values together, as Python holds them: one byte of a pickle makes an empty dict of 64."""
MAX_INTEGER_BYTES = 64

_UNPACK = {
    ord("J"): struct.Struct("<i"),
    ord("K"): struct.Struct("<B"),
    ord("M"): struct.Struct("<H"),
    ord("G"): struct.Struct(">d"),
}
_CONSTANTS = {ord("N"): None, 0x88: True, 0x89: False}
_SHORT_TEXT, _TEXT, _LONG_TEXT = 0x8C, ord("X"), 0x8D
_SHORT_BYTES, _BYTES, _LONG_BYTES = ord("C"), ord("B"), 0x8E
_LENGTHS = {_SHORT_TEXT: 1, _TEXT: 4, _LONG_TEXT: 8, _SHORT_BYTES: 1, _BYTES: 4, _LONG_BYTES: 8}
_INTEGERS = {0x8A: 1, 0x8B: 4}
_PUTS = {ord("q"): 1, ord("r"): 4}
_GETS = {ord("h"): 1, ord("j"): 4}
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_PROTO, _FRAME, _MEMOIZE, _MARK, _STOP = 0x80, 0x95, 0x94, ord("("), ord(".")


class NotPlainError(ValueError):
    """The bytes are no pickle of plain values."""


def load_plain(data: bytes) -> Any:
    """The value. Raises: NotPlainError for anything else, code above all.

    >>> load_plain(bytes([0x80, 4]) + b"]" + bytes([0x94]) + b"(K" + bytes([7]) + b"Ne.")
    [7, None]
    """
    try:
        return _Reader(data).run()
    except (IndexError, struct.error, TypeError, AttributeError, UnicodeDecodeError, KeyError) as error:
        raise NotPlainError(f"broken: {type(error).__name__}") from None


class _Reader:
    """The stack machine: values, marks (heights of the stack) and the memo."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._held = 0

    def run(self) -> Any:
        for _ in range(MAX_INSTRUCTIONS):
            code = self._data[self._at]
            self._at += 1
            if code == _STOP:
                return self._stack.pop()
            if self._held > MAX_HELD_BYTES:
                raise NotPlainError(f"more than {MAX_HELD_BYTES} bytes of values")
            if not (self._value(code) or self._memory(code) or self._container(code)):
                raise NotPlainError(f"instruction {chr(code)!r} at byte {self._at - 1} is none of plain values")
        raise NotPlainError(f"more than {MAX_INSTRUCTIONS} instructions")

    def _take(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise NotPlainError("it ends in the middle of a value")
        self._at += count
        return self._data[self._at - count : self._at]

    def _number(self, width: int) -> int:
        return int.from_bytes(self._take(width), "little")

    def _value(self, code: int) -> bool:
        """Constants, numbers, text and bytes."""
        if code in _UNPACK:
            form = _UNPACK[code]
            self._stack.append(form.unpack(self._take(form.size))[0])
            self._held += 40
        elif code in _CONSTANTS:
            self._stack.append(_CONSTANTS[code])
        elif code in _LENGTHS:
            raw = self._take(self._number(_LENGTHS[code]))
            self._held += len(raw) + 60
            is_text = code in (_SHORT_TEXT, _TEXT, _LONG_TEXT)
            self._stack.append(raw.decode("utf-8", "surrogatepass") if is_text else raw)
        elif code in _INTEGERS:
            width = self._number(_INTEGERS[code])
            if width > MAX_INTEGER_BYTES:
                raise NotPlainError(f"an integer of {width} bytes")
            self._stack.append(int.from_bytes(self._take(width), "little", signed=True))
            self._held += 60
        else:
            return False
        return True

    def _memory(self, code: int) -> bool:
        """Framing, marks and the memo."""
        if code == _MEMOIZE:
            self._memo[len(self._memo)] = self._stack[-1]
        elif code in _GETS:
            self._stack.append(self._memo[self._number(_GETS[code])])
        elif code in _PUTS:
            self._memo[self._number(_PUTS[code])] = self._stack[-1]
        elif code == _MARK:
            self._marks.append(len(self._stack))
            if len(self._marks) > MAX_DEPTH:
                raise NotPlainError(f"nested deeper than {MAX_DEPTH}")
        elif code == _PROTO:
            self._take(1)
        elif code == _FRAME:
            self._take(8)
        elif code == ord("0"):
            self._stack.pop()
        else:
            return False
        return True

    def _container(self, code: int) -> bool:
        """Lists, tuples and dicts, and what is put into them."""
        self._held += 72
        if code == ord("}"):
            self._stack.append({})
        elif code == ord("]"):
            self._stack.append([])
        elif code == ord(")"):
            self._stack.append(())
        elif code in _TUPLES:
            width = _TUPLES[code]
            self._stack[-width:] = [tuple(self._stack[-width:])]
        elif code == ord("s"):
            self._store([self._stack.pop(-2), self._stack.pop()])
        elif code == ord("a"):
            self._extend([self._stack.pop()])
        elif code in b"uetld":
            self._marked(code)
        else:
            return False
        return True

    def _marked(self, code: int) -> None:
        mark = self._marks.pop()
        items = self._stack[mark:]
        del self._stack[mark:]
        if code == ord("u"):
            self._store(items)
        elif code == ord("e"):
            self._extend(items)
        elif code == ord("t"):
            self._stack.append(tuple(items))
        elif code == ord("l"):
            self._stack.append(items)
        else:
            self._stack.append({})
            self._store(items)

    def _store(self, items: list[Any]) -> None:
        if not isinstance(self._stack[-1], dict) or len(items) % 2:
            raise NotPlainError("keys and values for what is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | int | float | bool | None):
                raise NotPlainError(f"a key that is a {type(key).__name__}")
            self._stack[-1][key] = value

    def _extend(self, items: list[Any]) -> None:
        if not isinstance(self._stack[-1], list):
            raise NotPlainError("items for what is no list")
        self._stack[-1].extend(items)
