"""Files that begin first, or stay together, are there."""

from tests.factories import ROOT
from tests.repository.side_by_side import LIVE_RANKS, TOGETHER, WITH_ENGINES, WITHOUT, FilesTogether, find_place


def test_every_file_that_is_named_is_there_and_has_tests_of_engines_where_it_says_so() -> None:
    assert all("pytest.mark.engine" in (ROOT / file).read_text(encoding="utf-8") for file in WITH_ENGINES)
    assert all((ROOT / file).is_file() for file in (*WITHOUT, *TOGETHER))


def test_slow_files_come_before_all_others() -> None:
    tests = ["tests/test_api.py::test_a", f"{LIVE_RANKS[0]}::test_b", "tests/runtime/runs/test_resumed_runs.py::test_c"]
    assert sorted(tests, key=find_place) == tests[::-1]


def test_files_that_share_what_they_start_are_one_for_both_processes() -> None:
    scheduler = object.__new__(FilesTogether)
    assert {scheduler._split_scope(f"{file}::test_a") for file in LIVE_RANKS} == {"ranks"}
    assert scheduler._split_scope("tests/test_api.py::test_a[x::y]") == "tests/test_api.py"
