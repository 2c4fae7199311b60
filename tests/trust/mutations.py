"""Mutations: from a good file a bad one, by a seed. Bytes are cut, doubled, flipped; values of JSON become hostile."""

import json
import random
from collections.abc import Callable
from typing import Any

HOSTILE: tuple[Any, ...] = (
    None, True, 0, -1, 1 << 31, 1 << 64, -(1 << 70), 1e308, 1e-320, 0.5, "", "auto", "0", "-1", "NaN", "1e999",
    "\x1b[2J\x1b]0;x\x07", "\u202eabc\u2066", "\ud800", "a\0b", "x" * 5000, "../" * 20, "/dev/zero", "/etc/passwd", "~",
    "${HOME}", "$(touch sprung)", "{{ 7 * 7 }}", "!!python/object/apply:os.system [true]", "__import__('os')",
    [], {}, [[]], [None], [0] * 3000, {"": None}, {"x": {"y": {}}}, [[[[[[]]]]]],
)  # fmt: skip
"""Hostile values: of every type, too large, too deep, for a terminal, for a shell, a template, a path."""
BYTES = (
    b"\0", b"\xff\xfe", b"\x1b[31m", b"\n", b"\r", b"'", b'"', b"{", b"[", b"}", b"]", b":", b",", b"-", b"#", b"&a",
    b"*a", b"!!", b"1e999", b"NaN", b"\xe2\x80\xae", b"$(", b"`", b"<<EOF\n", b"%", b"\\", b"0x",
)  # fmt: skip


def mutate(data: bytes, chance: random.Random) -> bytes:
    """One to four changes of a file's bytes, or of the values in it where it is JSON."""
    change: Callable[[bytes, random.Random], bytes] = _values if chance.random() < 0.5 else _bytes
    for _ in range(chance.randint(1, 4)):
        data = change(data, chance)
    return data


def _bytes(data: bytes, chance: random.Random) -> bytes:
    at, end = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    end = min(end, at + chance.choice((1, 8, 64, 4096)))
    piece = data[at:end]
    return chance.choice(
        (
            data[:at] + data[end:],
            data[:at] + piece * chance.choice((2, 3, 50)) + data[end:],
            data[:at] + chance.choice(BYTES) + data[at:],
            data[:at] + bytes(byte ^ 1 << chance.randrange(8) for byte in piece[:4]) + data[at + 4 :],
            data[:at],
            data[:at] + chance.choice(BYTES) * chance.choice((10, 1000)) + data[end:],
            data[:at] + json.dumps(chance.choice(HOSTILE)).encode() + data[end:],
        )
    )


def _values(data: bytes, chance: random.Random) -> bytes:
    """Change the values of a JSON file, or of one line of a JSONL file."""
    lines = data.splitlines(keepends=True)
    for at in (None, chance.randrange(len(lines)) if lines else None):
        try:
            value = json.loads(data if at is None else lines[at])
        except (ValueError, RecursionError):
            continue
        text = json.dumps(_change_value(value, chance)).encode()
        return text if at is None else b"".join([*lines[:at], text, b"\n", *lines[at + 1 :]])
    return _bytes(data, chance)


def _change_value(value: Any, chance: random.Random) -> Any:
    """A value with one of those inside it made hostile, renamed, taken away or doubled."""
    if not isinstance(value, dict | list) or not value or chance.random() < 0.1:
        return chance.choice(HOSTILE)
    if isinstance(value, list):
        at = chance.randrange(len(value))
        inner = (
            [_change_value(value[at], chance)] if chance.random() < 0.8 else [value[at]] * chance.choice((0, 2, 100))
        )
        return [*value[:at], *inner, *value[at + 1 :]]
    key = chance.choice(list(value))
    kept = {name: inner for name, inner in value.items() if name != key}
    if chance.random() < 0.8:
        return kept | {key: _change_value(value[key], chance)}
    return kept | {str(chance.choice(HOSTILE))[:40]: value[key]} if chance.random() < 0.5 else kept
