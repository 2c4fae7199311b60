"""Over which tokens a policy's metrics are: those that are learned from, worked by hand."""

import math
from typing import Any

import pytest
import torch

from rlplan.runtime.losses.inputs import LossInputs
from rlplan.runtime.losses.policy_losses import answer_ratio, clipped_ratio, preference
from rlplan.runtime.measure.step_metrics import StepMetrics, accumulate
from rlplan.runtime.rollout.experience import Completion, Prompt, Rollout, WeightSpan
from rlplan.runtime.workers.trainer.pass_summary import summarize_pass
from rlplan.spec.parts.algorithm import AlgorithmSpec
from tests.factories import make_job

BEHAVIOUR = torch.tensor([-1.0, -1.0, -1.0, -1.0])
LOGPROBS = BEHAVIOUR + torch.tensor([math.log(1.5), 0.0, math.log(4.0), math.log(4.0)])
WEIGHTS = torch.tensor([0.5, 0.5, 0.0, 0.0])
"""Two tokens of a rollout that counts, two of one that failed, which are clipped, unlikely and far from everything."""


def make_inputs(weights: torch.Tensor, **others: Any) -> LossInputs:
    return LossInputs(
        logprobs=LOGPROBS[: len(weights)].clone().requires_grad_(),
        behaviour_logprobs=BEHAVIOUR[: len(weights)],
        old_logprobs=BEHAVIOUR[: len(weights)] if others.pop("has_moved", True) else None,
        reference_logprobs=LOGPROBS[: len(weights)] - torch.tensor([-0.5, -0.25, 7.0, 7.0])[: len(weights)],
        advantages=torch.ones(len(weights)),
        weights=weights,
        **others,
    )


def compute_sums(weights: torch.Tensor) -> dict[str, float]:
    inputs = make_inputs(weights)
    loss, details = clipped_ratio(inputs, AlgorithmSpec(name="grpo", kl_estimator="k1"))
    difference = inputs.logprobs.detach() - inputs.behaviour_logprobs
    entropies = torch.tensor([0.25, 0.75, 9.0, 9.0])[: len(weights)]
    return summarize_pass(float(loss.detach()), difference, entropies, details, weights != 0)


def make_row(*ranks: dict[str, float]) -> dict[str, Any]:
    metrics = StepMetrics(make_job())
    metrics.add_training(ranks, is_first=True)
    return metrics.take_rows(1)[0]


def test_tokens_of_failed_rollouts_count_only_where_engine_and_trainer_are_compared() -> None:
    row = make_row(compute_sums(WEIGHTS))
    assert row["policy/entropy"] == 0.5
    assert row["policy/clip_fraction"] == 0.5
    assert row["policy/ratio_max"] == pytest.approx(1.5)
    assert row["kl/mean"] == pytest.approx(-0.375)
    assert row["kl/max"] == pytest.approx(-0.25), "k1 may be below 0: nothing is put beside it"
    assert row["sync/logprob_difference_max"] == pytest.approx(math.log(4.0)), "over all tokens"


def test_passes_and_ranks_without_a_token_to_learn_from_change_nothing() -> None:
    totals: dict[str, float] = {}
    for part in (compute_sums(torch.zeros(0)), compute_sums(WEIGHTS), compute_sums(torch.zeros(4))):
        accumulate(totals, part)
    alone, idle = make_row(compute_sums(WEIGHTS)), compute_sums(torch.zeros(0))
    assert make_row(idle, totals, idle) == alone


def test_where_no_token_is_learned_from_there_is_no_mean_over_tokens() -> None:
    row = make_row(compute_sums(torch.zeros(4)))
    differences = {f"sync/logprob_difference_{name}" for name in ("mean", "p99", "max", "kl")}
    assert set(row) == {"step", "policy/loss", *differences}
    assert row["policy/loss"] == 0


def test_corrections_of_importance_are_counted_where_they_count() -> None:
    spec = AlgorithmSpec(name="grpo", importance="mask", importance_low=0.5, importance_high=2.0)
    details = clipped_ratio(make_inputs(WEIGHTS, has_moved=False), spec)[1]
    assert details["importance"].tolist() == pytest.approx([1.5, 1.0])
    assert details["is_corrected"].tolist() == [False, False]
    answers = {"sequence_weights": torch.tensor([1.0, 0.0]), "sequence_advantages": torch.ones(2)}
    of_answers = make_inputs(WEIGHTS, lengths=(2, 2), has_moved=False, **answers)
    details = answer_ratio(of_answers, spec)[1]
    assert details["importance"].tolist() == pytest.approx([1.5, 1.0]), "of each token, also where an answer is judged"
    assert len(details["ratio"]) == 4


def test_the_mismatch_is_a_kl_and_the_weights_have_an_effective_sample_size() -> None:
    """Ratios 1.5, 1, 4, 4: k3 of the engine's tokens, and two weights that count, one of which is masked at 1.2.

    The weights that count are 1.5, masked to 0, and 1: (0 + 1)^2 / (2 * (0 + 1)) is half of the tokens.
    """
    spec = AlgorithmSpec(name="grpo", importance="mask", importance_low=0.9, importance_high=1.2)
    inputs = make_inputs(WEIGHTS, has_moved=False)
    loss, details = clipped_ratio(inputs, spec)
    difference = inputs.logprobs.detach() - inputs.behaviour_logprobs
    row = make_row(summarize_pass(float(loss.detach()), difference, torch.zeros(4), details, WEIGHTS != 0))
    each = [ratio - 1 - math.log(ratio) for ratio in (1.5, 1.0, 4.0, 4.0)]
    assert row["sync/logprob_difference_kl"] == pytest.approx(sum(each) / 4, abs=1e-6)
    assert row["importance/ess"] == pytest.approx(0.5)
    assert row["importance/masked_fraction"] == row["importance/corrected_fraction"] == 0.5


def test_the_age_of_a_rollout_is_that_of_its_oldest_token() -> None:
    """Version 6 is trained: one rollout's tokens are 2, 2 and 1 old, another's is new."""
    metrics = StepMetrics(make_job())
    ages = [((4, 0, 2), (5, 2, 3)), ((6, 0, 1),)]
    rollouts = [
        Rollout(Prompt("1", "a", "b", (1,)), 0, Completion((3,), (-0.5,), "stop", tuple(WeightSpan(*s) for s in spans)))
        for spans in ages
    ]
    metrics.add_staleness(rollouts, 6)
    row = metrics.take_rows(1)[0]
    assert (row["staleness/mean"], row["staleness/rollout_mean"], row["staleness/max"]) == (1.25, 1.0, 2)


def test_pairs_that_weigh_nothing_are_not_ranked() -> None:
    signs = {"sequence_advantages": torch.tensor([1.0, -1.0, 1.0, -1.0]), "groups": (0, 0, 1, 1)}
    inputs = make_inputs(WEIGHTS, lengths=(1, 1, 1, 1), sequence_weights=WEIGHTS, **signs)
    assert preference(inputs, AlgorithmSpec(name="dpo"))[1]["is_ranked_right"].tolist() == [False]


@pytest.mark.parametrize("num_judged", [0, 1])
def test_an_evaluation_without_a_reward_is_no_zero(num_judged: int) -> None:
    metrics = StepMetrics(make_job())
    completion = Completion((3,), (-0.5,), "stop")
    step = [Rollout(Prompt("1", "a", "b", (1,)), index, completion, "x") for index in range(2)]
    for rollout in step:
        rollout.has_failed = True
    for rollout in step[:num_judged]:
        rollout.has_failed, rollout.rewards = False, {"answer_matcher": 1.0}
    metrics.add_evaluation(step)
    row = metrics.take_rows(1)[0]
    assert row == {"step": 1} | ({"evaluate/greedy_accuracy": 1.0} if num_judged else {})


def evaluate(data: dict[str, Any], num_samples: int, right: list[tuple[str, list[float | None]]]) -> dict[str, Any]:
    """The metrics of an evaluation. right: (data set, the reward of each response, None where it failed) by prompt."""
    sampled = {"workload.num_evaluation_samples": num_samples, "workload.evaluation_temperature": 1.0}
    metrics = StepMetrics(make_job(**(sampled if num_samples else {}), **data))
    metrics.add_evaluation(
        [
            Rollout(
                Prompt("p", "p", "a", (1,), source=source),
                index,
                Completion((3,), (-0.1,), "stop"),
                has_failed=reward is None,
                rewards={} if reward is None else {"answer_matcher": reward},
            )
            for index, (source, rewards) in enumerate(right)
            for reward in rewards
        ]
    )
    return {key: value for key, value in metrics.take_rows(0)[0].items() if key != "step"}


def test_sampled_evaluation_gives_avg_at_n_and_pass_at_k_without_bias() -> None:
    row = evaluate({}, 4, [("", [1.0, 0.0, 0.0, 0.0]), ("", [0.0] * 4), ("", [1.0] * 4)])
    assert row["evaluate/accuracy/avg@4"] == pytest.approx((0.25 + 0 + 1) / 3)
    assert row["evaluate/accuracy/pass@2"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert row["evaluate/accuracy/pass@4"] == pytest.approx(2 / 3)
    assert len(row) == 3


def test_responses_without_a_verdict_count_nowhere() -> None:
    row = evaluate({}, 4, [("", [1.0, None, None, 0.0]), ("", [None] * 4)])
    assert row == {"evaluate/accuracy/avg@4": 0.5, "evaluate/accuracy/pass@2": 1.0}


def test_each_held_out_data_set_has_its_own_metrics() -> None:
    data = {"data": {"prompts": "p.jsonl", "heldout": {"near": "n.jsonl", "far": "f.jsonl"}}}
    row = evaluate(data, 0, [("near", [1.0]), ("near", [0.0]), ("far", [0.0])])
    assert row == {"evaluate/near/greedy_accuracy": 0.5, "evaluate/far/greedy_accuracy": 0.0}


@pytest.mark.parametrize(("importance", "name", "is_told"), [("none", "grpo", True), ("auto", "grpo", False)])
def test_the_first_stale_step_that_nothing_corrects_raises_an_alarm_once(
    importance: str, name: str, is_told: bool
) -> None:
    stale = {"placement.placement": "disaggregated", "placement.max_staleness": 2, "algorithm.name": name}
    metrics = StepMetrics(make_job(**stale, **{"algorithm.importance": importance}))
    alarms = []
    for version in (4, 5, 6):
        spans = (WeightSpan(version=4, start=0, end=1),)
        rollout = Rollout(Prompt("1", "a", "b", (1,)), 0, Completion((3,), (-0.5,), "stop", spans=spans), "x")
        metrics.add_staleness([rollout], version)
        alarms.append(metrics.uncorrected_staleness())
        metrics.take_rows(version)
    assert [alarm is not None for alarm in alarms] == [False, is_told, False], "the first step's tokens are new"
    if is_told:
        assert str(alarms[1]).startswith("training on tokens up to 1 versions old; algorithm.importance none")
