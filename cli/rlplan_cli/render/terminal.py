"""Everything that is drawn in a terminal: tables on stdout, notes and errors on stderr; plain text in a pipe."""

import errno
import json
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any, Literal

from rich import box
from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from rlplan.errors import RlplanError
from rlplan.printable import printable
from rlplan.timing.cost import Cost, Resource
from rlplan.units import format_bytes, format_seconds
from rlplan.vocabulary import MemoryKind, words_of

PIPE_WIDTH = 120
"""Columns where the width is not known: in a pipe or a file."""
NARROW = 112
"""Columns below which a table leaves out what another one or `--json` says too."""


class _Console(Console):
    """A console that prints what it is given, brackets and colons too: everything here may hold words of a user."""

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """All that this console writes passes here, and is made printable before it gets its colours."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)

    @property
    def file(self) -> IO[str]:
        """Where rich writes, below the streams that stand before it: rich's own, and app.py's."""
        file = super().file
        while hasattr(file, "rich_proxied_file"):
            file = file.rich_proxied_file
        return file

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def on_broken_pipe(self) -> None:
        """The reader has gone. rich's own answer is exit code 1, which says that nothing fits; app.py has another."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def _console(*, is_stderr: bool) -> Console:
    stream = sys.stderr if is_stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    colors: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"  # rich would still write bold
    return _Console(
        stderr=is_stderr,
        highlight=False,
        markup=False,
        emoji=False,
        width=width,
        color_system=colors,
        soft_wrap=not stream.isatty(),
    )


stdout, stderr = _console(is_stderr=False), _console(is_stderr=True)


_OVERRIDE = r"'?[\w.+-]+=(?:'[^']*'|[^\s',;()]+)'?"
_WHOLE = re.compile(rf"`[^`]+`|{_OVERRIDE}(?: {_OVERRIDE})*|\d [KMGT]iB")
"""What stays on one line of a sentence: overrides side by side, a command in backticks, a size with its unit."""


def folded(text: str, width: int, indent: str = "    ") -> str:
    """Lines of a width, broken between words, and never inside of what is to be typed: that may be longer.

    >>> folded("each of these helps: a.b=1 c.d='{e: 2}', or e.f=3", 26, "  ").split("\\n")
    ['each of these helps:', "  a.b=1 c.d='{e: 2}', or", '  e.f=3']
    """
    whole = _WHOLE.sub(lambda match: match[0].replace(" ", "\xa0"), text)
    lines = textwrap.fill(whole, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return lines.replace("\xa0", " ")


def note(text: str) -> None:
    """A remark on stderr: one line in a pipe, folded in a terminal."""
    lines = [folded(line, stderr.width) for line in text.splitlines()] if stderr.is_terminal else [text]
    print("\n".join(lines), file=sys.stderr)


def print_json(value: dict[str, Any]) -> None:
    """A library value on stdout."""
    print(json.dumps(value, indent=1))


def show_stage(name: str) -> None:
    """The heading of a stage; nothing of a job that stands alone."""
    if name:
        stdout.print(Text(f"Stage {name}", style="bold"))


def print_stages(texts: Mapping[str, str]) -> None:
    """A library value as JSON on stdout, or those of several stages by name."""
    if "" in texts:
        print(texts[""])
    else:
        print_json({"schema_version": 1, "stages": {name: json.loads(text) for name, text in texts.items()}})


def show_error(error: RlplanError) -> None:
    """The four parts of an error on stderr: whole lines in a pipe, indented ones in a terminal."""
    lines = f"error: {error}".split("\n")
    if stderr.is_terminal:
        lines = [folded(line, stderr.width) for line in lines]
    text = Text("\n".join(lines))
    text.stylize("bold red", 0, len("error:"))
    stderr.print(text, soft_wrap=True)


def show_change(typed: str, meaning: str) -> None:
    """A change as it is typed, never broken into lines; what it leads to beside it, or below where there is no room."""
    line = f"  {typed}  ({meaning})"
    if stdout.is_terminal and len(line) > stdout.width:
        line = f"  {typed}\n" + folded(f"      {meaning}", stdout.width, " " * 6)
    stdout.print(line, soft_wrap=True)


def new_table(*columns: str, title: str = "", left: tuple[str, ...] = ()) -> Table:
    """A table in the house style: the first column and those in `left` are text, which may wrap; the rest numbers."""
    table = Table(title=title or None, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for index, column in enumerate(columns):
        if column in left:
            table.add_column(column, justify="left", overflow="fold")
        else:
            table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def show_typed(rows: Iterable[tuple[str, str]]) -> None:
    """What is to be typed, below a table that has no room for it: each on one line, whatever its length."""
    for name, overrides in rows:
        stdout.print(Text.assemble((f"  {name}: ", "bold"), (overrides, "dim")), soft_wrap=True)


def say_left_out(columns: Iterable[str]) -> None:
    """Below a table, the columns for which there was no room."""
    if words := ", ".join(columns):
        stdout.print(f"Not shown for lack of width: {words}. A wider terminal or --json has it.", style="dim")


def fill(parts: list[str], room: int) -> str:
    """Parts with commas between them, broken into lines between parts only."""
    text = ", ".join(part.replace(" ", "\xa0") for part in parts)
    return "\n".join(textwrap.wrap(text, max(room, 24))).replace("\xa0", " ")


ON_GPUS = {Resource.MEMORY: "device memory"}
ON_A_HOST = {Resource.HOST: "fresh memory", Resource.LATENCY: "Python and calls", Resource.NETWORK: "collectives"}
"""What a resource is called in a table where its own name would not do, by what the devices are."""


def name_of(resource: Resource, *, is_on_host: bool) -> str:
    """What a resource is called on a machine."""
    special = {Resource.IDLE: "waiting"} | (ON_A_HOST if is_on_host else ON_GPUS)
    return special.get(resource) or words_of(resource.value)


def made_of(cost: Cost, *, is_on_host: bool) -> list[str]:
    """`compute 12.1 s` and so on, the three largest first; what is below a hundredth is left out."""
    parts = sorted(cost.parts.items(), key=lambda item: -item[1])
    shown = [(resource, part) for resource, part in parts if part >= 0.01 * cost.seconds][:3]
    return [f"{name_of(resource, is_on_host=is_on_host)} {format_seconds(part)}" for resource, part in shown]


def sizes_of(sizes: Mapping[MemoryKind, int]) -> list[str]:
    """`KV cache 32.0 MiB` and so on, largest first."""
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    return [f"{words_of(kind)} {format_bytes(size)}" for kind, size in ordered if size]


def say(head: str, text: str) -> None:
    """One line with what it is about in bold."""
    stdout.print(Text.assemble((f"{head}: ", "bold"), text))
