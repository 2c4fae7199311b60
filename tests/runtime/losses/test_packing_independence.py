"""A mini-batch has one gradient: how it is cut into passes and balanced over ranks changes nothing, for any loss.

Every algorithm's loss is computed pass by pass on the inputs that the trainer makes, for the shares that the driver
deals out, and compared with one pass over everything.
"""

import random
from typing import Any

import pytest
import torch

from rlplan.runtime.learning.mini_batch import Pass, assign_baselines, assign_samples
from rlplan.runtime.losses.policy_losses import estimate_kl_baseline, sum_margins
from rlplan.runtime.losses.registry import OWN, find_loss
from rlplan.runtime.losses.value import value_loss_and_sums
from rlplan.runtime.rollout.experience import TrainSample
from rlplan.runtime.workers.trainer.policy_trainer import PolicyTrainer
from rlplan.spec.declaration import NUM_GIVEN
from rlplan.spec.parts.algorithm import ALGORITHMS
from rlplan.spec.resolved import ResolvedJob
from tests.factories import make_plan

NUM_GROUPS, GROUP_SIZE = 8, 2
WHOLE = 10_000
CUTS = [(WHOLE, 1), (200, 1), (100, 1), (40, 1), (WHOLE, 2), (100, 2), (40, 2), (40, 3)]
"""(tokens of a pass at most, ranks): from one pass to one of every few answers."""


def drawn_samples(job: ResolvedJob) -> list[TrainSample]:
    """Answers of 0 to 24 tokens, the last of some of which are masked; every score that a loss may read is there."""
    draw, samples = random.Random(7), []
    is_paired = job.algorithm.declaration.joins_rollouts
    for index in range(NUM_GROUPS * GROUP_SIZE):
        length = 0 if index == 5 else draw.randrange(1, 25)

        def drawn(scale: float, length: int = length) -> tuple[float, ...]:
            return tuple(-scale * draw.random() for _ in range(length))

        sign = [1.0, -1.0][index % GROUP_SIZE]
        if job.algorithm.declaration.has_baseline_answers:
            sign = [1.0 if index % 4 else -1.0, 0.0][index % GROUP_SIZE]
        advantage = sign if is_paired else draw.uniform(-1.5, 1.5)
        samples.append(
            TrainSample(
                prompt_tokens=(1,) * draw.randrange(1, 9),
                response_tokens=(1,) * length,
                logprobs=drawn(3),
                # margins of either sign, so that a mean over a part of them is bounded otherwise than that over all
                reference_logprobs=drawn(1 if index % 3 else 5),
                advantages=(advantage,) * length,
                teacher_logprobs=drawn(3),
                values=drawn(1),
                returns=drawn(1),
                num_ignored=min(index % 3, length),
                old_logprobs=drawn(3),
                group=index // GROUP_SIZE,
                advantage=advantage,
            )
        )
    return samples


class MiniBatch:
    """A mini-batch of an algorithm, and what the policy says of its tokens, with gradient."""

    def __init__(self, overrides: dict[str, Any]) -> None:
        samples = overrides.get("workload.num_samples_per_prompt", GROUP_SIZE)
        sizes = {"num_samples_per_prompt": samples, "num_prompts_per_step": NUM_GROUPS * GROUP_SIZE // samples}
        self.job = make_plan(**{f"workload.{key}": size for key, size in sizes.items()} | overrides).job
        self.samples = drawn_samples(self.job)
        generator = torch.Generator().manual_seed(3)
        self.logprobs = [(-2 * torch.rand(len(s.logprobs), generator=generator)) for s in self.samples]
        self.trainer = PolicyTrainer("policy_trainer/0", self.job, {}, 1)

    def compute_gradient(self, max_tokens: int, num_ranks: int) -> tuple[int, torch.Tensor]:
        """(passes, gradient of every token's log-prob), added up over passes and ranks."""
        training = self.job.training.model_copy(update={"max_tokens_per_micro_batch": max_tokens})
        job = self.job.model_copy(update={"training": training})
        leaves = [logprobs.clone().requires_grad_() for logprobs in self.logprobs]
        of_sample = {id(sample): leaf for sample, leaf in zip(self.samples, leaves, strict=True)}
        if job.algorithm.declaration.has_baseline_answers:
            shares = assign_baselines(self.samples, job, num_ranks)
            self.trainer.baseline = estimate_kl_baseline(sum(map(self._margins, shares), torch.zeros(2)))
        ranks = assign_samples(self.samples, job, num_ranks)
        assert len({len(passes) for passes in ranks}) == 1, "all ranks make as many passes"
        for one_pass in (one_pass for passes in ranks for one_pass in passes):
            self._loss(one_pass, of_sample).backward()
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        return len(ranks[0]), torch.cat(gradients)

    def _loss(self, one_pass: Pass, of_sample: dict[int, torch.Tensor]) -> torch.Tensor:
        samples, weights = one_pass
        logprobs = torch.cat([torch.zeros(0, requires_grad=True), *(of_sample[id(sample)] for sample in samples)])
        inputs = self.trainer._build_loss_inputs(samples, weights, logprobs, logprobs**2)
        loss, _ = find_loss(self.job.algorithm)(inputs, self.job.algorithm)
        return loss

    def _margins(self, samples: list[TrainSample]) -> torch.Tensor:
        index = {id(sample): number for number, sample in enumerate(self.samples)}
        logprobs = torch.cat([torch.zeros(0), *(self.logprobs[index[id(sample)]] for sample in samples)])
        return sum_margins(self.trainer._build_loss_inputs(samples, [0.0] * len(samples), logprobs, logprobs))


def build_settings(name: str) -> dict[str, Any]:
    """A job of an algorithm in which its loss has everything that it can have: KL, entropy, a teacher."""
    declared = ALGORITHMS[name]
    settings: dict[str, Any] = {"algorithm.name": name}
    if not declared.trains_scalar:
        settings |= {"algorithm.kl_coef": 0.3, "algorithm.entropy_coef": 0.2}
    if declared.has_rollouts and not declared.joins_rollouts:
        settings |= {"roles.teacher.path": "examples/models/sorter"}
    if not declared.has_rollouts:
        settings |= {"workload.num_samples_per_prompt": NUM_GIVEN[declared.given]}
    if declared.trains_scalar:
        settings |= {"rewards": []}
    return settings


CASES = {name: build_settings(name) for name in ALGORITHMS} | {
    f"{name}, {key} {value}": build_settings(name) | {f"algorithm.{key}": value}
    for name in ("grpo", "gspo", "rloo", "cispo")
    for key, value in (("token_weights", "token"), ("token_weights", "constant"), ("importance", "truncate"))
}


def test_every_loss_of_ours_is_that_of_a_case() -> None:
    assert {ALGORITHMS[name].loss for name in ALGORITHMS} == set(OWN)


@pytest.mark.parametrize("name", CASES)
def test_a_mini_batch_s_gradient_is_the_same_however_it_is_cut_and_dealt_out(name: str) -> None:
    batch = MiniBatch(CASES[name])
    num_passes, whole = batch.compute_gradient(*CUTS[0])
    assert num_passes == 1
    assert float(whole.norm()) > 0
    seen = set()
    for max_tokens, num_ranks in CUTS[1:]:
        num_passes, gradient = batch.compute_gradient(max_tokens, num_ranks)
        seen.add(num_passes)
        assert torch.allclose(gradient, whole, rtol=1e-5, atol=1e-7), (max_tokens, num_ranks)
    assert max(seen) >= 4


def test_a_mini_batch_s_value_gradient_is_the_same_however_it_is_cut() -> None:
    batch = MiniBatch({"algorithm.name": "ppo"})

    def compute_gradient(max_tokens: int, num_ranks: int) -> torch.Tensor:
        training = batch.job.training.model_copy(update={"max_tokens_per_micro_batch": max_tokens})
        job = batch.job.model_copy(update={"training": training})
        leaves = [logprobs.clone().requires_grad_() for logprobs in batch.logprobs]
        of_sample = {id(sample): leaf for sample, leaf in zip(batch.samples, leaves, strict=True)}
        for samples, weights in (share for passes in assign_samples(batch.samples, job, num_ranks) for share in passes):
            values = torch.cat([torch.zeros(0, requires_grad=True), *(of_sample[id(sample)] for sample in samples)])
            old, returns = ([each for s in samples for each in getattr(s, name)] for name in ("values", "returns"))
            each = [weight for s, w in zip(samples, weights, strict=True) for weight in s.spread(w)]
            numbers = (torch.tensor(row) for row in (old, returns, each))
            value_loss_and_sums(values, *numbers, job.algorithm)[0].backward()
        return torch.cat([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves])

    whole = compute_gradient(*CUTS[0])
    assert float(whole.norm()) > 0
    for cut in CUTS[1:]:
        assert torch.allclose(compute_gradient(*cut), whole, rtol=1e-5, atol=1e-7), cut
