"""The four people of docs/first-ten-minutes.md, and readers of the guides, get the answers that the pages show."""

import re
from pathlib import Path

import pytest

from tests.docs.documentation import DOCS, read, run_commands
from tests.repository.at_night import mark_nightly

WITHIN_S = 60.0
"""Seconds from the first command to the answer, over all commands of a person or a guide."""
PEOPLE = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", read(DOCS / "first-ten-minutes.md"), re.MULTILINE | re.DOTALL))
GUIDES = {path.stem: path for path in sorted((DOCS / "guides").glob("*.md"))}
AT_ONCE = ("write-a-reward",)
"""The guide that `make test` runs; all others at night."""
MAX_WORDS = 700
"""Two screens."""


def test_there_are_four_people() -> None:
    assert len(PEOPLE) == 4


@pytest.mark.parametrize("person", mark_nightly(PEOPLE, but=1))
def test_each_of_them_has_the_answer_within_a_minute(person: str, tmp_path: Path) -> None:
    run_commands(PEOPLE[person], tmp_path, WITHIN_S)


@pytest.mark.parametrize(
    "guide", [pytest.param(name, marks=[pytest.mark.nightly] * (name not in AT_ONCE)) for name in GUIDES]
)
def test_commands_of_a_guide_answer_what_it_shows(guide: str, tmp_path: Path) -> None:
    run_commands(read(GUIDES[guide]), tmp_path, WITHIN_S)


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_is_short_and_named_on_the_first_page(guide: str) -> None:
    assert len(read(GUIDES[guide]).split()) <= MAX_WORDS
    assert f"(guides/{guide}.md)" in read(DOCS / "index.md")
