"""A plan in another stack's own keys: what is read back from its files is the plan's job."""

from pathlib import Path

import pytest

from rlplan.errors import EmitError, SpecError
from rlplan.foreign.check import Asked, imported_job
from rlplan.foreign.export.folders import TARGETS, write_export
from rlplan.foreign.source import read_source
from rlplan.planner.plan import Plan
from rlplan.planner.search import best_plan
from rlplan.spec.files.job_file import job_from

COLOCATED = ("placement.placement=colocated", "placement.offload=host", "placement.offload_roles=all")
ASKED = {
    "verl": ("target=megatron", "rollout.sleep_level=2"),
    "openrlhf": ("rollout.sleep_level=2", "rollout.max_num_seqs=256", "rollout.max_num_batched_tokens=16384"),
    "slime": ("target=megatron", "rollout.sleep_level=2", "rollout.max_num_seqs=256"),
    "nemo_rl": (
        "target=fsdp2",
        "rollout.sleep_level=1",
        "rollout.max_num_seqs=1024",
        "rollout.max_num_batched_tokens=16384",
    ),
}
"""What each stack can say of a job."""


def plan_of(*overrides: str) -> Plan:
    answers = {"policy": "Qwen/Qwen2.5-7B-Instruct", "hardware": "8xH100", "algorithm": "grpo"}
    return best_plan(job_from(answers, overrides))


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_read_back_is_the_plan_s_job(target: str, tmp_path: Path) -> None:
    plan = plan_of(*COLOCATED, *ASKED[target])
    started, readme = write_export(plan, target, tmp_path)
    assert readme.read_text().startswith("# job for ")
    imported, job = imported_job(read_source(started, None), Asked("H100"))
    assert not any(one.why.startswith("not known") for one in imported.left)
    for part, keys in {
        "workload": ("num_prompts_per_step", "num_samples_per_prompt", "mini_batch_size", "max_response_len"),
        "training": ("zero_stage", "tp", "pp", "gradient_checkpointing", "offloads_optimizer"),
        "rollout": ("tp", "max_num_seqs"),
        "algorithm": ("name", "kl_coef", "learning_rate"),
    }.items():
        for key in keys:
            there, here = getattr(getattr(job, part), key), getattr(getattr(plan.job, part), key)
            assert there in (here, "auto"), f"{part}.{key}"
    assert job.hardware.num_devices == 8
    cache = plan.job.rollout.kv_cache_memory
    assert cache <= int(job.rollout.kv_cache_memory) <= 1.02 * cache


@pytest.mark.parametrize(
    ("target", "overrides", "what"),
    [
        ("verl", (), "verl cannot say target = rlplan"),
        ("slime", ("target=fsdp2",), "slime cannot say target = fsdp2"),
        ("openrlhf", ("target=megatron",), "OpenRLHF cannot say target = megatron"),
        ("verl", ("target=fsdp2", "placement.placement=disaggregated"), "placement.placement = disaggregated"),
    ],
)
def test_what_a_stack_cannot_say_is_refused_by_its_key(
    target: str, overrides: tuple[str, ...], what: str, tmp_path: Path
) -> None:
    with pytest.raises(EmitError) as caught:
        write_export(plan_of(*overrides), target, tmp_path)
    assert what in caught.value.what
    assert caught.value.way_out
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_target_is_refused_with_what_was_meant(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="Did you mean 'verl'"):
        write_export(plan_of("target=fsdp2"), "verll", tmp_path)
