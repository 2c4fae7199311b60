"""Files of stacks without a table are refused by name; settings as their repositories' examples have them."""

import shlex
from pathlib import Path

import pytest

from rlplan.errors import SpecError
from rlplan.foreign.source import read_source
from rlplan.foreign.unread.stacks import Nearest, load_stacks
from rlplan.sources import JobWords, read_question

AXOLOTL = """
base_model: Qwen/Qwen2.5-3B-Instruct
load_in_4bit: true
adapter: qlora
lora_r: 32
sequence_len: 2048
micro_batch_size: 1
gradient_accumulation_steps: 4
bf16: auto
"""
LLAMA_FACTORY = """
model: Qwen/Qwen3-4B
model_class: llm
peft_config: {name: lora, r: 8, lora_alpha: 16}
dist_config: {name: fsdp2}
micro_batch_size: 1
cutoff_len: 2048
"""
TORCHTUNE = """
model: {_component_: torchtune.models.qwen3.lora_qwen3_0_6b_instruct, lora_rank: 32}
checkpointer: {checkpoint_dir: /tmp/Qwen3-0.6B}
batch_size: 2
gradient_accumulation_steps: 8
"""
OPEN_INSTRUCT = (
    "accelerate launch --num_processes 8 open_instruct/finetune.py --model_name_or_path Qwen/Qwen2.5-7B --use_lora "
    "--lora_rank 64 --max_seq_length 4096 --per_device_train_batch_size 1 --dataset_mixer_list x 1.0\n"
)
FILES = [
    ("LLaMA-Factory v1", "l.yaml", LLAMA_FACTORY, "sft", "training.lora.rank=8"),
    ("torchtune", "t.yaml", TORCHTUNE, "sft", "training.lora.rank=32"),
    ("open-instruct", "i.sh", OPEN_INSTRUCT, "sft", "training.lora.rank=64"),
]


@pytest.mark.parametrize(("title", "name", "text", "algorithm", "words"), FILES, ids=[file[1] for file in FILES])
def test_a_file_of_a_stack_without_a_table_is_refused_by_name(
    title: str, name: str, text: str, algorithm: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(SpecError, match=f"this is a file of {title} ") as caught:
        read_source(path, None)
    assert "verl" in caught.value.rule
    command = shlex.split(caught.value.way_out.split(": ", 1)[1])
    assert command[:2] == ["rlplan", "estimate"]
    options = dict(zip(command[2:8:2], command[3:8:2], strict=True))
    assert options["--algorithm"] == algorithm
    assert words in command[8:]
    read_question("estimate", JobWords(None, command[8:], options["--model"], algorithm, options["--gpus"]))


TORCHTUNE_DPO = TORCHTUNE + "loss: {beta: 0.1}\n"


@pytest.mark.parametrize(("text", "algorithm"), [(TORCHTUNE, "sft"), (TORCHTUNE_DPO, "dpo")])
@pytest.mark.parametrize(("hardware", "gpus"), [("", "8xH100"), ("4xA100", "4xA100"), ("H200", "8xH200")])
def test_the_nearest_command_has_the_gpus_and_the_model_that_were_asked_about(
    text: str, algorithm: str, hardware: str, gpus: str, tmp_path: Path
) -> None:
    (tmp_path / "t.yaml").write_text(text)
    with pytest.raises(SpecError) as caught:
        read_source(tmp_path / "t.yaml", None, nearest=Nearest(hardware, "Qwen/Qwen3-8B"))
    command = f"rlplan estimate --model Qwen/Qwen3-8B --algorithm {algorithm} --gpus {gpus}"
    assert command in caught.value.way_out


def test_a_program_that_is_not_read_has_a_command_with_the_gpus_that_were_asked_about(tmp_path: Path) -> None:
    (tmp_path / "t.sh").write_text("uv run examples/run_vlm_sft.py policy.model_name=a\n")
    with pytest.raises(SpecError) as caught:
        read_source(tmp_path / "t.sh", None, nearest=Nearest("2xL40S"))
    assert "--algorithm sft --gpus 2xL40S" in caught.value.way_out


@pytest.mark.parametrize("source", ["trl", "deepspeed", "slime"])
def test_a_named_source_does_not_make_another_stack_s_file_one_of_its_own(source: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(AXOLOTL)
    with pytest.raises(SpecError, match="this is a file of axolotl"):
        read_source(tmp_path / "a.yaml", source)


VERL = (
    "algorithm.adv_estimator=grpo data.train_batch_size=32 data.max_prompt_length=1024 data.max_response_length=1024 "
    "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B actor_rollout_ref.rollout.name=vllm\n"
)


@pytest.mark.parametrize(
    "command",
    [
        "python -u train.py rllm/backend=verl rllm.trainer.total_epochs=1 ",
        "python3 -m rllm.trainer.verl.train_agent_ppo ",
        "uv run --env-file .env -m skyrl_agent.integrations.verl.verl_main_ppo ",
    ],
)
def test_a_program_that_wraps_verl_is_read_as_verl(command: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("AgentTrainer(config=config).train()\n")
    (tmp_path / "run.sh").write_text(command + VERL)
    settings = read_source(tmp_path / "run.sh", None)
    assert (settings.table.title, settings.value("data.train_batch_size")) == ("verl", 32)


@pytest.mark.parametrize("root", ["max_length: 5", "max_num_seqs: 5", "train_batch_size: 5"])
def test_a_file_of_which_most_keys_are_unknown_is_not_of_a_stack_that_shares_one(root: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(f"{root}\nalpha_one: 1\nbeta_two: 2\ngamma_three: 3\ndelta_four: 4\n")
    with pytest.raises(SpecError, match=r"4 of its 5 keys are not known|does not say which of TRL"):
        read_source(path, None)


def test_toml_that_cannot_be_read_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("[a\n")
    with pytest.raises(SpecError, match="not TOML"):
        read_source(tmp_path / "x.toml", None)


def test_every_stack_has_a_name_and_a_way_to_be_recognised() -> None:
    assert len({stack.title for stack in load_stacks()}) == len(load_stacks())
    assert all(stack.commands or stack.keys for stack in load_stacks())
