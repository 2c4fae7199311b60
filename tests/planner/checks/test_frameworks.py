"""Keys that a framework does not say or run are refused by its plan, and what the refusal asks for is planned."""

import re

import pytest

from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Verdict
from rlplan.planner.search import find_best_plan
from rlplan.spec.files.job_file import job_from, override_job
from tests.foreign.export.spread import FRAMEWORKS
from tests.repository.at_night import rotate_places

JOB = {"policy": "Qwen/Qwen2.5-1.5B", "hardware": "8xH100", "algorithm": "grpo"}
WITH_ADAPTERS = "training.lora={rank: 16}"
LACKED = (
    *("training.recomputed=every_other_layer", "training.reduce_dtype=float32", "training.moment_dtype=bfloat16"),
    *("training.predicts_ahead=1", "training.kernels.matmuls=fp8", "training.kernels.is_compiled=true"),
    *("training.kernels.expert_dispatcher=deepep", "rollout.engine_version=0.23.0", "rollout.shares_process=true"),
    *("training.lora.dtype=float32", "training.lora.unquantized_dtype=float32"),
    *("scoring.teacher.micro_batch_size_per_gpu=4", "scoring.policy_log_probs=never"),
)
"""A value that no framework supports for a job that states it."""
OVERRIDE = re.compile(r"(?<![\w.])[a-z_]+(?:\.[a-z_0-9]+)+=[^\s)]+")


def make_plan(framework: str, *overrides: str) -> Plan:
    needs = [WITH_ADAPTERS] if any("lora." in override for override in overrides) else []
    return find_best_plan(job_from({**JOB, "framework": framework}, [*needs, *overrides]), with_others=False)


@pytest.mark.parametrize(
    ("framework", "override"),
    [each for each in rotate_places(FRAMEWORKS, LACKED) if each.values[0] != "slime" or "lora." not in each.values[1]],
)
def test_a_key_that_a_framework_lacks_is_refused_and_the_way_out_is_planned(framework: str, override: str) -> None:
    """slime has no adapters at all, which is refused before the search."""
    plan = make_plan(framework, override)
    key = override.partition("=")[0]
    assert plan.verdict is Verdict.REFUSED
    (reason,) = plan.refusals
    assert reason.startswith(f"{key} ")
    overrides = OVERRIDE.findall(reason)
    assert [each.partition("=")[0] for each in overrides] == [key]
    job = override_job(plan.asked, overrides)
    assert find_best_plan(job, with_others=False).verdict is Verdict.FITS


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_engine_s_share_of_a_gpu_is_planned_for_every_framework(framework: str) -> None:
    plan = make_plan(framework, "rollout.gpu_memory_utilization=0.6", "hardware.power_limit=400")
    assert plan.verdict is Verdict.FITS
    assert plan.asked.hardware.power_limit == 400


@pytest.mark.parametrize("framework", ["openrlhf", "nemo_rl"])
def test_a_reference_scores_in_passes_of_the_policy_s_size_where_one_key_is_of_both(framework: str) -> None:
    key = "scoring.{}.micro_batch_size_per_gpu=4"
    training = "workload.micro_batch_size_per_gpu=2"
    with_policy = make_plan(framework, training, "algorithm.kl_coef=0.01", key.format("policy"))
    assert with_policy.job.scoring.reference.micro_batch_size_per_gpu == 4
    alone = make_plan(framework, training, "algorithm.kl_coef=0.01", key.format("reference"))
    assert alone.verdict is Verdict.REFUSED
    assert "scoring.reference.micro_batch_size_per_gpu=auto" in alone.refusals[0]


def test_verl_generates_one_step_ahead_on_gpus_of_its_own_and_draws_groups_again_for_dapo() -> None:
    ahead = make_plan("verl", "placement.max_staleness=1", "placement.partial_rollouts=false")
    assert ahead.verdict is Verdict.FITS
    assert ahead.job.placement.placement == "disaggregated"
    for override in ("placement.placement=disaggregated", "placement.max_staleness=2"):
        assert make_plan("verl", override).verdict is Verdict.REFUSED
    dapo = make_plan("verl", "algorithm.name=dapo")
    assert "(algorithm.max_refills=100)" in dapo.refusals[0]
    assert make_plan("verl", "algorithm.name=dapo", "algorithm.max_refills=100").verdict is Verdict.FITS
