"""Names of `--set`: a variable of the script, or a key in the stack's spelling; others are refused."""

from pathlib import Path

import pytest

from rlplan.errors import SpecError
from rlplan.foreign.source import read_source
from tests.foreign.scripts import verl_script

SLIME = (
    "source models/small.sh\n"
    "python3 train.py --hf-checkpoint Qwen/Qwen3-4B --colocate --rollout-batch-size ${BATCH:-32} --load /ckpt\n"
)
OPENRLHF = "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path Qwen/Qwen2.5-7B --vllm.num_engines 2\n"


def slime(folder: Path, text: str = SLIME) -> Path:
    (folder / "models").mkdir()
    (folder / "models" / "small.sh").write_text("LAYERS=${LAYERS:-36}\n")
    (folder / "train.sh").write_text(text)
    return folder / "train.sh"


@pytest.mark.parametrize("key", ["+", "++", ""])
def test_a_key_of_hydra_s_is_set_however_a_command_line_of_verl_spells_it(key: str, tmp_path: Path) -> None:
    name = "actor_rollout_ref.actor.fsdp_config.model_dtype"
    settings = read_source(verl_script(tmp_path), None, [f"{key}{name}=bfloat16"])
    assert settings.value(name) == "bfloat16"


@pytest.mark.parametrize("key", ["optimizer-cpu-offload", "--optimizer-cpu-offload", "optimizer_cpu_offload"])
def test_a_flag_is_set_however_it_is_spelled(key: str, tmp_path: Path) -> None:
    assert read_source(slime(tmp_path), None, [f"{key}=True"]).value("optimizer_cpu_offload") is True


def test_a_flag_of_an_earlier_version_is_set_as_today_s(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(OPENRLHF)
    assert read_source(tmp_path / "train.sh", None, ["zero_stage=2"]).value("ds.zero_stage") == 2


@pytest.mark.parametrize("name", ["BATCH", "LAYERS", "load"])
def test_variables_of_the_script_and_of_what_it_sources_and_keys_that_it_gives_can_be_set(
    name: str, tmp_path: Path
) -> None:
    settings = read_source(slime(tmp_path), None, [f"{name}=64"])
    assert settings.value("rollout_batch_size") == (64 if name == "BATCH" else 32)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("modle", ""),
        ("data.train_batch_sise", "Did you mean 'data.train_batch_size'?"),
        ("trainer.loger", ""),
    ],
)
def test_a_word_that_names_nothing_is_refused(name: str, meant: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=rf"--set '?{name}'? has no effect") as caught:
        read_source(verl_script(tmp_path), None, [f"{name}=3"])
    assert meant in caught.value.rule
    assert caught.value.where == "command line: --set"


def test_a_word_that_names_nothing_of_a_yaml_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("grpo: {num_prompts_per_step: 96, seed: 1}\n")
    assert read_source(tmp_path / "job.yaml", None, ["grpo.seed=2"]).value("grpo.seed") == 2
    with pytest.raises(SpecError, match=r"Did you mean 'grpo\.num_prompts_per_step'"):
        read_source(tmp_path / "job.yaml", None, ["grpo.num_prompt_per_step=8"])


TRAINER = (
    "from trl import GRPOConfig, GRPOTrainer\nfrom argparse import ArgumentParser\n"
    "p = ArgumentParser()\np.add_argument('--model')\nargs = p.parse_args()\nSIZE = read()\n"
    "GRPOTrainer(args.model, len, GRPOConfig(num_generations=SIZE))\n"
)
LAUNCHER = "MODEL=${MODEL:-Qwen/Qwen2.5-7B}\naccelerate launch --num_processes 8 train.py --model $MODEL\n"


def test_a_script_and_the_program_that_it_starts_have_names_to_set_each(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINER)
    (tmp_path / "train.sh").write_text(LAUNCHER)
    settings = read_source(tmp_path / "train.sh", None, ["MODEL=Qwen/Qwen2.5-3B", "SIZE=4", "beta=0.1"])
    values = [settings.value(key) for key in ("model_name_or_path", "num_generations", "beta")]
    assert values == ["Qwen/Qwen2.5-3B", 4, 0.1]
    with pytest.raises(SpecError, match="--set 'SIZZE' has no effect"):
        read_source(tmp_path / "train.sh", None, ["SIZZE=4", "SIZE=4"])
