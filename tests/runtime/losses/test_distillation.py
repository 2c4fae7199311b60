"""The teacher's term has the gradient of KL(policy || teacher), enumerated over every answer of a small vocabulary."""

import itertools
import math

import pytest
import torch

from rlplan.runtime.losses.inputs import LossInputs
from rlplan.runtime.losses.registry import find_loss
from rlplan.spec.parts.algorithm import ALGORITHMS, AlgorithmSpec

VOCABULARY, LENGTH = 5, 2
WITH_ROLLOUTS = [name for name, declared in ALGORITHMS.items() if declared.has_rollouts and not declared.joins_rollouts]


def drawn(seed: int, scale: float = 1.0) -> torch.Tensor:
    """Logits of the first token, and of the second one after each first."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(1 + VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64)


def compute_logprobs(logits: torch.Tensor) -> torch.Tensor:
    """Log-probs of both tokens of every answer, [answers, 2]."""
    each = logits.log_softmax(-1)
    answers = itertools.product(range(VOCABULARY), repeat=LENGTH)
    return torch.stack([torch.stack([each[0, first], each[1 + first, second]]) for first, second in answers])


def exact_gradient(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Gradient of the KL at each place, summed over the places that the policy reaches, which is not differentiated."""
    policy, other = logits.log_softmax(-1), teacher.log_softmax(-1)
    each = (policy.exp() * (policy - other)).sum(-1)
    reached = torch.cat([torch.ones(1, dtype=torch.float64), policy[0].exp().detach()])
    return torch.autograd.grad((reached * each).sum(), logits)[0]


def sampled_gradient(
    spec: AlgorithmSpec, logits: torch.Tensor, teacher: torch.Tensor, sampled_by: torch.Tensor
) -> torch.Tensor:
    """The expectation of the loss's gradient over answers of `sampled_by`: every answer, weighed by its probability."""
    policy, behaviour = compute_logprobs(logits), compute_logprobs(sampled_by).detach()
    probability, count = behaviour.sum(1).exp(), len(policy)
    zeros = torch.zeros(policy.numel(), dtype=torch.float64)
    inputs = LossInputs(
        logprobs=policy.flatten(),
        behaviour_logprobs=behaviour.flatten(),
        reference_logprobs=None,
        advantages=zeros,
        weights=probability.repeat_interleave(LENGTH),
        teacher_logprobs=compute_logprobs(teacher).flatten(),
        lengths=(LENGTH,) * count,
        sequence_weights=probability,
        sequence_advantages=torch.zeros(count, dtype=torch.float64),
        groups=tuple(range(count)),
        old_logprobs=behaviour.flatten(),
    )
    return torch.autograd.grad(find_loss(spec)(inputs, spec)[0], logits)[0]


@pytest.mark.parametrize("name", WITH_ROLLOUTS)
def test_the_expected_gradient_is_that_of_the_reverse_kl_whatever_the_algorithm(name: str) -> None:
    logits, teacher = drawn(0).requires_grad_(), drawn(1, scale=2.0)
    spec = AlgorithmSpec(name=name, teacher_coef=1.0).model_copy(update={"kl_in": "reward", "entropy_coef": 0.0})
    gradient, exact = sampled_gradient(spec, logits, teacher, logits), exact_gradient(logits, teacher)
    assert float(exact.norm()) > 0.1
    assert torch.allclose(gradient, exact, atol=1e-12)


def test_samples_of_older_weights_are_weighed_so_that_the_gradient_stays_that_of_the_reverse_kl() -> None:
    """The first token's; at the second the places are those that the older weights reach, in both."""
    logits, teacher, older = drawn(0).requires_grad_(), drawn(1, scale=2.0), drawn(0) + drawn(2, scale=0.05)
    spec = AlgorithmSpec(name="grpo", kl_coef=0.0, clip_high=0.5)
    gradient, exact = sampled_gradient(spec, logits, teacher, older), exact_gradient(logits, teacher)
    assert torch.allclose(gradient[0], exact[0], atol=1e-12)


def test_a_sample_that_the_policy_has_become_far_likelier_to_draw_counts_at_most_the_clipped_ratio() -> None:
    logprobs = torch.tensor([math.log(0.9)], requires_grad=True)
    inputs = LossInputs(
        logprobs=logprobs,
        behaviour_logprobs=torch.tensor([math.log(0.001)]),
        old_logprobs=torch.tensor([math.log(0.001)]),
        reference_logprobs=None,
        advantages=torch.zeros(1),
        weights=torch.ones(1),
        teacher_logprobs=torch.tensor([math.log(0.3)]),
    )
    spec = AlgorithmSpec(name="grpo", kl_coef=0.0, clip_high=0.2)
    (gradient,) = torch.autograd.grad(find_loss(spec)(inputs, spec)[0], logprobs)
    assert float(gradient) == pytest.approx(1.2 * math.log(3))
