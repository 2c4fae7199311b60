"""Detection of a file's stack, and its settings in any syntax."""

from pathlib import Path

import pytest

from rlplan.errors import SpecError
from rlplan.foreign.check import Asked, import_job
from rlplan.foreign.convert import convert
from rlplan.foreign.documents import flatten_keys
from rlplan.foreign.settings import parse_word
from rlplan.foreign.source import read_source
from rlplan.foreign.table import load_table
from tests.foreign.scripts import verl_script


def test_a_script_is_known_by_the_command_that_it_runs(tmp_path: Path) -> None:
    settings = read_source(verl_script(tmp_path), None)
    assert settings.table.title == "verl"
    assert settings.value("data.train_batch_size") == 64
    assert settings.place("data.train_batch_size") == "train.sh:6"


def test_a_yaml_file_is_known_by_its_keys_and_its_references_are_followed(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "actor_rollout_ref:\n  rollout:\n    n: 4\n    max_num_seqs: ${oc.select:actor_rollout_ref.rollout.n,1}\n"
        "data:\n  train_batch_size: ${actor_rollout_ref.rollout.max_num_seqs}\n"
    )
    settings = read_source(path, None)
    assert settings.value("data.train_batch_size") == 4
    assert settings.place("data.train_batch_size") == "job.yaml: data.train_batch_size"


def test_references_in_a_circle_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("actor_rollout_ref:\n  a: ${actor_rollout_ref.b}\n  b: ${actor_rollout_ref.a}\n")
    with pytest.raises(SpecError, match="which is known only at run time"):
        read_source(path, None).value("actor_rollout_ref.a")


def test_variables_and_keys_can_be_set_from_outside(tmp_path: Path) -> None:
    script = verl_script(tmp_path, {"data.train_batch_size": None}, before="BATCH=${BATCH:-32}")
    script.write_text(script.read_text().replace('"$@"', "data.train_batch_size=$BATCH"))
    assert read_source(script, None).value("data.train_batch_size") == 32
    assert read_source(script, None, ["BATCH=128"]).value("data.train_batch_size") == 128
    assert read_source(script, None, ["data.train_batch_size=96"]).value("data.train_batch_size") == 96


def test_the_command_may_lie_behind_a_launcher(tmp_path: Path) -> None:
    path = tmp_path / "x.sh"
    path.write_text(
        "ray job submit --address=http://x:8265 -- python3 -m verl.trainer.main_ppo +data.train_batch_size=8\n"
    )
    assert read_source(path, None).value("data.train_batch_size") == 8


PROGRAM = """
from trl import GRPOConfig, GRPOTrainer
from peft import LoraConfig
SIZE = 4
config = GRPOConfig(per_device_train_batch_size=SIZE, max_completion_length=2 * 1024, use_vllm=True, beta=beta())
GRPOTrainer(model="Qwen/Qwen2.5-7B-Instruct", args=config, peft_config=LoraConfig(r=8), train_dataset=load())
"""


GIVEN = """
from trl import {name}Config, {name}Trainer
config = {name}Config(per_device_train_batch_size=4, gradient_accumulation_steps=2, max_length=2048, max_steps=100)
{name}Trainer(model="Qwen/Qwen2.5-7B-Instruct", args=config, train_dataset=load())
"""


@pytest.mark.parametrize(
    ("name", "algorithm", "num_samples", "learning_rate", "kl_coef"),
    [
        ("SFT", "sft", 1, 2e-5, 0),
        ("DPO", "dpo", 2, 1e-6, 0.1),
        ("KTO", "kto", 2, 1e-6, 0.1),
        ("Reward", "reward_modeling", 2, 1e-4, 0),
    ],
)
def test_a_script_of_a_trainer_with_given_answers_is_a_job_without_rollouts(
    tmp_path: Path, name: str, algorithm: str, num_samples: int, learning_rate: float, kl_coef: float
) -> None:
    """Defaults of TRL 1.16.0, trainer/*_config.py; eight GPUs times 4 sequences times 2 accumulated."""
    path = tmp_path / "train.py"
    path.write_text(GIVEN.format(name=name))
    _, job = import_job(read_source(path, None), Asked("8xH100"))
    assert (job.algorithm.name, job.algorithm.learning_rate, job.algorithm.kl_coef) == (
        algorithm,
        learning_rate,
        kl_coef,
    )
    work = job.workload
    assert (work.num_steps, work.num_prompts_per_step, work.num_samples_per_prompt) == (100, 64, num_samples)
    in_a_pass = 4 if name == "KTO" else 4 * num_samples  # KTO's other answers have a pass without gradients
    assert (work.mini_batch_size, work.micro_batch_size_per_gpu) == (64 * num_samples, in_a_pass)
    assert work.max_seq_len == 2048


@pytest.mark.parametrize("start", ["trl sft", "accelerate launch --num_processes 8 examples/scripts/sft.py"])
def test_a_program_of_trl_s_says_which_trainer_it_starts(tmp_path: Path, start: str) -> None:
    path = tmp_path / "train.sh"
    path.write_text(
        f"{start} --model_name_or_path Qwen/Qwen2.5-7B-Instruct --per_device_train_batch_size 2 --packing\n"
    )
    imported, job = import_job(read_source(path, None), Asked("8xH100"))
    assert (job.algorithm.name, job.workload.num_prompts_per_step, job.has_engine) == ("sft", 16, False)
    assert [left.key for left in imported.left] == ["packing"]


def test_literal_arguments_of_a_python_script_are_read_and_nothing_is_run(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    settings = read_source(path, None)
    keys = (
        "per_device_train_batch_size",
        "max_completion_length",
        "use_vllm",
        "use_peft",
        "lora_r",
        "model_name_or_path",
    )
    assert [settings.value(key) for key in keys] == [4, 2048, True, True, 8, "Qwen/Qwen2.5-7B-Instruct"]
    assert settings.place("lora_r") == "train.py:6"
    with pytest.raises(SpecError, match=r"beta is beta\(\), which is known only at run time"):
        settings.value("beta")


def test_a_launcher_brings_its_file_the_program_and_the_flags_which_win(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "zero3.yaml").write_text("num_processes: 8\ndeepspeed_config:\n  zero_stage: 3\n")
    script = tmp_path / "run.sh"
    script.write_text(
        "accelerate launch --config_file zero3.yaml --num_processes 4 train.py --learning_rate 1e-5 --use_vllm false\n"
    )
    settings = read_source(script, None)
    assert settings.table.title == "TRL"
    keys = ("accelerate.num_processes", "accelerate.deepspeed_config.zero_stage", "learning_rate", "use_vllm", "lora_r")
    assert [settings.value(key) for key in keys] == [4, 3, 1e-5, False, 8]


def test_python_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("GRPOConfig(\n")
    with pytest.raises(SpecError, match="the script is not Python"):
        read_source(path, None)


@pytest.mark.parametrize("part", ["a&", "2*", "a.b."])
def test_an_expression_of_very_many_parts_is_one_that_is_not_known(tmp_path: Path, part: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"from trl import GRPOConfig\nargs = GRPOConfig(learning_rate={part * 450}a)\n")
    with pytest.raises(SpecError, match="learning_rate is an expression of very many parts, which is known only"):
        read_source(script, None).value("learning_rate")


def test_flags_are_read_with_their_values_and_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.sh"
    path.write_text("python3 train.py --colocate --rollout-batch-size 32 --lr=1e-6 --dynamic 0 1 --hf-checkpoint a/b\n")
    settings = read_source(path, None)
    assert settings.table.title == "slime"
    keys = ("colocate", "rollout_batch_size", "lr", "dynamic", "hf_checkpoint")
    assert [settings.value(key) for key in keys] == [True, 32, 1e-6, "0 1", "a/b"]


def test_another_project_s_program_of_the_same_name_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "x.sh"
    path.write_text("python3 train.py --epochs 3\n")
    with pytest.raises(SpecError, match="no command of this script starts"):
        read_source(path, None)


def test_files_that_defaults_name_lie_below_and_a_missing_one_is_noted(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "policy:\n  model_name: a/b\n  train_micro_batch_size: 4\n  max_total_sequence_length: 512\n"
    )
    (tmp_path / "job.yaml").write_text(
        "defaults: base.yaml\npolicy:\n  train_micro_batch_size: 2\n  sequence_packing:\n"
        "    train_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}\n"
    )
    settings = read_source(tmp_path / "job.yaml", None)
    assert settings.table.title == "NeMo-RL"
    assert settings.value("policy.model_name") == "a/b"
    assert settings.value("policy.sequence_packing.train_mb_tokens") == 1024
    (tmp_path / "base.yaml").unlink()
    assert "'base.yaml' was not found" in read_source(tmp_path / "job.yaml", None).notes[0]


def test_of_two_commands_the_first_is_read_with_a_note(tmp_path: Path) -> None:
    path = tmp_path / "x.sh"
    path.write_text("".join(f"python -m verl.trainer.main_ppo data.train_batch_size={size}\n" for size in (8, 16)))
    settings = read_source(path, None)
    assert settings.value("data.train_batch_size") == 8
    assert settings.notes == ("2 commands start verl; the one at x.sh:1 is read",)


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("x.sh", "echo hello\n", "no command of this script starts"),
        ("x.sh", "", "no command of this script starts"),
        ("x.yaml", "a: 1\n", "none of its keys"),
        ("x.yaml", "- 1\n", "not a mapping"),
        ("x.yaml", "a: [\n", "not YAML"),
        ("x.json", '{"a": ', "not YAML"),
        ("missing.sh", None, "is missing"),
    ],
)
def test_a_file_of_no_use_is_one_message_with_four_parts(
    name: str, text: str | None, what: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(SpecError, match=r"^\S") as caught:
        read_source(path, None)
    error = caught.value
    assert what in error.what
    assert error.where
    assert error.rule
    assert error.way_out


def test_an_unknown_source_is_refused_with_what_was_meant(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="Did you mean 'verl'"):
        read_source(verl_script(tmp_path), "verll")


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("true", True),
        ("False", False),
        ("None", None),
        ("1e-6", 1e-6),
        ("-1", -1),
        ("1_000", "1_000"),
        ("[a,b]", "[a,b]"),
    ],
)
def test_words_are_typed_as_upstream_types_them(word: str, value: object) -> None:
    assert parse_word(word) == value
    assert type(parse_word(word)) is type(value)


def test_vllm_s_arguments_are_read_as_vllm_reads_them(tmp_path: Path) -> None:
    (tmp_path / "engine.yaml").write_text("max-num-seqs: 64\nmax-model-len: 16K\n")
    script = tmp_path / "serve.sh"
    script.write_text(
        "vllm serve Qwen/Qwen2.5-7B-Instruct -tp 2 --config engine.yaml --max-model-len 4k --dtype auto \\\n"
        '  --no-enforce-eager --speculative-config \'{"method": "ngram", "num_speculative_tokens": 3}\'\n'
    )
    settings = read_source(script, None)
    keys = ("model", "tensor_parallel_size", "max_num_seqs", "max_model_len", "enforce_eager", "dtype")
    assert [settings.value(key) for key in keys] == ["Qwen/Qwen2.5-7B-Instruct", 2, 64, 4000, False, "bfloat16"]
    assert settings.value("speculative_config.num_speculative_tokens") == 3
    assert read_source(tmp_path / "engine.yaml", None).value("max_model_len") == 16384


def test_deepspeed_s_json_is_read_without_what_it_leaves_to_others(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        '{"train_batch_size": "auto", "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},'
        ' "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95]}}, "bf16": {"enabled": true}}'
    )
    settings = read_source(path, None)
    assert settings.table.title == "DeepSpeed"
    assert "train_batch_size" not in settings.entries
    values = flatten_keys(convert(settings, "8xH100", "Qwen/Qwen2.5-7B-Instruct").data)
    assert (values["training.zero_stage"], values["training.offloads_optimizer"]) == (3, True)
    assert (values["algorithm.adam_beta2"], values["training.dtype"]) == (0.95, "bfloat16")
    assert "workload.mini_batch_size" not in values
    with pytest.raises(SpecError, match="does not say which model is trained"):
        convert(settings, "8xH100", None)


@pytest.mark.parametrize(
    "words",
    ["--config-path=$PWD --config-name=mine", "--config-path . --config-name mine.yaml", "-cn mine -cp conf"],
)
def test_a_configuration_that_a_command_of_verl_names_is_read_below_its_words(words: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("data: {train_batch_size: 96, max_prompt_length: 300}\n")
    (tmp_path / "train.sh").write_text(f"python3 -m verl.trainer.main_ppo {words} data.max_prompt_length=400\n")
    settings = read_source(tmp_path / "train.sh", None)
    assert settings.value("data.train_batch_size") == 96
    assert settings.value("data.max_prompt_length") == 400


@pytest.mark.parametrize("flag", ["--config=mine.yaml", "--config examples/mine.yaml"])
def test_a_configuration_that_a_command_of_nemo_rl_names_is_read(flag: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("grpo: {num_prompts_per_step: 96}\n")
    (tmp_path / "train.sh").write_text(f"uv run examples/run_grpo.py {flag} cluster.num_nodes=2\n")
    settings = read_source(tmp_path / "train.sh", None)
    assert (settings.value("grpo.num_prompts_per_step"), settings.value("cluster.num_nodes")) == (96, 2)


@pytest.mark.parametrize(
    ("name", "notes"),
    [
        ("mine", ["'mine.yaml' was not found beside the script and not read"]),
        ("ppo_trainer", []),
        ("ppo_megatron_trainer", []),
    ],
)
def test_a_configuration_that_is_not_there_is_said_and_upstream_s_own_is_known(
    name: str, notes: list[str], tmp_path: Path
) -> None:
    path = verl_script(tmp_path, preset=name)
    assert [note.partition(": ")[2] for note in read_source(path, None).notes] == notes


@pytest.mark.parametrize("name", ["mine", "$(find_configuration)"])
def test_a_command_whose_model_stands_in_a_missing_configuration_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(f"uv run examples/run_sft.py --config={name} cluster.num_nodes=2\n")
    with pytest.raises(SpecError, match=r"yaml' was not found"):
        read_source(tmp_path / "train.sh", None)
    words = ["policy.model_name=Qwen/Qwen2.5-7B"]
    assert read_source(tmp_path / "train.sh", None, words).value("policy.model_name") == "Qwen/Qwen2.5-7B"


# verl, fully_async_policy/shell/geo3k_qwen25vl_7b_megatron_4_4.sh has such a line
@pytest.mark.parametrize(
    "text",
    [
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=m/Qwen2.5-7B \\\n\ndata.n=4 \\\n a.b=1\n",
        "trl grpo --model_name_or_path Qwen/Qwen2.5-7B\n --num_generations 4\n",
    ],
)
def test_options_that_no_backslash_joins_to_their_command_are_noted(text: str, tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(text)
    (note,) = read_source(tmp_path / "train.sh", None).notes
    assert "2 words from" in note
    assert "bash does not pass them" in note


def test_flags_of_an_earlier_openrlhf_are_read_as_today_s(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(
        ': "${MODEL:=Qwen/Qwen2.5-7B}"\n'
        "deepspeed --module openrlhf.cli.train_ppo_ray --pretrain $MODEL --zero_stage 3 --prompt_max_len 512 "
        "--generate_max_len 1024 --micro_train_batch_size 4 --colocate_all_models --vllm_num_engines 8 --bf16\n"
    )
    settings = read_source(tmp_path / "train.sh", None)
    keys = {"actor.model_name_or_path": "Qwen/Qwen2.5-7B", "ds.zero_stage": 3, "rollout.max_new_tokens": 1024}
    assert {key: settings.value(key) for key in keys} == keys
    data = convert(settings, "8xH100", None).data
    assert (data["workload"]["max_prompt_len"], data["workload"]["micro_batch_size_per_gpu"]) == (512, 4)
    assert settings.notes[0].startswith("flags of an earlier OpenRLHF, with defaults of 0.11.2: pretrain, zero_stage")


@pytest.mark.parametrize("older", load_table("openrlhf").older.items(), ids=lambda pair: pair[0])
def test_an_earlier_flag_stands_for_one_that_the_table_has(older: tuple[str, str]) -> None:
    table = load_table("openrlhf")
    assert older[1] in table.keys or not table.why_without_counterpart(older[1]).startswith("not known")


@pytest.mark.parametrize(
    ("command", "program", "algorithm"),
    [
        ("uv run examples/run_vlm_sft.py --config x.yaml", "run_vlm_sft.py", "sft"),
        ("python examples/start_distill_pipeline.py --config_name x", "start_distill_pipeline.py", "grpo"),
    ],
)
def test_a_program_of_a_known_stack_that_is_not_read_is_named(
    command: str, program: str, algorithm: str, tmp_path: Path
) -> None:
    (tmp_path / "run.sh").write_text(command + "\n")
    with pytest.raises(SpecError, match=f"{program} of .* is not read") as error:
        read_source(tmp_path / "run.sh", None)
    assert f"--algorithm {algorithm} " in error.value.way_out


def test_a_configuration_is_found_below_the_folder_in_which_the_script_was_to_be_started(tmp_path: Path) -> None:
    configs, scripts = tmp_path / "examples" / "config", tmp_path / "examples" / "multiturn"
    configs.mkdir(parents=True)
    scripts.mkdir()
    (configs / "mine.yaml").write_text("actor_rollout_ref: {actor: {strategy: megatron}}\n")
    (scripts / "run.sh").write_text(
        'HERE="$(pwd)"\npython3 -m verl.trainer.main_ppo --config-path="$HERE/examples/config" --config-name=mine '
        "data.train_batch_size=8\n"
    )
    settings = read_source(scripts / "run.sh", None)
    assert settings.value("actor_rollout_ref.actor.strategy") == "megatron"
    assert not any("was not read" in note for note in settings.notes)


def test_a_command_of_bash_with_the_name_of_an_unread_configuration_is_none_of_its_programs(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("rm -rf /tmp/out\n./prepare\n")
    with pytest.raises(SpecError, match="no command of this script starts one of"):
        read_source(tmp_path / "run.sh", None)
