"""The tables of errors on hand-written pages are those of the published points."""

from pathlib import Path

import pytest

from benchmarks.accuracy_evidence import BEGIN, END, HEADLINE, HEADLINE_PAGES, ROOT, write_headline
from tests.accuracy.bundled import published_report


@pytest.mark.parametrize("page", HEADLINE_PAGES)
def test_a_page_shows_the_errors_of_the_published_points(page: str, tmp_path: Path) -> None:
    committed = (ROOT / page).read_text(encoding="utf-8")
    copy = tmp_path / "page.md"
    copy.write_text(committed, encoding="utf-8")
    write_headline(published_report(), copy)
    assert copy.read_text(encoding="utf-8") == committed, "run `make accuracy`"
    table = committed.partition(BEGIN)[2].partition(END)[0]
    assert table.count("\n") == len(HEADLINE) + 1
