"""Folders that a stack would start with: what it asks for beside its settings, by rules of its own sources."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlplan.errors import EmitError
from rlplan.foreign.check import Asked, import_job
from rlplan.foreign.documents import flatten_keys
from rlplan.foreign.export.backwards import export_plan
from rlplan.foreign.export.folders import write_export
from rlplan.foreign.source import read_source
from rlplan.planner.executable import check_fits
from rlplan.planner.plan import Plan
from rlplan.planner.search import find_best_plan
from rlplan.spec.files.job_file import job_from
from tests.foreign.export.plans import ASKED, make_plan, plan_stack
from tests.foreign.scripts import write_yaml

MIXTURE = "Qwen/Qwen3-30B-A3B"
MEGATRON = (*ASKED["nemo_rl"], "training.backend=megatron")
APART = {
    "policy.model_name": "Qwen/Qwen2.5-1.5B",
    "policy.max_total_sequence_length": 2048,
    "policy.megatron_cfg.enabled": True,
    "policy.generation.colocated.enabled": False,
    "loss_fn.reference_policy_kl_penalty": 0.0,
    "grpo.async_grpo.enabled": True,
    "loss_fn.use_importance_sampling_correction": True,
}
ONE_NODE = {"cluster.gpus_per_node": 8, "policy.generation.colocated.resources.gpus_per_node": 2}
FOUR_NODES = {
    "cluster.gpus_per_node": 8,
    "cluster.num_nodes": 4,
    "policy.generation.colocated.resources.gpus_per_node": 8,
    "policy.generation.colocated.resources.num_nodes": 2,
}
OWN_PROGRAM = '''
import sys
from pathlib import Path
from ruamel.yaml import YAML

def load(path, names):
    """As load_config_with_inheritance of nemo_rl/utils/config.py resolves `defaults`."""
    names.append(path.name)
    below = YAML(typ="safe").load(path).pop("defaults", [])
    for name in [below] if isinstance(below, str) else below:
        load(Path(name) if name.startswith("/") else path.parent / name, names)
    return names

print(load(Path(sys.argv[sys.argv.index("--config") + 1]), []))
'''


def plan_nemo_rl(folder: Path, settings: dict[str, Any]) -> tuple[Plan, dict[str, Any]]:
    """The plan of a document of theirs, and the settings that are written for it."""
    _, job = import_job(read_source(write_yaml(folder, settings), None), Asked("H100"))
    plan = find_best_plan(job, with_others=False)
    return plan, export_plan(plan, "nemo_rl").settings


def test_nemo_rl_s_command_finds_the_configuration_that_its_file_stands_on(tmp_path: Path) -> None:
    checkout, folder = tmp_path / "RL", tmp_path / "out"
    (checkout / "examples" / "configs").mkdir(parents=True)
    (checkout / "examples" / "run_grpo.py").write_text(OWN_PROGRAM)
    (checkout / "examples" / "configs" / "grpo_math_1B.yaml").write_text("policy: {}\n")
    readme = write_export(make_plan(*ASKED["nemo_rl"]), "nemo_rl", folder)[-1].read_text()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    variables = os.environ | {"NEMO_RL": str(checkout), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    command = readme.partition("Start it with `")[2].partition("`")[0]
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run([bash, "-c", command], cwd=folder, env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['planned.yaml', 'grpo_math_1B.yaml']"


def test_nemo_rl_trains_with_one_backend_and_sequences_that_its_ranks_share(tmp_path: Path) -> None:
    """NeMo-RL's policy: 'Configure either Megatron or DTensor, not both'."""
    written = export_plan(make_plan(*MEGATRON, "training.tp=2"), "nemo_rl").settings
    assert written["policy.megatron_cfg.enabled"] is True
    assert written["policy.dtensor_cfg.enabled"] is False
    assert written["policy.megatron_cfg.sequence_parallel"] is True
    multiple = "${policy.megatron_cfg.tensor_model_parallel_size}"
    assert written["policy.make_sequence_length_divisible_by"] == multiple
    assert "policy.dtensor_cfg.enabled" not in export_plan(make_plan(*ASKED["nemo_rl"]), "nemo_rl").settings


@pytest.mark.parametrize("nodes", [ONE_NODE, FOUR_NODES], ids=["one node", "four nodes"])
def test_gpus_of_nemo_rl_that_generate_are_a_part_of_one_node_or_whole_nodes(
    nodes: dict[str, Any], tmp_path: Path
) -> None:
    """NeMo-RL's own assertion: of several nodes as many of each as cluster.gpus_per_node says."""
    plan, written = plan_nemo_rl(tmp_path, APART | nodes)
    resources = {
        key: written.get(f"policy.generation.colocated.resources.{key}") for key in ("gpus_per_node", "num_nodes")
    }
    wanted = {"gpus_per_node": "${cluster.gpus_per_node}", "num_nodes": 2} if len(nodes) > 2 else None
    assert resources == (wanted or {"gpus_per_node": 2, "num_nodes": None})
    write_export(plan, "nemo_rl", tmp_path / "out")
    _, again = import_job(read_source(tmp_path / "out" / "train.yaml", None), Asked("H100"))
    assert again.placement.num_generation_devices == plan.job.placement.num_generation_devices


def test_nemo_rl_generates_ahead_with_what_it_asserts_for_that(tmp_path: Path) -> None:
    """NeMo-RL's own assertions: an asynchronous engine, and a correction of the loss."""
    _, written = plan_nemo_rl(tmp_path, APART | ONE_NODE)
    assert written["policy.generation.vllm_cfg.async_engine"] is True
    assert written["loss_fn.use_importance_sampling_correction"] is True


def test_adapters_of_nemo_rl_are_trained_in_passes_of_rollouts_where_the_plan_says_so(tmp_path: Path) -> None:
    plan = make_plan(*ASKED["nemo_rl"], "training.lora={rank: 16}", "workload.micro_batch_size_per_gpu=4")
    assert not plan.choice.trainer.max_tokens
    write_export(plan, "nemo_rl", tmp_path)
    values = flatten_keys(import_job(read_source(tmp_path / "train.yaml", None), Asked("8xH100"))[0].data)
    assert values["workload.micro_batch_size_per_gpu"] == plan.job.workload.micro_batch_size_per_gpu
    assert "training.max_tokens_per_micro_batch" not in values


def slime(folder: Path, *overrides: str, model: str = MIXTURE) -> str:
    write_export(make_plan(*ASKED["slime"], *overrides, model=model), "slime", folder)
    return (folder / "train.sh").read_text()


def test_slime_is_told_how_it_recomputes_and_that_experts_are_whole(tmp_path: Path) -> None:
    """Megatron's TransformerConfig refuses full recomputation without a method, and experts beside tensor parallel
    ranks without sequence parallelism; it cuts experts over those ranks unless told otherwise.
    """
    asked = ("training.gradient_checkpointing=true", "training.tp=2", "training.ep=4")
    words = slime(tmp_path, *asked).replace("\\\n", " ").split()
    values = {flag: value for flag, value in zip(words, [*words[1:], ""], strict=True) if flag.startswith("--")}
    assert values["--recompute-granularity"] == "full"
    assert (values["--recompute-method"], values["--recompute-num-layers"]) == ("uniform", "1")
    assert (values["--expert-model-parallel-size"], values["--expert-tensor-parallel-size"]) == ("4", "1")
    assert "--sequence-parallel" in values


def test_slime_is_told_the_coefficient_of_the_kl_that_is_in_its_loss(tmp_path: Path) -> None:
    text = slime(tmp_path, "algorithm.kl_coef=1e-9", model="Qwen/Qwen3-4B")
    assert "--use-kl-loss" in text
    assert "--kl-loss-coef 1e-09" in text
    assert "--kl-coef" not in text


@pytest.mark.parametrize(
    ("model", "file"),
    [
        (MIXTURE, "scripts/models/qwen3-30B-A3B.sh"),
        ("Qwen/Qwen2.5-1.5B-Instruct", "scripts/models/qwen2.5-1.5B.sh"),
        ("Qwen/Qwen2.5-14B", '"${MODEL_FILE:?one as in scripts/models, of the shape of the model}"'),
    ],
)
def test_slime_is_given_the_file_of_the_model_s_shape(model: str, file: str, tmp_path: Path) -> None:
    text = slime(tmp_path, model=model)
    assert f"\nsource {file}\n" in text
    assert 'python3 train.py "${MODEL_ARGS[@]}"' in text


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_verl_is_told_how_megatron_recomputes_and_a_critic_too(algorithm: str, tmp_path: Path) -> None:
    asked = (f"algorithm.name={algorithm}", "training.gradient_checkpointing=true", "training.tp=2")
    write_export(make_plan(*ASKED["verl"], *asked), "verl", tmp_path)
    text = (tmp_path / "train.sh").read_text()
    for role in ("actor_rollout_ref.actor", *(["critic"] if algorithm == "ppo" else [])):
        part = f" {role}.megatron.override_transformer_config.recompute_"
        assert all(f"{part}{end}" in text for end in ("granularity=full ", "method=uniform ", "num_layers=1 "))
        assert f" {role}.megatron.tensor_model_parallel_size=2 " in text


def test_a_context_that_a_job_overrides_is_said_to_verl_and_read_back(tmp_path: Path) -> None:
    asked = {
        "policy": "Qwen/Qwen2.5-Math-7B",
        "hardware": "8xH100",
        "algorithm": "grpo",
        "training": {"backend": "fsdp2"},
    }
    job = job_from(asked, ["policy.max_position_embeddings=16384", "workload.max_response_len=8192"])
    plan = plan_stack(job, "verl")
    write_export(plan, "verl", tmp_path)
    assert " ++actor_rollout_ref.model.override_config.max_position_embeddings=16384 " in (
        (tmp_path / "train.sh").read_text()
    )
    imported, _ = import_job(read_source(tmp_path / "train.sh", None), Asked("H100"))
    assert imported.data["policy"]["max_position_embeddings"] == 16384


@pytest.mark.parametrize("target", ["verl", "nemo-rl"])
def test_megatron_is_told_to_have_the_whole_optimizer_on_the_cpu(target: str, tmp_path: Path) -> None:
    """Its fraction is 0.0 by default, with which nothing leaves the GPU (Megatron's optimizer_config.py)."""
    plan = make_plan(*ASKED[target.replace("-", "_")], "training.backend=megatron", "training.offloads_optimizer=true")
    written = export_plan(plan, target.replace("-", "_")).settings
    fractions = [value for key, value in written.items() if key.endswith("optimizer_offload_fraction")]
    assert fractions == [1.0]


SERVED = ("placement.placement=disaggregated", "placement.num_generation_devices=4", "rollout.tp=2")


def plan_trl(hardware: str, *overrides: str) -> Plan:
    """A plan of a job that TRL can say."""
    sizes = ("workload.num_prompts_per_step=64", "workload.mini_batch_size=512", "workload.num_samples_per_prompt=8")
    asked = {"policy": "Qwen/Qwen2.5-1.5B-Instruct", "hardware": hardware, "algorithm": "grpo"}
    job = job_from(asked, (*sizes, *overrides))
    return plan_stack(job, "trl")


def test_engines_of_trl_on_gpus_of_their_own_are_a_server_beside_the_training(tmp_path: Path) -> None:
    """The server behind the GPUs that train; what is read back has the same GPUs for each."""
    plan = plan_trl("8xH100", *SERVED)
    write_export(plan, "trl", tmp_path)
    text = (tmp_path / "train.sh").read_text()
    assert "CUDA_VISIBLE_DEVICES=4,5,6,7 trl vllm-serve --model Qwen/Qwen2.5-1.5B-Instruct " in text
    sizes = (
        "--tensor-parallel-size 2 ",
        "--data-parallel-size 2 ",
        f"--max-model-len {plan.job.workload.max_seq_len} &",
    )
    assert all(size in text for size in sizes)
    assert "export CUDA_VISIBLE_DEVICES=0,1,2,3\ntrl grpo " in text
    _, job = import_job(read_source(tmp_path / "train.sh", None), Asked("H100"))
    assert (job.hardware.num_devices, job.placement.num_generation_devices, job.rollout.tp) == (8, 4, 2)
    assert job.workload.mini_batch_size == plan.job.workload.mini_batch_size


def test_a_server_beside_several_hosts_that_train_is_not_written() -> None:
    plan = plan_trl("24xH100", "placement.placement=disaggregated", "placement.num_generation_devices=8")
    with pytest.raises(EmitError, match="trl vllm-serve on the training host"):
        check_fits(plan)
