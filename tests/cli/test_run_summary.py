"""The end of a run in a terminal: what it evaluated, by its own name."""

from pathlib import Path

import pytest
from rlplan_cli.render.running.run_summary import show_summary
from rlplan_cli.render.running.watching import RunDisplay

from rlplan.report.run_folder import read_run_folder
from rlplan.runtime.driver.events import RunEvent
from tests.report.factory import RunShape, make_run, make_run_with_own_reward


def test_a_run_with_its_own_reward_ends_with_that_rewards_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show_summary(make_run_with_own_reward(tmp_path))
    printed = " ".join(capsys.readouterr().out.split())
    assert "length_score on held-out prompts: -3 after 0, " in printed
    assert "accuracy" not in printed


def test_a_run_with_rules_ends_with_shares_of_the_held_out_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show_summary(make_run(tmp_path, RunShape(num_steps=2)))
    assert "greedy accuracy on held-out prompts: 25.0% after 0, " in capsys.readouterr().out


def test_a_step_names_what_it_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run_with_own_reward(tmp_path)
    with RunDisplay(read_run_folder(folder).plan, folder) as display:
        display.show_event(RunEvent("step", step=2, learning={"evaluate/length_score": 0.25}, timings={"step_s": 1.0}))
    assert "held-out length_score 0.25 " in " ".join(capsys.readouterr().err.split())
