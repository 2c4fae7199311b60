"""Remedies of `rlplan check`: in the stack's own keys, for the GPU and the host, and true when they are typed."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from rlplan.errors import NoFeasiblePlanError, SpecError
from rlplan.foreign.check import Asked, Checked, check, check_fits, format_options
from rlplan.foreign.source import read_source
from rlplan.planner.plan_parts import Verdict
from rlplan.spec.files.job_schema import job_keys
from tests.foreign.scripts import verl_script, write_script, write_yaml

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LARGE = {
    "actor_rollout_ref.model.path": "Qwen/Qwen2.5-72B-Instruct",
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1,
    f"{ROLLOUT}.tensor_model_parallel_size": 8,
    f"{ROLLOUT}.gpu_memory_utilization": 0.5,
    "trainer.nnodes": 2,
}
"""72B on 16 H100 with verl: its optimizer runs out of GPU memory unless it stays on the host."""
OFFLOADED = {
    "actor_rollout_ref.model.path": "Qwen/Qwen2.5-32B-Instruct",
    "data.max_prompt_length": 2432,
    "data.max_response_length": 4096,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1,
    f"{ACTOR}.use_kl_loss": True,
    f"{ROLLOUT}.tensor_model_parallel_size": 4,
    "actor_rollout_ref.ref.fsdp_config.param_offload": True,
}
"""32B on 8 H100, everything offloaded: the host ran out of memory (verl, issue 1964)."""


def verl(folder: Path, settings: dict[str, Any]) -> Path:
    return verl_script(folder, settings)


def trl(folder: Path, settings: dict[str, Any]) -> Path:
    return write_script(folder, "trl sft", {f"--{key}": value for key, value in settings.items()})


def openrlhf(folder: Path, settings: dict[str, Any]) -> Path:
    usual = {"actor.num_gpus_per_node": 8, "vllm.num_engines": 8, "train.colocate_all": True, "data.max_len": 4096}
    words = {f"--{key}": value for key, value in {**usual, **settings}.items()}
    return write_script(folder, "python3 -m openrlhf.cli.train_ppo_ray", words)


def vllm(folder: Path, settings: dict[str, Any]) -> Path:
    return write_script(folder, "vllm serve Qwen/Qwen2.5-72B-Instruct", {f"--{k}": v for k, v in settings.items()})


def write_deepspeed(folder: Path, settings: dict[str, Any]) -> Path:
    return write_yaml(folder, settings).rename(folder / "ds.json")


LORA = {"model_name_or_path": "Qwen/Qwen3-4B", "use_peft": True, "lora_r": 16, "dtype": "bfloat16"}
BORDERLINE = {
    **LORA,
    "max_length": 9500,
    "per_device_train_batch_size": 1,
    "gradient_checkpointing": False,
}
CASES = {
    "verl, large": (verl, LARGE, "16xH100", ()),
    "verl, large, fsdp2": (verl, {**LARGE, f"{ACTOR}.strategy": "fsdp2"}, "16xH100", ()),
    "verl, a small host": (verl, OFFLOADED, "8xH100", ("hardware.host_memory=500GiB",)),
    "verl, long passes": (verl, {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 64}, "8xH100", ()),
    "verl, a greedy engine": (
        verl,
        {f"{ROLLOUT}.gpu_memory_utilization": 0.95, f"{ACTOR}.fsdp_config.optimizer_offload": False},
        "8xH100",
        (),
    ),
    "trl, in expectation only": (trl, BORDERLINE, "1xA100-80GB", ()),
    "openrlhf": (openrlhf, {"actor.model_name_or_path": "Qwen/Qwen2.5-7B", "ds.zero_stage": 2}, "8xA100-80GB", ()),
    "vllm": (vllm, {"tensor-parallel-size": 2}, "8xH100", ()),
    "deepspeed": (
        write_deepspeed,
        {"train_micro_batch_size_per_gpu": 8, "zero_optimization.stage": 1, "bf16.enabled": True},
        "8xA100-40GB",
        (),
    ),
}
MODELS = {"deepspeed": "Qwen/Qwen2.5-14B"}


def check_case(name: str, folder: Path, outside: tuple[str, ...] = ()) -> Checked:
    write, settings, hardware, overrides = CASES[name]
    return check(read_source(write(folder, settings), None, outside), Asked(hardware, MODELS.get(name), overrides))


@pytest.mark.parametrize("name", CASES)
def test_each_remedy_gives_its_verdict_when_it_is_typed(name: str, tmp_path: Path) -> None:
    answer = check_case(name, tmp_path)
    assert not answer.fits
    assert answer.changes
    for change in answer.changes:
        words = shlex.split(format_options(change.values))
        assert words[::2] == ["--set"] * len(change.values)
        after = check_case(name, tmp_path, tuple(words[1::2]))
        assert after.fits, words
        result = after.served or after.plan
        assert result is not None
        assert result.verdict is change.plan.verdict is Verdict.FITS
    with pytest.raises(NoFeasiblePlanError) as caught:
        check_fits(answer)
    assert format_options(answer.changes[0].values) in caught.value.way_out
    assert not find_our_keys(caught.value.way_out)


def find_our_keys(way_out: str) -> set[str]:
    """Keys of a job in a way out, but for those of the hardware, which are typed behind `rlplan check` itself."""
    words = set(re.findall(r"(?<![\w.])[a-z_]+(?:\.[a-z_]+)+", way_out))
    return {key for key in job_keys() if key in words and not key.startswith("hardware.")}


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_offload_policy_is_offered_whatever_the_strategy_is(strategy: str, tmp_path: Path) -> None:
    """A remedy is left out where all of its keys have their values, not where its first one has."""
    script = verl_script(tmp_path, {**LARGE, f"{ACTOR}.strategy": strategy})
    changes = [change.values for change in check(read_source(script, None), Asked("16xH100")).changes]
    assert changes[0] == {f"{ACTOR}.strategy": "fsdp2", f"{ACTOR}.fsdp_config.offload_policy": True}


def test_a_small_host_is_named_beside_a_small_gpu_and_remedies_mend_both(tmp_path: Path) -> None:
    answer = check_case("verl, a small host", tmp_path)
    assert answer.plan is not None
    assert [short.of for short in answer.plan.shortages] == ["a GPU", "a host's memory"]
    for change in answer.changes:
        assert not getattr(change.plan, "shortages", ())
    with pytest.raises(NoFeasiblePlanError, match=r"of a GPU, .* and .* of a host's memory, 500 GiB available"):
        check_fits(answer)


def test_an_import_that_fits_in_expectation_only_does_not_fit_unless_that_is_accepted(tmp_path: Path) -> None:
    answer = check_case("trl, in expectation only", tmp_path)
    assert answer.plan is not None
    assert answer.plan.verdict is Verdict.IN_EXPECTATION
    assert (answer.as_json()["verdict"], answer.as_json()["fits"]) == (Verdict.IN_EXPECTATION.value, False)
    assert {"gradient_checkpointing": True} in [change.values for change in answer.changes]
    accepting = Asked("1xA100-80GB", None, ("limits.accepts_oom_risk=true",))
    accepted = check(read_source(trl(tmp_path, BORDERLINE), None), accepting)
    assert accepted.fits
    check_fits(accepted)


@pytest.mark.parametrize(
    "settings",
    [
        {f"{ROLLOUT}.tensor_model_parallel_size": 3},
        {f"{ROLLOUT}.tensor_model_parallel_size": 16},
        {f"{ROLLOUT}.n": 0},
        {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 0},
        {f"{ACTOR}.ulysses_sequence_parallel_size": 3},
        {"data.max_response_length": 0},
        {f"{ROLLOUT}.gpu_memory_utilization": 0.05},
        {"model_engine": "megatron", f"{ACTOR}.megatron.pipeline_model_parallel_size": 3},
        {"model_engine": "megatron", f"{ACTOR}.megatron.tensor_model_parallel_size": 16},
        {"algorithm.kl_ctrl.kl_coef": -1, "algorithm.use_kl_in_reward": True},
    ],
    ids=lambda settings: " ".join(settings),
)
def test_a_refusal_has_no_way_out_in_keys_that_the_stack_does_not_have(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises((SpecError, NoFeasiblePlanError)) as caught:
        check_fits(check(read_source(verl_script(tmp_path, settings), None), Asked("8xH100")))
    assert caught.value.way_out
    assert not find_our_keys(caught.value.way_out)
