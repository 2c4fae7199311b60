"""The pages of docs/, offline: cut into sections, searched by words, their tables as lines that a terminal holds.

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
"""Pages for who works on rlplan: they come after the others."""
_HEADING = re.compile(r"(#+) +(.+)")
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")
MAX_PARAGRAPHS = 12
"""Of a section that is shown; the page has the rest."""


def pages_folder() -> Path:
    """The packaged folder, or the checkout's in an editable install (which does not show force-included files)."""
    packaged = Path(str(resources.files("rlplan"))) / "_docs"
    return packaged if packaged.is_dir() else Path(__file__).resolve().parents[2] / "docs"


@dataclass(frozen=True)
class Section:
    """What stands between two headings."""

    page: str
    """Such as `job` or `guides/start`."""
    heading: str
    body: str

    @property
    def place(self) -> str:
        """As a link on the page has it."""
        anchor = re.sub(r"[^\w\- ]", "", self.heading.lower()).replace(" ", "-")
        return f"docs/{self.page}.md#{anchor}"

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """Paragraphs, blocks of code and tables."""
        return tuple(block for block in re.split(r"\n\s*\n", self.body.strip()) if block)

    def score(self, wanted: str) -> float:
        """How well it answers: named by its heading, by a key of a table, or only in passing. 0: not at all."""
        heading, body = folded(self.heading), folded(self.body)
        words = wanted.split()
        if not all(word in f"{heading} {body}" for word in words):
            return 0.0
        keys = [folded(row[0]) for table in self.blocks if _is_table(table) for row in _rows(table)]
        shared = [key for cell in keys if ", " in cell for key in cell.split(", ")]
        found = (
            130.0 * (heading.removeprefix("the ") == wanted)
            + 40.0 * (wanted in heading)
            + 60.0 * (wanted == self.page and not self.body)
        )
        found += 120.0 * (wanted in keys) + 90.0 * any(key.endswith(f".{wanted}") for key in keys)
        found += 80.0 * (wanted in shared)
        found += 15.0 * any(
            wanted in folded(table) for table in self.blocks if _is_table(table)
        )  # more than in passing
        found += min(body.count(wanted), 20) + 1.0
        return found * (0.2 if self.page in HISTORY else 1.0)

    def told(self, wanted: str) -> list[str]:
        """Its blocks for a terminal: of tables only the rows that say the word, where some do."""
        shown = []
        for block in self.blocks:
            if not _is_table(block):
                shown.append(_LINK.sub(r"\1", _on_one_line(block)))
                continue
            header, rows = _header(block), [*_rows(block)]
            named = [row for row in rows if wanted in (key := folded(row[0])) or key.endswith(f".{wanted}")]
            named = named or [row for row in rows if wanted in folded(" ".join(row))]
            exact = [row for row in named if wanted == (key := folded(row[0])) or key.endswith(f".{wanted}")]
            shown += [_as_lines(header, row) for row in exact or named or rows]
        if any(wanted in folded(block) for block in shown) and len(shown) > MAX_PARAGRAPHS:
            shown = [block for block in shown if wanted in folded(block)]
        return shown[:MAX_PARAGRAPHS]


def pages() -> dict[str, str]:
    """Titles by page."""
    return {name: path.read_text("utf-8").splitlines()[0].lstrip("# ") for name, path in _paths()}


def _paths() -> list[tuple[str, Path]]:
    """Pages by name, such as `guides/start`: those on top first."""
    folder = pages_folder()
    found = sorted(folder.rglob("*.md"), key=lambda path: (len(path.parts), path))
    return [(path.relative_to(folder).with_suffix("").as_posix(), path) for path in found]


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
    """Sections that say the words, the best first. Raises: SpecError with what is near, where none does."""
    wanted, every = folded(words), sections()
    scored = sorted(((one.score(wanted), one) for one in every), key=lambda pair: -pair[0])
    if found := [one for score, one in scored if score > 0]:
        return found
    names = {folded(one.heading) for one in every}
    names |= {word for one in every for word in re.findall(r"`([\w.+-]+)`", one.body)}
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.6)
    raise SpecError(
        f"no page says '{words[:80]}'",
        where="docs/",
        rule="a word of the pages, a key of a job, a metric or a heading"
        + (f". Did you mean {' or '.join(map(repr, near))}?" if near else ""),
        way_out="`rlplan docs` lists the pages",
    )


def folded(text: str) -> str:
    """Without case, marks and the difference between `kv_cache`, `kv-cache` and `KV cache`.

    >>> folded("`KV_cache`,  **peak**"), folded("training.zero_stage")
    ('kv cache, peak', 'training.zero stage')
    """
    return re.sub(r"[\s_-]+", " ", re.sub(r"[`*]", "", text)).strip().lower()


def _on_one_line(block: str) -> str:
    """A paragraph, or each item of a list, as one line, for a terminal of any width to fold; code as it stands.

    >>> _on_one_line("- one\\n  item\\n- two")
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
    """A row of a table under its first cell."""
    named = (
        f"  {name}: {cell}" if name else f"  {cell}" for name, cell in zip(header[1:], row[1:], strict=False) if cell
    )
    return _LINK.sub(r"\1", "\n".join([row[0], *named]))
