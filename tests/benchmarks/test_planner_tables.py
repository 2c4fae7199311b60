"""The committed page of the planner says what its tables hold, and the tables what is promised."""

from pathlib import Path
from statistics import median

import pytest

from benchmarks import planner_tables
from benchmarks.planner_tables import COUNTS, LENGTHS, SCAN_COLUMNS, read


def test_every_published_step_and_recipe_has_a_row() -> None:
    assert [row["point"] for row in read("published.csv")] == [point.id for point in planner_tables.points()]


def test_published_steps_are_met_and_recipes_that_run_fit() -> None:
    rows = read("published.csv")
    errors = [abs(float(row["error"])) for row in rows if row["error"]]
    assert len(errors) == 15
    assert median(errors) <= 0.15
    assert max(errors) <= 0.40
    assert {row["published_layout"] for row in rows if not row["unit"]} == {"fits"}


def test_no_number_of_gpus_in_the_scan_is_slower_than_fewer() -> None:
    rows = read("scan.csv")
    assert [int(row["gpus"]) for row in rows] == list(COUNTS)
    for column in SCAN_COLUMNS[1:]:
        seconds = [float(row[column]) for row in rows]
        assert all(step_s <= min(seconds[: place + 1]) * (1 + 1e-5) for place, step_s in enumerate(seconds))
    assert len(SCAN_COLUMNS) == 1 + len(LENGTHS)


def test_the_page_is_made_of_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed = (planner_tables.FOLDER / "README.md").read_text(encoding="utf-8")
    for name in ("published.csv", "scan.csv"):
        (tmp_path / name).write_bytes((planner_tables.FOLDER / name).read_bytes())
    monkeypatch.setattr(planner_tables, "FOLDER", tmp_path)
    planner_tables.draw()
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == committed
