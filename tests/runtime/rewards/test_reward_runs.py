"""Whole runs with rewards in processes of their own: begun before generation has ended, and nothing left behind."""

import json
from collections.abc import Iterator

import psutil
import pytest

from benchmarks.runs.reward_overlap import LENGTHS, overlap
from tests.runtime.conftest import ASYNC, FinishedRun, Runner
from tests.waiting import orphans_come_here, own_processes

pytestmark = [pytest.mark.engine]

BATCHES_ALONE = ("weighted",)
"""Examples whose only rewards in processes are functions of TRL's signature."""
JUDGED_BY_THE_DRIVER = ("format",)
"""Examples whose rewards are patterns alone: no process of their own judges."""
SHORT = (
    "workload.num_steps=2",
    "workload.num_heldout_prompts=16",
    "workload.evaluate_every=2",
    "preflight.rehearses=false",
)


def check(run: FinishedRun, num_steps: int = 2, *, is_early: bool = True) -> None:
    assert run.exit_code == 0, run.stderr
    assert [row["reward/failed_fraction"] for row in run.metrics if row["step"] > 0] == [0.0] * num_steps
    assert (run.folder / "failures.jsonl").read_text() == ""
    spans = {(span.process, span.action_id, span.step): span for span in run.trace.spans}
    judged, generated = spans.get(("verifiers", "verify", 1)), spans["rollout_engine/0", "generate", 1]
    if run.plan.job.name in JUDGED_BY_THE_DRIVER:
        assert judged is None
    else:
        assert judged is not None
        assert (judged.start_s < generated.end_s) == is_early, "a batch is whole when generation has ended"
    assert [process for process in own_processes().values() if _is_a_reward_s(process)] == []


@pytest.fixture(autouse=True)
def orphans() -> Iterator[None]:
    """Orphans of a run become children of this process, where the test finds them."""
    with orphans_come_here():
        yield


def _is_a_reward_s(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return "rlplan.runtime.rewards.child" in words or any(word.endswith("bwrap") for word in words[:1])


def test_programs_are_judged_in_a_sandbox_while_others_are_written(run_once: Runner) -> None:
    """`async_run`, made here: only this process finds what it might leave behind."""
    run = run_once(*ASYNC)
    check(run, num_steps=3)
    status = json.loads((run.folder / "status.json").read_text())
    assert status["sandbox"] == "bubblewrap"
    assert all(0 < row["reward/code_executor/mean"] < 1 for row in run.metrics if row["step"] > 0)


@pytest.mark.nightly
def test_while_generation_lasts_longer_programs_cost_the_step_next_to_nothing(run_job: Runner) -> None:
    """Bounds for a busy machine; alone on one: reports/sandbox/overlap.md."""
    run = run_job("examples/rewards/code-executor.yaml", *LENGTHS, "workload.num_steps=4", "workload.evaluate_every=4")
    check(run, num_steps=4)
    spans = {(span.process, span.action_id, span.step): span for span in run.trace.spans}
    for step in (3, 4):
        _, share = overlap(run.trace, step)
        waited, generated = spans["driver/0", "verify", step], spans["rollout_engine/0", "generate", step]
        assert share > 0.5, "most of the judging is done during generation"
        assert waited.end_s - waited.start_s < 0.5 * (generated.end_s - generated.start_s)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["math", "function", "weighted", "format", "reasoning-gym"])
def test_the_other_kinds_of_rewards(run_job: Runner, name: str) -> None:
    run = run_job(f"examples/rewards/{name}.yaml", *SHORT, "metrics.sinks=[tensorboard]")
    check(run, is_early=name not in BATCHES_ALONE)
