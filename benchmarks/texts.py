"""Texts of pages, which stand in the .md file beside the module that fills them in, and tables in Markdown
and CSV.
"""

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def read_texts(module: str) -> dict[str, str]:
    """The parts of the .md file beside a module (`__file__`), each below a line `=== NAME`."""
    _, *parts = re.split(r"^=== (\w+)\n", Path(module).with_suffix(".md").read_text("utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def format_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown, without the last line's end."""
    names = tuple(head)
    lines = [names, ("---",) * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with the same keys as CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
