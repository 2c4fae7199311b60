"""Each algorithm learns, and does not where nothing can be learned: in this process, on the examples' task and policy.

The short form takes some algorithms a few steps; the nightly one all of them in three seeds. Runs on vLLM, DeepSpeed
and Ray are those of benchmarks/learning_curves.py.
"""

import pytest

from rlplan.spec.algorithm import ALGORITHMS
from rlplan.spec.job import JobSpec, load_job
from tests.factories import EXAMPLES
from tests.runtime.in_process import InProcess

TARGET = 0.9
"""Greedy held-out accuracy after the job's own number of steps, in every seed."""
SHORT = {"grpo": 12, "ppo": 12, "online_dpo": 6}
"""Steps after which these are LIFT above the start policy: one loss of tokens, one with a value model, one of pairs."""
LIFT = 0.1
DRIFT = 0.1


def job(name: str, *overrides: str) -> JobSpec:
    return load_job(EXAMPLES / "algorithms" / f"{name}.yaml", ("workload.num_heldout_prompts=128", *overrides))


@pytest.mark.parametrize("name", SHORT)
def test_some_steps_lift_the_accuracy(name: str) -> None:
    run = InProcess(job(name))
    before = run.accuracy()
    assert run.train(SHORT[name]) >= before + LIFT


def test_at_learning_rate_0_nothing_changes() -> None:
    run = InProcess(job("grpo", "algorithm.learning_rate=0"))
    before = run.accuracy()
    assert run.train(2) == before


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_reaches_the_target_in_every_seed(name: str, seed: int) -> None:
    asked = job(name, f"seed={seed}")
    assert InProcess(asked).train(asked.workload.num_steps) >= TARGET


@pytest.mark.nightly
@pytest.mark.parametrize("name", ALGORITHMS)
def test_shuffled_rewards_teach_nothing(name: str) -> None:
    asked = job(name, "controls.shuffle_rewards=true")
    run = InProcess(asked)
    before = run.accuracy()
    assert run.train(asked.workload.num_steps) <= before + DRIFT
