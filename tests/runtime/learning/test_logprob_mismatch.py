"""How far engine and trainer may be apart: the mean and the 99th percentile are judged, the largest is reported."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from rlplan.emit.execution import execution_spec
from rlplan.errors import RunError
from rlplan.planner.search import find_plan
from rlplan.runtime.learning.learner import Learner
from rlplan.runtime.learning.logprob_mismatch import (
    BINS_PER_DOUBLING,
    FOUR_BITS,
    LIMITS,
    check_logprob_mismatch,
    choose_limits,
    merge_differences,
)
from rlplan.runtime.measure.step_metrics import StepMetrics, accumulate
from rlplan.runtime.rollout.experience import Completion, Prompt, Rollout
from rlplan.runtime.workers.trainer.pass_summary import summarize_pass
from rlplan.spec.resolved import ResolvedJob
from rlplan.vocabulary import ActionKind, Dtype
from tests.factories import ask_job, make_job

BF16 = {"training.dtype": "bfloat16", "rollout.dtype": "bfloat16"}
NUM_TOKENS = 4000


def honest(scale: float, *, seed: int = 0) -> torch.Tensor:
    """Differences of an honest run: nearly all are small, a few are not."""
    drawn = torch.randn(NUM_TOKENS, generator=torch.Generator().manual_seed(seed))
    return drawn * scale


def passes(apart: torch.Tensor, count: int = 3) -> dict[str, float]:
    """A rank's sums of such differences in some passes, the last of them empty."""
    totals: dict[str, float] = {}
    for part in (*apart.chunk(count), torch.zeros(0)):
        details = {"is_clipped": torch.zeros(len(part)), "ratio": torch.ones(len(part))}
        learned = torch.ones(len(part), dtype=torch.bool)
        accumulate(totals, summarize_pass(0.0, part, torch.zeros(len(part)), details, learned))
    return totals


class Ranks:
    """Stands where the trainer's ranks are: each answers with what it has seen."""

    def __init__(self, *answers: dict[str, float]) -> None:
        self.answers = answers

    def everywhere(self, action: Any, call: Any) -> tuple[list[Any], list[Any]]:
        return list(self.answers), []


def train(answers: list[torch.Tensor], **overrides: Any) -> tuple[dict[str, Any], str | None]:
    """A step's first mini-batch of a learner whose ranks see such differences: its metrics, and its alarm."""
    spec = execution_spec(find_plan(ask_job(**overrides)))
    metrics = StepMetrics(spec.job)
    learner = Learner(spec, Ranks(*map(passes, answers)), metrics)  # type: ignore[arg-type]
    action = next(a for a in spec.schedule.step if a.kind is ActionKind.TRAIN_FORWARD_BACKWARD)
    completion = Completion((3, 4), (-0.1, -0.2), "stop")
    rollouts = [Rollout(Prompt("1", "a", "b", (1, 2)), 0, completion, advantages=(1.0, 1.0)) for _ in range(16)]
    learner.train_forward_backward(action, 1, rollouts, True)
    return metrics.take_rows(1)[0], learner.take_alarm()


def test_an_honest_run_in_bf16_with_one_token_at_0_3_goes_on_and_tells_it() -> None:
    first = honest(0.01)
    first[17] = -0.3
    row, alarm = train([first, honest(0.01, seed=1)], **BF16)
    assert alarm is None
    assert row["sync/logprob_difference_max"] == pytest.approx(0.3)
    both = torch.cat([first, honest(0.01, seed=1)]).abs()
    assert row["sync/logprob_difference_mean"] == pytest.approx(float(both.mean()))
    exact = float(both.double().quantile(0.99))
    assert exact <= row["sync/logprob_difference_p99"] <= exact * 2 ** (1 / BINS_PER_DOUBLING) * 1.01


def test_a_run_whose_mean_is_off_ends_with_what_can_be_typed() -> None:
    with pytest.raises(RunError, match=r"differ by 0\.08 on average, .* \(8000 tokens\)") as caught:
        train([torch.full((NUM_TOKENS,), 0.08), torch.full((NUM_TOKENS,), 0.08)], **BF16)
    error = caught.value
    assert error.where == "step 1, train_forward_backward"
    assert error.rule == "at most 0.05 on average and 0.5 at the 99th percentile in bfloat16"
    assert "algorithm.importance=truncate" in error.way_out
    assert "training.dtype=float32 rollout.dtype=float32" in error.way_out


def test_what_the_message_offers_is_taken_and_goes_on_with_an_alarm() -> None:
    far = torch.full((NUM_TOKENS,), 0.08)
    row, alarm = train([far, far], **BF16, **{"algorithm.importance": "truncate"})
    assert alarm is not None
    assert "differ by 0.08 on average" in alarm
    assert row["sync/logprob_difference_mean"] == pytest.approx(0.08)
    make_job(**{"training.dtype": "float32", "rollout.dtype": "float32"})


def test_many_far_tokens_end_a_run_whose_mean_is_small() -> None:
    apart = torch.zeros(NUM_TOKENS)
    apart[: NUM_TOKENS // 50] = 0.9
    with pytest.raises(RunError, match="at the 99th percentile"):
        train([apart, apart], **BF16)


def test_of_few_tokens_only_the_mean_is_judged() -> None:
    apart = torch.zeros(200)
    apart[:4] = 0.9
    train([apart, apart], **BF16)


def test_pairs_are_not_offered_a_correction_that_they_refuse() -> None:
    job = make_job(**{"algorithm.name": "online_dpo", "algorithm.kl_coef": 0.1, **BF16})
    with pytest.raises(RunError) as caught:
        check_logprob_mismatch(merge_differences([passes(torch.full((NUM_TOKENS,), 0.3))]), job, 1)
    assert "importance" not in caught.value.way_out


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_log_prob_that_is_no_number_ends_the_run_also_where_importance_is_corrected(value: float) -> None:
    apart = torch.zeros(10)
    apart[3] = value
    with pytest.raises(RunError, match="differ by"):
        check_logprob_mismatch(merge_differences([passes(apart)]), make_job(**{"algorithm.importance": "mask"}), 1)


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ({}, Dtype.FLOAT32),
        ({"training.dtype": "bfloat16"}, Dtype.BFLOAT16),
        ({"rollout.dtype": "bfloat16"}, Dtype.BFLOAT16),
        ({"training.dtype": "float16"}, Dtype.FLOAT16),
        ({"training.dtype": "float16", "rollout.dtype": "bfloat16"}, Dtype.BFLOAT16),
    ],
)
def test_the_coarser_of_the_two_types_sets_the_limits(overrides: dict[str, Any], name: str) -> None:
    assert choose_limits(make_job(**overrides)) == (name, LIMITS[name])


def test_an_engine_in_fp8_has_limits_of_its_own() -> None:
    job: ResolvedJob = make_job(**BF16)
    rollout = job.rollout.model_copy(update={"quantization": "fp8"})
    assert choose_limits(job.model_copy(update={"rollout": rollout}))[0] == "fp8"


@pytest.mark.parametrize("rollout", [{"base_path": "/models/awq"}, {"quantization": "mxfp4"}])
def test_an_engine_in_4_bits_has_limits_of_its_own_and_is_not_said_to_have_the_same_weights(
    rollout: dict[str, str],
) -> None:
    job = make_job(**BF16, **{f"rollout.{key}": value for key, value in rollout.items()})
    assert choose_limits(job) == (FOUR_BITS, LIMITS[FOUR_BITS])
    with pytest.raises(RunError, match=r"with the same weights in 4 bits, differ by 0\.5") as caught:
        check_logprob_mismatch(merge_differences([passes(torch.full((NUM_TOKENS,), 0.5))]), job, 1)
    (key,) = rollout
    assert f"rollout.{key}={'null' if key == 'base_path' else 'none'} loads unquantized weights" in str(caught.value)


def test_a_stale_policy_in_fp32_is_far_beyond_the_limits() -> None:
    # A step of the quickstart moves log-probs by 0.01 and more; rounding is 1e-6 to 1e-5 (measured).
    check_logprob_mismatch(merge_differences([passes(honest(1e-5))]), make_job(), 1)
    with pytest.raises(RunError, match="on average"):
        check_logprob_mismatch(merge_differences([passes(honest(0.01))]), make_job(), 1)


def test_limits_grow_with_the_coarseness_and_each_says_where_it_comes_from() -> None:
    rows = list(LIMITS.values())
    assert all(coarse.mean > fine.mean and coarse.p99 > fine.p99 for coarse, fine in pairwise(rows))
    assert all(row.source for row in rows)
