"""Memory over time: step functions, phase blocks and windows."""

from pathlib import Path

import numpy as np
import pytest

from rlplan.report import timeline
from rlplan.report.run_folder import RunFolder, read_run_folder
from rlplan.units import MIB
from tests.report.factory import HOST_PROCESSES, TOTAL_FACTOR, RunShape, make_empty_run, make_run


@pytest.fixture(name="run")
def _run(tmp_path: Path) -> RunFolder:
    return read_run_folder(make_run(tmp_path / "run", RunShape(num_steps=40)))


def _middle(run: RunFolder, action_id: str, step: int) -> float:
    span = next(span for span in run.trace.spans if (span.action_id, span.step) == (action_id, step))
    return (span.start_s + span.end_s) / 2


def _read_level(levels: timeline.Levels, values: timeline.Bytes, second: float) -> float:
    return float(values[np.searchsorted(levels.edges, second, "right") - 1])


def test_predicted_and_measured_lie_on_one_grid(run: RunFolder) -> None:
    assert (timeline.predicted_levels(run).edges == timeline.measured_levels(run).edges).all()


@pytest.mark.parametrize("step", [1, 2, 40])
def test_inside_an_action_a_process_holds_its_peak(run: RunFolder, step: int) -> None:
    second = _middle(run, "score/reference", step)
    predicted, measured = timeline.predicted_levels(run), timeline.measured_levels(run)
    total = (480 + 3 + 33 + 13) * MIB
    assert _read_level(predicted, predicted.total(["scorer/reference/0"]), second) == total
    assert _read_level(measured, measured.total(["scorer/reference/0"]), second) == int(total * TOTAL_FACTOR)


def test_between_its_actions_a_process_holds_what_stayed(run: RunFolder) -> None:
    second = _middle(run, "train_forward_backward", 2)
    predicted = timeline.predicted_levels(run)
    assert _read_level(predicted, predicted.total(["scorer/reference/0"]), second) == (480 + 3) * MIB


def test_the_driver_and_ray_are_there_from_beginning_to_end(run: RunFolder) -> None:
    for levels, factor in ((timeline.predicted_levels(run), 1.0), (timeline.measured_levels(run), TOTAL_FACTOR)):
        for process, size in HOST_PROCESSES.items():
            assert set(levels.total([process])) == {int(size * factor)}


def test_points_wait_until_every_process_that_began_was_measured(run: RunFolder) -> None:
    names = timeline.measured_levels(run).processes
    seconds, sizes = timeline.measured_points(run, names)
    ready = max(span.end_s for span in run.trace.spans if span.action_id.startswith("start_"))
    assert seconds.min() >= ready - 0.1
    resident = (640 + 3 * 3) + (700 + 1 + 3 + 64) + (480 + 3) + 200 + 560
    assert sizes[0] == pytest.approx(resident * MIB * TOTAL_FACTOR, rel=1e-6)


def test_phases_follow_the_schedule_and_neighbours_are_joined(run: RunFolder) -> None:
    blocks = timeline.phase_blocks(run)
    assert [block.phase for block in blocks if block.step == 1] == ["rollout", "score", "train", "sync"]
    assert {block.phase for block in blocks if block.step == -1} == {"evaluate", "checkpoint"}
    assert all(block.end_s > block.start_s for block in blocks)


def test_a_long_run_shows_its_start_first_steps_and_last_steps(run: RunFolder) -> None:
    windows = timeline.choose_windows(timeline.phase_blocks(run))
    assert [window.title for window in windows] == ["Start", "Steps 1–2", "Steps 39–40 and finish"]  # noqa: RUF001


@pytest.mark.parametrize(
    ("shape", "titles"),
    [
        (RunShape(num_steps=3), ["Start", "Steps 1-3 and finish"]),
        (RunShape(num_steps=6, stops_after=5), ["Start", "Steps 1-2", "Steps 4-5"]),
        (RunShape(num_steps=6, stops_after=1), ["Start", "Step 1"]),
        (RunShape(num_steps=6, stops_after=0), ["Start"]),
    ],
)
def test_a_short_run_shows_all_that_it_did(tmp_path: Path, shape: RunShape, titles: list[str]) -> None:
    run = read_run_folder(make_run(tmp_path, shape))
    windows = timeline.choose_windows(timeline.phase_blocks(run))
    assert [window.title.replace("\u2013", "-") for window in windows] == titles


def test_a_run_without_spans_has_no_levels_and_no_windows(tmp_path: Path) -> None:
    run = read_run_folder(make_empty_run(tmp_path))
    assert timeline.predicted_levels(run).parts == {}
    assert timeline.choose_windows(timeline.phase_blocks(run)) == ()
