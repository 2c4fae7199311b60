"""A scoring pass has a size of its own: `scoring.ROLE` moves the peak of that role's pass and nothing else."""

from typing import Any

import pytest

from rlplan.planner.plan import Plan
from rlplan.planner.search import find_best_plan
from rlplan.vocabulary import MemoryKind
from tests.factories import gpu_job

FORCED: dict[str, Any] = {
    "policy": "Qwen/Qwen2.5-0.5B",
    "hardware": "8xH100",
    "algorithm": {"name": "grpo", "kl_coef": 0.001},
    "framework": "verl@0.9",
    "workload": {
        "num_prompts_per_step": 64,
        "num_samples_per_prompt": 8,
        "max_prompt_len": 512,
        "max_response_len": 1536,
        "micro_batch_size_per_gpu": 2,
    },
    "training": {
        "gradient_checkpointing": True,
        "offloads_optimizer": False,
        "offloads_parameters": False,
        "ulysses": 1,
    },
    "rollout": {"tp": 1, "kv_cache_memory": "8GiB", "max_num_seqs": 64},
    "placement": {"placement": "hybrid", "offload": "none"},
}
"""A layout in which no size of a scoring pass changes another choice."""
VOCABULARY, HIDDEN = 151_936, 896
"""Source: config.json of Qwen2.5-0.5B."""
LONGEST = 2048
"""Tokens of the longest sequence: 512 + 1,536."""


def plan(*overrides: str) -> Plan:
    return find_best_plan(gpu_job(FORCED, overrides), with_others=False)


USUAL = plan()


def changed_actions(sized: Plan) -> set[str]:
    """Actions in which some GPU holds other bytes than in the usual plan."""
    assert sized.choice == USUAL.choice
    return {
        action
        for device in sized.ledger.devices
        for (phase, action), num_bytes in sized.ledger.device_totals(device).items()
        if USUAL.ledger.device_totals(device)[phase, action] != num_bytes
    }


def logits_bytes(plan: Plan, action: str) -> int:
    """Bytes of logits that a rank of the trainer holds at most inside an action."""
    rows = [row for row in plan.ledger.rows if row.action_id == action and row.kind is MemoryKind.LOGITS]
    return max(row.peak_bytes for row in rows)


@pytest.mark.parametrize("size", [1, 4, 8])
def test_the_micro_batch_of_log_probs_moves_the_peak_of_that_pass_and_of_nothing_else(size: int) -> None:
    sized = plan(f"scoring.policy.micro_batch_size_per_gpu={size}")
    assert changed_actions(sized) == {"score/policy"}
    # Worked by hand: verl 0.9 on FSDP2 keeps the 16-bit logits and their quotient, of every token of a pass, beside the
    # hidden states that the head reads.
    assert logits_bytes(sized, "score/policy") == size * LONGEST * 2 * (2 * VOCABULARY + HIDDEN)


def test_tokens_of_a_scoring_pass_are_its_size_as_well() -> None:
    by_tokens = plan(f"scoring.policy.max_tokens_per_micro_batch={4 * LONGEST}")
    by_count = plan("scoring.policy.micro_batch_size_per_gpu=4")
    assert changed_actions(by_tokens) == {"score/policy"}
    assert logits_bytes(by_tokens, "score/policy") == logits_bytes(by_count, "score/policy")


def test_without_a_size_of_its_own_a_scoring_pass_is_as_large_as_a_training_pass() -> None:
    assert changed_actions(plan("scoring.policy.micro_batch_size_per_gpu=2")) == set()


def test_a_size_of_the_reference_s_passes_is_the_reference_s_alone() -> None:
    assert changed_actions(plan("scoring.reference.micro_batch_size_per_gpu=8")) == {"score/reference"}


def test_a_large_scoring_pass_is_the_peak_of_the_step() -> None:
    assert USUAL.binding.action_id != "score/policy"
    large = plan("scoring.policy.micro_batch_size_per_gpu=16")
    assert large.binding.action_id == "score/policy"
    assert large.binding.num_bytes > USUAL.binding.num_bytes
