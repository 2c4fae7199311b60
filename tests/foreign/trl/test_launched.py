"""Commands that start TRL, whatever launches them, and the configurations of accelerate that they name."""

from pathlib import Path
from typing import Any

import pytest

from rlplan.errors import SpecError
from rlplan.foreign.convert import Imported, convert
from rlplan.foreign.documents import flatten_keys
from rlplan.foreign.settings import Settings
from rlplan.foreign.source import read_source

SFT = "from trl import SFTConfig, SFTTrainer\nSFTTrainer('Qwen/Qwen2.5-7B', args=SFTConfig('x'))\n"
SERVED = (
    "from trl import GRPOConfig, GRPOTrainer\n"
    "GRPOTrainer('Qwen/Qwen2.5-7B', len, GRPOConfig('x', use_vllm=True, vllm_mode='server'))\n"
)
ACCELERATE = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\nnum_processes: 4\n"
PARALLEL = "distributed_type: {}\nnum_processes: 4\nparallelism_config:\n  parallelism_config_{}_size: 2\n{}"


def read(folder: Path, script: str, program: str = SFT) -> Settings:
    (folder / "train.py").write_text(program)
    (folder / "accelerate.yaml").write_text(ACCELERATE)
    (folder / "run.sh").write_text(script + "\n")
    return read_source(folder / "run.sh", None)


def import_script(folder: Path, script: str, hardware: str = "H100", program: str = SFT) -> Imported:
    return convert(read(folder, script, program), hardware, None)


def job(folder: Path, script: str, hardware: str = "H100", program: str = SFT) -> dict[str, Any]:
    return flatten_keys(import_script(folder, script, hardware, program).data)


@pytest.mark.parametrize(
    ("command", "num_devices"),
    [
        ("torchrun --nproc_per_node=4 train.py", 4),
        ("torchrun --nnodes 2 --nproc-per-node 8 train.py", 16),
        ("python -m torch.distributed.run --nproc_per_node 2 train.py", 2),
        ("deepspeed --num_gpus 8 train.py", 8),
        ("accelerate launch --num_processes 4 train.py", 4),
        ("uv run --with trl accelerate launch --num_processes 2 train.py", 2),
        ("trl sft --model_name_or_path Qwen/Qwen2.5-7B --num_processes 4", 4),
        ("deepspeed --num_gpus 4 --module trl.scripts.sft --model_name_or_path Qwen/Qwen2.5-7B", 4),
        ("accelerate launch --num_processes 2 -m trl.scripts.sft --model_name_or_path Qwen/Qwen2.5-7B", 2),
    ],
)
def test_every_launcher_says_how_many_gpus_there_are(command: str, num_devices: int, tmp_path: Path) -> None:
    assert job(tmp_path, command)["hardware.num_devices"] == num_devices


@pytest.mark.parametrize("program", [SFT, SERVED.replace("'server'", "'colocate'")])
def test_a_file_of_accelerate_that_distributes_nothing_has_one_gpu(program: str, tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text('distributed_type: "NO"\nmixed_precision: bf16\n')
    assert (
        job(tmp_path, "accelerate launch --config_file one.yaml train.py", program=program)["hardware.num_devices"] == 1
    )


def test_a_command_of_trl_s_needs_no_other_key_to_be_known(tmp_path: Path) -> None:
    """The first command of TRL's page on its command line, docs/source/clis.md."""
    command = "trl grpo --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name x --reward_funcs accuracy_reward"
    assert job(tmp_path, command, "1xH100")["algorithm.name"] == "grpo"


def test_a_switch_that_turns_a_default_off_is_read(tmp_path: Path) -> None:
    command = "trl sft --model_name_or_path Qwen/Qwen2.5-0.5B --no_gradient_checkpointing"
    assert job(tmp_path, command, "1xH100")["training.gradient_checkpointing"] is False


@pytest.mark.parametrize(
    ("command", "backend", "stage", "num_devices"),
    [
        ("trl sft --model_name_or_path Qwen/Qwen2.5-7B --accelerate_config zero3", "deepspeed", 3, 8),
        ("trl sft --model_name_or_path Qwen/Qwen2.5-7B --accelerate_config zero2 --num_processes 4", "deepspeed", 2, 4),
        ("trl sft --model_name_or_path Qwen/Qwen2.5-7B --accelerate_config fsdp2", "fsdp2", 3, 8),
        ("accelerate launch --config_file trl/accelerate_configs/zero1.yaml train.py", "deepspeed", 1, 8),
        (
            "accelerate launch --config_file examples/accelerate_configs/deepspeed_zero2.yaml train.py",
            "deepspeed",
            2,
            8,
        ),
    ],
)
def test_a_configuration_that_trl_ships_is_known_by_its_name(
    command: str, backend: str, stage: int, num_devices: int, tmp_path: Path
) -> None:
    result = import_script(tmp_path, command)
    data = flatten_keys(result.data)
    assert (data["training.backend"], data["training.zero_stage"], data["hardware.num_devices"]) == (
        backend,
        stage,
        num_devices,
    )
    assert not any("was not read" in note for note in result.notes)


def test_shipped_configurations_are_as_the_package_has_them() -> None:
    """Every key that the facts have, in the files of the installed package."""
    resources = pytest.importorskip("trl", reason="TRL is not installed").__path__[0]
    from rlplan.foreign.trl.launched import find_shipped
    from rlplan.spec.files.yaml import read_yaml

    for path in sorted((Path(resources) / "accelerate_configs").glob("*.yaml")):
        theirs, ours = flatten_keys(read_yaml(path, "a file of TRL")), find_shipped(path.stem)
        assert ours is not None, path.name
        differing = {key for key, value in ours.items() if theirs.get(key) != value}
        assert differing <= ({"num_processes"} if path.stem == "single_gpu" else set())


def test_trl_s_own_file_names_accelerate_s_and_hands_on_processes(tmp_path: Path) -> None:
    text = "model_name_or_path: Qwen/Qwen2.5-7B\nnum_generations: 8\naccelerate_config: zero3\nnum_processes: 4\n"
    (tmp_path / "grpo.yaml").write_text(text)
    for settings in (read_source(tmp_path / "grpo.yaml", None), read(tmp_path, "trl grpo --config grpo.yaml")):
        values = flatten_keys(convert(settings, "H100", None).data)
        assert (values["training.zero_stage"], values["hardware.num_devices"]) == (3, 4)


def test_the_engine_s_server_has_its_gpus_and_the_trainer_those_of_its_launcher(tmp_path: Path) -> None:
    """Four processes train, 8 rollouts each, 8 of a prompt; the server has 2 engines of 2 GPUs."""
    script = (
        "trl vllm-serve --model Qwen/Qwen2.5-7B --tensor-parallel-size 2 --data-parallel-size 2 &\n"
        "accelerate launch --config_file accelerate.yaml train.py"
    )
    result = import_script(tmp_path, script, program=SERVED)
    data = flatten_keys(result.data)
    assert (data["hardware.num_devices"], data["placement.num_generation_devices"], data["rollout.tp"]) == (8, 4, 2)
    assert data["workload.num_prompts_per_step"] == 4
    assert not any("commands start TRL" in note for note in result.notes)


def test_a_server_elsewhere_leaves_the_trainer_what_its_launcher_says(tmp_path: Path) -> None:
    result = job(tmp_path, "accelerate launch --config_file accelerate.yaml train.py", "8xH100", SERVED)
    assert (result["placement.num_generation_devices"], result["workload.num_prompts_per_step"]) == (4, 4)


def test_a_server_beside_an_unknown_number_of_trainers_is_refused_and_its_way_out_can_be_typed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SERVED)
    with pytest.raises(SpecError, match="the number of training GPUs is not given") as caught:
        convert(read_source(tmp_path / "train.py", None), "8xH100", None)
    assert caught.value.way_out.startswith("--set accelerate.num_processes=4 --hardware 8xH100")
    values = flatten_keys(
        convert(read_source(tmp_path / "train.py", None, ["accelerate.num_processes=4"]), "8xH100", None).data
    )
    assert values["placement.num_generation_devices"] == 4


FSDP2 = "fsdp_config:\n  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
ZERO3 = "deepspeed_config:\n  zero_stage: 3\n"


@pytest.mark.parametrize(
    ("kind", "axis", "more", "key"),
    [("FSDP", "cp", FSDP2, "training.cp"), ("DEEPSPEED", "sp", ZERO3, "training.ulysses")],
)
def test_ranks_that_share_a_sequence_share_a_batch(kind: str, axis: str, more: str, key: str, tmp_path: Path) -> None:
    """Four processes in pairs: two batches of 8, where accelerate's data parallelism is 2."""
    (tmp_path / "own.yaml").write_text(PARALLEL.format(kind, axis, more))
    result = job(tmp_path, "accelerate launch --config_file own.yaml train.py")
    assert (result[key], result["workload.num_prompts_per_step"]) == (2, 16)


def test_what_is_not_counted_of_accelerate_s_parallelism_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(PARALLEL.format("FSDP", "tp", FSDP2))
    with pytest.raises(SpecError, match="tensor parallelism of accelerate is not supported"):
        job(tmp_path, "accelerate launch --config_file own.yaml train.py")


def test_states_that_a_part_of_the_ranks_shares_are_counted_so(tmp_path: Path) -> None:
    """Two copies over four ranks, each in two shards; and two hosts of eight, each with all states."""
    both = f"  parallelism_config_dp_shard_size: 2\n{FSDP2}"
    (tmp_path / "own.yaml").write_text(PARALLEL.format("FSDP", "dp_replicate", both))
    assert job(tmp_path, "accelerate launch --config_file own.yaml train.py")["training.fsdp_size"] == 2
    command = "accelerate launch --use_fsdp --fsdp_sharding_strategy HYBRID_SHARD --num_machines 2 --num_processes 16"
    assert job(tmp_path, f"{command} train.py")["training.fsdp_size"] == 8


@pytest.mark.parametrize(
    ("strategy", "backend", "stage"),
    [
        ("fsdp_sharding_strategy: FULL_SHARD", "fsdp2", 3),
        ("fsdp_sharding_strategy: SHARD_GRAD_OP", "deepspeed", 2),
        ("fsdp_sharding_strategy: 2", "deepspeed", 2),
        ("fsdp_sharding_strategy: NO_SHARD", "deepspeed", 0),
        ("fsdp_version: 2\n  fsdp_reshard_after_forward: false", "deepspeed", 2),
        ("fsdp_version: 2\n  fsdp_reshard_after_forward: true", "fsdp2", 3),
    ],
)
def test_what_fsdp_shards_is_counted(strategy: str, backend: str, stage: int, tmp_path: Path) -> None:
    text = f"distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_offload_params: false\n  {strategy}\n"
    (tmp_path / "own.yaml").write_text(text)
    result = job(tmp_path, "accelerate launch --config_file own.yaml train.py")
    assert (result["training.backend"], result["training.zero_stage"]) == (backend, stage)


def test_a_key_of_accelerate_s_that_is_not_known_is_not_taken_for_a_name_or_a_logger(tmp_path: Path) -> None:
    result = import_script(tmp_path, "accelerate launch --num_processes 2 --own_parallelism 2 train.py")
    assert {entry.key: entry.why for entry in result.left}["accelerate.own_parallelism"].startswith("not known of TRL")


def test_a_program_that_makes_no_trainer_is_none_of_trl_s(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no command of this script starts"):
        read(tmp_path, "accelerate launch train.py --per_device_train_batch_size 8", "print(1)\n")
