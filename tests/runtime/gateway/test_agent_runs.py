"""A whole run with an agent: vLLM answers its calls, and the trainer trains on exactly what the engine sampled."""

from pathlib import Path

import pytest

from tests.runtime.conftest import FEW_PROCESSES, alive, finish, list_descendants, start
from tests.waiting import wait_until


@pytest.mark.engine
def test_32_conversations_of_an_agent_at_once_are_generated_and_learned_from(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    small = ("workload.num_steps=1", "workload.num_prompts_per_step=4", "workload.mini_batch_size=32")
    fast = ("workload.num_heldout_prompts=8", "workload.evaluate_every=1", "preflight.rehearses=false")
    agents = ("rollout.environment.num_agents=32",)
    process = start("run", "examples/agent.yaml", *small, *fast, *agents, *FEW_PROCESSES, "--out", str(folder))
    log = folder / "logs" / "environment.log"
    wait_until(lambda: log.exists(), 180)
    children = list_descendants(process.pid)
    run = finish(process, folder)
    assert run.exit_code == 0, run.stderr
    (row,) = [row for row in run.metrics if row["step"] > 0]
    assert 1 < row["environment/turns_mean"] <= 3
    assert row["environment/failed_fraction"] == row["environment/branches_mean"] == 0
    assert row["tools/ok"] > 0
    assert row["environment/observed_tokens_mean"] > 0
    assert row["sync/logprob_difference_max"] < 1e-4
    measured = {sample.process: sample.num_bytes for sample in run.trace.samples if sample.action_id == "finish_step"}
    predicted = {row.process: row.resident_bytes for row in run.plan.ledger.rows if row.process == "environment"}
    assert 0 < measured["environment"] <= predicted["environment"]
    assert alive(children) == []
