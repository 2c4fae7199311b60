"""Printable: what a file says reaches a terminal as characters, never as commands to it.

In: any text. Out: text in which control characters, such as those that begin an escape sequence, and characters that
reorder or hide others (of writing direction, of zero width) stand as Python writes them: `\\x1b`, `\\u202e`.
Left out: what only looks alike, such as letters of two alphabets.
"""

import re
from typing import Any, TextIO

KEPT = "\n\t\xa0"
"""That str.isprintable does not count: ends of lines, tabs, spaces at which no line is broken."""
_UNUSUAL = re.compile(r"[^ -~\n]+")


def printable(text: str, *, kept: str = KEPT) -> str:
    """A text for people, wherever it comes from. kept: characters that are let through beside printable ones.

    >>> printable("a\\x1b[31mb")
    'a\\\\x1b[31mb'
    """
    return _UNUSUAL.sub(lambda found: "".join(_escaped(each, kept) for each in found.group()), text)


def _escaped(character: str, kept: str) -> str:
    return character if character.isprintable() or character in kept else repr(character)[1:-1]


class PrintableStream:
    """A text stream that passes on printable characters only; otherwise the stream itself."""

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream
        """rich writes here: its colours are escape sequences, and its text was made printable before."""

    def write(self, text: str) -> int:
        return self.rich_proxied_file.write(printable(text))

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)
