"""Plans on every bundled GPU, of any number, for any backend: an answer or a message, never a traceback."""

from random import Random

import pytest

from rlplan.errors import RlplanError
from rlplan.planner.search import find_best_plan
from rlplan.spec.files.job_file import job_from
from rlplan.spec.hardware.catalogue import load_profiles
from rlplan.spec.hardware.profile import GpuProfile, NodeProfile

GPUS = sorted(name for name, profile in load_profiles().items() if isinstance(profile, GpuProfile | NodeProfile))
COUNTS = (1, 2, 3, 4, 6, 8, 16, 24, 64)
TRAINERS = ("deepspeed", "fsdp2", "megatron")
MODELS = (
    *("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B", "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-70B"),
    *("Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V2-Lite", "google/gemma-3-4b-it", "openai/gpt-oss-20b"),
)
ALGORITHMS = ("grpo", "ppo", "dapo", "rloo", "gspo", "remax", "reinforce++", "online_dpo", "dpo", "sft", "kto")
CHANGES = (
    *((), ("roles.reward.path=Qwen/Qwen2.5-0.5B",), ("roles.teacher.path=Qwen/Qwen2.5-7B",)),
    *(("training.lora={rank: 16}",), ("training.lora={rank: 16, base_dtype: nf4}",), ("placement.max_staleness=1",)),
    *(("placement.num_scoring_devices=1",), ("placement.placement=disaggregated",), ("placement.offload=host",)),
)
FROZEN_APART = [
    ("4xL4", "Qwen/Qwen2.5-7B", "fsdp2"),
    ("8xA10", "Qwen/Qwen2.5-7B", "fsdp2"),
    ("8xrtx-3090", "Qwen/Qwen3-30B-A3B", "megatron"),
]
"""Jobs whose frozen roles were timed in the trainer's layout on a group that is too small for it."""


def answers(gpus: str, model: str, backend: str, *overrides: str, algorithm: str = "grpo") -> str:
    """The verdict, or what was refused."""
    asked = {"policy": model, "algorithm": algorithm, "hardware": gpus, "training": {"backend": backend}}
    try:
        return find_best_plan(job_from(asked, overrides)).verdict.value
    except RlplanError as error:
        return error.what


@pytest.mark.parametrize(("gpus", "model", "backend"), FROZEN_APART)
def test_frozen_roles_on_gpus_of_their_own_are_cut_as_the_policy_is(gpus: str, model: str, backend: str) -> None:
    assert answers(gpus, model, backend) in ("fits", "fits in expectation only", "does not fit")


def test_a_frozen_role_s_group_that_the_policy_s_cut_does_not_divide_is_refused_by_name() -> None:
    cut = ("training.tp=4", "placement.num_scoring_devices=2", "placement.placement=disaggregated")
    with pytest.raises(RlplanError) as refused:
        find_best_plan(job_from({"policy": MODELS[1], "hardware": "8xH100", "training": {"backend": "fsdp2"}}, cut))
    assert "num_scoring_devices 2 does not divide by the 4" in str(refused.value)


def test_a_few_jobs_on_a_few_of_all_gpus_are_answered() -> None:
    random = Random(1)
    for gpu in random.sample(GPUS, 8):
        gpus = f"{random.choice(COUNTS[:6])}x{gpu}"
        assert answers(gpus, random.choice(MODELS[:3]), random.choice(TRAINERS), *random.choice(CHANGES))


@pytest.mark.nightly
@pytest.mark.parametrize("count", COUNTS)
def test_jobs_on_every_gpu_are_answered(count: int) -> None:
    random = Random(count)
    for gpu in GPUS:
        for backend in TRAINERS:
            asked = f"{count}x{gpu}", random.choice(MODELS), backend, *random.choice(CHANGES)
            assert answers(*asked, algorithm=random.choice(ALGORITHMS))
