"""Engines with a base in 4 bits are planned where they can be run, and refused by name where not."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlplan.emit.ray import WHOLE_ACTIVATIONS, ray_placement
from rlplan.emit.vllm import engine_arguments
from rlplan.errors import NoFeasiblePlanError, RlplanError, SpecError
from rlplan.planner import rules
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Verdict
from rlplan.planner.resolve import read_choice
from rlplan.planner.search import find_best_plan
from rlplan.spec.files.job_file import job_from
from rlplan.spec.models.catalogue import load_catalogue
from rlplan.vocabulary import MemoryKind, Placement
from tests.factories import gpu_job, make_job, make_plan
from tests.memory.model.packed_base import packed_base
from tests.memory.serving.test_shared_base import find_peaks
from tests.planner.test_rules import build_job
from tests.runtime.live.four_bits import METHODS

ASKED: dict[str, Any] = {
    "training.lora": {"rank": 4},
    "placement.placement": "hybrid",
    "placement.sync_content": "adapter",
    "rollout.num_engines": 1,
    "rollout.dtype": "bfloat16",
}
ON_GPUS: dict[str, Any] = {"training": {"lora": {"rank": 16}}, "placement": {"sync_content": "adapter"}}
MXFP4 = {"rollout": {"quantization": "mxfp4"}}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(packed_base(tmp_path_factory.mktemp("bases") / "awq"))


def reasons(base: str, **overrides: Any) -> str:
    """Why a small job cannot."""
    job = make_job(**(ASKED | {"rollout.base_path": base} | overrides))
    choice = read_choice(job, Placement(job.placement.placement), int(job.training.zero_stage))
    return "; ".join((*rules.find_job_refusals(job), *rules.find_choice_refusals(job, choice)))


@pytest.mark.parametrize("method", METHODS)
def test_nothing_speaks_against_adapters_over_a_base_of_the_policy(tmp_path: Path, method: str) -> None:
    assert reasons(str(packed_base(tmp_path / "base", method))) == ""


def test_the_trainer_s_own_base_may_be_in_4_bits_too(base: str) -> None:
    assert reasons(base, **{"training.lora": {"rank": 4, "base_dtype": "nf4"}}) == ""


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no adapters": (
        {"training.lora": None, "placement.sync_content": "full"},
        "training.lora={rank: 16} placement.sync_content=adapter",
    ),
    "whole weights": ({"placement.sync_content": "full"}, "overwrite the 4-bit base (placement.sync_content=adapter)"),
    "fp32": ({"rollout.dtype": "float32"}, "(rollout.dtype=bfloat16)"),
    "colocated": ({"placement.placement": "colocated"}, "(placement.placement=hybrid)"),
    "several ranks": ({"rollout.tp": 2}, "(rollout.tp=1)"),
    "drawn weights": ({"policy.init": "random"}, "(policy.init=checkpoint)"),
    "two formats": ({"rollout.quantization": "fp8"}, "its weights are already quantized"),
    "one base": ({"rollout.shares_base": True}, "(rollout.shares_base=false)"),
}


@pytest.mark.parametrize(("overrides", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_have_one_is_refused_by_name(base: str, overrides: dict[str, Any], words: str) -> None:
    refusals = reasons(base, **overrides)
    assert "rollout.base_path: " in refusals
    assert words in refusals


def test_what_a_refusal_offers_is_taken(base: str) -> None:
    offered = {"training.lora": {"rank": 16}, "placement.sync_content": "adapter"}
    assert reasons(base, **offered, **{"placement.placement": "hybrid", "rollout.dtype": "bfloat16"}) == ""


def test_a_folder_of_another_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    other = str(packed_base(tmp_path / "other", vocab_size=128))
    with pytest.raises(RlplanError, match="vocab_size is 128 there and 64 in the policy"):
        raise rules.build_refusal(reasons(other))


def test_an_engine_on_a_cpu_keeps_activations_in_16_bits(base: str) -> None:
    plan = make_plan(**ASKED, **{"rollout.base_path": base})
    engine = next(worker for worker in ray_placement(plan).workers if worker.worker == "rollout_engine")
    assert engine.environment.items() >= WHOLE_ACTIVATIONS.items()
    plain = next(worker for worker in ray_placement(make_plan(**ASKED)).workers if worker.worker == "rollout_engine")
    assert not plain.environment.keys() & WHOLE_ACTIVATIONS.keys()
    assert "quantization" not in engine_arguments(plan.job), "the checkpoint says it"


def test_the_ledger_of_a_cpu_host_holds_packed_weights(base: str) -> None:
    plan = make_plan(**ASKED, **{"rollout.base_path": base})
    weights = find_peaks(plan, "rollout_engine")[MemoryKind.WEIGHTS]
    table, norms = 64 * 128 * 2, (4 * (2 * 128 + 2 * 32) + 128) * 2
    linear = 4 * (128 * (128 + 128) + 128 * 128 + 3 * 128 * 384)
    assert weights == table + norms + linear // 2 + 2 * linear // 32 + linear // 32 // 2


# On GPUs


def qwen_in_awq(folder: Path) -> str:
    """Qwen2.5-1.5B's config as its AWQ checkpoints have it."""
    config = load_catalogue()["Qwen/Qwen2.5-1.5B"].config
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}), encoding="utf-8")
    return str(folder)


def plan_engines(rollout: dict[str, Any], hardware: str = "2xH100") -> Plan:
    parts: dict[str, Any] = {"policy": "Qwen/Qwen2.5-1.5B", "hardware": hardware, **ON_GPUS}
    work = {"num_prompts_per_step": 32, "num_samples_per_prompt": 4, "max_response_len": 1024}
    placed = {**ON_GPUS["placement"], "placement": "hybrid"}
    asks = {**parts, "placement": placed, "workload": work, "rollout": {**rollout, "kv_cache_memory": "8GiB"}}
    return find_best_plan(job_from(asks), with_others=False)


def test_on_gpus_weights_and_the_time_to_read_them_are_those_of_4_bits(tmp_path: Path) -> None:
    whole, packed = plan_engines({}), plan_engines({"base_path": qwen_in_awq(tmp_path / "awq")})
    assert (packed.verdict, packed.choice.sync_mode) == (Verdict.FITS, "adapter")
    linear = 28 * (1536 * (1536 + 2 * 256) + 1536 * 1536 + 3 * 1536 * 8960)
    saved = linear * 2 - (linear // 2 + linear // 128 * 2 + linear // 128 // 2)
    rows = [find_peaks(plan, "rollout_engine")[MemoryKind.WEIGHTS] for plan in (whole, packed)]
    assert rows[0] - rows[1] == saved
    assert (packed.seconds or 0) < (whole.seconds or 0)


def test_on_gpus_it_can_be_quantised_to_mxfp4_while_loading_for_adapters_alone() -> None:
    plan = plan_engines({"quantization": "mxfp4"})
    assert (plan.verdict, plan.choice.sync_mode, plan.choice.engine.quantization) == (Verdict.FITS, "adapter", "mxfp4")
    arguments = engine_arguments(plan.job)
    assert arguments["quantization"] == "mxfp4"
    assert arguments["kernel_config"] == {"linear_backend_per_quant": {"mxfp4": "marlin"}}
    with pytest.raises(NoFeasiblePlanError, match=r"without training\.lora") as caught:
        find_best_plan(build_job(MXFP4))
    assert caught.value.way_out == "training.lora={rank: 16} placement.sync_content=adapter"


def test_ranks_that_would_cut_a_group_are_refused(tmp_path: Path) -> None:
    rollout = {"base_path": qwen_in_awq(tmp_path / "awq"), "num_engines": 1}
    with pytest.raises(NoFeasiblePlanError, match=r"rollout\.tp 4 would split groups of 128 columns of 8960"):
        plan_engines({**rollout, "tp": 4}, "4xH100")  # 8,960 are 70 groups
    assert plan_engines({**rollout, "tp": 2}).verdict is Verdict.FITS


def test_a_mixture_of_experts_is_refused() -> None:
    job = gpu_job({"policy": "Qwen/Qwen3-30B-A3B", "hardware": "8xH100", **ON_GPUS, **MXFP4})
    assert any(
        "the policy has experts, which are untested in 4 bits" in refusal for refusal in rules.find_job_refusals(job)
    )


def test_other_frameworks_refuse_it(tmp_path: Path) -> None:
    base = {"base_path": qwen_in_awq(tmp_path / "awq")}
    with pytest.raises(SpecError, match=r"rollout\.base_path with verl"):
        find_best_plan(
            job_from(
                {"policy": "Qwen/Qwen2.5-1.5B", "hardware": "8xH100", "training": {"backend": "fsdp2"}, "rollout": base}
            )
        )
