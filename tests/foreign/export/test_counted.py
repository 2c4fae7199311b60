"""`rlplan check` of what `emit` wrote needs what the plan counted."""

from pathlib import Path

import pytest

from rlplan.api import emit
from rlplan.foreign.check import Asked, Checked, check
from rlplan.foreign.export.backwards import name_hardware
from rlplan.foreign.source import read_source
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Verdict
from rlplan.spec.files.job_file import load_job
from rlplan.spec.files.yaml import read_yaml
from tests.factories import EXAMPLES
from tests.foreign.export.plans import STARTED, make_plan, plan_stack
from tests.repository.at_night import mark_nightly

SLIME_CRITIC = ("algorithm.value_learning_rate=null", "roles.reward.path=null", "roles.value.path=null")
FIRST = [
    ("verl", "grpo-7b-8xh100", ()),
    ("openrlhf", "ppo-70b-64xh100", ()),
    ("nemo_rl", "grpo-7b-8xh100", ()),
    ("slime", "ppo-70b-64xh100", SLIME_CRITIC),
    ("trl", "grpo-7b-8xh100", ()),
]
AT_NIGHT = [
    ("verl", "ppo-70b-64xh100", ()),
    ("verl", "grpo-671b-1024xh200", ()),
    ("verl", "exercises/ppo-70b", ()),
    ("openrlhf", "grpo-7b-8xh100", ()),
    ("openrlhf", "exercises/ppo-7b", ()),
    ("openrlhf", "exercises/grpo-7b", ()),
    ("openrlhf", "exercises/grpo-70b", ()),
    ("openrlhf", "exercises/ppo-70b", ()),
    ("nemo_rl", "grpo-671b-1024xh200", ()),
    ("slime", "grpo-7b-8xh100", ()),
    ("slime", "grpo-671b-1024xh200", ()),
    ("slime", "exercises/ppo-7b", SLIME_CRITIC),
    ("slime", "exercises/grpo-70b", ()),
    ("trl", "exercises/grpo-7b", ("training.backend=deepspeed",)),
    ("trl", "exercises/grpo-70b", ()),
    ("trl", "dpo-8b-8xa100", ()),
]


def check_export(folder: Path, stack: str, plan: Plan) -> Checked:
    return check(read_source(folder / STARTED[stack], None), Asked(name_hardware(plan)))


@pytest.mark.parametrize(("stack", "name", "overrides"), mark_nightly([*FIRST, *AT_NIGHT], but=len(FIRST)))
def test_a_written_file_needs_what_the_plan_counts(
    stack: str, name: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    job = load_job(EXAMPLES / f"{name}.yaml", overrides)
    plan = plan_stack(job, stack)
    emit(EXAMPLES / f"{name}.yaml", tmp_path, overrides, target=stack)
    answer = check_export(tmp_path, stack, plan)
    assert answer.fits
    assert answer.plan is not None
    assert answer.plan.binding.num_bytes == pytest.approx(plan.binding.num_bytes, rel=0.001)


def test_the_one_limit_of_trl_holds_a_prompt_and_an_answer_of_different_lengths(tmp_path: Path) -> None:
    emit(EXAMPLES / "dpo-8b-8xa100.yaml", tmp_path, target="trl")
    assert read_yaml(tmp_path / "train.yaml", "TRL's settings")["max_length"] == 1024 + 2048


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (("framework=nemo_rl", "training.logits=fused"), "plain"),
        (("framework=verl", "training.backend=fsdp2", "training.logits=plain"), "uncast"),
        (("framework=verl", "training.backend=megatron", "training.logits=plain"), "in_place"),
        (("framework=trl", "training.logits=plain"), "fused"),
        (("framework=slime", "training.logits=fused"), "copied"),
        (("framework=openrlhf", "training.logits=fused"), "kept"),
    ],
)
def test_a_loss_that_a_framework_does_not_take_is_refused_with_its_own(words: tuple[str, ...], instead: str) -> None:
    plan = make_plan(*words)
    assert plan.verdict is Verdict.REFUSED
    assert f"training.logits={instead}" in plan.refusals[0]
    assert make_plan(*words, f"training.logits={instead}").verdict is Verdict.FITS
