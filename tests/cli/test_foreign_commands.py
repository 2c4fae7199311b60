"""`rlplan import` and `rlplan check`, as they are typed."""

import builtins
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from rlplan.spec.files.job_file import load_job
from tests.cli.conftest import Call
from tests.factories import EXAMPLES
from tests.foreign.scripts import verl_script

MICRO = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"


def test_a_script_that_fits_ends_with_0_and_its_account(rlplan: Call, tmp_path: Path) -> None:
    answer = rlplan("check", verl_script(tmp_path, {"trainer.logger": "console"}), "--hardware", "H100")
    assert answer.exit_code == 0, answer.err
    assert answer.out.startswith("fits  Qwen/Qwen2.5-7B-Instruct, grpo, 8x h100-sxm: ")
    assert "1 without a counterpart" in answer.err
    assert "trainer.logger" in answer.err


def test_one_that_does_not_ends_with_1_and_changes_in_its_own_keys(rlplan: Call, tmp_path: Path) -> None:
    answer = rlplan("check", verl_script(tmp_path, {MICRO: 64}), "--hardware", "8xH100")
    assert answer.exit_code == 1
    assert "on cuda:0" in answer.out.splitlines()[0]
    assert "Each of these changes alone makes it fit, the mildest first:" in answer.out
    assert f"  {MICRO}=" in answer.out
    assert "way out: each of these alone helps: --set actor_rollout_ref." in answer.err


def test_the_answer_as_json_is_one_value(rlplan: Call, tmp_path: Path) -> None:
    answer = rlplan("check", verl_script(tmp_path), "--hardware", "H100", "--json")
    result = json.loads(answer.out)
    assert (answer.exit_code, result["schema_version"], result["verdict"]) == (0, 1, "fits")


def test_an_imported_job_is_a_job_file_that_says_the_same(rlplan: Call, tmp_path: Path) -> None:
    out = tmp_path / "job.yaml"
    answer = rlplan("import", verl_script(tmp_path), "--hardware", "H100", "--out", out)
    assert answer.exit_code == 0, answer.err
    job = load_job(out)
    assert job.workload.num_prompts_per_step == 64
    assert "# data.train_batch_size = 64" in out.read_text()
    assert "(default)" in out.read_text()
    assert rlplan("estimate", out).exit_code == 0


OPENRLHF = (
    "python -m openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen2.5-1.5B --actor_num_nodes 1 --actor_num_gpus_per_node 8 "
    "--vllm_num_engines 8 --colocate_all_models --vllm_enable_sleep --vllm_gpu_memory_utilization 0.5 --zero_stage 3 "
    "--n_samples_per_prompt 8 --advantage_estimator group_norm --gradient_checkpointing --bf16\n"
)
UNSLOTH = """
from unsloth import FastLanguageModel
from trl import GRPOConfig, GRPOTrainer
model, tokenizer = FastLanguageModel.from_pretrained(
    "Qwen/Qwen3-0.6B", max_seq_length=1024, load_in_4bit=True, fast_inference=True, gpu_memory_utilization=0.5
)
model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=16)
options = GRPOConfig(output_dir="out", per_device_train_batch_size=4, num_generations=4, use_vllm=True)
GRPOTrainer(model=model, args=options, train_dataset=data, reward_funcs=[reward]).train()
"""


@pytest.mark.parametrize(
    ("name", "text", "gpus", "refused_for"),
    [("o.sh", OPENRLHF, "8xH100", None), ("u.py", UNSLOTH, "1xH100", "rollout.quantization=none")],
)
def test_what_import_writes_is_planned_as_it_is_emitted(
    rlplan: Call, name: str, text: str, gpus: str, refused_for: str | None, tmp_path: Path
) -> None:
    """Unsloth's engine in 4 bits is counted, and no export for TRL has it: every verb says so, with the bytes."""
    (tmp_path / name).write_text(text)
    out = tmp_path / "job.yaml"
    assert rlplan("import", tmp_path / name, "--hardware", gpus, "--out", out).exit_code == 0
    for verb in ("estimate", "plan"):
        answer = rlplan(verb, out)
        assert answer.exit_code == (3 if refused_for else 0), answer.out + answer.err
        assert answer.out.startswith("refused " if refused_for else "fits ")
        assert "GiB of 78.9 GiB" in answer.out
        assert (refused_for or "") in answer.err
    assert rlplan("emit", out, "--out", tmp_path / "bundle").exit_code == (3 if refused_for else 0)


def test_a_folder_with_several_scripts_has_a_command_for_one_and_a_bundle_an_estimate(
    rlplan: Call, tmp_path: Path
) -> None:
    for name in ("one.sh", "other.sh"):
        verl_script(tmp_path).rename(tmp_path / name)
    answer = rlplan("check", tmp_path, "--hardware", "H100")
    assert answer.exit_code == 2
    command = shlex.split(answer.err.rpartition("way out: ")[2])
    assert command[:2] == ["rlplan", "check"]
    assert rlplan(*command[1:]).exit_code == 0
    (tmp_path / "plan.json").write_text("{}")
    assert "way out: rlplan estimate " in rlplan("check", tmp_path, "--hardware", "H100").err


def test_the_first_line_says_that_a_setting_is_not_counted(rlplan: Call, tmp_path: Path) -> None:
    critic = {"algorithm.adv_estimator": "gae", "critic.model.path": "Qwen/Qwen2.5-7B-Instruct"}
    critic |= {"critic.fsdp.param_offload": True, "critic.fsdp.optimizer_offload": True}
    script = verl_script(tmp_path, critic | {"critic.model.enable_gradient_checkpointing": False})
    first, *others = rlplan("check", script, "--hardware", "H100").out.splitlines()
    assert first.startswith("fits, but 1 setting that can take more memory is not counted  ")
    assert "critic.model.enable_gradient_checkpointing=false (true for the policy)" in "\n".join(others)


def test_without_a_file_the_job_goes_to_stdout_alone(rlplan: Call, tmp_path: Path) -> None:
    answer = rlplan("import", verl_script(tmp_path), "--hardware", "H100")
    assert answer.out.startswith("# From ")
    assert "schema_version: 2" in answer.out


@pytest.mark.parametrize(
    ("hardware", "what"),
    [("", "--hardware"), ("H1000", "H1000"), ("8xH100 + 8xL40S + 8xA100", "names 3 groups")],
)
def test_hardware_that_is_none_is_one_message(rlplan: Call, hardware: str, what: str, tmp_path: Path) -> None:
    answer = rlplan("check", verl_script(tmp_path), "--hardware", hardware)
    assert answer.exit_code == 2
    assert what in answer.err
    assert answer.err.count("way out:") == 1


def test_without_the_grammar_the_message_names_the_extra(
    rlplan: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **more: Any) -> Any:
        if name.startswith("tree_sitter"):
            raise ImportError(name, name=name)
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    answer = rlplan("check", verl_script(tmp_path), "--hardware", "H100")
    assert answer.exit_code == 4
    assert "way out: pip install tree-sitter tree-sitter-bash" in answer.err


def test_a_plan_is_emitted_for_another_stack(rlplan: Call, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    assert rlplan("import", verl_script(tmp_path), "--hardware", "H100", "--out", job).exit_code == 0
    answer = rlplan("emit", job, "--target", "verl", "--out", tmp_path / "out")
    assert answer.exit_code == 0, answer.err
    assert "README.md explains how to start it" in answer.err
    assert rlplan("check", tmp_path / "out" / "train.sh", "--hardware", "H100").exit_code == 0
    assert rlplan("check", tmp_path / "out", "--hardware", "H100").exit_code == 0
    assert rlplan("emit", job, "--target", "slime", "--out", tmp_path / "other").exit_code == 3


def test_a_plan_is_emitted_with_what_starts_it_on_a_cluster(rlplan: Call, tmp_path: Path) -> None:
    answer = rlplan("emit", EXAMPLES / "grpo-7b-8xh100.yaml", "--target", "slurm", "--out", tmp_path / "out")
    assert answer.exit_code == 0, answer.err
    assert "train.sbatch" in answer.out
    assert "bundle/plan.json" in answer.out
    wrong = rlplan("emit", EXAMPLES / "grpo-7b-8xh100.yaml", "--target", "kubray", "--out", tmp_path / "no")
    assert wrong.exit_code == 2
    assert "Did you mean 'kuberay'?" in wrong.err
