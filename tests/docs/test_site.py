"""The site of docs/ builds, with every page in it and no link that leads nowhere."""

import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from benchmarks import docs_site
from tests.docs.documentation import DOCS


def files_of(nav: Any) -> list[str]:
    """Every page of a navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    return [file for one in (nav.values() if isinstance(nav, dict) else nav) for file in files_of(one)]


def test_every_page_stands_in_the_navigation_once() -> None:
    nav = tomllib.loads((DOCS / "site.toml").read_text("utf-8"))["project"]["nav"]
    assert sorted(files_of(nav)) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def test_the_site_builds_with_strict_links_and_asks_no_other_server(tmp_path: Path) -> None:
    site = docs_site.build(tmp_path)
    assert (site / "guides" / "out-of-memory" / "index.html").is_file()
    home = (site / "index.html").read_text("utf-8")
    assert "fonts.googleapis.com" not in home
    assert not [line for line in home.splitlines() if '<script src="http' in line]


def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = tmp_path / "docs"
    pages.mkdir()
    (pages / "index.md").write_text("# Home\n\n[nowhere](nowhere.md)\n")
    (pages / "site.toml").write_text('[project]\nsite_name = "x"\n')
    monkeypatch.setattr(docs_site, "DOCS", pages)
    with pytest.raises(subprocess.CalledProcessError):
        docs_site.build(tmp_path / "out")
