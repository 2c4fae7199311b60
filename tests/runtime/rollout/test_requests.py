"""Requests to the engine are the same for the same job, whoever asks and in whatever order."""

import json
from pathlib import Path

from rlplan.runtime.data.prompt_sets import PromptSets
from rlplan.runtime.data.text_tokens import read_end_tokens
from rlplan.runtime.rollout.experience import Prompt
from rlplan.runtime.rollout.requests import RequestMaker
from tests.factories import make_job

PROMPTS = PromptSets(
    tuple(Prompt(f"train-{i}", f"p{i}", "a", (i,)) for i in range(10)),
    tuple(Prompt(f"held-{i}", f"h{i}", "a", (100 + i,)) for i in range(3)),
)
FORCED = {
    "controls.forces_lengths": True,
    "workload.response_lengths": {"kind": "lognormal", "median": 5, "sigma": 1.0},
}


def make_maker(**overrides: object) -> RequestMaker:
    return RequestMaker(make_job(**overrides), PROMPTS)


def test_each_epoch_has_every_prompt_once() -> None:
    maker = make_maker()
    for epoch in range(3):
        ids = {maker.prompt(number).id for number in range(epoch * 10, epoch * 10 + 10)}
        assert len(ids) == 10


def test_requests_of_different_prompts_differ_in_name_and_in_every_seed() -> None:
    requests = [make_maker().rollout_request(number) for number in range(12)]
    assert len({request.id for request in requests}) == 12
    seeds = [request.seed + index for request in requests for index in range(request.num_samples)]
    assert len(set(seeds)) == len(seeds)


def test_a_request_is_the_same_in_whatever_order_requests_are_asked_for() -> None:
    assert make_maker(**FORCED).rollout_request(7) == make_maker(**FORCED).rollout_request(7)
    assert make_maker(seed=1, **FORCED).rollout_request(7) != make_maker(**FORCED).rollout_request(7)


def test_lengths_are_forced_only_where_the_job_says_so_and_never_beyond_the_limit() -> None:
    assert make_maker().rollout_request(0).lengths == ()
    lengths = [length for number in range(50) for length in make_maker(**FORCED).rollout_request(number).lengths]
    assert len(lengths) == 200
    assert min(lengths) >= 1
    assert max(lengths) == 12, "the longest allowed is cut, not refused"
    assert 3 <= sorted(lengths)[100] <= 7


def test_evaluation_is_greedy_and_never_forced() -> None:
    requests = make_maker(**FORCED).evaluation_requests()
    assert [request.prompt for request in requests] == [(100,), (101,), (102,)]
    assert all((r.temperature, r.num_samples, r.lengths) == (0.0, 1, ()) for r in requests)


def test_an_evaluation_that_samples_draws_each_response_from_a_seed_of_its_own() -> None:
    requests = make_maker(
        **{"workload.num_evaluation_samples": 4, "workload.evaluation_temperature": 0.7}
    ).evaluation_requests()
    assert all((r.temperature, r.num_samples) == (0.7, 4) for r in requests)
    seeds = {request.seed + index for request in requests for index in range(4)}
    assert len(seeds) == 12


def test_end_tokens_come_from_both_configurations(tmp_path: Path) -> None:
    assert read_end_tokens(tmp_path) == frozenset()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert read_end_tokens(tmp_path) == {2, 7}


def test_a_judged_answer_stands_beside_one_to_another_prompt() -> None:
    prompts = PromptSets(
        tuple(Prompt(f"train-{i}", f"p{i // 2}", "", (i,), answers=((i, 9),), is_good=i % 2 == 0) for i in range(4)), ()
    )
    keys = {"algorithm.name": "kto", "algorithm.kl_coef": 0.1, "workload.num_samples_per_prompt": 2}
    maker = RequestMaker(make_job(**keys, **{"workload.mini_batch_size": 8}), prompts)
    for number in range(4):
        judged, other = maker.answer_group(number).rollouts
        assert judged.completion.tokens == judged.prompt.answers[0]
        assert (judged.reward, other.reward) == (1.0 if judged.prompt.is_good else -1.0, 0.0)
        assert other.prompt == judged.prompt
        assert other.completion.tokens[0] // 2 != judged.completion.tokens[0] // 2


def test_an_answer_to_imitate_stands_alone() -> None:
    prompts = PromptSets(tuple(Prompt(f"train-{i}", f"p{i}", "", (i,), answers=((i, 9),)) for i in range(4)), ())
    keys = {"algorithm.name": "sft", "workload.num_samples_per_prompt": 1, "workload.mini_batch_size": 4}
    (only,) = RequestMaker(make_job(**keys), prompts).answer_group(0).rollouts
    assert (only.completion.tokens, only.reward) == (only.prompt.answers[0], 1.0)
