"""Terminal output: tables and sentences on stdout, notes and errors on stderr; plain text in a pipe."""

import errno
import json
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
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
from rlplan.vocabulary import MemoryKind, format_name

PIPE_WIDTH = 120
"""Width in characters when it is not known: in a pipe or a file."""
NARROW = 112
"""Width in characters below which tables drop columns that another table or `--json` has too."""
GLUE = "\ue000"
"""A private-use character that replaces a space where a line must not break, while lines are cut."""


class _Console(Console):
    """A console without markup: brackets and colons are printed as they are, since text may come from a user."""

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Make all text printable before it gets its colors."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)

    @property
    def file(self) -> IO[str]:
        """The underlying stream, without rich's proxy and app.py's."""
        file = super().file
        while hasattr(file, "rich_proxied_file"):
            file = file.rich_proxied_file
        return file

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def on_broken_pipe(self) -> None:  # overrides rich's method
        """Raise the error again: rich would exit with code 1, which means that nothing fits; app.py handles it."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def _console(*, is_stderr: bool) -> Console:
    stream = sys.stderr if is_stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    # with NO_COLOR, rich itself would still write bold text
    colors: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
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
_UNBROKEN = re.compile(
    rf"`[^`]+`|{_OVERRIDE}(?: {_OVERRIDE})*|\d (?:B|[KMGT]iB|h|min|s|ms|us|GPU-hours)\b(?: \d+ (?:min|s)\b)?"
)
"""Parts of a sentence that stay on one line: overrides, a command in backticks, a size or a duration with its unit."""


def fold(text: str, width: int, indent: str = "    ") -> str:
    """Break text into lines between words. A command or an override is never broken, so a line may be longer.

    >>> fold("each of these helps: a.b=1 c.d='{e: 2}', or e.f=3", 26, "  ").split("\\n")
    ['each of these helps:', "  a.b=1 c.d='{e: 2}', or", '  e.f=3']
    """
    glued = _UNBROKEN.sub(lambda match: match[0].replace(" ", GLUE), text)
    lines = textwrap.fill(glued, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return lines.replace(GLUE, " ")


def show_text(text: Text, indent: str = "    ") -> None:
    """Print a sentence on stdout: one line in a pipe, folded with a hanging indent in a terminal."""
    if not stdout.is_terminal:
        stdout.print(text)
        return
    # Nothing is dropped or inserted, so the lines' lengths are offsets in the styled text.
    glued = _UNBROKEN.sub(lambda match: match[0].replace(" ", GLUE), text.plain)
    width = stdout.width - len(indent)
    lines = textwrap.wrap(glued, width, drop_whitespace=False, break_long_words=False, break_on_hyphens=False)
    for number, line in enumerate(text.divide([*accumulate(map(len, lines))][:-1])):
        line.rstrip()
        continued = line[len(line) - len(line.plain.lstrip()) :]
        stdout.print(Text(indent) + continued if number else line, soft_wrap=True)


def note(text: str) -> None:
    """Print a remark on stderr: one line in a pipe, folded in a terminal."""
    lines = [fold(line, stderr.width) for line in text.splitlines()] if stderr.is_terminal else [text]
    print("\n".join(lines), file=sys.stderr)


def hint(text: str) -> None:
    """Print a remark for a person at a terminal; a pipe gets none."""
    if stderr.is_terminal:
        note(text)


def print_json(value: dict[str, Any]) -> None:
    """Print a value as JSON on stdout."""
    print(json.dumps(value, indent=1))


def show_stage(name: str) -> None:
    """Print the heading of a stage; nothing for a job without stages."""
    if name:
        stdout.print(Text(f"Stage {name}", style="bold"))


def print_stages(texts: Mapping[str, str]) -> None:
    """Print one JSON text on stdout, or those of several stages by name."""
    if "" in texts:
        print(texts[""])
    else:
        print_json({"schema_version": 1, "stages": {name: json.loads(text) for name, text in texts.items()}})


def show_error(error: RlplanError) -> None:
    """Print the four parts of an error on stderr: one line each in a pipe, folded in a terminal."""
    lines = f"error: {error}".split("\n")
    if stderr.is_terminal:
        lines = [fold(line, stderr.width) for line in lines]
    text = Text("\n".join(lines))
    text.stylize("bold red", 0, len("error:"))
    stderr.print(text, soft_wrap=True)


def show_change(typed: str, meaning: str) -> None:
    """Print an override, never broken into lines, with its meaning beside it, or below it if there is no room."""
    line = f"  {typed}  ({meaning})"
    if stdout.is_terminal and len(line) > stdout.width:
        line = f"  {typed}\n" + fold(f"      {meaning}", stdout.width, " " * 6)
    stdout.print(line, soft_wrap=True)


def new_table(*columns: str, title: str = "", left: tuple[str, ...] = ()) -> Table:
    """Create a table. The first column is left-aligned, those in `left` may also wrap; all others are numbers."""
    # a title as a string would be wrapped at the table's width
    heading = Text(title, style="bold", no_wrap=True, overflow="ignore") if title else None
    table = Table(title=heading, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for index, column in enumerate(columns):
        if column in left:
            table.add_column(column, justify="left", overflow="fold")
        else:
            table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def show_table(
    columns: Iterable[str], rows: Iterable[Iterable[str | Text]], title: str = "", left: tuple[str, ...] = ()
) -> None:
    """Print a table, as `new_table` makes it; nothing without rows."""
    table = new_table(*columns, title=title, left=left)
    for row in rows:
        table.add_row(*row)
    if table.rows:
        stdout.print(table)


def show_typed(rows: Iterable[tuple[str, str]]) -> None:
    """Print (name, overrides) below a table that has no room for them, each on one line of any length."""
    for name, overrides in rows:
        stdout.print(Text.assemble((f"  {name}: ", "bold"), (overrides, "dim")), soft_wrap=True)


def show_left_out(columns: Iterable[str]) -> None:
    """Print the names of a table's columns that had no room."""
    if words := ", ".join(columns):
        show_text(Text(f"Hidden in a narrow terminal: {words}. --json has all columns.", style="dim"))


def join_parts(parts: list[str], room: int) -> str:
    """Join parts with commas, and break lines only between parts."""
    text = ", ".join(part.replace(" ", "\xa0") for part in parts)
    return "\n".join(textwrap.wrap(text, max(room, 24))).replace("\xa0", " ")


ON_GPUS = {Resource.MEMORY: "device memory"}
ON_A_HOST = {Resource.HOST: "fresh memory", Resource.LATENCY: "Python and calls", Resource.NETWORK: "collectives"}
"""Names of resources in tables, where they differ from the resource's own name."""


def name_resource(resource: Resource, *, is_on_host: bool) -> str:
    """The name of a resource on a host or a GPU."""
    special = {Resource.IDLE: "waiting"} | (ON_A_HOST if is_on_host else ON_GPUS)
    return special.get(resource) or format_name(resource.value)


def list_parts(cost: Cost, *, is_on_host: bool) -> list[str]:
    """List the three largest parts of a cost, such as `compute 12.1 s`; parts below 1 % are left out."""
    parts = sorted(cost.parts.items(), key=lambda item: -item[1])
    shown = [(resource, part) for resource, part in parts if part >= 0.01 * cost.seconds][:3]
    return [f"{name_resource(resource, is_on_host=is_on_host)} {format_seconds(part)}" for resource, part in shown]


def list_sizes(sizes: Mapping[MemoryKind, int]) -> list[str]:
    """List sizes such as `KV cache 32.0 MiB`, largest first."""
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    return [f"{format_name(kind)} {format_bytes(size)}" for kind, size in ordered if size]


def show_fact(head: str, text: str) -> None:
    """Print a sentence after its subject in bold."""
    show_text(Text.assemble((f"{head}: ", "bold"), text), indent="  ")
