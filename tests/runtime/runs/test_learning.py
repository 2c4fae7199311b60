"""Each algorithm learns, and does not where nothing can be learned: in this process, on the examples' task and policy.

The short form takes some algorithms a few quick steps; the nightly one all of them in three seeds, in the jobs' own
number of steps. Runs on vLLM, DeepSpeed and Ray are those of benchmarks/learning/curves.py.
"""

import sys
from pathlib import Path

import pytest

from benchmarks.learning.against_trl import AS_TRL, run_trl
from benchmarks.learning.curves_in_process import run
from benchmarks.learning.in_process import InProcess
from benchmarks.learning.record import CONTROLS, LEARNING_RATE_0, TARGET, find_controls
from rlplan.spec.files.job_file import load_job
from rlplan.spec.parts.algorithm import ALGORITHMS
from rlplan.spec.resolved import ResolvedJob, resolve_on_cpu
from tests.factories import EXAMPLES

QUICK = ("algorithm.learning_rate=1e-4", "workload.num_heldout_prompts=128", "workload.mini_batch_size=128")
"""Half as many rollouts as the examples, and larger steps."""
SHORT = {"grpo": (16, 6), "ppo": (64, 8), "online_dpo": (32, 4)}
"""(prompts, steps) of a loss of tokens, one with a value model, and one of pairs."""
LIFT = 0.15
"""How far above the start policy they are then. The standard error of 128 prompts is 4 points."""


def job(name: str, *overrides: str) -> ResolvedJob:
    return resolve_on_cpu(load_job(EXAMPLES / "algorithms" / f"{name}.yaml", (*QUICK, *overrides)))


@pytest.mark.nightly  # that GRPO learns is seen in the quickstart's run before (test_runs.py)
@pytest.mark.parametrize("name", SHORT)
def test_some_steps_lift_the_accuracy(name: str) -> None:
    num_prompts, steps = SHORT[name]
    trained = InProcess(job(name, f"workload.num_prompts_per_step={num_prompts}"))
    before = trained.accuracy()
    assert trained.train(steps) >= before + LIFT


def test_at_learning_rate_0_nothing_changes() -> None:
    small = ("workload.num_prompts_per_step=4", "workload.mini_batch_size=32", "workload.num_heldout_prompts=32")
    trained = InProcess(job("grpo", *small, *CONTROLS[LEARNING_RATE_0]))
    before = trained.accuracy()
    assert trained.train(1) == before


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_reaches_the_target_in_every_seed(name: str, seed: int) -> None:
    assert run(name, f"seed {seed}", (f"seed={seed}",)).accuracy[-1] >= TARGET


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "case"), [(name, case) for name in ALGORITHMS for case in find_controls(name)])
def test_the_controls_learn_nothing(name: str, case: str) -> None:
    curve = run(name, case, CONTROLS[case])
    assert curve.has_passed
    assert case != LEARNING_RATE_0 or len(set(curve.accuracy)) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", ["tools", "agent"])
def test_a_policy_learns_to_call_a_tool(name: str, seed: int) -> None:
    """The policy starts by mostly guessing; the tool runs in its own processes, or in those of an agent."""
    trained = InProcess(resolve_on_cpu(load_job(EXAMPLES / f"{name}.yaml", (f"seed={seed}",))))
    try:
        assert trained.accuracy() < 0.4
        assert trained.train(trained.job.workload.num_steps) > TARGET
    finally:
        trained.close()


@pytest.mark.nightly
def test_an_agent_learns_nothing_from_shuffled_rewards() -> None:
    trained = InProcess(resolve_on_cpu(load_job(EXAMPLES / "agent.yaml", ("controls.shuffle_rewards=true",))))
    try:
        assert trained.train(trained.job.workload.num_steps) < 0.4
    finally:
        trained.close()


@pytest.mark.nightly
def test_grpo_learns_as_trl_s_does(tmp_path: Path) -> None:
    twenty = (*AS_TRL, "workload.num_steps=20")
    theirs = run_trl(Path(sys.executable), tmp_path, twenty, keep=False)
    ours = run("grpo", "seed 0", twenty).accuracy
    assert ours[-1] == pytest.approx(theirs[-1], abs=0.1)
