"""Printable text: contents of files reach a terminal as characters, never as commands to it.

In: any text. Out: text in which unprintable characters appear as in Python: `\\x1b`, `\\u202e`. These are control
characters, such as those that begin an escape sequence, and characters that reorder or hide others. Left out:
look-alikes, such as letters of two alphabets.
"""

import re
from typing import Any, TextIO

KEPT = "\n\t\xa0"
"""Characters passed through although str.isprintable excludes them: newlines, tabs, non-breaking spaces."""
_UNUSUAL = re.compile(r"[^ -~\n]+")


def printable(text: str, *, kept: str = KEPT) -> str:
    """A text that is safe for a terminal, whatever its origin. kept: characters passed through besides printable
    ones.

    >>> printable("a\\x1b[31mb")
    'a\\\\x1b[31mb'
    """
    return _UNUSUAL.sub(lambda match: "".join(_escape(character, kept) for character in match.group()), text)


def _escape(character: str, kept: str) -> str:
    return character if character.isprintable() or character in kept else repr(character)[1:-1]


class PrintableStream:
    """A text stream that escapes unprintable characters and otherwise behaves like the stream itself."""

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream
        """Stream that rich writes to directly: its colors are escape sequences, and its text was made printable
        before."""

    def write(self, text: str) -> int:
        return self.rich_proxied_file.write(printable(text))

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)
