"""The step of another framework: its release says which scoring passes stand before training, and in which order."""

import pytest

from rlplan.dataflow.build import build_step_graph
from rlplan.vocabulary import ActionKind
from tests.factories import gpu_job

ONE_UPDATE = ("algorithm.kl_coef=0",)
TWO_UPDATES = (*ONE_UPDATE, "workload.mini_batch_size=512")
WITH_KL = ("algorithm.kl_coef=0.001",)


def list_scored(framework: str, *overrides: str, algorithm: str = "grpo") -> list[str]:
    """Roles that score before the first update of a step of 1,024 rollouts, in order."""
    asked = {"policy": "Qwen/Qwen2.5-0.5B", "hardware": "8xH100", "algorithm": algorithm, "framework": framework}
    step = build_step_graph(gpu_job(asked, overrides)).step
    first_update = next(index for index, call in enumerate(step) if call.kind is ActionKind.TRAIN_FORWARD_BACKWARD)
    scored = [
        (index, call.id.removeprefix("score/")) for index, call in enumerate(step) if call.kind is ActionKind.SCORE
    ]
    assert all(index < first_update for index, _ in scored)
    return [role for _, role in scored]


# Source of every row: the code that `sources` of the release's profile names under `step`.
@pytest.mark.parametrize(
    ("framework", "overrides", "roles"),
    [
        ("rlplan", ONE_UPDATE, []),
        ("rlplan", TWO_UPDATES, ["policy"]),
        ("rlplan", (*WITH_KL, "algorithm.kl_in=reward"), ["policy", "reference"]),
        ("verl@0.9", ONE_UPDATE, ["policy"]),
        ("verl@0.9", TWO_UPDATES, ["policy"]),
        ("verl@0.9", WITH_KL, ["policy", "reference"]),
        ("verl@0.2", ONE_UPDATE, ["policy", "reference"]),
        ("trl@0.14", TWO_UPDATES, ["reference"]),
        ("trl@0.16", ONE_UPDATE, []),
        ("trl@0.16", TWO_UPDATES, ["policy"]),
        ("trl@0.23", ONE_UPDATE, ["policy"]),
        ("trl@0.23", (*ONE_UPDATE, "algorithm.importance=none"), []),
        ("openrlhf@0.5", WITH_KL, ["reference", "policy"]),
        ("openrlhf@0.8", WITH_KL, ["policy", "reference"]),
        ("slime@0.2", ONE_UPDATE, ["policy"]),
        ("slime@0.3", ONE_UPDATE, []),
        ("slime@0.3", TWO_UPDATES, ["policy"]),
        ("slime@0.2", WITH_KL, ["reference", "policy"]),
        ("nemo_rl@0.5", ONE_UPDATE, ["policy", "reference"]),
        ("nemo_rl@0.7", ONE_UPDATE, ["policy"]),
    ],
)
def test_a_step_has_the_passes_of_its_release(framework: str, overrides: tuple[str, ...], roles: list[str]) -> None:
    assert list_scored(framework, *overrides) == roles


@pytest.mark.parametrize(
    ("framework", "roles"),
    [
        ("rlplan", ["policy", "value", "reference"]),
        ("verl@0.2", ["policy", "reference", "value"]),
        ("verl@0.9", ["policy", "reference", "value"]),
        ("openrlhf@0.5", ["reference", "value", "policy"]),
        ("openrlhf@0.8", ["policy", "value", "reference"]),
    ],
)
def test_passes_of_ppo_follow_one_another_in_the_order_of_the_release(framework: str, roles: list[str]) -> None:
    passes = list_scored(framework, *WITH_KL, "workload.mini_batch_size=512", algorithm="ppo")
    assert passes == roles


def test_the_job_overrides_when_log_probs_of_the_policy_are_recomputed() -> None:
    assert list_scored("verl@0.9", *TWO_UPDATES, "scoring.policy_log_probs=never") == []
    assert list_scored("rlplan", *ONE_UPDATE, "scoring.policy_log_probs=always") == ["policy"]
    assert list_scored("slime@0.3", *ONE_UPDATE, "scoring.policy_log_probs=always") == ["policy"]


def test_answers_that_are_given_need_no_log_probs_before_an_update() -> None:
    assert list_scored("verl@0.9", algorithm="sft") == []
    assert list_scored("trl@1.0", algorithm="dpo") == ["reference"]
