"""The site of docs/: its pages, built by zensical with every link checked.

In: a folder. Out: FOLDER/site/, which is opened as it lies or served by anything. Left out: publishing it.

    python -m benchmarks.docs_site [FOLDER]
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def build(folder: Path) -> Path:
    """The built site. Raises: subprocess.CalledProcessError, with what zensical says of a link that leads nowhere."""
    pages = folder / "docs"
    shutil.rmtree(pages, ignore_errors=True)
    for page in DOCS.rglob("*.md"):
        copy = pages / page.relative_to(DOCS)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(mark_key_tables(replace_outside_links(page)), encoding="utf-8")
    for style in DOCS.glob("*.css"):
        shutil.copyfile(style, pages / style.name)
    shutil.copyfile(DOCS / "site.toml", folder / "zensical.toml")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "-f", str(folder / "zensical.toml")]
    subprocess.run(command, check=True, capture_output=True, text=True, env={"NO_COLOR": "1", "PATH": ""})
    return folder / "site"


def replace_outside_links(page: Path) -> str:
    """A page whose links to files of the repository that are no pages are the files' names: the site has only pages."""

    def kept(match: re.Match[str]) -> str:
        target = (page.parent / match[2].partition("#")[0]).resolve()
        is_outside = not re.match(r"\w+:|#", match[2]) and not target.is_relative_to(DOCS)
        return f"{match[1]} (`{target.relative_to(ROOT)}`)" if is_outside else match[0]

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", kept, page.read_text("utf-8"))


def mark_key_tables(text: str) -> str:
    """A page whose tables of keys have a class of their own, which docs/site.css draws as a list on a phone."""
    return re.sub(r"(?m)^\| key \| type.*\n(?:\|.*\n)+", r'<div class="keys" markdown>\n\n\g<0>\n</div>\n', text)


if __name__ == "__main__":
    site = build(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "docs")
    print(site / "index.html")
