"""Rollouts whose response is empty are counted, scored and trained on without an error, alone or beside others."""

import math

import pytest

from rlplan.runtime.learning.packing import pack_shares
from rlplan.runtime.losses.advantages import ADVANTAGES
from rlplan.runtime.measure.step_metrics import StepMetrics
from rlplan.runtime.rewards.reward_pool import RewardPool
from rlplan.runtime.rollout.experience import Completion, Prompt, Rollout, SequencePair
from tests.factories import make_job

NO_TOKENS = {
    "num_tokens": 0.0, "loss": 0.0, "entropy_sum": 0.0, "is_clipped_sum": 0.0, "logprob_difference_max": 0.0,
    "ratio_max": 1.0, "kl_sum": 0.0, "kl_max": 0.0,
}  # fmt: skip


def rollouts(*responses: tuple[int, ...]) -> list[Rollout]:
    prompt = Prompt("1", "Sort: 21345", "12345", (1, 2))
    return [
        Rollout(prompt, 0, Completion(tokens, (-0.5,) * len(tokens), "stop"), "x" * len(tokens)) for tokens in responses
    ]


@pytest.mark.parametrize("responses", [((), (3, 4)), ((), ())])
def test_empty_responses_go_through_rewards_advantages_and_metrics(responses: tuple[tuple[int, ...], ...]) -> None:
    job, step = make_job(), rollouts(*responses)
    RewardPool(job).judge(step)
    judged = ADVANTAGES[job.algorithm.declaration.advantage](step, job.algorithm)
    assert [len(judgement.advantages) for judgement in judged] == [len(tokens) for tokens in responses]
    metrics = StepMetrics(job)
    metrics.add_rollouts(step)
    metrics.add_rewards(step)
    metrics.add_training([NO_TOKENS], is_first=True)
    learning, _ = metrics.take_rows(1)
    assert learning["response_len/max"] == max(map(len, responses))
    assert all(math.isfinite(value) for value in learning.values())


def test_empty_responses_are_packed_with_their_prompts() -> None:
    packs = pack_shares([2, 2, 4], 2, 8)
    assert sorted(index for share in packs for pack in share for index in pack) == [0, 1, 2]


@pytest.mark.parametrize("responses", [((), (3, 4)), ((), ())])
def test_the_policy_s_forward_and_backward_pass_takes_empty_responses(responses: tuple[tuple[int, ...], ...]) -> None:
    from rlplan.runtime.models.logprob_model import LogprobModel, make_batch
    from rlplan.runtime.models.start_checkpoint import load_language_model

    model = LogprobModel(load_language_model(make_job().policy.path), 1.0, entropies="seen")
    logprobs, entropies = model(make_batch([SequencePair((1, 2), tokens) for tokens in responses]))
    assert len(logprobs) == len(entropies) == sum(map(len, responses))
    logprobs.sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
