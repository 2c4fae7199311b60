"""Python programs of slime and miles that build a command line and start it."""

from pathlib import Path
from typing import Any

from rlplan.foreign.settings import Settings
from rlplan.foreign.source import read_source

PROGRAM = """
from dataclasses import dataclass
import os
import typer
import miles.utils.external_utils.command_utils as U

@dataclass(frozen=True)
class Recipe:
    tp: int
    tokens: int

RECIPES = {"Qwen3-4B": Recipe(tp=2, tokens=9216), "Qwen3-8B": Recipe(tp=4, tokens=4096)}

@dataclass
class Arguments(U.ExecuteTrainConfig):
    model: str = "Qwen3-8B"
    hardware: str = "H200"
    num_gpus: int | None = None
    extra_args: str = ""

    def __post_init__(self):
        self.num_gpus = self.num_gpus or U.NUM_GPUS_OF_HARDWARE[self.hardware]

    @property
    def recipe(self) -> Recipe:
        return RECIPES[self.model]

def execute(args: Arguments):
    perf = f"--use-dynamic-batch-size --max-tokens-per-gpu {args.recipe.tokens} "
    match (args.hardware, args.num_nodes):
        case ("H100" | "H200", 1):
            perf += f"--tensor-model-parallel-size {args.recipe.tp} --sequence-parallel "
        case _:
            raise NotImplementedError
    if os.path.exists("/fast"):
        perf += "--recompute-loss-function "
    U.execute_train(
        train_args=(
            f"--hf-checkpoint /data/{args.model} --save /data/{U.create_run_id()}/save "
            "--rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 4096 "
            f"--global-batch-size 256 --actor-num-nodes {args.num_nodes} "
            f"--actor-num-gpus-per-node {args.num_gpus} --colocate "
            f"{U.get_default_wandb_args(__file__)} {perf} {args.extra_args}"
        ),
        train_script="train_async.py",
        megatron_model_type=None,
    )

@U.dataclass_cli
def main(args: Arguments):
    execute(args)

if __name__ == "__main__":
    typer.run(main)
"""


def _read(folder: Path, *outside: str, program: str = PROGRAM) -> Settings:
    (folder / "run.py").write_text(program)
    return read_source(folder / "run.py", None, outside)


def _take(settings: Settings, *keys: str) -> list[Any]:
    return [settings.value(key) for key in keys]


def test_the_options_of_a_program_are_read_as_those_of_its_command(tmp_path: Path) -> None:
    settings = _read(tmp_path)
    keys = ("hf_checkpoint", "max_tokens_per_gpu", "tensor_model_parallel_size", "actor_num_gpus_per_node", "is_async")
    assert settings.table.title == "miles"
    assert _take(settings, *keys) == ["/data/Qwen3-8B", 4096, 4, 8, True]


def test_a_switch_before_unknown_options_stays_a_switch(tmp_path: Path) -> None:
    settings = _read(tmp_path)
    assert _take(settings, "colocate", "sequence_parallel") == [True, True]
    assert "options of {U.get_default_wandb_args(__file__)} are known only at run time" in " ".join(settings.notes)


def test_a_field_of_the_arguments_can_be_set(tmp_path: Path) -> None:
    keys = ("hf_checkpoint", "max_tokens_per_gpu", "tensor_model_parallel_size")
    assert _take(_read(tmp_path, "model=Qwen3-4B"), *keys) == ["/data/Qwen3-4B", 9216, 2]
