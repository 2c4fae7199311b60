"""The step's first pass in 16 bits: engine and trainer differ, and no loss takes that for a move of the policy."""

from typing import Any

import pytest
import torch

from rlplan.runtime.losses.inputs import LossInputs
from rlplan.runtime.losses.registry import find_loss
from rlplan.spec.parts.algorithm import ALGORITHMS, AlgorithmSpec

SAMPLED = [name for name in ALGORITHMS if AlgorithmSpec(name=name).weighs_rollouts]
MISMATCH = 0.05
"""Mean difference of log-probs, the largest that the check of bf16 accepts (logprob_mismatch.py)."""
NUM_ANSWERS, LENGTH = 64, 1024


def first_pass(**others: Any) -> LossInputs:
    """Answers of 1,024 tokens. The engine's log-probs are off by Laplace noise, as measured between kernels."""
    torch.manual_seed(0)
    shape = (NUM_ANSWERS * LENGTH,)
    own = -torch.rand(shape)
    noise = torch.distributions.Laplace(0, MISMATCH).sample(shape)
    signs = torch.randn(NUM_ANSWERS).sign()
    values: dict[str, Any] = {
        "logprobs": own.clone().requires_grad_(),
        "behaviour_logprobs": own - noise,
        "reference_logprobs": own - 0.1,
        "advantages": signs.repeat_interleave(LENGTH),
        "weights": torch.full(shape, 1 / (NUM_ANSWERS * LENGTH)),
        "lengths": (LENGTH,) * NUM_ANSWERS,
        "sequence_weights": torch.full((NUM_ANSWERS,), 1 / NUM_ANSWERS),
        "sequence_advantages": signs,
    }
    return LossInputs(**(values | others))


def find_weights(spec: AlgorithmSpec, inputs: LossInputs) -> torch.Tensor:
    """Weights of the tokens; for an answer that is one action, the answer's weight."""
    return inputs.weights * (LENGTH if spec.declaration.loss == "answer_ratio" else 1)


@pytest.mark.parametrize("importance", ["none", "truncate"])
@pytest.mark.parametrize("name", SAMPLED)
def test_a_first_pass_clips_nothing_and_every_answer_keeps_its_gradient(name: str, importance: Any) -> None:
    spec = AlgorithmSpec(name=name, kl_coef=0, importance=importance)
    inputs = first_pass()
    loss, details = find_loss(spec)(inputs, spec)
    assert not details["is_clipped"].any()
    assert set(details["ratio"].tolist()) == {1.0}
    loss.backward()
    assert inputs.logprobs.grad is not None
    of_answers = inputs.logprobs.grad.view(NUM_ANSWERS, LENGTH).abs().sum(1)
    expected = float(find_weights(spec, inputs)[0]) * LENGTH
    assert of_answers.tolist() == pytest.approx([expected] * NUM_ANSWERS, rel=0.05)


@pytest.mark.parametrize("name", SAMPLED)
def test_without_a_correction_its_gradient_is_that_of_plain_policy_gradient(name: str) -> None:
    """Each of these losses has at ratio 1 the gradient of -A log p, with the weight of a token."""
    spec = AlgorithmSpec(name=name, kl_coef=0, importance="none")
    inputs = first_pass()
    find_loss(spec)(inputs, spec)[0].backward()
    assert inputs.logprobs.grad is not None
    assert torch.allclose(inputs.logprobs.grad, -inputs.advantages * find_weights(spec, inputs), rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", SAMPLED)
def test_the_correction_weighs_each_token_s_gradient_up_to_its_cap(name: str) -> None:
    """GSPO too, as in verl 0.9.1 (`rollout_is: token`). TRL 1.16 weighs a sequence with the mean of its tokens."""
    spec = AlgorithmSpec(name=name, kl_coef=0, importance="truncate", importance_high=1.05)
    inputs = first_pass()
    find_loss(spec)(inputs, spec)[0].backward()
    weights = torch.exp(inputs.logprobs.detach() - inputs.behaviour_logprobs).clamp(max=1.05)
    assert inputs.logprobs.grad is not None
    assert torch.allclose(inputs.logprobs.grad, -inputs.advantages * find_weights(spec, inputs) * weights, rtol=1e-4)


@pytest.mark.parametrize("name", SAMPLED)
def test_a_masked_token_has_no_gradient_even_where_its_weight_is_infinite(name: str) -> None:
    spec = AlgorithmSpec(name=name, kl_coef=0, importance="mask", importance_low=0.5, importance_high=2.0)
    inputs = first_pass()
    inputs.behaviour_logprobs[0] = -1000.0
    loss, details = find_loss(spec)(inputs, spec)
    loss.backward()
    assert inputs.logprobs.grad is not None
    assert torch.isfinite(inputs.logprobs.grad).all()
    assert int(details["is_corrected"].sum()) >= 1
    assert float(inputs.logprobs.grad[0]) == 0
