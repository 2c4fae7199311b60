"""Advantages and the loss, against hand-worked numbers."""

import math

import pytest
import torch

from rlplan.runtime.losses.advantages import generalized, group_normalized, whitened
from rlplan.runtime.losses.clipped_ratio import LossInputs, clipped_ratio, clipped_ratio_with_kl
from rlplan.runtime.losses.value import clipped_value_loss
from rlplan.spec.algorithm import AlgorithmSpec


def test_advantages_are_normalized_within_a_group() -> None:
    """Rewards 1, 0, 0, 0: mean 1/4, sample deviation 1/2."""
    advantages = group_normalized([1.0, 0.0, 0.0, 0.0, 7.0, 7.0], [3, 3, 3, 3, 5, 5])
    assert advantages[:4] == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    assert advantages[4:] == [0.0, 0.0]


def test_the_loss_is_the_one_worked_by_hand() -> None:
    """Ratios 1.5 and 0.5 with advantages 1 and -1 are both clipped; k3 of a difference of ln 2 is 2 - ln 2 - 1."""
    behaviour = torch.tensor([-1.0, -1.0])
    logprobs = behaviour + torch.tensor([math.log(1.5), math.log(0.5)])
    inputs = LossInputs(
        logprobs=logprobs,
        behaviour_logprobs=behaviour,
        reference_logprobs=logprobs + math.log(2),
        advantages=torch.tensor([1.0, -1.0]),
        weights=torch.tensor([0.25, 0.75]),
    )
    loss, details = clipped_ratio_with_kl(inputs, AlgorithmSpec(kl_coef=0.1, clip_low=0.2, clip_high=0.2))
    surrogate = 0.25 * 1.2 + 0.75 * -0.8
    assert float(loss) == pytest.approx(-surrogate + 0.1 * (1 - math.log(2)), abs=1e-6)
    assert details["is_clipped"].tolist() == [True, True]
    assert details["ratio"].tolist() == pytest.approx([1.5, 0.5])


def test_a_clipped_ratio_gives_no_gradient_and_a_kept_one_does() -> None:
    logprobs = torch.tensor([math.log(1.5), math.log(1.1)], requires_grad=True)
    zeros = torch.zeros(2)
    inputs = LossInputs(logprobs, zeros, None, torch.ones(2), torch.ones(2))
    clipped_ratio_with_kl(inputs, AlgorithmSpec(kl_coef=0.0))[0].backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, -1.1])


def test_with_lambda_one_a_generalized_advantage_is_the_return_less_the_value() -> None:
    rewards, values = [0.5, 0.0, 2.0], [1.0, -1.0, 0.25]
    advantages, returns = generalized(rewards, values, gamma=1.0, gae_lambda=1.0)
    assert returns == pytest.approx([2.5, 2.0, 2.0])
    assert advantages == pytest.approx([1.5, 3.0, 1.75])


def test_with_lambda_zero_it_is_the_error_of_one_step() -> None:
    advantages, _ = generalized([0.5, 0.0, 2.0], [1.0, -1.0, 0.25], gamma=0.5, gae_lambda=0.0)
    assert advantages == pytest.approx([0.5 - 0.5 - 1.0, 0.125 + 1.0, 2.0 - 0.25])


def test_whitened_advantages_have_mean_zero_and_deviation_one_over_all_tokens() -> None:
    white = [value for values in whitened([[1.0, 2.0], [], [7.0]]) for value in values]
    assert sum(white) == pytest.approx(0.0, abs=1e-12)
    assert sum(value**2 for value in white) / 2 == pytest.approx(1.0)


def test_the_value_loss_clips_moves_away_from_the_old_value() -> None:
    values, old, returns = torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0.0, 0.0, 0.4]), torch.tensor([1.0, 1.0, 0.0])
    loss, is_clipped = clipped_value_loss(values, old, returns, torch.ones(3), 0.2)
    # 1.0 is held at 0.2 and 0.8 away; 0.0 stays; 0.5 is within 0.2 of 0.4.
    assert float(loss) == pytest.approx((0.64 + 1.0 + 0.25) / 2)
    assert is_clipped.tolist() == [True, False, False]


def test_a_teacher_draws_the_policy_to_its_log_probs() -> None:
    logprobs = torch.tensor([math.log(0.5)], requires_grad=True)
    inputs = LossInputs(
        logprobs=logprobs,
        behaviour_logprobs=logprobs.detach(),
        reference_logprobs=None,
        advantages=torch.zeros(1),
        weights=torch.ones(1),
        teacher_logprobs=torch.tensor([math.log(0.75)]),
    )
    loss, details = clipped_ratio(inputs, AlgorithmSpec(name="ppo", teacher_coef=2.0))
    assert float(loss.detach()) == pytest.approx(2 * (1.5 - math.log(1.5) - 1))
    assert float(details["teacher_kl"]) == pytest.approx(1.5 - math.log(1.5) - 1)
    loss.backward()
    assert logprobs.grad is not None
    assert float(logprobs.grad) == pytest.approx(2 * (1 - 1.5))  # downhill: a higher log-prob
