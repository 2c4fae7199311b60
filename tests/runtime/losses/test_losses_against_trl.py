"""Losses and advantages equal TRL's own code to 1e-6, with masks, empty answers and groups without variance."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlplan.runtime.learning.mini_batch import token_weights
from rlplan.runtime.losses import advantages as ours
from rlplan.runtime.losses.inputs import LossInputs
from rlplan.runtime.losses.policy_losses import estimate_kl_baseline
from rlplan.runtime.losses.registry import find_advantage, find_loss
from rlplan.runtime.rollout.experience import Completion, Prompt, Rollout, TrainSample
from rlplan.spec.parts.algorithm import AlgorithmSpec
from rlplan.vocabulary import Role
from tests.factories import make_job
from tests.runtime.losses import trl_code

LENGTHS = (4, 0, 1, 7, 3, 5)
IGNORED = (0, 0, 0, 2, 3, 0)
"""Last tokens of each answer that nobody learns from: of one all of them."""
MASK = torch.tensor([[float(i < n - ignored) for i in range(8)] for n, ignored in zip(LENGTHS, IGNORED, strict=True)])
PRESENT = torch.tensor([[i < n for i in range(8)] for n in LENGTHS])
ADVANTAGES = torch.tensor([1.5, -0.5, 0.0, -1.0, 2.0, 0.25])


def drawn(seed: int, *, scale: float = 1.0) -> torch.Tensor:
    return -torch.rand(MASK.shape, generator=torch.Generator().manual_seed(seed)) * scale


LOGPS, OLD, SAMPLED, REFERENCE, ENTROPIES = drawn(1, scale=2), drawn(2, scale=2), drawn(3, scale=2), drawn(4), -drawn(5)


def row(values: torch.Tensor) -> torch.Tensor:
    """Every answer's tokens one after the other, as in our passes."""
    return values[PRESENT]


def our_loss(spec: AlgorithmSpec, logprobs: torch.Tensor, *, old: torch.Tensor | None = OLD) -> torch.Tensor:
    samples = [
        TrainSample((1,), (1,) * n, (0.0,) * n, (), (), num_ignored=ignored)
        for n, ignored in zip(LENGTHS, IGNORED, strict=True)
    ]
    job = SimpleNamespace(algorithm=spec, workload=SimpleNamespace(max_response_len=8))
    weights = token_weights(samples, job)  # type: ignore[arg-type]
    inputs = LossInputs(
        logprobs=row(logprobs),
        behaviour_logprobs=row(SAMPLED),
        reference_logprobs=row(REFERENCE),
        advantages=ADVANTAGES.repeat_interleave(torch.tensor(LENGTHS)),
        weights=torch.tensor([w for s, weight in zip(samples, weights, strict=True) for w in s.spread(weight)]),
        lengths=LENGTHS,
        num_learned=tuple(sample.num_learned for sample in samples),
        sequence_weights=torch.tensor([s.weigh_response(w) for s, w in zip(samples, weights, strict=True)]),
        sequence_advantages=ADVANTAGES,
        groups=tuple(range(len(LENGTHS))),
        old_logprobs=None if old is None else row(old),
        entropies=row(ENTROPIES),
    )
    loss, _ = find_loss(spec)(inputs, spec)
    assert isinstance(loss, torch.Tensor)
    return loss


def trl_inputs(logprobs: torch.Tensor, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "logps": logprobs,
        "entropies": ENTROPIES,
        "completion_mask": MASK,
        "advantages": ADVANTAGES,
        "old_per_token_logps": OLD,
        "ref_per_token_logps": REFERENCE,
        **more,
    }


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"name": "grpo", "kl_coef": 0.0}, {}),
    "grpo with kl": ({"name": "grpo", "kl_coef": 0.3}, {"beta": 0.3}),
    "clip-higher": ({"clip_low": 0.1, "clip_high": 0.5, "kl_coef": 0}, {"epsilon_low": 0.1, "epsilon_high": 0.5}),
    "dr_grpo": ({"name": "dr_grpo"}, {"loss_type": "dr_grpo", "max_completion_length": 8}),
    "dapo": ({"name": "dapo"}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "gspo, not clipped": (
        {"name": "gspo", "clip_low": 0.9, "clip_high": 9.0},
        {"importance_sampling_level": "sequence", "epsilon_low": 0.9, "epsilon_high": 9.0},
    ),
    "gspo": ({"name": "gspo"}, {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}),
    "cispo": ({"name": "cispo", "clip_high": 0.5}, {"loss_type": "cispo", "epsilon_high": 1.5}),
    "entropy": ({"name": "cispo", "entropy_coef": 0.2}, {"loss_type": "cispo", "epsilon_high": 5, "entropy_coef": 0.2}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_loss_and_its_gradient_are_trl_s(name: str) -> None:
    own_case, theirs = CASES[name]
    own, other = LOGPS.clone().requires_grad_(), LOGPS.clone().requires_grad_()
    loss, expected = our_loss(AlgorithmSpec(**own_case), own), trl_code.grpo_loss(trl_inputs(other), **theirs)
    assert float(loss) == pytest.approx(float(expected), abs=1e-6)
    loss.backward()
    expected.backward()
    assert own.grad is not None
    assert other.grad is not None
    assert torch.allclose(own.grad, other.grad, atol=1e-6, rtol=0)


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("name", ["grpo", "dapo", "cispo"])
def test_the_correction_between_engine_and_trainer_is_trl_s(name: str, mode: str) -> None:
    """TRL's `token_truncate` and `token_mask`: the ratio compares with the trainer's log-probs before the step."""
    ratio = torch.exp((OLD - SAMPLED) * MASK)
    low, high = 0.5, 1.5
    kept = ratio.clamp(low, high) if mode == "truncate" else ratio * ((ratio >= low) & (ratio <= high))
    trl_batch = trl_inputs(LOGPS, importance_sampling_ratio=kept)
    settings: dict[str, Any] = {"grpo": {}, "dapo": {"loss_type": "dapo", "epsilon_high": 0.28}}.get(
        name, {"loss_type": "cispo", "epsilon_high": 5.0}
    )
    spec = AlgorithmSpec(name=name, kl_coef=0, importance=mode, importance_low=low, importance_high=high)
    expected = trl_code.grpo_loss(trl_batch, **settings)
    assert float(our_loss(spec, LOGPS)) == pytest.approx(float(expected), abs=1e-6)


def test_rloo_is_trl_s() -> None:
    """TRL counts a constant, -A, without gradient for answers that are masked entirely: ours leaves them out."""
    own, other = LOGPS.clone().requires_grad_(), LOGPS.clone().requires_grad_()
    trl_batch = trl_inputs(other) | {"old_logps": (OLD * MASK).sum(1)}
    expected = trl_code.rloo_loss(trl_batch, epsilon_low=0.2, epsilon_high=0.2)
    loss = our_loss(AlgorithmSpec(name="rloo"), own)
    constant = -float(ADVANTAGES[4]) / len(LENGTHS)
    assert float(loss) + constant == pytest.approx(float(expected), abs=1e-6)
    loss.backward()
    expected.backward()
    assert own.grad is not None
    assert other.grad is not None
    assert torch.allclose(own.grad, other.grad, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("name", "kind"), [("dpo", "sigmoid"), ("ipo", "ipo")])
def test_losses_of_pairs_are_trl_s_with_empty_and_single_token_answers(name: str, kind: str) -> None:
    """Answers 0, 1, 2 are chosen, 3, 4, 5 rejected; one is empty, one has one token."""
    own, other = LOGPS.clone().requires_grad_(), LOGPS.clone().requires_grad_()
    spec = AlgorithmSpec(name=name, kl_coef=0.4)
    loss = given_loss(spec, row(own), row(REFERENCE), LENGTHS, [1.0, 1, 1, -1, -1, -1], (0, 1, 2, 0, 1, 2))
    expected = trl_code.dpo_loss(other, REFERENCE, PRESENT.float(), beta=0.4, kind=kind)
    assert float(loss) == pytest.approx(float(expected), abs=1e-6)
    assert torch.allclose(differentiate(loss, own), differentiate(expected, other), atol=1e-6, rtol=0)


def test_kto_is_trl_s() -> None:
    """Three labelled answers, the second of them bad, each beside an answer to another prompt (1, 3, 5)."""
    judged, others = [0, 2, 4], [1, 3, 5]
    own_case, reference = LOGPS[:, :4].clone(), REFERENCE[:, :4].clone()
    reference[others] -= 1.0  # so that the estimate of KL is above 0
    own, other = own_case.clone().requires_grad_(), own_case.clone().requires_grad_()
    spec = AlgorithmSpec(name="kto", kl_coef=0.4)
    apart = own_case[others].sum(1), reference[others].sum(1)
    baseline = estimate_kl_baseline(torch.stack([(apart[0] - apart[1]).sum(), torch.tensor(3.0)]))
    rows = (values[judged].reshape(-1) for values in (own, reference))
    loss = given_loss(spec, *rows, (4,) * 3, [1.0, -1, 1], (0, 1, 2), baseline=baseline)
    expected = trl_code.kto_loss(other[judged], reference[judged], apart, [True, False, True], beta=0.4)
    assert float(loss) == pytest.approx(float(expected), abs=1e-6)
    assert torch.allclose(differentiate(loss, own), differentiate(expected, other), atol=1e-6, rtol=0)


def test_sft_is_torch_s_cross_entropy_over_the_answers_tokens() -> None:
    logits = torch.randn(7, 11, generator=torch.Generator().manual_seed(6))
    words = torch.tensor([3, 1, 4, 1, 5, 9, 2])
    logprobs = logits.log_softmax(-1).gather(1, words[:, None])[:, 0]
    spec = AlgorithmSpec(name="sft")
    loss = given_loss(spec, logprobs, None, (5, 2), [1.0, 1.0], (0, 1))
    assert float(loss) == pytest.approx(float(torch.nn.functional.cross_entropy(logits, words)), abs=1e-6)


def differentiate(loss: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, of)[0]


def given_loss(
    spec: AlgorithmSpec,
    logprobs: torch.Tensor,
    reference: torch.Tensor | None,
    lengths: Sequence[int],
    advantages: list[float],
    groups: tuple[int, ...],
    baseline: float = 0.0,
) -> torch.Tensor:
    """Inputs of offline answers with one advantage each, weighed as a trainer weighs them."""
    samples = [
        TrainSample((1,), (1,) * n, (0.0,) * n, (), (), advantage=advantage)
        for n, advantage in zip(lengths, advantages, strict=True)
    ]
    job = SimpleNamespace(algorithm=spec, workload=SimpleNamespace(max_response_len=8))
    weights = token_weights(samples, job)  # type: ignore[arg-type]
    inputs = LossInputs(
        logprobs=logprobs,
        behaviour_logprobs=logprobs.detach(),
        reference_logprobs=reference,
        advantages=torch.tensor(advantages).repeat_interleave(torch.tensor(lengths)),
        weights=torch.tensor([w for s, weight in zip(samples, weights, strict=True) for w in s.spread(weight)]),
        lengths=tuple(lengths),
        sequence_weights=torch.tensor([s.weigh_response(w) for s, w in zip(samples, weights, strict=True)]),
        sequence_advantages=torch.tensor(advantages),
        groups=groups,
        baseline=baseline,
    )
    loss: torch.Tensor = find_loss(spec)(inputs, spec)[0]
    return loss


REWARDS = [1.0, 0.0, 0.5, -2.0, 3.0, 3.0, 3.0, 3.0]
"""Two groups of four; the second has no variance."""


def rollouts(lengths: Sequence[int] = (3, 1, 0, 2, 1, 4, 2, 1)) -> list[Rollout]:
    built = []
    for index, (reward, length) in enumerate(zip(REWARDS, lengths, strict=True)):
        logprobs = tuple(-0.1 * (index + token + 1) for token in range(length))
        own = Rollout(Prompt("1", "", "", (1,)), index // 4, Completion((1,) * length, logprobs, "stop"), reward=reward)
        own.scores[Role.POLICY] = tuple(-0.15 * (index + token + 1) for token in range(length))
        own.scores[Role.REFERENCE] = tuple(-0.25 * (token + 1) for token in range(length))
        built.append(own)
    return built


@pytest.mark.parametrize("failed", [None, 2])
@pytest.mark.parametrize(("name", "scale"), [("grpo", "group"), ("dr_grpo", "none")])
def test_group_advantages_are_trl_s(name: str, scale: str, failed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "GROUP_STD_EPSILON", 1e-4)  # TRL's
    step, rewards = rollouts(), torch.tensor(REWARDS)
    if failed is not None:
        step[failed].has_failed = True
        rewards[failed] = torch.nan
    trainer = SimpleNamespace(
        multi_objective_aggregation="sum_then_normalize", scale_rewards=scale, reward_weights=torch.ones(1)
    )
    names = {
        "self": trainer,
        "rewards_per_func": rewards[:, None],
        "unscorable_mask": torch.isnan(rewards),
        "device": torch.device("cpu"),
        "num_generations": 4,
    }
    expected = trl_code.advantages("grpo_trainer.py", "if self.multi_objective_aggregation ==", names)
    spec = AlgorithmSpec(name=name)
    wholes = [judged.whole for judged in find_advantage(spec)(step, spec)]
    assert wholes == pytest.approx(expected.tolist(), abs=1e-6)


def test_leave_one_out_advantages_are_trl_s_with_kl_taken_off_the_rewards() -> None:
    """TRL's `old_per_token_logps` are the trainer's own; the engine's differ from them here."""
    step = rollouts()
    width = max(len(rollout.completion.tokens) for rollout in step)

    def pad(each: Sequence[Sequence[float]]) -> torch.Tensor:
        return torch.tensor([[*values, *[0.0] * (width - len(values))] for values in each])

    policy, reference = (pad([r.scores[role] for r in step]) for role in (Role.POLICY, Role.REFERENCE))
    trainer = SimpleNamespace(beta=0.2, normalize_advantages=False)
    names = {
        "self": trainer,
        "rewards": torch.tensor(REWARDS),
        "old_per_token_logps": policy,
        "ref_per_token_logps": reference,
        "completion_mask": pad([(1.0,) * len(r.completion.tokens) for r in step]),
        "gather": lambda value: value,
        "num_generations": 4,
    }
    expected = trl_code.advantages("rloo_trainer.py", "# Include the KL penalty in the reward", names)
    spec = AlgorithmSpec(name="rloo", kl_coef=0.2)
    wholes = [judged.whole for judged in find_advantage(spec)(step, spec)]
    assert wholes == pytest.approx(expected.tolist(), abs=1e-6)


def test_a_job_of_each_algorithm_reads_what_trl_s_test_reads() -> None:
    """The weights of the tests above are those of a job."""
    job = make_job(**{"algorithm.name": "dapo"})
    samples = [TrainSample((1,), (1,) * n, (0.0,) * n, (), ()) for n in LENGTHS]
    assert sum(weight * n for weight, n in zip(token_weights(samples, job), LENGTHS, strict=True)) == pytest.approx(1.0)
