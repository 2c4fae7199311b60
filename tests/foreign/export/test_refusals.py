"""A way out that a refused export prints works as it is typed."""

import re
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from rlplan.api import emit, plan
from rlplan.errors import EmitError, RlplanError
from rlplan.planner.plan import write_plan
from rlplan.spec.files.job_file import load_job
from tests.factories import EXAMPLES
from tests.repository.at_night import at_night

STACKS = ("nemo-rl", "slime", "openrlhf", "trl", "verl")
ON_GPUS = ("grpo-7b-8xh100", "ppo-70b-64xh100", "grpo-lora-8b-1xrtx4090", "dpo-8b-8xa100", "grpo-671b-1024xh200")
EXERCISES = ("exercises/grpo-7b", "exercises/ppo-7b", "exercises/grpo-70b", "exercises/ppo-70b")
ON_HOSTS = ("quickstart", "maturity/2-swapping", "lora-tiny", "algorithms/gspo", "algorithms/sft")
FIRST = [("grpo-7b-8xh100", "nemo-rl"), ("ppo-70b-64xh100", "slime"), ("grpo-lora-8b-1xrtx4090", "trl")]
CASES = [*FIRST, *(case for case in product((*ON_GPUS, *EXERCISES, *ON_HOSTS), STACKS) if case not in FIRST)]
OVERRIDE = re.compile(r"(?<![\w.])[a-z_]+(?:\.[a-z_]+)*=\S+")
LEARNED = "(this changes what is learned)"


@cache
def refusal(name: str, stack: str, folder: Path, *overrides: str) -> RlplanError | None:
    """Why an example is not written for a stack; None where it is."""
    try:
        emit(EXAMPLES / f"{name}.yaml", folder, overrides, target=stack)
    except RlplanError as error:
        return error
    return None


@pytest.mark.parametrize(("name", "stack"), at_night(CASES, but=len(FIRST)))
def test_the_command_of_a_refused_export_succeeds(name: str, stack: str, tmp_path: Path) -> None:
    error = refusal(name, stack, tmp_path / "first")
    if not isinstance(error, EmitError):
        return
    assert error.way_out
    assert not re.search(r"\b(VALUE|ORG/NAME)\b|--set", error.way_out)
    overrides = OVERRIDE.findall(error.way_out)
    assert overrides or "=" not in error.way_out
    if overrides:
        assert refusal(name, stack, tmp_path / "then", *overrides) is None, error.way_out


def test_what_changes_what_is_learned_is_named_apart(tmp_path: Path) -> None:
    """NeMo-RL has one length of prompts and responses together; how ranks share a sequence changes nothing."""
    error = refusal("grpo-7b-8xh100", "nemo-rl", tmp_path, "training.ulysses=4", "framework=rlplan")
    assert error is not None
    layout, _, learned = error.way_out.partition(f"and {LEARNED} ")
    assert "training.backend=fsdp2" in layout
    assert "workload" not in layout
    assert learned.startswith("workload.max_prompt_len=")


@pytest.mark.parametrize(("model", "layers"), [("Qwen/Qwen2.5-7B", 28), ("Qwen/Qwen2.5-32B", 64)])
def test_uneven_pipeline_stages_are_refused_with_a_number_that_is_taken(
    model: str, layers: int, tmp_path: Path
) -> None:
    """Of 28 layers on 16 stages, or 64 on 20, no last stage makes the others alike."""
    stages = 16 if layers == 28 else 20
    words = [
        f"policy={model}",
        "hardware=320xH200",
        "training.backend=megatron",
        f"training.pp={stages}",
        "training.tp=4",
    ]
    words += ["workload.num_prompts_per_step=640", "workload.num_samples_per_prompt=16", "training.ep=1"]
    error = refusal("grpo-671b-1024xh200", "slime", tmp_path, *words)
    assert isinstance(error, EmitError)
    assert f"{layers} layers" in error.what
    overrides = OVERRIDE.findall(error.way_out)
    assert overrides
    assert refusal("grpo-671b-1024xh200", "slime", tmp_path, *words, *overrides) is None


def test_a_plan_that_a_stack_cannot_say_is_refused_with_what_plans_its_job(tmp_path: Path) -> None:
    write_plan(plan(EXAMPLES / "grpo-7b-8xh100.yaml").plan, tmp_path / "plan.json")
    with pytest.raises(EmitError) as caught:
        emit(tmp_path / "plan.json", tmp_path / "out", target="slime")
    overrides = OVERRIDE.findall(caught.value.way_out)
    assert "training.backend=megatron" in overrides
    assert load_job(EXAMPLES / "grpo-7b-8xh100.yaml", overrides)
    write_plan(plan(EXAMPLES / "grpo-7b-8xh100.yaml", overrides).plan, tmp_path / "plan.json")
    assert emit(tmp_path / "plan.json", tmp_path / "out", target="slime").files
