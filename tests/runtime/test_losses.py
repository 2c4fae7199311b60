"""Advantages and the loss, against hand-worked numbers."""

import math

import pytest
import torch

from rlplan.runtime.losses.advantages import group_normalized
from rlplan.runtime.losses.clipped_ratio import LossInputs, clipped_ratio_with_kl
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
