"""`rollout.shares_base` is planned where it can be done, and refused by name where it cannot."""

from typing import Any

import pytest

from rlplan.dataflow.choice import Choice
from rlplan.errors import NoFeasiblePlanError, SpecError
from rlplan.planner import rules
from rlplan.planner.plan_parts import Verdict
from rlplan.planner.resolve import read_choice
from rlplan.planner.search import find_best_plan
from rlplan.spec.files.job_file import job_from
from rlplan.vocabulary import ActionKind, Placement
from tests.factories import make_job, make_plan
from tests.memory.serving.test_shared_base import SHARED
from tests.planner.test_rules import build_job

SHARES = SHARED | {"rollout.shares_base": True}
ON_GPUS = {
    "training": {"lora": {"rank": 16}},
    "rollout": {"shares_base": True},
    "placement": {"placement": "hybrid", "sync_content": "adapter"},
}


def reasons(**overrides: Any) -> str:
    """Why a small job cannot."""
    job = make_job(**(SHARES | overrides))
    choice: Choice = read_choice(job, Placement(job.placement.placement), int(job.training.zero_stage))
    return "; ".join(rules.find_choice_refusals(job, choice))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no adapters": ({"training.lora": None, "placement.sync_content": "full"}, "without training.lora"),
    "whole weights": ({"placement.sync_content": "full"}, "would overwrite the base (placement.sync_content=adapter)"),
    "another type": ({"rollout.dtype": "bfloat16"}, "the trainer's base is in float32, the engine's in bfloat16"),
    "4 bits": ({"training.lora": {"rank": 4, "base_dtype": "nf4"}}, "base_dtype nf4"),
    "colocated": ({"placement.placement": "colocated"}, "drops its weights between phases"),
    "disaggregated": ({"placement.placement": "disaggregated"}, "on separate devices"),
    "shares": ({"training.zero_stage": 3}, "ZeRO-3 shards the base"),
    "parts of layers": ({"rollout.tp": 2}, "tensor-parallel ranks hold only parts"),
}


def test_nothing_speaks_against_adapters_over_a_base_on_one_device() -> None:
    assert reasons() == ""


@pytest.mark.parametrize(("overrides", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_share_a_base_is_refused_by_name(overrides: dict[str, Any], words: str) -> None:
    refusals = reasons(**overrides)
    assert "rollout.shares_base: " in refusals
    assert words in refusals


def test_a_policy_with_experts_is_refused_on_gpus_too() -> None:
    parts = {"policy": "Qwen/Qwen3-30B-A3B", "hardware": "8xH200", **ON_GPUS}
    with pytest.raises(NoFeasiblePlanError, match=r"rollout\.shares_base: the policy has experts"):
        find_best_plan(build_job(parts))


def test_on_gpus_it_is_planned_hybrid_with_an_engine_on_each_trainer_s_gpu() -> None:
    plan = find_best_plan(build_job(ON_GPUS | {"hardware": "2xH100"}))
    assert (plan.verdict, plan.choice.arrangement.placement) == (Verdict.FITS, Placement.HYBRID)
    assert (plan.choice.engine.ranks, plan.choice.engines, plan.choice.sync_mode) == (1, 2, "adapter")
    assert plan.choice.trainer.zero_stage < 3
    assert not plan.choice.engine.sleep_level


def test_other_frameworks_refuse_it() -> None:
    with pytest.raises(SpecError, match=r"rollout\.shares_base with verl"):
        find_best_plan(
            job_from(
                {"policy": "Qwen/Qwen2.5-1.5B", "hardware": "8xH100", **ON_GPUS},
                ["framework=verl", "training.backend=fsdp2"],
            )
        )


def test_an_engine_without_weights_starts_after_the_trainer_that_holds_them() -> None:
    for shares_base, after in ((False, ()), (True, ("start_trainer",))):
        plan = make_plan(**SHARED, **{"rollout.shares_base": shares_base})
        (start,) = [action for action in plan.schedule.start if action.kind is ActionKind.START_ENGINE]
        assert start.after == after
