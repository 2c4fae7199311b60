"""The conditions under which the examples' learning runs pass. The runs are benchmarks/learning/example_runs.py."""

import json
from pathlib import Path

import pytest

from benchmarks.learning.example_record import (
    GOALS,
    RESUMED,
    ExampleCurve,
    examples_section,
    is_as_seed_0,
    read_examples,
    read_run,
)
from benchmarks.learning.example_runs import CASES, REWARDED
from benchmarks.learning.record import CONTROLS, LEARNING_RATE_0, SHUFFLED
from tests.factories import EXAMPLES


def curve(case: str, *values: float, example: str = "tools", stage: str = "") -> ExampleCurve:
    return ExampleCurve(example, stage, case, tuple(range(len(values))), values)


def test_a_seed_has_to_start_low_and_end_high() -> None:
    assert curve("seed 0", 0.3, 0.95).has_passed
    assert not curve("seed 0", 0.3, 0.85).has_passed
    assert not curve("seed 0", 0.45, 0.95).has_passed


def test_a_stage_has_to_end_above_its_start() -> None:
    assert curve("seed 0", 0.3, 0.45, example="three-stage", stage="sft").has_passed
    assert not curve("seed 0", 0.3, 0.35, example="three-stage", stage="sft").has_passed
    assert curve("seed 0", 0.9, 0.96, example="three-stage", stage="sft").has_passed
    assert not curve("seed 0", 0.9, 0.94, example="three-stage", stage="sft").has_passed


@pytest.mark.parametrize("case", CONTROLS)
def test_a_control_must_not_get_better(case: str) -> None:
    assert curve(case, 0.3, 0.35).has_passed
    assert not curve(case, 0.3, 0.95).has_passed


def test_a_resumed_run_has_to_be_as_the_one_that_nobody_stopped() -> None:
    whole = curve("seed 0", 0.3, 0.5, 0.95)
    assert is_as_seed_0(curve(RESUMED, 0.3, 0.5, 0.95), [whole])
    assert not is_as_seed_0(curve(RESUMED, 0.3, 0.5, 0.94), [whole])
    assert "**not as it must**" in examples_section([whole, curve(RESUMED, 0.3, 0.5, 0.94)])


def test_a_run_s_held_out_figures_and_calls_of_tools_are_read(tmp_path: Path) -> None:
    rows = [
        {"step": 0, "evaluate/greedy_accuracy": 0.25},
        {"step": 1, "tools/calls_mean": 0.5, "tools/ok": 3, "tools/raised": 1, "tools/died": 0},
        {"step": 2, "tools/calls_mean": 0.5, "tools/ok": 4, "tools/raised": 1, "evaluate/greedy_accuracy": 0.75},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    curve = read_run(tmp_path, "tools", "", "seed 0")
    assert (curve.steps, curve.values) == ((0, 2), (0.25, 0.75))
    assert curve.calls == {"ok": 7, "raised": 2}
    assert "7 ok, 2 raised" in examples_section([curve])


def test_every_case_is_of_an_example_and_has_goals() -> None:
    assert {name for name, _ in GOALS} == set(CASES) == set(REWARDED)
    assert all((EXAMPLES / f"{name}.yaml").exists() for name in CASES)
    assert all((name, stage) in GOALS for name, stages in REWARDED.items() for stage in stages)
    assert all({LEARNING_RATE_0, SHUFFLED} & set(cases) for cases in CASES.values())


def test_what_is_committed_has_passed() -> None:
    curves = read_examples()
    assert curves
    assert [each for each in curves if not (each.has_passed and is_as_seed_0(each, curves))] == []
