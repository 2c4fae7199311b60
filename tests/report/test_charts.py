"""Charts show what they should: the right panels, scales, marks and words."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from rlplan.report import charts, result_charts, style
from rlplan.report.run_folder import RunFolder, read_run_folder, unique_labels
from rlplan.units import GIB
from rlplan.vocabulary import MemoryKind, Phase
from tests.report.factory import RunShape, make_empty_run, make_killed_run, make_run, make_run_with_own_reward


def _read(folder: Path, shape: RunShape) -> RunFolder:
    return read_run_folder(make_run(folder, shape))


def _words(figure: Figure) -> str:
    """Every text of a figure, as the reader sees it."""
    figure.canvas.draw()
    return " | ".join(text.get_text() for text in figure.findobj(lambda part: hasattr(part, "get_text")))


def test_every_kind_and_phase_has_its_own_color() -> None:
    assert set(style.KIND_COLORS) == set(MemoryKind)
    assert set(style.PHASE_COLORS) == set(Phase)
    assert len(set(style.KIND_COLORS.values())) == len(MemoryKind)
    assert len(set(style.PHASE_COLORS.values())) == len(Phase)


def test_a_capacity_far_above_is_marked_and_not_to_scale(tmp_path: Path) -> None:
    figure = charts.memory_timeline(_read(tmp_path, RunShape(capacity=64 * GIB)))
    words = _words(figure)
    assert "capacity 64.0 GiB" in words
    assert "not to scale" in words
    assert max(axes.get_ylim()[1] for axes in figure.axes) < 8 * GIB


def test_a_capacity_nearby_is_drawn_where_it_lies(tmp_path: Path) -> None:
    figure = charts.memory_timeline(_read(tmp_path, RunShape(capacity=3 * GIB)))
    assert "not to scale" not in _words(figure)
    lines = [line for axes in figure.axes for line in axes.get_lines() if set(line.get_ydata()) == {3 * GIB}]
    assert len(lines) == 3


def test_a_tiny_model_gets_a_row_without_the_baselines(tmp_path: Path) -> None:
    tiny = _words(charts.memory_timeline(_read(tmp_path / "tiny", RunShape(size="tiny"))))
    large = _words(charts.memory_timeline(_read(tmp_path / "large", RunShape(size="large"))))
    assert "Without process baselines" in tiny
    assert "Without process baselines" not in large
    assert "predicted peak" in large
    assert "measured peak" in large


def test_every_process_has_a_row_until_there_are_too_many(tmp_path: Path) -> None:
    words = _words(charts.memory_by_process(_read(tmp_path / "few", RunShape(num_devices=2))))
    for name in ("policy_trainer/0", "rollout_engine/0", "scorer/reference/0", "driver/0", "ray_system"):
        assert name in words
    words = _words(charts.memory_by_process(_read(tmp_path / "many", RunShape(num_devices=16, num_steps=2))))
    assert "the 12 largest of 19 processes" in words


@pytest.mark.parametrize("draw", [charts.memory_timeline, charts.memory_by_process])
def test_a_runs_legends_hold_every_kind_and_phase_that_is_drawn(
    tmp_path: Path, draw: Callable[[RunFolder], Figure]
) -> None:
    run = _read(tmp_path, RunShape(num_steps=3))
    shown = _words(draw(run)).split(" | ")
    kinds = {str(row.kind) for row in run.ledger.rows if row.peak_bytes and row.run_phase != "finish"}
    assert {style.name_of(kind) for kind in kinds} <= set(shown)
    assert {str(action.phase) for action in run.schedule.step} <= set(shown)


def test_all_runs_are_named_at_the_end_of_their_accuracy(tmp_path: Path) -> None:
    shapes = [RunShape(), RunShape(seed=1), RunShape(learning_rate=0), RunShape(shuffle_rewards=True)]
    runs = tuple(_read(tmp_path / str(i), shape) for i, shape in enumerate(shapes))
    words = _words(result_charts.learning(runs, unique_labels(runs)))
    for label in ("seed 0  95.7 %", "seed 1  94.7 %", "learning rate 0  2", "shuffled rewards  2"):
        assert label in words


def test_labels_of_equal_runs_do_not_lie_on_each_other(tmp_path: Path) -> None:
    runs = tuple(_read(tmp_path / str(i), RunShape(seed=0)) for i in range(5))
    figure = result_charts.learning(runs, unique_labels(runs))
    for axes in figure.axes[:2]:
        heights = sorted(text.xyann[1] for text in axes.texts)
        assert len(heights) == 5
        assert min(second - first for first, second in pairwise(heights)) > 0.03


def test_every_evaluation_of_a_run_has_a_chart_under_its_own_name(tmp_path: Path) -> None:
    figure = result_charts.learning([_read(tmp_path / "rules", RunShape())], ["seed 0"])
    assert [axes.get_title(loc="left") for axes in figure.axes[:2]] == [
        "Greedy accuracy on held-out prompts",
        "format_accuracy on held-out prompts",
    ]
    own = read_run_folder(make_run_with_own_reward(tmp_path / "own"))
    figure = result_charts.learning([own], ["seed 0"])
    assert figure.axes[0].get_title(loc="left") == "length_score on held-out prompts"
    assert next(iter(figure.axes[0].get_lines()[0].get_ydata())) == -3.0
    low, high = figure.axes[0].get_ylim()
    assert low < -3.0 < 4.068 < high
    assert "accuracy" not in _words(figure).lower()


def test_a_run_without_an_evaluation_has_no_empty_chart_for_it(tmp_path: Path) -> None:
    killed = read_run_folder(make_killed_run(tmp_path / "killed"))
    figure = result_charts.learning([killed], ["killed"])
    assert len(figure.axes) == len(result_charts.PANELS)
    assert "no evaluation was recorded" in _words(figure)


def test_curves_that_were_not_recorded_say_so(tmp_path: Path) -> None:
    empty = read_run_folder(make_empty_run(tmp_path / "empty"))
    assert _words(result_charts.learning([empty], ["empty"])).count("not recorded") == 6


def test_a_learning_chart_needs_not_all_metrics(tmp_path: Path) -> None:
    folder = make_run(tmp_path, RunShape(num_steps=2))
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n{"step": 2, "kl/mean": null}\n')
    words = _words(result_charts.learning([read_run_folder(folder)], ["seed 0"]))
    assert words.count("not recorded") == 4


def test_the_prediction_chart_says_predicted_bytes_and_error(tmp_path: Path) -> None:
    words = _words(result_charts.prediction(_read(tmp_path, RunShape(size="large"))))
    assert "3.76 GiB, +5.3 %" in words
    assert "nothing but its baseline" in words
    assert "measured peak" in words


@pytest.mark.parametrize("draw", [charts.memory_timeline, charts.memory_by_process])
def test_an_empty_run_gets_a_sentence_instead_of_a_timeline(tmp_path: Path, draw: object) -> None:
    run = read_run_folder(make_empty_run(tmp_path))
    assert callable(draw)
    assert "measured" in _words(draw(run))


def test_pictures_too_large_as_svg_become_png(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = result_charts.prediction(_read(tmp_path, RunShape()))
    assert style.data_uri(figure).startswith("data:image/svg+xml;base64,")
    monkeypatch.setattr(style, "MAX_SVG_BYTES", 10)
    assert style.data_uri(figure).startswith("data:image/png;base64,")
