"""The learning report: what counts as passed and as agreeing; the committed page is of the committed curves."""

import pytest

from benchmarks.learning import page as learning_page
from benchmarks.learning import record
from benchmarks.learning.page import ALGORITHMS_PAGE, BEGIN, END, list_reached, write_page
from benchmarks.learning.record import (
    CURVES,
    EVERY,
    IN_PROCESS,
    JOBS,
    LEARNING_RATE_0,
    SHUFFLED,
    Beside,
    Curve,
    Point,
    add_curve,
    read_comparison,
    read_curves,
    write_comparison,
)
from rlplan.spec.files.job_file import load_job


def curve(*accuracy: float, case: str = "seed 0", algorithm: str = "grpo") -> Curve:
    return Curve(algorithm, case, EVERY, accuracy)


def test_a_seed_has_to_end_at_the_target_and_a_control_where_it_began() -> None:
    assert curve(0.3, 0.95, 0.9).has_passed
    assert not curve(0.3, 0.95, 0.89).has_passed
    assert curve(0.3, 0.39, case=SHUFFLED).has_passed
    assert not curve(0.3, 0.41, case=LEARNING_RATE_0).has_passed


def test_means_may_be_as_far_apart_as_the_seeds_of_one_side_are() -> None:
    assert Point(5, (0.5, 0.6), (0.65, 0.65)).agrees  # 0.10 apart, ours spread over 0.10
    assert not Point(5, (0.5, 0.6), (0.66, 0.66)).agrees
    assert Point(0, (0.25, 0.25), (0.26, 0.26)).agrees  # a point, which so many prompts do not tell


@pytest.mark.nightly
def test_a_set_in_part_has_a_page(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "REPORTS", tmp_path)
    monkeypatch.setattr(learning_page, "REPORTS", tmp_path)
    docs = tmp_path / "algorithms.md"  # type: ignore[operator]
    docs.write_text(f"before\n{BEGIN}old\n{END}after\n")
    monkeypatch.setattr(learning_page, "ALGORITHMS_PAGE", docs)
    add_curve(curve(0.3, 0.5), CURVES)
    add_curve(curve(0.3, 0.95), CURVES)
    add_curve(curve(0.3, 0.3, case=SHUFFLED, algorithm="ppo"), IN_PROCESS)
    write_comparison(Beside(EVERY, ((0.3, 0.95),), ((0.3, 0.9),)))
    write_page()
    page = (tmp_path / "README.md").read_text()  # type: ignore[operator]
    assert "| 5 | 95.0% |  |  |  |  | so far |" in page
    assert "1 of 2 steps" in page
    assert docs.read_text().startswith(f"before\n{BEGIN}| algorithm |")
    assert docs.read_text().endswith(f"{END}after\n")


def test_the_committed_page_is_of_the_committed_curves() -> None:
    assert f"{BEGIN}{list_reached()}{END}" in ALGORITHMS_PAGE.read_text("utf-8")


@pytest.mark.parametrize("file", [CURVES, IN_PROCESS])
def test_every_committed_curve_passes_and_is_as_long_as_its_job(file: str) -> None:
    for each in read_curves(file):
        assert each.has_passed, each
        is_short = file == IN_PROCESS and each.case == LEARNING_RATE_0
        assert each.steps[-1] == (EVERY if is_short else load_job(JOBS[each.algorithm]).workload.num_steps)


def test_the_committed_curves_of_grpo_agree_with_trl_s() -> None:
    beside = read_comparison()
    assert beside is not None
    assert all(point.agrees for point in beside.points)
