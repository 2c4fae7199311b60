"""A foreign word in a job of ours is refused with our word for it, whichever stack it is of."""

from typing import Any

import pytest

from rlplan.errors import MisspeltError
from rlplan.foreign.meant import add_hint
from rlplan.spec.files.job_file import job_from
from rlplan.spec.files.yaml import apply_overrides


def way_out(override: str) -> str:
    answers: dict[str, Any] = {"policy": "Qwen/Qwen2.5-7B", "hardware": "8xH100"}
    with pytest.raises(MisspeltError) as caught:
        job_from(answers, [override])
    return add_hint(caught.value).way_out


@pytest.mark.parametrize(
    ("override", "ours"),
    [
        ("actor_rollout_ref.rollout.n=8", "workload.num_samples_per_prompt"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=8", "workload.mini_batch_size"),
        ("rollout.tensor_parallel_size=2", "rollout.tp"),
        ("training.tensor_parallel_size=2", "training.tp"),
        ("rollout.enforce_eager=true", "rollout.has_cuda_graphs"),
        ("per_device_train_batch_size=4", "workload.micro_batch_size_per_gpu"),
        ("num_generations=4", "workload.num_samples_per_prompt"),
        ("max_completion_length=4", "workload.max_response_len"),
        ("zero_optimization.stage=3", "training.zero_stage"),
        ("optimizer.params.lr=1e-6", "algorithm.learning_rate"),
        ("training.lora_r=16", "training.lora.rank"),
        ("policy.generation.vllm_cfg.precision=fp8", "rollout.dtype"),
        ("fsdp=true", "training.backend=fsdp2"),
        ("training.dtype=bf16", "training.dtype=bfloat16"),
    ],
)
def test_the_way_out_says_our_word(override: str, ours: str) -> None:
    assert way_out(override).startswith(f"write {ours} for ")


@pytest.mark.parametrize(
    ("override", "ours"),
    [
        ("num_prompts_per_step=3", "workload.num_prompts_per_step=3"),
        ("micro_batch_size_per_gpu=8", "workload.micro_batch_size_per_gpu"),
        ("rollout.temperature=1", "workload.temperature"),
        ("training.zero=3", "training.zero_stage"),
        ("tp=2", "training.tp=2 or rollout.tp=2"),
        ("traning.zero_stage=2", "training.zero_stage=2 for traning.zero_stage"),
    ],
)
def test_a_key_of_ours_in_another_part_comes_before_other_stacks(override: str, ours: str) -> None:
    assert way_out(override).startswith(f"write {ours}")
    assert " of " not in way_out(override), "no other stack is named"


def test_a_whole_configuration_is_sent_to_import() -> None:
    assert "a configuration of verl is read by `rlplan import FILE" in way_out("actor_rollout_ref.foo.bar=1")


@pytest.mark.parametrize(
    ("override", "new"),
    [
        ("workload.num_prompt_per_step=8", "workload.num_prompts_per_step=8"),
        ("modle=Qwen/Qwen3-4B", "policy=Qwen/Qwen3-4B for modle"),
        ("polcy.path=Qwen/Qwen3-4B", "policy.path=Qwen/Qwen3-4B for polcy.path"),
        ("algorithm=gpro", "algorithm.name=grpo"),
        ("placement.placement=colocatd", "placement.placement=colocated"),
    ],
)
def test_a_misspelt_word_is_answered_with_the_new_one_which_parses(override: str, new: str) -> None:
    assert way_out(override) == f"write {new}"
    assert apply_overrides({}, [new])


def test_an_unknown_word_keeps_the_usual_way_out() -> None:
    assert way_out("foo.bar=1") == "docs/job.md shows every key and a whole job"
