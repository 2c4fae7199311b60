"""verl's keys as jobs; facts of the table's commit."""

from pathlib import Path
from typing import Any

import pytest

from rlplan.errors import SpecError
from rlplan.foreign.convert import Imported, convert
from rlplan.foreign.documents import flatten_keys
from rlplan.foreign.source import read_source
from tests.foreign.scripts import verl_script

ACTOR = "actor_rollout_ref.actor."
OPTIMIZER = f"{ACTOR}optim.override_optimizer_config."
MEGATRON = "ppo_megatron_trainer.yaml"


def import_settings(folder: Path, settings: dict[str, Any], hardware: str = "H100", preset: str = "") -> Imported:
    return convert(read_source(verl_script(folder, settings, preset=preset), None), hardware, None)


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        ({f"{ACTOR}fsdp_config.ulysses_sequence_parallel_size": 4}, 4),
        ({f"{ACTOR}ulysses_sequence_parallel_size": 2}, 2),
        ({f"{ACTOR}ulysses_sequence_parallel_size": 2, f"{ACTOR}fsdp_config.ulysses_sequence_parallel_size": 4}, 2),
    ],
)
def test_ranks_that_share_a_sequence_are_said_by_the_engine_s_key_or_by_its_older_name(
    settings: dict[str, Any], ranks: int, tmp_path: Path
) -> None:
    assert import_settings(tmp_path, settings).data["training"]["ulysses"] == ranks


@pytest.mark.parametrize(("fraction", "lies_on_the_cpu"), [(None, False), (0.5, False), (1, True), (1.0, True)])
def test_megatron_leaves_on_the_gpu_what_no_fraction_says_to_be_on_the_cpu(
    fraction: float | None, lies_on_the_cpu: bool, tmp_path: Path
) -> None:
    settings = {
        f"+{OPTIMIZER}optimizer_cpu_offload": True,
        f"+{OPTIMIZER}use_precision_aware_optimizer": True,
        f"+{OPTIMIZER}optimizer_offload_fraction": fraction,
    }
    imported = import_settings(tmp_path, settings, preset=MEGATRON)
    assert imported.data["training"]["offloads_optimizer"] is lies_on_the_cpu
    assert any("optimizer_offload_fraction" in note for note in imported.notes) is not lies_on_the_cpu


@pytest.mark.parametrize("hardware", ["H100", "12xH100"])
def test_engines_beside_those_of_the_trainer_s_gpus_are_said(hardware: str, tmp_path: Path) -> None:
    settings = {
        "trainer.v1.trainer_mode": "separate_async",
        "actor_rollout_ref.rollout.nnodes": 1,
        "actor_rollout_ref.rollout.n_gpus_per_node": 4,
    }
    imported = import_settings(tmp_path, settings, hardware)
    assert imported.data["hardware"]["num_devices"] == 8
    assert any("engines beside the trainer and others on GPUs of their own" in note for note in imported.notes)
    assert not any("the plan uses --hardware" in note for note in imported.notes)


def test_a_mode_that_takes_turns_ahead_of_time_is_said_to_be_counted_as_sync(tmp_path: Path) -> None:
    imported = import_settings(tmp_path, {"trainer.v1.trainer_mode": "colocate_async"})
    assert flatten_keys(imported.data)["placement.placement"] == "colocated"
    assert any("colocate_async is predicted as sync" in note for note in imported.notes)


def test_the_gpus_of_a_teacher_are_beside_those_that_are_counted(tmp_path: Path) -> None:
    settings = {"distillation.enabled": True, "distillation.nnodes": 1, "distillation.n_gpus_per_node": 4}
    imported = import_settings(tmp_path, settings, "12xH100")
    assert imported.data["hardware"]["num_devices"] == 8
    assert any("the teacher's separate GPUs" in note for note in imported.notes)


def test_a_trainer_that_is_chosen_as_a_group_of_the_configuration_is_that_trainer(tmp_path: Path) -> None:
    group = "actor@actor_rollout_ref.actor"
    assert import_settings(tmp_path, {group: "megatron_actor"}).data["training"]["backend"] == "megatron"
    with pytest.raises(SpecError, match="one of dp_actor, megatron_actor"):
        import_settings(tmp_path, {group: "mlite_actor"})


@pytest.mark.parametrize("settings", [{}, {"actor_rollout_ref.hybrid_engine": False, "rollout.nnodes": 1}])
def test_a_reference_under_fsdp_lies_on_the_host_whatever_its_own_key_says(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    kept = {f"{ACTOR}fsdp_config.param_offload": False, f"{ACTOR}fsdp_config.optimizer_offload": False}
    apart = settings | {"rollout.n_gpus_per_node": 8} if settings else {}
    values = flatten_keys(import_settings(tmp_path, {**kept, **apart, f"{ACTOR}use_kl_loss": True}).data)
    assert (values["placement.offload"], values["placement.offload_roles"]) == ("host", "frozen")
    alone = flatten_keys(import_settings(tmp_path, {**kept, **apart}).data)
    assert alone["placement.offload"] == "none"


def test_a_policy_loss_that_is_not_modelled_has_a_note(tmp_path: Path) -> None:
    """verl's core_algos.py registers twelve policy losses; three of them are modelled."""
    for loss, has_note in (("geo_mean", True), ("gspo", False), ("vanilla", False)):
        notes = import_settings(tmp_path, {f"{ACTOR}policy_loss.loss_mode": loss}).notes
        assert any("predicted as GRPO's" in note for note in notes) is has_note


@pytest.mark.parametrize("betas", ["[0.9,0.95]", "'(0.9, 0.95)'"])
def test_betas_of_the_optimizer_are_read(betas: str, tmp_path: Path) -> None:
    algorithm = import_settings(tmp_path, {f"{ACTOR}optim.betas": betas}).data["algorithm"]
    assert (algorithm["adam_beta1"], algorithm["adam_beta2"]) == (0.9, 0.95)
