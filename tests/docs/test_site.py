"""The site of docs/ builds, with every page in it and no link that leads nowhere."""

import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from benchmarks import docs_site
from benchmarks.pages.chromium import WIDTHS, Chromium
from tests.docs.documentation import DOCS


def list_pages(nav: Any) -> list[str]:
    """Every page of a navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    return [file for entry in (nav.values() if isinstance(nav, dict) else nav) for file in list_pages(entry)]


def test_every_page_stands_in_the_navigation_once() -> None:
    nav = tomllib.loads((DOCS / "site.toml").read_text("utf-8"))["project"]["nav"]
    assert sorted(list_pages(nav)) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


@pytest.fixture(name="site", scope="module")
def _site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return docs_site.build(tmp_path_factory.mktemp("site"))


def test_the_site_builds_with_strict_links_and_asks_no_other_server(site: Path) -> None:
    assert (site / "guides" / "out-of-memory" / "index.html").is_file()
    home = (site / "index.html").read_text("utf-8")
    assert "fonts.googleapis.com" not in home
    assert not [line for line in home.splitlines() if '<script src="http' in line]


@pytest.mark.nightly
def test_on_a_phone_no_page_scrolls_sideways_and_every_key_of_a_job_is_read_whole(site: Path) -> None:
    width, height = WIDTHS["phone"]
    with Chromium() as browser:
        browser.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=True)
        for page in ("job", "runtime"):
            browser.ask("Page.navigate", url=(site / page / "index.html").as_uri())
            browser.wait("document.readyState === 'complete'")
            assert browser.says("document.documentElement.scrollWidth") == width
            cells = "[...document.querySelectorAll('.keys td')].map(cell => cell.getBoundingClientRect().right)"
            rights = browser.says(cells)
            assert bool(rights) == (page == "job")
            assert not [right for right in rights if right > width]


@pytest.mark.nightly
def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = tmp_path / "docs"
    pages.mkdir()
    (pages / "index.md").write_text("# Home\n\n[nowhere](nowhere.md)\n")
    (pages / "site.toml").write_text('[project]\nsite_name = "x"\n')
    monkeypatch.setattr(docs_site, "DOCS", pages)
    with pytest.raises(subprocess.CalledProcessError):
        docs_site.build(tmp_path / "out")
