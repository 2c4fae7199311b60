"""The outcome corpus: what people reported in public threads, beside what rlplan answers (outcomes.py)."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.foreign.outcomes import grade, list_cases
from tests.repository.at_night import mark_nightly

GRADES = ("unread", "wrong", "partly", "right")
CASES = {case["id"]: case for case in list_cases()}
EVERY_FOURTH = list(CASES)[::4]
LEAST_CASES = 60
LEAST_RIGHT = 0.8


@pytest.mark.parametrize("name", mark_nightly(CASES, but=EVERY_FOURTH))
def test_an_answer_is_as_good_as_its_recorded_grade(name: str, tmp_path: Path) -> None:
    graded, words = grade(CASES[name], tmp_path)
    assert GRADES.index(graded) >= GRADES.index(CASES[name]["grade"]), words


def test_four_of_five_answers_are_right_and_every_other_one_has_a_note() -> None:
    counts = Counter(case["grade"] for case in CASES.values())
    assert counts.total() >= LEAST_CASES
    assert counts["right"] >= LEAST_RIGHT * (counts.total() - counts["unread"])
    assert [name for name, case in CASES.items() if case["grade"] != "right" and not case.get("note")] == []


def test_every_case_names_its_source_and_a_fact() -> None:
    def is_complete(case: dict[str, Any]) -> bool:
        return case["url"].startswith("https://") and bool(case["reported"]) and case["grade"] in GRADES

    assert [name for name, case in CASES.items() if not is_complete(case)] == []
