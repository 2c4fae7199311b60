"""Advantages and the loss, against hand-worked numbers."""

import math
from pathlib import Path

import pytest
import torch

from rlplan.errors import SpecError
from rlplan.runtime.losses.advantages import (
    estimate_gae,
    group_normalized,
    kl_estimate,
    leave_one_out,
    whiten_advantages,
)
from rlplan.runtime.losses.inputs import LossInputs
from rlplan.runtime.losses.policy_losses import clipped_ratio, estimate_kl_baseline
from rlplan.runtime.losses.registry import find_advantage, find_loss
from rlplan.runtime.losses.value import clipped_value_loss
from rlplan.runtime.rollout.experience import Completion, Prompt, Rollout
from rlplan.spec.parts.algorithm import ALGORITHMS, AlgorithmSpec
from rlplan.vocabulary import Role


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
        behaviour_logprobs=behaviour - 7.0,  # what an engine says of them moves no ratio
        reference_logprobs=logprobs + math.log(2),
        advantages=torch.tensor([1.0, -1.0]),
        weights=torch.tensor([0.25, 0.75]),
        old_logprobs=behaviour,
    )
    loss, details = clipped_ratio(inputs, AlgorithmSpec(kl_coef=0.1, clip_low=0.2, clip_high=0.2))
    surrogate = 0.25 * 1.2 + 0.75 * -0.8
    assert float(loss) == pytest.approx(-surrogate + 0.1 * (1 - math.log(2)), abs=1e-6)
    assert details["is_clipped"].tolist() == [True, True]
    assert details["ratio"].tolist() == pytest.approx([1.5, 0.5])


def test_a_clipped_ratio_gives_no_gradient_and_a_kept_one_does() -> None:
    logprobs = torch.tensor([math.log(1.5), math.log(1.1)], requires_grad=True)
    zeros = torch.zeros(2)
    inputs = LossInputs(logprobs, zeros, None, torch.ones(2), torch.ones(2), old_logprobs=zeros)
    clipped_ratio(inputs, AlgorithmSpec(kl_coef=0.0))[0].backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, -1.1])


def test_with_lambda_one_a_generalized_advantage_is_the_return_less_the_value() -> None:
    rewards, values = [0.5, 0.0, 2.0], [1.0, -1.0, 0.25]
    advantages, returns = estimate_gae(rewards, values, gamma=1.0, gae_lambda=1.0)
    assert returns == pytest.approx([2.5, 2.0, 2.0])
    assert advantages == pytest.approx([1.5, 3.0, 1.75])


def test_with_lambda_zero_it_is_the_error_of_one_step() -> None:
    advantages, _ = estimate_gae([0.5, 0.0, 2.0], [1.0, -1.0, 0.25], gamma=0.5, gae_lambda=0.0)
    assert advantages == pytest.approx([0.5 - 0.5 - 1.0, 0.125 + 1.0, 2.0 - 0.25])


def test_whitened_advantages_have_mean_zero_and_deviation_one_over_all_tokens() -> None:
    white = [value for values in whiten_advantages([[1.0, 2.0], [], [7.0]]) for value in values]
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
    assert float(loss.detach()) == pytest.approx(2 * math.log(0.5 / 0.75))
    assert float(details["teacher_reverse_kl"]) == pytest.approx(math.log(0.5 / 0.75))
    loss.backward()
    assert logprobs.grad is not None
    assert float(logprobs.grad) == pytest.approx(-2 * math.log(1.5))  # downhill: a higher log-prob


@pytest.mark.parametrize(
    ("estimator", "value"), [("k1", math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", math.log(2) - 0.5)]
)
def test_the_estimators_of_kl_are_worked_by_hand(estimator: str, value: float) -> None:
    """p = 0.5, q = 0.25: d = ln 2; k3 = 1/2 - 1 + ln 2."""
    results = kl_estimate(torch.tensor([math.log(0.5) - math.log(0.25)]), estimator, torch.exp)
    assert float(results) == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_the_loss_has_its_weight_and_kl_in_the_rewards_stays_out_of_it(estimator: str) -> None:
    inputs = LossInputs(torch.tensor([-0.5]), torch.tensor([-0.5]), torch.tensor([-1.5]), torch.zeros(1), torch.ones(1))
    keys = {"kl_coef": 0.5, "kl_estimator": estimator}
    values = {"k1": 1.0, "k2": 0.5, "k3": math.exp(-1)}
    assert float(clipped_ratio(inputs, AlgorithmSpec(**keys))[0]) == pytest.approx(0.5 * values[estimator])
    assert float(clipped_ratio(inputs, AlgorithmSpec(**keys, kl_in="reward"))[0]) == 0


def rollouts(rewards: list[float], lengths: list[int], groups: list[int]) -> list[Rollout]:
    return [
        Rollout(Prompt("1", "", "", (1,)), group, Completion((1,) * n, (-0.5,) * n, "stop"), reward=reward)
        for reward, n, group in zip(rewards, lengths, groups, strict=True)
    ]


def advantages(name: str, step: list[Rollout], **keys: float) -> list[tuple[float, ...]]:
    spec = AlgorithmSpec(name=name, **keys)  # type: ignore[arg-type]
    return [judged.advantages for judged in find_advantage(spec)(step, spec)]


def test_a_greedy_baseline_is_taken_off_every_token() -> None:
    """Rewards 1 and 0 against a greedy 0.25; of the KL 0.5 a token, times 0.1, what is to come."""
    step = rollouts([1.0, 0.0], [2, 0], [0, 0])
    for rollout in step:
        rollout.baseline = 0.25
        rollout.scores[Role.POLICY] = (-0.5,) * len(rollout.completion.tokens)
        rollout.scores[Role.REFERENCE] = (-1.0,) * len(rollout.completion.tokens)
    first, second = advantages("remax", step, kl_coef=0.1)
    assert first == pytest.approx((1 - 0.1 - 0.25, 1 - 0.05 - 0.25))
    assert second == ()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if AlgorithmSpec(name=name).weighs_rollouts])
def test_a_kl_in_the_rewards_is_that_of_the_trainer_s_policy(name: str, estimator: str) -> None:
    """Whatever the engine said of the tokens. The rewards are recomputed plainly, and judged by the same advantage."""
    policy, reference = torch.tensor([[-0.7, -1.1], [-0.2, -2.0]]), torch.tensor([[-1.0, -0.9], [-0.5, -1.0]])
    apart = policy - reference
    kl = {"k1": apart, "k2": apart**2 / 2, "k3": torch.exp(-apart) - 1 + apart}[estimator]
    answers, plain = rollouts([1.0, 0.0], [2, 2], [0, 0]), rollouts([1.0, 0.0], [2, 2], [0, 0])
    for index, (answer, other) in enumerate(zip(answers, plain, strict=True)):
        answer.scores |= {Role.POLICY: tuple(policy[index].tolist()), Role.REFERENCE: tuple(reference[index].tolist())}
        answer.scores[Role.VALUE] = other.scores[Role.VALUE] = (0.25, -0.5)
        first, last = (-0.1 * kl[index]).tolist()
        other.turn_rewards, other.reward = ((1, first),), other.reward + first + last
    spec = AlgorithmSpec(name=name, kl_in="reward", kl_coef=0.1, kl_estimator=estimator)  # type: ignore[arg-type]
    results = find_advantage(spec)(answers, spec)
    expected = find_advantage(spec)(plain, spec.model_copy(update={"kl_coef": 0.0}))
    for answer, other in zip(results, expected, strict=True):
        assert answer.advantages == pytest.approx(other.advantages, abs=1e-5)
        assert answer.returns == pytest.approx(other.returns, abs=1e-6)


def test_rewards_to_come_are_normalized_over_the_whole_batch() -> None:
    """Two tokens of 1 and one of 0, without KL: mean 2/3, variance 1/3."""
    step = rollouts([1.0, 0.0], [2, 1], [0, 1])
    results = advantages("reinforce++", step, kl_coef=0.0)
    deviation = math.sqrt(1 / 3)
    assert results[0] == pytest.approx((1 / 3 / deviation,) * 2, abs=1e-6)
    assert results[1] == pytest.approx((-2 / 3 / deviation,), abs=1e-6)


def test_with_a_baseline_rewards_are_centred_in_their_group_first() -> None:
    """Groups (1, 0) and (5, 5): centred 0.5, -0.5, 0, 0, of which each rollout has one token: variance 1/6."""
    results = advantages("reinforce++_baseline", rollouts([1.0, 0.0, 5.0, 5.0], [1] * 4, [0, 0, 1, 1]))
    assert [value for (value,) in results] == pytest.approx([0.5 * 6**0.5, -0.5 * 6**0.5, 0, 0], abs=1e-6)


def test_a_rollout_that_failed_is_no_part_of_its_group() -> None:
    step = rollouts([1.0, 0.0, -99.0], [1, 1, 1], [0, 0, 0])
    step[2].has_failed = True
    assert [value for (value,) in advantages("dr_grpo", step)] == [0.5, -0.5, 0.0]


def test_masked_tokens_do_not_change_the_normalization() -> None:
    step = rollouts([1.0, 0.0, 7.0], [1, 1, 3], [0, 1, 2])
    step[2].num_ignored = 3
    whole = advantages("reinforce++", step, kl_coef=0.0)
    assert whole[:2] == [pytest.approx(pair) for pair in advantages("reinforce++", step[:2], kl_coef=0.0)]


def test_a_response_ends_with_its_last_token_that_is_learned_from() -> None:
    """GAE by hand with gamma 1, lambda 0.5: two learned tokens, the reward on the second; two forced ones count not."""
    step = rollouts([1.0, 0.0], [4, 2], [0, 1])
    step[0].num_ignored = 2
    for rollout, values in zip(step, [(0.5, 0.25, 9.0, 9.0), (0.0, 0.0)], strict=True):
        rollout.scores[Role.VALUE] = values
    spec = AlgorithmSpec(name="ppo", kl_coef=0, gae_lambda=0.5)
    first, second = find_advantage(spec)(step, spec)
    assert first.returns == (0.625, 1.0, 0.0, 0.0)
    mean, deviation = 0.21875, 0.3590  # of 0.125, 0.75, 0, 0
    assert first.advantages[:2] == pytest.approx([(0.125 - mean) / deviation, (0.75 - mean) / deviation], rel=1e-3)
    assert second.returns == (0.0, 0.0)


def test_alone_in_a_group_there_is_nothing_to_compare_with() -> None:
    assert leave_one_out([3.0], [0]) == [0.0]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_s_advantage_and_loss_are_there_and_take_a_pass_without_tokens(name: str) -> None:
    spec = AlgorithmSpec(name=name)
    empty = torch.zeros(0, requires_grad=True)
    nothing = torch.zeros(0)
    inputs = LossInputs(
        logprobs=empty * 1,
        behaviour_logprobs=nothing,
        reference_logprobs=nothing,
        advantages=nothing,
        weights=nothing,
        sequence_weights=nothing,
        sequence_advantages=nothing,
    )
    loss, details = find_loss(spec)(inputs, spec)
    loss.backward()
    assert float(loss.detach()) == 0
    assert {"ratio", "is_clipped"} <= set(details)
    assert callable(find_advantage(spec))


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("exits.py", "import sys\nsys.exit(0)", "SystemExit: 0"),
        ("raises.py", "1 / 0", "ZeroDivisionError"),
        ("mine.txt", "", "does not end in .py"),
    ],
)
def test_a_user_s_file_that_cannot_be_run_is_said(tmp_path: Path, name: str, text: str, why: str) -> None:
    (tmp_path / name).write_text(text)
    declared = {"name": "mine", "source": "", "advantage": "own", "loss": "own"}
    spec = AlgorithmSpec.model_validate({"path": f"{tmp_path / name}:M", "custom": declared, "name": "mine"})
    with pytest.raises(SpecError, match=f"cannot be run: .*{why}"):
        find_loss(spec)


def test_what_a_user_s_file_prints_is_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prints.py").write_text("print('hello')\ndef own(): ...")
    declared = {"name": "mine", "source": "", "advantage": "own", "loss": "own"}
    spec = AlgorithmSpec.model_validate({"path": f"{tmp_path / 'prints.py'}:M", "custom": declared, "name": "mine"})
    assert callable(find_loss(spec))
    assert capsys.readouterr().out == ""


def test_ipo_draws_the_margin_to_half_the_inverse_of_its_coefficient() -> None:
    """Means of the margins 0.5 and -0.25 are 0.75 apart; 1 / (2 * 0.5) is 1."""
    loss = _offline_loss(
        "ipo", margins=[[0.5, 0.5], [-0.25]], advantages=[1.0, -1.0], groups=(0, 0), weights=[0.5, 0.5]
    )
    assert loss == pytest.approx(0.25**2)


def test_kto_compares_each_judged_answer_with_the_baseline() -> None:
    """z = 0.5; a good answer 1.5 above it with beta 0.5, a bad one 1.5 below."""
    margins = [[2.0], [-1.0]]
    loss = _offline_loss(
        "kto", margins=margins, advantages=[1.0, -1.0], groups=(0, 1), weights=[0.5, 0.5], baseline=0.5
    )
    assert loss == pytest.approx(1 - 1 / (1 + math.exp(-0.75)))


def test_kto_s_baseline_is_the_mean_margin_of_all_passes_and_never_below_zero() -> None:
    """Margins of 1 and -5 in one pass, 6 and 4 in another: their mean is 1.5, that of the bounded passes 2.5."""
    passes = [torch.tensor([-4.0, 2.0], dtype=torch.float64), torch.tensor([10.0, 2.0], dtype=torch.float64)]
    assert estimate_kl_baseline(passes[0] + passes[1]) == 1.5
    assert estimate_kl_baseline(passes[0]) == 0
    assert estimate_kl_baseline(torch.zeros(2)) == 0


def _offline_loss(
    name: str,
    margins: list[list[float]],
    advantages: list[float],
    groups: tuple[int, ...],
    weights: list[float],
    baseline: float = 0.0,
) -> float:
    """The loss with kl_coef 0.5 of answers whose tokens have such margins over the reference."""
    each = torch.tensor([value for answer in margins for value in answer])
    spec = AlgorithmSpec(name=name, kl_coef=0.5)
    inputs = LossInputs(
        logprobs=each,
        behaviour_logprobs=each,
        reference_logprobs=torch.zeros_like(each),
        advantages=torch.zeros_like(each),
        weights=torch.zeros_like(each),
        lengths=tuple(map(len, margins)),
        sequence_weights=torch.tensor(weights),
        sequence_advantages=torch.tensor(advantages),
        groups=groups,
        baseline=baseline,
    )
    return float(find_loss(spec)(inputs, spec)[0])


def test_a_reward_model_s_loss_is_that_of_the_odds_that_the_chosen_answer_wins() -> None:
    """Scores 2 and 0.5, and -1 and 0: odds of e^1.5 and e^-1; one pair is ranked right."""
    scores = torch.tensor([2.0, 0.5, -1.0, 0.0], requires_grad=True)
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0])
    inputs = LossInputs(
        logprobs=scores,
        behaviour_logprobs=scores.detach(),
        reference_logprobs=None,
        advantages=signs,
        weights=torch.full((4,), 0.25),
        lengths=(1,) * 4,
        sequence_weights=torch.full((4,), 0.25),
        sequence_advantages=signs,
        groups=(0, 0, 1, 1),
    )
    spec = AlgorithmSpec(name="reward_modeling")
    loss, details = find_loss(spec)(inputs, spec)
    expected = (math.log(1 + math.exp(-1.5)) + math.log(1 + math.exp(1))) / 2
    assert float(loss.detach()) == pytest.approx(expected)
    assert details["is_ranked_right"].tolist() == [True, False]
