"""Merging metrics and timings: each step once, whole, and in order; however often one looks, and after going back."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplan.runtime.run_folder.recorder import Recorder
from rlplan.runtime.sinks.merge import Merge


class Run:
    """A run that writes as a run does, and a sink's process that looks now and then."""

    def __init__(self, folder: Path, after: int | None = None) -> None:
        self.recorder = Recorder(folder, {}, after)
        self.merge = Merge(folder, -1 if after is None else after)
        self.told: list[tuple[int, dict[str, float]]] = []

    def write_metrics(self, step: int, value: float) -> None:
        self.recorder.write_row("metrics.jsonl", {"step": step, "reward/mean": value})

    def write_timings(self, step: int, value: float) -> None:
        self.recorder.write_row("timings.jsonl", {"step": step, "step_s": value})

    def do(self, *steps: int, value: float = 1.0) -> None:
        for step in steps:
            self.write_metrics(step, value)
            self.write_timings(step, value)

    def look(self, *, is_over: bool = False) -> list[int]:
        new = list(self.merge.new(is_over=is_over))
        self.told += new
        return [step for step, _ in new]

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.told]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.recorder.close()


def test_several_rows_in_each_look_come_in_the_order_of_their_steps(run: Run) -> None:
    run.do(0, 1, 2)
    assert run.look() == [0, 1, 2]
    run.do(3, 4)
    assert run.look() == [3, 4]
    assert run.look(is_over=True) == []
    assert all(numbers == {"reward/mean": 1.0, "step_s": 1.0} for _, numbers in run.told)


def test_a_step_waits_for_its_other_row_or_for_a_later_one(run: Run) -> None:
    run.write_timings(0, 1.0)  # nothing was learned before step 1
    run.write_metrics(1, 1.0)
    assert run.look() == [0]
    run.write_timings(1, 1.0)
    assert run.look() == [1]
    run.write_metrics(2, 1.0)
    assert run.look() == []
    assert run.look(is_over=True) == [2], "the run is over: no other row comes"


def test_a_resumed_run_is_told_of_behind_its_checkpoint(run: Run, tmp_path: Path) -> None:
    run.do(0, 1, 2, 3)
    run.recorder.close()
    resumed = Run(tmp_path, after=2)
    assert resumed.look() == []
    resumed.do(3, 4)
    assert resumed.look() == [3, 4]
    resumed.recorder.close()


@pytest.mark.parametrize("looks_between", [False, True])
def test_after_a_run_went_back_each_step_is_told_once_and_in_order(run: Run, looks_between: bool) -> None:
    run.do(0, 1, 2, 3)
    assert run.look() == [0, 1, 2, 3]
    run.write_metrics(4, 1.0)  # its other row never comes
    assert run.look() == []
    run.recorder.truncate_after(1)
    if looks_between:
        assert run.look() == []
    run.do(2, 3, 4, 5, 6, 7, value=2.0)
    run.do(-1, value=3.0)
    run.look()
    run.look(is_over=True)
    assert run.steps == list(range(8))
    assert run.told[4][1] == {"reward/mean": 2.0, "step_s": 2.0}, "nothing of the step that was lost"


def test_a_run_that_went_back_over_steps_that_were_not_passed_on(run: Run) -> None:
    run.do(0, 1, 2, 3)
    run.recorder.truncate_after(1)
    run.do(2, 3, value=2.0)
    assert run.look() == [0, 1, 2, 3]
    assert [numbers["reward/mean"] for _, numbers in run.told] == [1.0, 1.0, 2.0, 2.0]


def test_files_that_were_emptied_are_read_anew(run: Run) -> None:
    run.do(0)
    run.write_metrics(1, 1.0)
    assert run.look() == [0]
    run.recorder.restart()
    assert run.look() == []
    run.do(0, 1, value=2.0)
    assert run.look() == [1]
    assert run.told[1][1]["reward/mean"] == 2.0


def test_the_end_stands_beside_the_last_step_under_new_names(run: Run) -> None:
    run.do(0, 1)
    run.recorder.write_row("metrics.jsonl", {"step": -1, "evaluate/greedy_accuracy": 0.5})
    run.recorder.write_row("timings.jsonl", {"step": -1, "step_s": 9.0, "seconds/final_evaluate": 4.0})
    run.look()
    run.look(is_over=True)
    assert run.told[-1] == (1, {"evaluate/greedy_accuracy": 0.5, "seconds/final_evaluate": 4.0})


def test_half_a_line_waits_for_its_end(run: Run, tmp_path: Path) -> None:
    run.do(0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 1, "reward/mean": 0.5})[:-4])
    assert run.look(is_over=True) == [0]


@given(looks=st.lists(st.booleans(), min_size=30, max_size=30), back=st.integers(0, 5))
def test_whenever_one_looks_each_step_is_told_once_and_whole(
    tmp_path_factory: pytest.TempPathFactory, looks: list[bool], back: int
) -> None:
    run, moments = Run(tmp_path_factory.mktemp("run")), iter(looks)
    for steps in (range(6), range(back + 1, 9)):
        for step in steps:
            for write in (run.write_metrics, run.write_timings):
                write(step, float(step))
                if next(moments, False):
                    run.look()
        if steps.start == 0:
            run.recorder.truncate_after(back)
    run.look(is_over=True)
    run.recorder.close()
    assert run.told == [(step, {"reward/mean": step, "step_s": step}) for step in range(9)]
