"""Foreign settings as a job of ours: as given, with upstream's defaults, and an account of every key."""

from pathlib import Path
from typing import Any

import pytest

from rlplan.errors import SpecError
from rlplan.foreign.check import Asked, import_job
from rlplan.foreign.convert import Imported, convert
from rlplan.foreign.documents import flatten_keys
from rlplan.foreign.source import read_source
from rlplan.spec.models.catalogue import find_model
from rlplan.units import MIB
from tests.foreign.scripts import VERL, verl_script


def import_settings(
    folder: Path, settings: dict[str, Any] | None = None, *, hardware: str = "H100", **more: Any
) -> Imported:
    return convert(read_source(verl_script(folder, settings, **more), None), hardware, None)


def job(folder: Path, settings: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return flatten_keys(import_settings(folder, settings, **more).data)


def test_keys_that_are_given_become_ours(tmp_path: Path) -> None:
    result = job(tmp_path)
    assert result["workload.num_prompts_per_step"] == 64
    assert result["workload.num_samples_per_prompt"] == 8
    assert result["policy.path"] == "Qwen/Qwen2.5-7B-Instruct"
    assert (result["hardware.profile"], result["hardware.num_devices"]) == ("h100-sxm", 8)


def test_sizes_that_upstream_counts_in_prompts_are_rollouts_of_ours(tmp_path: Path) -> None:
    assert job(tmp_path)["workload.mini_batch_size"] == 64 * 8


def test_keys_that_are_left_out_have_upstream_s_defaults_and_not_auto(tmp_path: Path) -> None:
    result = job(tmp_path)
    assert result["rollout.tp"] == 2
    assert result["rollout.max_num_seqs"] == 256
    assert result["training.gradient_checkpointing"] is True
    assert result["training.zero_stage"] == 3
    assert result["placement.sync_bucket"] == 2048 * MIB
    assert [key for key, value in result.items() if value == "auto" and key != "training.logits"] == []


def test_schedules_and_epochs_become_ours(tmp_path: Path) -> None:
    optim = "actor_rollout_ref.actor.optim"
    sizes = {f"{optim}.lr_scheduler_type": "cosine", f"{optim}.lr_warmup_steps": 10, f"{optim}.min_lr_ratio": 0.1}
    result = job(tmp_path, {**sizes, "actor_rollout_ref.actor.ppo_epochs": 4})
    assert result["workload.num_epochs_per_step"] == 4
    kinds = ("lr_scheduler_type", "lr_warmup_steps", "lr_warmup_ratio", "min_lr_ratio")
    assert [result[f"algorithm.{key}"] for key in kinds] == ["cosine", 10, 0, 0.1]
    usual = job(tmp_path)
    assert usual["algorithm.lr_scheduler_type"] == "constant"
    assert usual["algorithm.lr_warmup_steps"] == 0


def test_a_batch_over_all_gpus_is_divided_among_them(tmp_path: Path) -> None:
    micro = {
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": None,
        "actor_rollout_ref.actor.ppo_micro_batch_size": 32,
    }
    assert job(tmp_path, micro)["workload.micro_batch_size_per_gpu"] == 4
    micro["actor_rollout_ref.actor.ppo_micro_batch_size"] = 12
    with pytest.raises(SpecError, match="sizes that divide"):
        job(tmp_path, micro)


def test_dynamic_batches_are_tokens_over_the_ranks_that_share_a_sequence(tmp_path: Path) -> None:
    result = job(
        tmp_path,
        {
            "actor_rollout_ref.actor.use_dynamic_bsz": True,
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 4096,
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size": 2,
        },
    )
    assert result["training.max_tokens_per_micro_batch"] == 8192
    assert "workload.micro_batch_size_per_gpu" not in result


@pytest.mark.parametrize(
    ("settings", "coefficient", "place"),
    [
        ({}, 0, None),
        ({"actor_rollout_ref.actor.use_kl_loss": True}, 0.001, "loss"),
        ({"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.01}, 0.01, "reward"),
    ],
)
def test_the_kl_coefficient_is_the_one_that_is_switched_on(
    settings: dict[str, Any], coefficient: float, place: str | None, tmp_path: Path
) -> None:
    result = job(tmp_path, settings)
    assert (result["algorithm.kl_coef"], result.get("algorithm.kl_in")) == (coefficient, place)


def test_another_configuration_brings_its_own_defaults(tmp_path: Path) -> None:
    tp = {"actor_rollout_ref.actor.megatron.tensor_model_parallel_size": 4}
    result = job(tmp_path, tp, preset="ppo_megatron_trainer.yaml")
    assert (result["training.backend"], result["training.tp"], result["training.zero_stage"]) == ("megatron", 4, 1)
    assert result["training.gradient_checkpointing"] is False


def test_a_model_s_path_that_is_not_here_is_known_by_its_name(tmp_path: Path) -> None:
    result = import_settings(tmp_path, {"actor_rollout_ref.model.path": "~/models/Qwen2.5-7B"})
    assert result.data["policy"]["path"] == "Qwen/Qwen2.5-7B"
    assert any("taken for Qwen/Qwen2.5-7B, by its name" in note for note in result.notes)


def test_every_key_without_a_counterpart_is_listed_with_why(tmp_path: Path) -> None:
    settings = {"trainer.project_name": "x", "actor_rollout_ref.rollout.gpu_memory_utilisation": 0.6, "foo.bar": 1}
    left = {entry.key: entry for entry in import_settings(tmp_path, settings).left}
    assert "which do not affect a step's memory or time" in left["trainer.project_name"].why
    assert left["foo.bar"].why.startswith("not known of verl 0.9.1")
    assert set(left) == set(settings)


def test_a_misspelt_key_is_listed_with_what_was_meant(tmp_path: Path) -> None:
    left = import_settings(tmp_path, {"actor_rollout.rollout.gpu_memory_utilisation": 0.6}).left
    assert left[0].why.endswith("Did you mean 'actor_rollout_ref.rollout.gpu_memory_utilization'?")


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"actor_rollout_ref.actor.strategy": "mindspeed"}, "actor_rollout_ref.actor.strategy is 'mindspeed'"),
        ({"data.train_batch_size": "${NPROC}"}, "data.train_batch_size is"),
        ({"actor_rollout_ref.rollout.n": "many"}, "actor_rollout_ref.rollout.n is 'many'"),
        ({"actor_rollout_ref.rollout.gpu_memory_utilization": 60}, "gpu_memory_utilization is 60"),
        ({"actor_rollout_ref.model.path": "~/models/my-own"}, "neither on this machine nor the name"),
    ],
)
def test_a_value_of_no_use_is_one_message_with_four_parts(settings: dict[str, Any], what: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"^\S") as caught:
        import_settings(tmp_path, settings)
    error = caught.value
    assert what in error.what
    assert error.where
    assert error.rule
    assert error.way_out


@pytest.mark.parametrize("value", ["inf", "nan", "1e300"])
@pytest.mark.parametrize("key", ["data.train_batch_size", "actor_rollout_ref.rollout.n", "trainer.nnodes"])
def test_a_number_that_no_size_can_be_is_refused(tmp_path: Path, key: str, value: str) -> None:
    with pytest.raises(SpecError):
        import_job(read_source(verl_script(tmp_path, {key: value}), None), Asked("H100"))


def test_an_algorithm_of_their_own_is_counted_as_the_nearest_with_a_note(tmp_path: Path) -> None:
    result = import_settings(tmp_path, {"algorithm.adv_estimator": "gpg"})
    assert result.data["algorithm"]["name"] == "grpo"
    assert "algorithm.adv_estimator = gpg is counted as grpo" in result.notes


def test_a_number_of_gpus_on_the_command_line_wins_with_a_note(tmp_path: Path) -> None:
    result = import_settings(tmp_path, hardware="16xH100")
    assert result.data["hardware"]["num_devices"] == 16
    assert any("says 8 GPUs" in note for note in result.notes)


def test_a_number_that_only_the_cluster_knows_is_taken_from_the_command_line(tmp_path: Path) -> None:
    settings = {"trainer.nnodes": None}
    script = verl_script(tmp_path, settings, before="")
    script.write_text(script.read_text().replace('"$@"', "trainer.nnodes=$SLURM_NNODES"))
    assert convert(read_source(script, None), "16xH100", None).data["hardware"]["num_devices"] == 16
    with pytest.raises(SpecError, match="--set SLURM_NNODES=VALUE"):
        convert(read_source(script, None), "H100", None)


def test_megatron_is_verl_s_trainer_by_the_engine_s_name_and_by_a_configuration_named_with_a_space(
    tmp_path: Path,
) -> None:
    tp = {"actor_rollout_ref.actor.megatron.tensor_model_parallel_size": 4}
    result = job(tmp_path, {"model_engine": "megatron", **tp})
    assert (result["training.backend"], result["training.tp"]) == ("megatron", 4)
    script = verl_script(tmp_path, tp, preset="ppo_megatron_trainer.yaml")
    script.write_text(script.read_text().replace("--config-name=", "--config-name "))
    assert flatten_keys(convert(read_source(script, None), "H100", None).data)["training.backend"] == "megatron"


def test_a_reference_that_is_loaded_for_a_kl_loss_of_coefficient_0_is_counted_and_said(tmp_path: Path) -> None:
    result = import_settings(
        tmp_path, {"actor_rollout_ref.actor.use_kl_loss": True, "actor_rollout_ref.actor.kl_loss_coef": 0.0}
    )
    assert flatten_keys(result.data)["algorithm.kl_coef"] > 0
    assert any("loads a reference" in note for note in result.notes)


def test_weights_that_are_offloaded_without_the_optimizer_are_said_to_be_counted_as_there(tmp_path: Path) -> None:
    result = import_settings(tmp_path, {"actor_rollout_ref.actor.fsdp_config.optimizer_offload": False})
    assert flatten_keys(result.data)["placement.offload"] == "none"
    assert any("only the weights are offloaded" in note for note in result.notes)


def test_an_optimizer_of_8_bits_in_verl_is_counted_as_one(tmp_path: Path) -> None:
    assert job(tmp_path, {"actor_rollout_ref.actor.optim.optimizer": "AdamW8bit"})["training.optimizer"] == "adamw_8bit"


def test_a_context_that_verl_overrides_is_the_model_s_limit(tmp_path: Path) -> None:
    override = "+actor_rollout_ref.model.override_config."
    assert job(tmp_path, {f"{override}max_position_embeddings": 32768})["policy.max_position_embeddings"] == 32768
    scaled = job(tmp_path, {f"{override}rope_scaling.rope_type": "yarn"})
    assert scaled["policy.max_position_embeddings"] == 512 + 1024
    assert "policy.max_position_embeddings" not in job(tmp_path)


def test_what_megatron_does_otherwise_for_verl_is_said(tmp_path: Path) -> None:
    sizes = {"actor_rollout_ref.actor.megatron.use_megatron_fsdp": True}
    result = import_settings(tmp_path, sizes, preset="ppo_megatron_trainer.yaml")
    assert (result.data["training"]["backend"], result.data["training"]["zero_stage"]) == ("megatron", 1)
    assert any("Megatron's FSDP is predicted as its distributed optimizer" in note for note in result.notes)


@pytest.mark.parametrize(("sizes", "expected"), [({}, True), ({"sequence_parallel": False}, False)])
def test_verl_s_megatron_shares_rows_unless_it_is_told_not_to(
    sizes: dict[str, Any], expected: bool, tmp_path: Path
) -> None:
    cut = {"tensor_model_parallel_size": 2, **sizes}
    settings = {f"actor_rollout_ref.actor.megatron.{key}": value for key, value in cut.items()}
    result = import_settings(tmp_path, settings, preset="ppo_megatron_trainer.yaml")
    assert result.data["training"]["sequence_parallel"] is expected


def test_an_engine_of_verl_that_nothing_here_counts_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"model_engine is 'mindspeed'(?s:.*)one of dp, megatron"):
        import_settings(tmp_path, {"model_engine": "mindspeed"})


@pytest.mark.parametrize("engine", ["veomni", "torchtitan"])
def test_other_engines_of_verl_that_shard_like_fsdp2_are_predicted_so_with_a_note(engine: str, tmp_path: Path) -> None:
    keys = {f"actor_rollout_ref.actor.{engine}.{part}_offload": True for part in ("param", "optimizer")}
    alone = {key: None for key in VERL if "fsdp_config" in key}
    result = import_settings(tmp_path, {"model_engine": engine, **alone, **keys})
    data = flatten_keys(result.data)
    assert (data["training.backend"], data["placement.offload"]) == ("fsdp2", "host")
    assert any("predicted as FSDP2" in note for note in result.notes)


def test_a_kv_cache_in_fp8_is_verl_s_engine_s_own_key(tmp_path: Path) -> None:
    key = "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype"
    assert job(tmp_path, {f"+{key}": "fp8"})["rollout.kv_dtype"] == "fp8"


def test_a_critic_that_is_not_given_is_verl_s_default_and_said_to_be(tmp_path: Path) -> None:
    """`~/models/deepseek-llm-7b-chat`, which verl loads whatever the policy is; 6.91e9 parameters by its config."""
    result = import_settings(tmp_path, {"algorithm.adv_estimator": "gae"})
    assert result.data["roles"]["value"]["path"] == "deepseek-ai/deepseek-llm-7b-chat"
    assert any("critic.model.path" in note and "default, for it is not given" in note for note in result.notes)
    assert find_model("deepseek-ai/deepseek-llm-7b-chat").num_parameters == 6_910_365_696
