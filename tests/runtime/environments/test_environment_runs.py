"""Whole runs with an environment: engine and trainer agree on the policy's own tokens, and nothing is left behind."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rlplan.runtime.processes.machine_speed import scale_seconds
from tests.factories import EXAMPLES
from tests.runtime.conftest import FEW_PROCESSES, alive, finish, list_descendants, start
from tests.waiting import wait_until

NO_REHEARSAL = "preflight.rehearses=false"
UNRELIABLE = """
import os, time

def play(messages, answer):
    num_digits = sum(character.isdigit() for character in messages[-1]["content"])
    if num_digits == 4:
        time.sleep(60)
    if num_digits == 6:
        os._exit(1)
    return {"reward": num_digits / 10} if len(messages) > 3 else {"observation": "again: 12"}
"""


@pytest.mark.engine
def test_a_game_of_several_turns_is_played_and_learned_from(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    overrides = ("workload.num_steps=2", "workload.num_heldout_prompts=8", "workload.evaluate_every=2", NO_REHEARSAL)
    process = start("run", "examples/multi-turn.yaml", *overrides, *FEW_PROCESSES, "--out", str(folder))
    metrics = folder / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 1, 120)
    children = list_descendants(process.pid)
    run = finish(process, folder)
    assert run.exit_code == 0, run.stderr
    rows = [row for row in run.metrics if row["step"] > 0]
    assert all(1 < row["environment/turns_mean"] <= 3 for row in rows)
    assert all(0 < row["environment/observed_tokens_mean"] <= 2 for row in rows)  # a sign, at most twice
    assert all(row["environment/failed_fraction"] == 0 for row in rows)
    assert all(row["reward/mean"] == row["reward/environment/mean"] for row in rows)
    assert all(row["response_len/max"] <= 40 for row in rows)
    assert max(row["sync/logprob_difference_max"] for row in rows) < 1e-4
    measured = {sample.process: sample.num_bytes for sample in run.trace.samples if sample.action_id == "finish_step"}
    predicted = {row.process: row.resident_bytes for row in run.plan.ledger.rows if row.process == "environment"}
    assert 0 < measured["environment"] <= predicted["environment"]
    assert alive(children) == []


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["mcp", "http"])
def test_an_example_whose_tools_or_game_are_behind_a_server_learns_from_them(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    overrides = ("workload.num_steps=2", "workload.num_heldout_prompts=8", "workload.evaluate_every=2", NO_REHEARSAL)
    if name == "http":
        overrides += (f"rollout.environment.url=http://127.0.0.1:{port}/play",)
    server = subprocess.Popen([sys.executable, EXAMPLES / "environments" / "guess_digit_server.py", str(port)])
    try:
        process = start("run", f"examples/environments/{name}.yaml", *overrides, *FEW_PROCESSES, "--out", str(folder))
        run = finish(process, folder)
    finally:
        server.kill()
        server.wait()
    assert run.exit_code == 0, run.stderr
    rows = [row for row in run.metrics if row["step"] > 0]
    assert all(row["environment/failed_fraction"] == 0 for row in rows)
    assert all(row["environment/turns_mean"] > 1 for row in rows)
    assert all(row["tools/ok"] > 0 for row in rows if name == "mcp")
    assert max(row["sync/logprob_difference_max"] for row in rows) < 1e-4
    measured = [sample.num_bytes for sample in run.trace.samples if sample.process == "environment"]
    predicted = [row.resident_bytes for row in run.plan.ledger.rows if row.process == "environment"]
    assert 0 < max(measured) <= max(predicted)


FAULTY = '''
import time

def look_up(code: str) -> str:
    """Looks up.

    Args:
        code: Five digits.
    """
    if code[0] in "012":
        raise ValueError("no")
    if code == "00000":
        time.sleep(60)
    return "123"
'''


@pytest.mark.engine
@pytest.mark.nightly
def test_tools_are_called_in_a_run_and_what_goes_wrong_is_counted_and_said(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(FAULTY)
    folder = tmp_path / "run"
    overrides = (
        *("workload.num_steps=2", "workload.num_heldout_prompts=8", "workload.evaluate_every=2", NO_REHEARSAL),
        f"rollout.environment.tools=[{tmp_path / 'tools.py'}:look_up]",
    )
    process = start("run", "examples/tools.yaml", *overrides, *FEW_PROCESSES, "--out", str(folder))
    run = finish(process, folder)
    assert run.exit_code == 0, run.stderr
    rows = [row for row in run.metrics if row["step"] > 0]
    assert all(row["tools/ok"] > 0 for row in rows)
    assert sum(row["tools/raised"] for row in rows) > 0
    assert all(row["environment/failed_fraction"] == 0 for row in rows)
    assert all(row["response_len/max"] <= 40 for row in rows)
    assert max(row["sync/logprob_difference_max"] for row in rows) < 1e-4
    assert "failed tool calls" in (folder / "alarms.jsonl").read_text()


@pytest.mark.engine
@pytest.mark.nightly
def test_what_the_environment_does_not_answer_is_masked_and_counted_where_generation_runs_ahead(tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(UNRELIABLE)
    folder = tmp_path / "run"
    overrides = (
        *(
            "workload.num_steps=3",
            "workload.num_heldout_prompts=8",
            f"rollout.environment.timeout_s={scale_seconds(1.0)}",
        ),
        *(f"rollout.environment.path={tmp_path / 'game.py'}:play", "rollout.environment.max_observation_len=8"),
        *("placement.placement=disaggregated", "placement.max_staleness=1"),
    )
    run = finish(start("run", "examples/multi-turn.yaml", *overrides, "--out", str(folder)), folder)
    assert run.exit_code == 0, run.stderr
    rows = [row for row in run.metrics if row["step"] > 0]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert 0 < sum(row["environment/failed_fraction"] for row in rows) < 3
    assert max(row["staleness/max"] for row in rows) <= 1
    alarms = (folder / "alarms.jsonl").read_text()
    assert "rollouts are masked, such as: " in alarms
