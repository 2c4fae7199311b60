"""Explanations: what binds, why others lost, what changes bring; each held to the search itself."""

import json
from functools import cache
from itertools import pairwise

import pytest

from rlplan.errors import SpecError
from rlplan.planner.answers.changes import Change, ask, check_change
from rlplan.planner.answers.explain import Explanation, explain
from rlplan.planner.answers.families import LADDERS, list_families, list_more_devices, list_what_ifs, next_gpu
from rlplan.planner.answers.plan_results import DEFAULTS, choice_words, differences
from rlplan.planner.answers.sensitivity import FACTORS, constants
from rlplan.planner.machine import search_of
from rlplan.planner.margins import SAME_SPEED
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Verdict
from rlplan.planner.search import best_plan
from rlplan.spec.files.job_file import changed, job_from
from rlplan.spec.hardware.catalogue import get_gpu
from rlplan.spec.hardware.profile import GpuProfile
from rlplan.spec.job import JobSpec
from rlplan.vocabulary import Provenance
from tests.docs.documentation import keys_of
from tests.repository.at_night import at_night

SMALL = "Qwen/Qwen2.5-0.5B"
SHORT = ("workload.num_prompts_per_step=16", "workload.max_response_len=512", "workload.max_prompt_len=256")


def asked(*overrides: str, model: str = SMALL, gpus: str = "2xH100", algorithm: str = "grpo") -> JobSpec:
    return job_from({"policy": model, "hardware": gpus, "algorithm": algorithm}, (*SHORT, *overrides))


CASES = {
    "grpo": asked(),
    "a node": asked(model="Qwen/Qwen2.5-7B", gpus="8xH100"),
    "ppo": asked("roles.reward.path=Qwen/Qwen2.5-0.5B", algorithm="ppo"),
    "dpo": asked("training.backend=fsdp2", algorithm="dpo"),
    "too small": asked(model="Qwen/Qwen2.5-7B", gpus="1xRTX4090"),
}


@cache
def found(name: str) -> Plan:
    """A case's answer; searched for when a test asks, not while tests are collected."""
    return best_plan(CASES[name])


@cache
def explained(name: str) -> Explanation:
    return explain(found(name))


FEW = ("grpo", "too small")
cases = pytest.mark.parametrize("name", at_night(CASES, but=FEW))
fitting = pytest.mark.parametrize("name", at_night((name for name in CASES if name != "too small"), but=FEW))


@cases
def test_phases_add_up_to_the_step_and_name_the_resource_that_takes_the_most(name: str) -> None:
    plan, why = found(name), explained(name)
    assert sum(phase.seconds for phase in why.phases) == pytest.approx(plan.seconds)
    assert sum(phase.share for phase in why.phases) == pytest.approx(1)
    for phase in why.phases:
        rest = [one.seconds for one in phase.slack]
        assert phase.bound_s + sum(rest) == pytest.approx(phase.seconds)
        assert all(one.seconds * one.grows == pytest.approx(phase.bound_s) for one in phase.slack)
        assert all(one.grows >= 1 for one in phase.slack)


@cases
def test_why_a_runner_up_lost_adds_up_to_what_it_takes_longer(name: str) -> None:
    for one in explained(name).runners_up:
        assert sum(one.phases.values()) == pytest.approx(one.slower_s)
        assert one.why
        assert one.differs


@fitting
def test_no_family_that_fits_is_faster_than_what_was_chosen(name: str) -> None:
    """Beyond SAME_SPEED, within which the simpler layout is taken."""
    plan = found(name)
    assert plan.verdict is Verdict.FITS
    outcomes = explained(name).families
    assert outcomes
    for one in outcomes:
        if one.verdict is Verdict.FITS and one.seconds is not None:
            assert one.seconds * (1 + SAME_SPEED) >= plan.seconds * (1 - 1e-9)


@pytest.mark.parametrize("name", at_night(CASES, but=("grpo", "dpo")))
def test_a_family_flips_one_choice_and_is_answered_by_a_whole_search(name: str) -> None:
    plan = found(name)
    for one in explained(name).families:
        key, _, value = one.change.overrides[-1].partition("=")
        assert choice_words(plan.choice, plan.job, plan.asked).get(key, DEFAULTS.get(key)) != value
        if one.plan is not None:
            again = best_plan(changed(plan.asked, one.change.overrides))
            assert again.seconds == pytest.approx(one.seconds)
            assert choice_words(again.choice, again.job).get(key, DEFAULTS.get(key)) == value


@cases
def test_what_does_not_fit_says_by_how_much_and_what_would_help(name: str) -> None:
    spec = found(name).asked
    for one in explained(name).families:
        if one.verdict is Verdict.DOES_NOT_FIT:
            assert "too much for" in one.why
            assert "largest: " in one.why
        if one.way_out and "'" not in one.way_out:
            helped = best_plan(changed(spec, (*one.change.overrides, *one.way_out.split())))
            assert helped.verdict is Verdict.FITS


@fitting
def test_where_everything_fits_the_room_that_is_left_is_not_negative(name: str) -> None:
    memory = explained(name).memory
    assert memory.headroom_bytes >= 0
    assert memory.num_bytes + memory.headroom_bytes <= memory.capacity_bytes
    assert explained(name).why_not == ""


def test_where_nothing_fits_it_says_what_is_in_the_way() -> None:
    why = explained("too small")
    assert why.verdict is Verdict.DOES_NOT_FIT
    assert "too much for" in why.why_not
    assert any(one.fits for one in why.what_ifs), "a larger GPU or adapters would fit"


@cases
def test_an_explanation_is_json(name: str) -> None:
    data = json.loads(json.dumps(explained(name).as_json()))
    assert data["schema_version"] == 1
    assert data["seconds"] == found(name).seconds
    assert {one["change"] for one in data["families"]} == {one.change.typed for one in explained(name).families}


# ---------------------------------------------------------------------------------------------------------- what if


def test_the_usual_what_ifs_are_asked() -> None:
    words = {change.words: change.typed for change in list_what_ifs(found("a node"))}
    assert words["one host more"] == "hardware.num_devices=16"
    assert words["half of the GPUs"] == "hardware.num_devices=4"
    assert words["the next GPU"] == "hardware.profile=h200-sxm"
    assert "rollout.quantization=fp8" in words.values()
    assert "placement.max_staleness=1" in words.values()
    assert [change.typed for change in list_what_ifs(found("ppo"))][-1] == "roles.reward.path=null"
    assert all("rollout." not in change.typed for change in list_what_ifs(found("dpo")))


def test_nodes_stay_nodes_so_that_their_hosts_are_the_same() -> None:
    plan = best_plan(asked(model="Qwen/Qwen2.5-7B", gpus="1xaws-p5"))
    typed = [change.typed for change in list_what_ifs(plan)]
    assert typed[:3] == ["hardware.num_devices=16", "hardware.num_devices=4", "hardware.profile=h200-sxm"]
    assert [change.typed for change in list_more_devices(plan)] == [
        f"hardware.num_devices={8 * count}" for count in (2, 4, 8, 16)
    ]


def test_what_is_asked_is_answered_beside_the_rest() -> None:
    plan = found("grpo")
    change = Change(("training.zero_stage=3", "workload.micro_batch_size_per_gpu=1"))
    why = explain(plan, [change], more_devices=True)
    expected = best_plan(changed(plan.asked, change.overrides))
    assert why.asked[0].seconds == expected.seconds
    assert [one.num_devices for one in why.asked[1:]] == [4, 8, 16, 32]


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


@pytest.mark.parametrize("ladder", LADDERS, ids="-".join)
def test_each_rung_of_a_ladder_is_larger_or_faster_and_never_slower(ladder: tuple[str, ...]) -> None:
    gpus = [get_gpu(name, where="ladder") for name in ladder]

    def flops(gpu) -> int:  # type: ignore[no-untyped-def]
        return max(gpu.dense_flops_per_s[key].value for key in gpu.dense_flops_per_s if key in ("float16", "bfloat16"))

    for lower, upper in pairwise(gpus):
        assert flops(upper) >= flops(lower) * 0.99
        assert upper.memory.value >= lower.memory.value * 0.98
        assert (upper.memory.value, flops(upper)) != (lower.memory.value, flops(lower))
    assert next_gpu(ladder[0]) is not None


# ------------------------------------------------------------------------------------------------------ sensitivity


@fitting
def test_a_slower_resource_never_makes_the_step_shorter(name: str) -> None:
    for one in explained(name).sensitivities:
        low, high = one.seconds
        is_duration = one.constant.endswith((".layer", ".collective", "_latency"))
        assert (low <= high + 1e-9) if is_duration else (low >= high - 1e-9), one.constant


@fitting
def test_constants_are_ordered_by_how_much_they_move_the_step(name: str) -> None:
    spans = [one.span for one in explained(name).sensitivities]
    assert spans == sorted(spans, reverse=True)
    assert spans[0] > 0


def test_a_constant_s_step_is_that_of_the_same_layout_on_such_a_gpu() -> None:
    plan, why = found("grpo"), explained("grpo")
    row = next(one for one in why.sensitivities if one.constant == "h100-sxm: efficiencies.matmul")
    search = search_of(plan.asked)
    constant = next(one for one in constants(search.profiles) if one.name == row.constant)
    profile = constant.times(FACTORS[0])
    assert isinstance(profile, GpuProfile)
    assert profile.efficiencies is not None
    assert profile.efficiencies.matmul.value == pytest.approx(0.7 * row.value)
    assert plan.kv is not None
    seconds = search.with_profile(profile).step_s(plan.choice, plan.kv.kv_cache_memory_bytes)
    assert seconds == pytest.approx(row.seconds[0])


def h100() -> GpuProfile:
    return get_gpu("h100-sxm", where="test")


def test_what_was_measured_is_not_uncertain() -> None:
    gpu = h100()
    names = {one.name for one in constants([gpu])}
    assert gpu.efficiencies is not None
    share = gpu.efficiencies.matmul.model_copy(update={"provenance": Provenance.MEASURED})
    efficiencies = gpu.efficiencies.model_copy(update={"matmul": share})
    measured = gpu.model_copy(update={"efficiencies": efficiencies})
    assert {one.name for one in constants([measured])} == names - {"h100-sxm: efficiencies.matmul"}


def test_a_share_of_a_peak_stays_a_share() -> None:
    constant = next(one for one in constants([h100()]) if one.name == "h100-sxm: efficiencies.memory")
    profile = constant.times(1.3 / constant.value)
    assert isinstance(profile, GpuProfile)
    assert profile.efficiencies is not None
    assert profile.efficiencies.memory.value == 1.0


# ------------------------------------------------------------------------------------------------------------ words


@cases
def test_the_words_of_a_choice_are_keys_that_lead_to_it(name: str) -> None:
    plan: Plan = found(name)
    words = choice_words(plan.choice, plan.job, plan.asked)
    assert set(words) <= set(keys_of(JobSpec))
    typed = [f"{key}={value}" for key, value in words.items()]
    again = best_plan(changed(plan.asked, typed))
    assert again.choice == plan.choice
    assert again.timing == plan.timing


def test_differences_name_what_one_has_and_the_other_has_not() -> None:
    job = asked("training.zero_stage=3", "placement.placement=hybrid")
    one = best_plan(job).choice
    other = best_plan(asked("training.zero_stage=2", "placement.placement=disaggregated")).choice
    words = dict(word.split("=") for word in differences(one, other, job).split())
    assert words["training.zero_stage"] == "3"
    assert words["placement.placement"] == "hybrid"
    assert words["placement.num_generation_devices"] == "auto"
    assert differences(one, one, job) == ""


def test_the_explanation_hears_of_every_question_in_order() -> None:
    heard: list[tuple[int, int]] = []
    why: Explanation = explain(found("dpo"), listen=lambda done, total, words: heard.append((done, total)))
    total = len(why.families) + len(why.what_ifs) + len(why.asked)
    assert heard == [(index, total) for index in range(total)]


def test_families_are_choices_that_were_left_open() -> None:
    fixed = best_plan(asked("training.zero_stage=2", "placement.placement=hybrid", "rollout.tp=1"))
    keys = {change.typed.partition("=")[0] for change in list_families(fixed)}
    assert not keys & {"training.zero_stage", "placement.placement", "rollout.tp"}


@pytest.mark.parametrize("placement", ["colocated", "hybrid", "disaggregated"])
def test_frozen_roles_alone_can_be_offloaded_by_what_is_typed(placement: str) -> None:
    plan = best_plan(
        asked(f"placement.placement={placement}", "placement.offload=host", "placement.offload_roles=frozen")
    )
    assert choice_words(plan.choice, plan.job, plan.asked)["placement.offload_roles"] == "frozen"
    assert plan.choice.arrangement.offloaded == "frozen"


def test_where_the_objective_takes_some_of_the_gpus_changes_are_asked_of_these() -> None:
    plan = best_plan(asked("objective=gpus", gpus="8xH100"))
    assert plan.num_devices < 8
    why = explain(plan)
    assert {one.num_devices for one in why.families if one.num_devices} == {plan.num_devices}
    for one in why.families:
        if one.verdict is Verdict.FITS and one.seconds is not None:
            assert one.seconds >= plan.seconds * (1 - 1e-9)
