"""Explanations: what binds, why others lost, what changes bring; each held to the search itself."""

import json
from functools import cache
from itertools import pairwise

import pytest

from rlplan.errors import SpecError
from rlplan.planner.answers.changes import Change, ask, check_change
from rlplan.planner.answers.explain import Explanation, explain
from rlplan.planner.answers.families import find_next_gpu, list_more_devices, list_what_ifs, load_table
from rlplan.planner.answers.plan_results import DEFAULTS, list_overrides
from rlplan.planner.margins import SAME_SPEED
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Verdict
from rlplan.planner.search import find_best_plan
from rlplan.spec.files.job_file import job_from, override_job
from rlplan.spec.hardware.catalogue import get_gpu
from rlplan.spec.job import JobSpec
from tests.repository.at_night import mark_nightly

SMALL = "Qwen/Qwen2.5-0.5B"
SHORT = ("workload.num_prompts_per_step=16", "workload.max_response_len=512", "workload.max_prompt_len=256")


def load_asked(*overrides: str, model: str = SMALL, gpus: str = "2xH100", algorithm: str = "grpo") -> JobSpec:
    return job_from({"policy": model, "hardware": gpus, "algorithm": algorithm}, (*SHORT, *overrides))


CASES = {
    "grpo": load_asked(),
    "a node": load_asked(model="Qwen/Qwen2.5-7B", gpus="8xH100"),
    "ppo": load_asked("roles.reward.path=Qwen/Qwen2.5-0.5B", algorithm="ppo"),
    "dpo": load_asked("framework=trl", algorithm="dpo"),
    "too small": load_asked(model="Qwen/Qwen2.5-7B", gpus="1xRTX4090"),
}


@cache
def found(name: str) -> Plan:
    """A case's answer; searched for when a test asks, not while tests are collected."""
    return find_best_plan(CASES[name])


@cache
def explain_example(name: str) -> Explanation:
    return explain(found(name))


FEW = ("grpo", "too small")
cases = pytest.mark.parametrize("name", mark_nightly(CASES, but=FEW))
fitting = pytest.mark.parametrize("name", mark_nightly((name for name in CASES if name != "too small"), but=FEW))


@cases
def test_phases_add_up_to_the_step_and_name_the_resource_that_takes_the_most(name: str) -> None:
    plan, why = found(name), explain_example(name)
    assert sum(phase.seconds for phase in why.phases) == pytest.approx(plan.seconds)
    assert sum(phase.share for phase in why.phases) == pytest.approx(1)
    for phase in why.phases:
        rest = [slack.seconds for slack in phase.slack]
        assert phase.bound_s + sum(rest) == pytest.approx(phase.seconds)
        assert all(slack.seconds * slack.grows == pytest.approx(phase.bound_s) for slack in phase.slack)
        assert all(slack.grows >= 1 for slack in phase.slack)


@cases
def test_why_a_runner_up_lost_adds_up_to_what_it_takes_longer(name: str) -> None:
    for runner_up in explain_example(name).runners_up:
        assert sum(runner_up.phases.values()) == pytest.approx(runner_up.slower_s)
        assert runner_up.why
        assert runner_up.differs


@fitting
def test_no_family_that_fits_is_faster_than_what_was_chosen(name: str) -> None:
    """Outside SAME_SPEED; within it the simpler layout is chosen."""
    plan = found(name)
    assert plan.verdict is Verdict.FITS
    outcomes = explain_example(name).families
    assert outcomes
    for outcome in outcomes:
        if outcome.verdict is Verdict.FITS and outcome.seconds is not None:
            assert outcome.seconds * (1 + SAME_SPEED) >= plan.seconds * (1 - 1e-9)


@pytest.mark.parametrize("name", mark_nightly(CASES, but=("grpo", "dpo")))
def test_a_family_flips_one_choice_and_is_answered_by_a_whole_search(name: str) -> None:
    plan = found(name)
    for outcome in explain_example(name).families:
        key, _, value = outcome.change.overrides[-1].partition("=")
        assert list_overrides(plan.choice, plan.job, plan.asked).get(key, DEFAULTS.get(key)) != value
        if outcome.plan is not None:
            again = find_best_plan(override_job(plan.asked, outcome.change.overrides))
            assert again.seconds == pytest.approx(outcome.seconds)
            assert list_overrides(again.choice, again.job).get(key, DEFAULTS.get(key)) == value


@cases
def test_what_does_not_fit_says_by_how_much_and_what_would_help(name: str) -> None:
    spec = found(name).asked
    for outcome in explain_example(name).families:
        if outcome.verdict is Verdict.DOES_NOT_FIT:
            assert "too much for" in outcome.why
            assert "largest: " in outcome.why
        if outcome.way_out and "'" not in outcome.way_out:
            helped = find_best_plan(override_job(spec, (*outcome.change.overrides, *outcome.way_out.split())))
            assert helped.verdict is Verdict.FITS


@fitting
def test_where_everything_fits_the_room_that_is_left_is_not_negative(name: str) -> None:
    memory = explain_example(name).memory
    assert memory.headroom_bytes >= 0
    assert memory.num_bytes + memory.headroom_bytes <= memory.capacity_bytes
    assert explain_example(name).why_not == ""


def test_where_nothing_fits_it_says_what_is_in_the_way() -> None:
    why = explain_example("too small")
    assert why.verdict is Verdict.DOES_NOT_FIT
    assert "too much for" in why.why_not
    assert any(outcome.fits for outcome in why.what_ifs), "a larger GPU or adapters would fit"


@cases
def test_an_explanation_is_json(name: str) -> None:
    data = json.loads(json.dumps(explain_example(name).as_json()))
    assert data["schema_version"] == 1
    assert data["seconds"] == found(name).seconds
    assert {outcome["change"] for outcome in data["families"]} == {
        outcome.change.typed for outcome in explain_example(name).families
    }


# ---------------------------------------------------------------------------------------------------------- what if


def test_the_usual_what_ifs_are_asked() -> None:
    words = {change.words: change.typed for change in list_what_ifs(found("a node"))}
    assert words["one more host"] == "hardware.num_devices=16"
    assert words["half the GPUs"] == "hardware.num_devices=4"
    assert words["the next GPU"] == "hardware.profile=h200-sxm"
    assert "rollout.quantization=fp8" in words.values()
    assert "placement.max_staleness=1" in words.values()
    assert [change.typed for change in list_what_ifs(found("ppo"))][-1] == "roles.reward.path=null"
    assert all("rollout." not in change.typed for change in list_what_ifs(found("dpo")))


def test_nodes_stay_nodes_so_that_their_hosts_are_the_same() -> None:
    plan = find_best_plan(load_asked(model="Qwen/Qwen2.5-7B", gpus="1xaws-p5"))
    typed = [change.typed for change in list_what_ifs(plan)]
    assert typed[:3] == ["hardware.num_devices=16", "hardware.num_devices=4", "hardware.profile=h200-sxm"]
    assert [change.typed for change in list_more_devices(plan)] == [
        f"hardware.num_devices={8 * count}" for count in (2, 4, 8, 16)
    ]


def test_what_is_asked_is_answered_beside_the_rest() -> None:
    plan = found("grpo")
    change = Change(("training.zero_stage=3", "workload.micro_batch_size_per_gpu=1"))
    why = explain(plan, [change], more_devices=True)
    expected = find_best_plan(override_job(plan.asked, change.overrides))
    assert why.asked[0].seconds == expected.seconds
    assert [outcome.num_devices for outcome in why.asked[1:]] == [4, 8, 16, 32]


@pytest.mark.parametrize(
    "override", ["training.zero=3", "hardware=0xH100", "rollout.tp=3", "training.zero_stage=4", "x"]
)
def test_a_wrong_what_if_is_refused(override: str) -> None:
    with pytest.raises(SpecError):
        check_change(found("grpo").asked, Change((override,)))


def test_a_what_if_that_changes_nothing_is_refused() -> None:
    with pytest.raises(SpecError, match="changes nothing"):
        check_change(found("grpo").asked, Change(("workload.num_steps=200",)))


def test_a_change_that_cannot_be_built_says_which_rule_refuses_it() -> None:
    outcome = ask(found("grpo").asked, Change(("rollout.tp=3",)))
    assert (outcome.verdict, outcome.seconds, outcome.fits) == (None, None, False)
    assert "tp 3" in outcome.why


@pytest.mark.parametrize("ladder", load_table()["ladders"], ids="-".join)
def test_each_rung_of_a_ladder_is_larger_or_faster_and_never_slower(ladder: tuple[str, ...]) -> None:
    gpus = [get_gpu(name, where="ladder") for name in ladder]

    def flops(gpu) -> int:  # type: ignore[no-untyped-def]
        return max(gpu.dense_flops_per_s[key].value for key in gpu.dense_flops_per_s if key in ("float16", "bfloat16"))

    for lower, upper in pairwise(gpus):
        assert flops(upper) >= flops(lower) * 0.99
        assert upper.memory.value >= lower.memory.value * 0.98
        assert (upper.memory.value, flops(upper)) != (lower.memory.value, flops(lower))
    assert find_next_gpu(ladder[0]) is not None
