"""Engines with data-parallel attention as a choice: where they are offered, what they bring, and what a plan says."""

import pytest

from rlplan.errors import NoFeasiblePlanError, SpecError
from rlplan.planner.answers.families import list_families
from rlplan.planner.answers.plan_results import list_overrides
from rlplan.planner.answers.simulated_plan import simulate_plan
from rlplan.planner.gpu.axes import list_engine_axes
from rlplan.planner.gpu.candidates import GpuSpace
from rlplan.planner.memo import Memo
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Verdict
from rlplan.planner.search import find_best_plan
from rlplan.planner.setting import read_setting
from rlplan.timing.cost import Resource
from tests.factories import gpu_job

MIXTURE = "Qwen/Qwen3-30B-A3B"
LATENT = "deepseek-ai/DeepSeek-V2-Lite"


def make_plan(policy: str, gpus: str, *overrides: str, backend: str = "megatron") -> Plan:
    job = gpu_job(
        {"policy": policy, "hardware": gpus, "algorithm": "grpo", "training": {"backend": backend}}, list(overrides)
    )
    return find_best_plan(job, with_others=False)


@pytest.mark.parametrize(
    ("policy", "backend", "overrides"),
    [
        ("Qwen/Qwen2.5-7B", "megatron", ()),
        ("Qwen/Qwen2.5-7B", "deepspeed", ()),
        (MIXTURE, "deepspeed", ()),
        (MIXTURE, "megatron", ("rollout.attention_dp=1",)),
        (MIXTURE, "fsdp2", ("rollout.has_expert_parallel=false",)),
    ],
)
def test_who_cannot_have_it_is_offered_the_same_engines_as_without(
    policy: str, backend: str, overrides: tuple[str, ...]
) -> None:
    top = {"policy": policy, "hardware": "8xH100", "algorithm": "grpo", "training": {"backend": backend}}
    job = gpu_job(top, list(overrides))
    sizes = list_engine_axes(job, read_setting(job).policy)
    assert {axes.attention_dp for axes in sizes} == {1}
    wholes = {False} if policy != MIXTURE or "rollout.has_expert_parallel=false" in overrides else {False, True}
    assert {axes.has_experts for axes in sizes} == wholes


def test_engines_of_up_to_64_gpus_share_experts_in_layers_of_one_host() -> None:
    job = gpu_job(
        {"policy": MIXTURE, "hardware": "128xH100", "algorithm": "grpo", "training": {"backend": "megatron"}}, []
    )
    shared = [axes for axes in list_engine_axes(job, read_setting(job).policy) if axes.attention_dp > 1]
    assert {(axes.tp, axes.tp * axes.attention_dp) for axes in shared} == {
        (tp, ranks) for tp in (1, 2, 4, 8) for ranks in (2, 4, 8, 16, 32, 64) if ranks > tp
    }
    assert all(axes.has_experts for axes in shared)


def test_an_engine_takes_its_gpus_and_the_number_of_engines_follows() -> None:
    plan = make_plan(MIXTURE, "16xH100", "rollout.tp=2", "rollout.attention_dp=4", "placement.placement=colocated")
    assert (plan.choice.engine.ranks, plan.choice.engines, plan.choice.engine.expert_ranks) == (8, 2, 8)
    layout = plan.schedule.find_layout("rollout_engine")
    assert (len(layout.devices), layout.dp, layout.num_ranks_per_pass) == (16, 2, 8)
    assert (plan.job.rollout.num_engines, plan.job.rollout.attention_dp, plan.job.rollout.num_processes) == (2, 4, 16)
    assert plan.kv is not None
    tokens = plan.kv.num_blocks * 16  # of a rank
    assert plan.kv.num_tokens == pytest.approx(4 * tokens, rel=0.01)


def test_the_overrides_of_a_plan_lead_to_it() -> None:
    first = make_plan(LATENT, "8xH100", "workload.max_response_len=16384", "workload.num_prompts_per_step=256")
    assert first.choice.engine.attention_dp > 1
    words = list_overrides(first.choice, first.job, first.asked)
    assert words["rollout.attention_dp"] == str(first.choice.engine.attention_dp)
    again = make_plan(
        LATENT,
        "8xH100",
        "workload.max_response_len=16384",
        "workload.num_prompts_per_step=256",
        *(f"{key}={value}" for key, value in words.items()),
    )
    assert (again.choice, again.seconds) == (first.choice, pytest.approx(first.seconds))


@pytest.mark.parametrize(
    ("policy", "gpus", "overrides"),
    [
        (MIXTURE, "8xH100", ("workload.max_response_len=2048",)),
        (MIXTURE, "16xH100", ("workload.max_response_len=16384", "workload.num_prompts_per_step=256")),
        (LATENT, "8xH100", ("workload.num_prompts_per_step=8",)),
        (LATENT, "16xL40S", ("workload.max_response_len=8192", "placement.max_staleness=2")),
        ("deepseek-ai/DeepSeek-V3", "256xH100", ("training.pp=16", "training.cp=1", "placement.placement=colocated")),
    ],
)
def test_no_plan_is_slower_for_having_the_choice(policy: str, gpus: str, overrides: tuple[str, ...]) -> None:
    """The simpler of two within one percent is taken either way."""
    with_it, without = (
        make_plan(policy, gpus, *overrides),
        make_plan(policy, gpus, "rollout.attention_dp=1", *overrides),
    )
    assert with_it.verdict.rank <= without.verdict.rank
    assert with_it.seconds <= 1.01 * without.seconds


def test_more_rollouts_of_latent_attention_run_at_once() -> None:
    """DeepSeek-V3 in 8 bits on 16 H200: of the same GPUs one cache is kept, and not one a rank."""
    asked = ("rollout.quantization=fp8", "placement.placement=disaggregated", "placement.num_generation_devices=16")
    longest = "workload.max_response_len=16384", "workload.num_prompts_per_step=256", "training.pp=16"
    cuts = (("rollout.tp=16", "rollout.attention_dp=1"), ("rollout.tp=1", "rollout.attention_dp=16"))
    plain, shared = (make_plan("deepseek-ai/DeepSeek-V3", "144xH200", *asked, *longest, *cut) for cut in cuts)
    assert plain.kv is not None
    assert shared.kv is not None
    assert shared.kv.num_tokens > 8 * plain.kv.num_tokens
    rollout = [
        next(action.cost for action in plan.timing.step.actions if action.action_id.startswith("generate"))  # type: ignore[union-attr]
        for plan in (plain, shared)
    ]
    assert rollout[1].seconds < 0.7 * rollout[0].seconds
    assert Resource.NETWORK in rollout[1].parts, "16 GPUs lie on two hosts"


@pytest.mark.parametrize("lengths", ["{kind: constant}", "{kind: lognormal, median: 1500, sigma: 1.0}"])
def test_the_closed_form_is_held_to_the_simulator(lengths: str) -> None:
    plan = make_plan(
        MIXTURE, "16xH100", f"workload.response_lengths={lengths}", "workload.max_response_len=8192",
        "rollout.attention_dp=8", "workload.num_prompts_per_step=64", "placement.placement=colocated",
    )  # fmt: skip
    steps = simulate_plan(plan, num_steps=4).step_s
    assert sum(steps) / len(steps) == pytest.approx(plan.seconds, rel=0.1)


def test_a_number_that_the_gpus_do_not_divide_by_says_so() -> None:
    with pytest.raises(NoFeasiblePlanError) as caught:
        make_plan(MIXTURE, "8xH100", "rollout.tp=4", "rollout.attention_dp=4")
    assert "rollout.tp x rollout.attention_dp 16 does not divide the 8 GPUs that generate" in str(caught.value)


def test_target_rlplan_refuses_it_with_the_verdict() -> None:
    plan = make_plan(MIXTURE, "8xH200", "rollout.attention_dp=4", "rollout.tp=1", backend="deepspeed")
    assert plan.verdict is Verdict.REFUSED
    assert any("rollout.attention_dp 4" in reason for reason in plan.refusals)


def test_explain_asks_for_more_of_it_and_for_less() -> None:
    plan = make_plan(LATENT, "8xH100", "workload.max_response_len=16384", "workload.num_prompts_per_step=256")
    asked = {change.typed for change in list_families(plan) if "attention_dp" in change.typed}
    dp, most = plan.choice.engine.attention_dp, 8 // plan.choice.engine.tp
    assert asked == {f"rollout.attention_dp={size}" for size in (dp // 2, 2 * dp) if 1 <= size <= most}
    dense = make_plan("Qwen/Qwen2.5-7B", "8xH100")
    assert not [change for change in list_families(dense) if "attention_dp" in change.typed]


def test_space_counts_the_engines_that_it_lists() -> None:
    job = gpu_job(
        {"policy": LATENT, "hardware": "8xH100", "algorithm": "grpo", "training": {"backend": "megatron"}},
        ["training.pp=1"],
    )
    space = GpuSpace(job, read_setting(job), Memo())
    assert space.num_candidates == sum(1 for _ in space)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("rollout.attention_dp=4", "rollout.has_expert_parallel=false"), "has_expert_parallel=false"),
        (("rollout.attention_dp=4", "rollout.max_num_seqs=66"), "rollout.max_num_seqs is 66"),
        (("rollout.attention_dp=3", "rollout.tp=1", "rollout.max_num_batched_tokens=8190"), "does not divide over ep"),
    ],
)
def test_what_does_not_go_with_it_is_refused(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        make_plan(MIXTURE, "24xH100", *overrides)
    assert words in caught.value.what
    assert caught.value.way_out


def test_an_engine_without_it_is_taken_where_it_is_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = LATENT, "8xH200", "workload.max_response_len=16384", "workload.num_prompts_per_step=256"
    assert make_plan(*asked).choice.engine.attention_dp > 1
    monkeypatch.setattr("rlplan.planner.gpu.search.SAME_SPEED", 100.0)
    monkeypatch.setattr("rlplan.planner.gpu.search.ENOUGH_ROOM", 0.0)  # else all that is as fast is looked at
    assert make_plan(*asked).choice.engine.attention_dp == 1
