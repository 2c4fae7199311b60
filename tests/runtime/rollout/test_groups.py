"""Zero-variance groups are replaced, up to a number of times, and a step always has as many groups."""

import json
import math

import pytest

from rlplan.runtime.data.prompt_sets import load_prompts
from rlplan.runtime.learning.mini_batch import assign_samples, make_train_sample, token_weights
from rlplan.runtime.rewards.total import compute_overlong_penalty, finish_rewards
from rlplan.runtime.rollout.experience import Completion, Prompt, Rollout, WeightSpan
from rlplan.runtime.rollout.groups import Group, GroupMaker, gather_groups
from rlplan.runtime.rollout.requests import RequestMaker
from rlplan.spec.files.job_file import load_job
from rlplan.spec.resolved import ResolvedJob, resolve_on_cpu
from rlplan.vocabulary import Role
from tests.factories import EXAMPLES, make_job

PROMPT = Prompt("1", "Sort: 21345", "12345", (5, 8, 7))


def rollout(reward: float, length: int = 2, group: int = 0, advantage: float = 0.0, reason: str = "stop") -> Rollout:
    completion = Completion((7,) * length, (-0.5,) * length, reason, (WeightSpan(0, 0, length),))
    built = Rollout(PROMPT, group, completion, reward=reward, advantage=advantage)
    built.advantages = (advantage,) * length
    return built


def group(number: int, *rewards: float) -> Group:
    return Group(number, [rollout(reward) for reward in rewards], [])


class Source:
    """Groups in the order of their numbers: those named have variance, others have none."""

    def __init__(self, *with_variance: int) -> None:
        self.with_variance, self.next, self.asked = with_variance, 0, []

    def more(self, count: int) -> list[Group]:
        numbers = range(self.next, self.next + count)
        self.next += count
        self.asked.append(count)
        return [group(number, 1.0, float(number not in self.with_variance)) for number in numbers]


def gather_numbers(source: Source, count: int, max_refills: int) -> tuple[list[int], int]:
    replaced: list[int] = []
    groups = gather_groups(count, source.more, max_refills, replaced.append)
    return [each.number for each in groups], sum(replaced)


def test_without_refills_every_group_is_taken_as_it_is() -> None:
    assert gather_numbers(Source(), 3, 0) == ([0, 1, 2], 0)


def test_zero_variance_groups_are_replaced_until_there_are_enough() -> None:
    source = Source(1, 4, 5)
    assert gather_numbers(source, 3, 5) == ([1, 4, 5], 3)
    assert source.asked == [3, 2, 1]


def test_after_the_last_refill_such_groups_make_up_the_number() -> None:
    source = Source(4)
    assert gather_numbers(source, 3, 1) == ([0, 1, 4], 3)
    assert source.asked == [3, 3]


def test_a_failed_rollout_gives_a_group_no_variance() -> None:
    mixed = group(0, 1.0, 0.0)
    mixed.rollouts[1].has_failed = True
    assert group(0, 1.0, 0.0).has_variance
    assert not mixed.has_variance


def test_truncated_answers_are_masked_where_the_job_says_so_and_greedy_ones_kept_apart() -> None:
    job = make_job(**{"algorithm.name": "remax", "algorithm.masks_truncated": True})
    completions = [Completion((8, 9), (-1.0, -1.0), reason) for reason in ("stop", "length", "stop", "stop", "stop")]
    built = GroupMaker(job, lambda number: PROMPT, frozenset({1})).make((0, completions))
    assert [len(built.rollouts), len(built.baselines)] == [4, 1]
    assert [each.num_learned for each in built.rollouts] == [2, 0, 2, 2]


def test_a_penalty_grows_in_the_buffer_before_the_limit() -> None:
    """Limit 12, buffer 4: nothing up to 8, then a quarter a token."""
    job = make_job(**{"algorithm.overlong_buffer": 4, "algorithm.overlong_penalty": 2.0})
    penalties = [compute_overlong_penalty(rollout(0.0, length), job) for length in (0, 8, 9, 10, 12)]
    assert penalties == [0.0, 0.0, -0.5, -1.0, -2.0]
    assert compute_overlong_penalty(rollout(0.0, 0), job) == 0.0


def test_a_greedy_answer_s_reward_is_its_group_s_baseline() -> None:
    job, step = make_job(**{"algorithm.name": "remax"}), [rollout(1.0), rollout(0.0, group=1)]
    finish_rewards(step, [rollout(0.25), rollout(0.75, group=1)], job, 1)
    assert [each.baseline for each in step] == [0.25, 0.75]


def test_a_reward_model_s_score_that_is_no_number_is_a_failure_and_its_group_s_alone() -> None:
    job, step = make_job(**{"roles.reward.path": ".", "roles.reward.weight": 2.0}), [rollout(1.0), rollout(0.0)]
    for each, score in zip(step, (math.nan, 0.5), strict=True):
        each.scores[Role.REWARD] = (score,)
    assert finish_rewards(step, [], job, 1) == [step[0]]
    assert (step[0].has_failed, step[0].failure, step[0].reward) == (True, "reward_model: it returned nan", 0.0)
    assert (step[1].has_failed, step[1].reward) == (False, 1.0)


def test_rollouts_whose_baseline_has_no_reward_fail_with_it() -> None:
    job, step, baseline = make_job(**{"algorithm.name": "remax"}), [rollout(1.0)], rollout(0.0)
    baseline.has_failed = True
    assert finish_rewards(step, [baseline], job, 1) == step
    assert step[0].failure == "its baseline has no reward"


def weights(job: ResolvedJob, *rollouts: Rollout) -> list[float]:
    return token_weights([make_train_sample(each) for each in rollouts], job)


def test_each_way_of_weighing_adds_up_as_it_says() -> None:
    step = [rollout(0, 1), rollout(0, 3), rollout(0, 0)]
    assert weights(make_job(), *step) == [1 / 3, 1 / 9, 1 / 3]
    assert weights(make_job(**{"algorithm.token_weights": "token"}), *step) == [0.25] * 3
    assert weights(make_job(**{"algorithm.token_weights": "constant"}), *step) == [1 / 36] * 3


def test_a_pair_shares_a_pass_and_what_is_in_no_pair_is_left_out() -> None:
    job = make_job(**{"algorithm.name": "online_dpo", "workload.micro_batch_size_per_gpu": 2})
    signs = [(0, 1.0), (0, 0.0), (0, -1.0), (1, 0.0), (1, 0.0), (2, -1.0), (2, 1.0)]
    step = [rollout(0, length=1 + index, group=g, advantage=sign) for index, (g, sign) in enumerate(signs)]
    shares = assign_samples([make_train_sample(each) for each in step], job, 2)
    passes = [samples for share in shares for samples, _ in share if samples]
    assert sorted(tuple(sorted(s.group for s in samples)) for samples in passes) == [(0, 0), (2, 2)]
    whole = [
        s.weigh_response(w) for share in shares for samples, each in share for s, w in zip(samples, each, strict=True)
    ]
    assert whole == [0.25] * 4


def test_a_mini_batch_is_dealt_out_over_ranks_that_do_not_divide_it() -> None:
    step = [rollout(0, length=1 + index % 5) for index in range(16)]
    for num_ranks in (3, 5, 7, 16):
        shares = assign_samples([make_train_sample(each) for each in step], make_job(), num_ranks)
        assert len({len(share) for share in shares}) == 1, "as many passes on each rank"
        assert all(any(samples for samples, _ in share) for share in shares), "and some rollout"
        whole = [
            s.weigh_response(w)
            for packs in shares
            for samples, each in packs
            for s, w in zip(samples, each, strict=True)
        ]
        assert whole == pytest.approx([1 / 16] * 16)


def test_given_answers_become_a_group_of_a_chosen_and_a_rejected_one() -> None:
    job = resolve_on_cpu(load_job(EXAMPLES / "algorithms" / "dpo.yaml"))
    prompts = load_prompts(job)
    first = (EXAMPLES / "data" / "sort_digits" / "pairs.jsonl").read_text().splitlines()[0]
    assert prompts.train[0].text == json.loads(first)["prompt"]
    requests = RequestMaker(job, prompts)
    group, number = requests.answer_group(7), requests.prompt(7)
    assert [each.reward for each in group.rollouts] == [1.0, 0.0]
    assert [each.completion.tokens for each in group.rollouts] == list(number.answers)
    assert all(each.completion.tokens[-1] == 1 for each in group.rollouts), "an end of sequence follows"
