"""The way out of a refused export works when typed, and makes no job smaller."""

import re
from itertools import product
from pathlib import Path

import pytest

from rlplan.api import emit, plan
from rlplan.errors import EmitError, RlplanError, SpecError
from rlplan.planner.plan import write_plan
from tests.factories import EXAMPLES
from tests.repository.at_night import mark_nightly

STACKS = ("nemo-rl", "slime", "openrlhf", "trl", "verl")
ON_GPUS = ("grpo-7b-8xh100", "ppo-70b-64xh100", "grpo-lora-8b-1xrtx4090", "dpo-8b-8xa100", "grpo-671b-1024xh200")
EXERCISES = ("exercises/grpo-7b", "exercises/ppo-7b", "exercises/grpo-70b", "exercises/ppo-70b")
ON_HOSTS = ("quickstart", "maturity/2-swapping", "lora-tiny", "algorithms/gspo", "algorithms/sft")
FIRST = [("grpo-lora-8b-1xrtx4090", "slime"), ("ppo-70b-64xh100", "slime"), ("grpo-671b-1024xh200", "trl")]
CASES = [*FIRST, *(case for case in product((*ON_GPUS, *EXERCISES, *ON_HOSTS), STACKS) if case not in FIRST)]
OVERRIDE = re.compile(r"(?<![\w.])[a-z_]+(?:\.[a-z_]+)*=\S+")
NEVER = ("workload.max_", "workload.num_prompts", "workload.num_samples", "workload.mini_batch")


def refusal(name: str, stack: str, folder: Path, *overrides: str) -> RlplanError | None:
    """Why an example is not written for a stack; None where it is."""
    try:
        emit(EXAMPLES / f"{name}.yaml", folder, overrides, target=stack)
    except RlplanError as error:
        return error
    return None


@pytest.mark.parametrize(("name", "stack"), mark_nightly(CASES, but=len(FIRST)))
def test_the_command_of_a_refused_export_succeeds(name: str, stack: str, tmp_path: Path) -> None:
    """One alternative at least; where it is another framework, the folder of that one is written."""
    error = refusal(name, stack, tmp_path / "first")
    if not isinstance(error, EmitError | SpecError):
        return
    alternatives = [OVERRIDE.findall(words) for words in error.way_out.split(" or ")]
    assert all(alternatives), error.way_out
    assert not any(override.startswith(NEVER) for overrides in alternatives for override in overrides)
    outcomes: list[RlplanError | None] = []
    for index, overrides in enumerate(alternatives):
        named = [override.partition("=")[2] for override in overrides if override.startswith("framework=")]
        if named == ["rlplan"]:  # whose bundle asks for weights and data
            outcomes.append(None)
        else:
            outcomes.append(refusal(name, (*named, stack)[0], tmp_path / str(index), *overrides))
    assert not all(isinstance(outcome, EmitError | SpecError) for outcome in outcomes), error.way_out


def test_what_changes_what_is_learned_is_named_apart(tmp_path: Path) -> None:
    words = ("training.lora={rank: 8}", "algorithm.token_weights=constant", "training.logits=fused")
    error = refusal("grpo-7b-8xh100", "slime", tmp_path, *words)
    assert isinstance(error, SpecError)
    layout, _, learned = error.way_out.partition(" and (this changes what is learned) ")
    assert layout == "training.logits=copied"
    assert set(learned.split()) == {"training.lora=null", "algorithm.token_weights=token"}
    assert refusal("grpo-7b-8xh100", "slime", tmp_path, layout, *learned.split()) is None


@pytest.mark.parametrize(("model", "layers"), [("Qwen/Qwen2.5-7B", 28), ("Qwen/Qwen2.5-32B", 64)])
def test_uneven_pipeline_stages_are_refused_with_a_number_that_is_taken(
    model: str, layers: int, tmp_path: Path
) -> None:
    """No size of the last stage makes the others equal, with 28 layers on 16 stages or 64 on 20."""
    stages = 16 if layers == 28 else 20
    words = [f"policy={model}", "hardware=320xH200", f"training.pp={stages}", "training.tp=4"]
    words += ["workload.num_prompts_per_step=640", "workload.num_samples_per_prompt=16", "training.ep=1"]
    error = refusal("grpo-671b-1024xh200", "slime", tmp_path, *words)
    assert isinstance(error, EmitError)
    assert f"{layers} layers" in error.what
    overrides = OVERRIDE.findall(error.way_out)
    assert [override.partition("=")[0] for override in overrides] == ["training.pp"]


def test_a_plan_for_another_framework_names_the_framework_to_plan_for(tmp_path: Path) -> None:
    write_plan(plan(EXAMPLES / "grpo-7b-8xh100.yaml").plan, tmp_path / "plan.json")
    with pytest.raises(EmitError) as caught:
        emit(tmp_path / "plan.json", tmp_path / "out", target="slime")
    assert "framework=slime" in caught.value.way_out
    write_plan(plan(EXAMPLES / "grpo-7b-8xh100.yaml", ["framework=slime"]).plan, tmp_path / "plan.json")
    assert emit(tmp_path / "plan.json", tmp_path / "out", target="slime").files
    assert emit(tmp_path / "plan.json", tmp_path / "again").files == ("README.md", "train.sh")
