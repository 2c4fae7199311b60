"""Answers that data sets hold, to imitate or judged good or bad: found in every layout, or a bad row."""

from pathlib import Path
from typing import Any

import pytest

from rlplan.errors import SpecError
from rlplan.runtime.data.layouts import Columns
from rlplan.runtime.data.loading import RowNeeds, load_rows
from rlplan.spec.declaration import Given
from tests.runtime.data.test_loading import SORTER, USER, jsonl, said

IMITATED: dict[str, dict[str, Any]] = {
    "TRL, prompt and completion": {"prompt": "1 + 1?", "completion": "2"},
    "TRL, messages of a chat": {"prompt": [USER], "completion": [said("2")]},
    "messages": {"messages": [USER, said("2")]},
    "the chosen of a pair": {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"},
    "the chosen chat of a pair": {"chosen": [USER, said("2")], "rejected": [USER, said("3")]},
    "the same, beside its prompt": {"prompt": [USER], "chosen": [USER, said("2")], "rejected": [USER, said("3")]},
    "a pair of equal answers": {"prompt": "1 + 1?", "chosen": "2", "rejected": "2"},
    "an answer": {"prompt": "1 + 1?", "answer": 2},
}


@pytest.mark.parametrize("name", IMITATED)
def test_an_answer_to_imitate_is_found_in_every_layout(tmp_path: Path, name: str) -> None:
    (row,) = load_rows(jsonl(tmp_path / "p.jsonl", [IMITATED[name]]), Columns(), SORTER, RowNeeds("answer")).rows
    assert (row.prompt, row.chosen, row.rejected, row.others) == ("1 + 1?", "2", None, "{}")


def test_a_judged_answer_is_good_or_bad_by_its_label(tmp_path: Path) -> None:
    cells = {"prompt": "1 + 1?", "completion": "2"}
    rows = [cells | {"label": True}, cells | {"label": False}, {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}]
    loaded = load_rows(jsonl(tmp_path / "p.jsonl", rows), Columns(), SORTER, RowNeeds("unpaired"))
    assert [(row.chosen, row.rejected) for row in loaded.rows] == [("2", None), (None, "2"), ("2", "3")]


@pytest.mark.parametrize(
    ("answer_kind", "row", "what"),
    [
        ("answer", {"prompt": "x"}, "no answer"),
        ("answer", {"messages": [USER]}, "messages must end with an assistant message"),
        ("answer", {"prompt": "x", "completion": [USER]}, "completion must be one assistant message"),
        ("unpaired", {"prompt": "x", "completion": "a"}, "label must be true or false"),
        ("unpaired", {"prompt": "x", "label": True}, "completion is null"),
    ],
)
def test_a_row_without_its_given_answer_is_a_bad_row(tmp_path: Path, answer_kind: Given, row: Any, what: str) -> None:
    with pytest.raises(SpecError, match="1 of 1 rows cannot be used: row 1: ") as caught:
        load_rows(jsonl(tmp_path / "p.jsonl", [row]), Columns(), SORTER, RowNeeds(answer_kind))
    assert what in caught.value.what
