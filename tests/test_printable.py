"""Nothing that a file says is a command to a terminal."""

import io
from typing import TextIO, cast

import pytest

from rlplan.printable import PrintableStream, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ~ text\n\tand more", "plain ~ text\n\tand more"),
        ("größer, 大きい, ≤, █, 🙂", "größer, 大きい, ≤, █, 🙂"),
        ("\x1b[2J", "\\x1b[2J"),
        ("\x9b31m", "\\x9b31m"),
        ("a\rb\x08\x07", "a\\rb\\x08\\x07"),
        ("\u202ecod\u2066", "\\u202ecod\\u2066"),
        ("\u200bhidden\ufeff", "\\u200bhidden\\ufeff"),
        ("\ud800", "\\ud800"),
        ("\u2028", "\\u2028"),
    ],
)
def test_what_would_move_colour_hide_or_reorder_is_written_out(text: str, shown: str) -> None:
    assert printable(text) == shown
    stream = io.StringIO()
    print(text, end="", file=cast("TextIO", PrintableStream(cast("TextIO", stream))))
    assert stream.getvalue() == shown
