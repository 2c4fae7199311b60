"""Offline search in the pages of docs/: split into sections, ranked by words, with tables as lines for a terminal.

In: the bundled pages, words. Out: sections, the best first. Left out: printing.
"""

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from pathlib import Path

from rlplan.errors import SpecError

HISTORY = ("decisions", "architecture")
"""Pages for developers of rlplan, which are ranked after the others."""
_HEADING = re.compile(r"(#+) +(.+)")
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")
MAX_PARAGRAPHS = 12
"""Largest number of paragraphs that are shown of a section."""


def pages_folder() -> Path:
    """The packaged folder of pages, or the checkout's docs/ in an editable install, which lacks included files."""
    packaged = Path(str(resources.files("rlplan"))) / "_docs"
    return packaged if packaged.is_dir() else Path(__file__).resolve().parents[2] / "docs"


@dataclass(frozen=True)
class Section:
    """The text between two headings."""

    page: str
    """Name of the page, such as `job` or `guides/start`."""
    heading: str
    body: str

    @property
    def place(self) -> str:
        """Link to the section, as a page would write it."""
        anchor = re.sub(r"[^\w\- ]", "", self.heading.lower()).replace(" ", "-")
        return f"docs/{self.page}.md#{anchor}"

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """Paragraphs, blocks of code and tables."""
        return tuple(block for block in re.split(r"\n\s*\n", self.body.strip()) if block)

    def score(self, wanted: str) -> float:
        """Relevance for words: high if a heading or a table's key names them, low if only the text does; 0 for none."""
        heading, body = normalize(self.heading), normalize(self.body)
        words = wanted.split()
        if not all(word in f"{heading} {body}" for word in words):
            return 0.0
        keys = [normalize(row[0]) for table in self.blocks if _is_table(table) for row in _rows(table)]
        shared = [key for cell in keys if ", " in cell for key in cell.split(", ")]
        score = 130.0 * (heading.removeprefix("the ") == wanted) + 40.0 * (wanted in heading)
        score += 60.0 * (wanted == self.page and not self.body)
        score += 120.0 * (wanted in keys) + 90.0 * any(key.endswith(f".{wanted}") for key in keys)
        score += 80.0 * (wanted in shared)
        score += 15.0 * any(wanted in normalize(table) for table in self.blocks if _is_table(table))
        score += min(body.count(wanted), 20) + 1.0
        return score * (0.2 if self.page in HISTORY else 1.0)

    def select_blocks(self, wanted: str) -> list[str]:
        """Select the blocks to show in a terminal. Tables are reduced to the rows with the words, if any has them."""
        shown = []
        for block in self.blocks:
            if not _is_table(block):
                shown.append(_LINK.sub(r"\1", _join_lines(block)))
                continue
            header, rows = _header(block), [*_rows(block)]
            named = [row for row in rows if wanted in (key := normalize(row[0])) or key.endswith(f".{wanted}")]
            named = named or [row for row in rows if wanted in normalize(" ".join(row))]
            exact = [row for row in named if wanted == (key := normalize(row[0])) or key.endswith(f".{wanted}")]
            shown += [_as_lines(header, row) for row in exact or named or rows]
        if any(wanted in normalize(block) for block in shown) and len(shown) > MAX_PARAGRAPHS:
            shown = [block for block in shown if wanted in normalize(block)]
        return shown[:MAX_PARAGRAPHS]


def pages() -> dict[str, str]:
    """Titles of the pages by name."""
    return {name: path.read_text("utf-8").splitlines()[0].lstrip("# ") for name, path in _paths()}


def _paths() -> list[tuple[str, Path]]:
    """Pages with their names, such as `guides/start`, those of the top folder first."""
    folder = pages_folder()
    paths = sorted(folder.rglob("*.md"), key=lambda path: (len(path.parts), path))
    return [(path.relative_to(folder).with_suffix("").as_posix(), path) for path in paths]


@cache
def sections() -> tuple[Section, ...]:
    """Every section of every page."""
    return tuple(_sections())


def _sections() -> Iterator[Section]:
    for name, path in _paths():
        heading, lines, in_code = name, list[str](), False
        for line in path.read_text("utf-8").splitlines():
            in_code ^= line.startswith("```")
            match = None if in_code else _HEADING.fullmatch(line)
            if match is None:
                lines.append(line)
                continue
            if lines:
                yield Section(name, heading, "\n".join(lines))
            heading, lines = match[2], []
        yield Section(name, heading, "\n".join(lines))


def look_up(words: str) -> list[Section]:
    """Find the sections with the words, the best first. Raises: SpecError with similar words if there is none."""
    wanted = normalize(words)
    scored = sorted(((section.score(wanted), section) for section in sections()), key=lambda pair: -pair[0])
    if matches := [section for score, section in scored if score > 0]:
        return matches
    names = {normalize(section.heading) for section in sections()}
    names |= {word for section in sections() for word in re.findall(r"`([\w.+-]+)`", section.body)}
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.6)
    raise SpecError(
        f"no page contains '{words[:80]}'",
        where="docs/",
        rule="a word of the documentation, a key of a job, a metric or a heading"
        + (f". Did you mean {' or '.join(map(repr, near))}?" if near else ""),
        way_out="`rlplan docs` lists the pages",
    )


def normalize(text: str) -> str:
    """Remove case, markup and the difference between `kv_cache`, `kv-cache` and `KV cache`.

    >>> normalize("`KV_cache`,  **peak**"), normalize("training.zero_stage")
    ('kv cache, peak', 'training.zero stage')
    """
    return re.sub(r"[\s_-]+", " ", re.sub(r"[`*]", "", text)).strip().lower()


def _join_lines(block: str) -> str:
    """Join each paragraph or list item into one line, which a terminal folds at any width; code stays as it is.

    >>> _join_lines("- one\\n  item\\n- two")
    '- one item\\n- two'
    """
    return block if block.startswith("```") else re.sub(r"\n(?! *(?:[-*]|\d+\.) ) *", " ", block)


def _is_table(block: str) -> bool:
    return block.startswith("|")


def _header(table: str) -> list[str]:
    return _cells(table.splitlines()[0])


def _rows(table: str) -> Iterator[list[str]]:
    return (_cells(line) for line in table.splitlines()[2:])


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def _as_lines(header: list[str], row: list[str]) -> str:
    """Write a row of a table as its first cell, with the other cells as lines below it."""
    named = (
        f"  {name}: {cell}" if name else f"  {cell}" for name, cell in zip(header[1:], row[1:], strict=False) if cell
    )
    return _LINK.sub(r"\1", "\n".join([row[0], *named]))
