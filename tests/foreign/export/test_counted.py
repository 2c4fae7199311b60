"""`rlplan check` of what `emit` wrote needs what the plan counted, or both figures are told."""

from pathlib import Path

import pytest

from rlplan.api import emit
from rlplan.errors import EmitError
from rlplan.foreign.check import Asked, Checked, check
from rlplan.foreign.export.counted import SAME_PEAK, name_hardware
from rlplan.foreign.export.folders import write_export
from rlplan.foreign.source import read_source
from rlplan.planner.plan import Plan
from rlplan.spec.files.job_file import load_job
from rlplan.units import format_bytes
from tests.factories import EXAMPLES
from tests.foreign.export.plans import STARTED, plan_for, plan_of
from tests.repository.at_night import at_night

CHECKPOINTED = "training.gradient_checkpointing=true"
SLIME_CRITIC = ("algorithm.value_learning_rate=null",)
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
    ("slime", "exercises/ppo-7b", ()),
    ("slime", "exercises/grpo-70b", ()),
    ("trl", "exercises/grpo-7b", ()),
    ("trl", "exercises/grpo-70b", ()),
    ("trl", "dpo-8b-8xa100", ()),
]


def checked(folder: Path, stack: str, plan: Plan) -> Checked:
    return check(read_source(folder / STARTED[stack], None), Asked(name_hardware(plan)))


@pytest.mark.parametrize(("stack", "name", "overrides"), at_night([*FIRST, *AT_NIGHT], but=len(FIRST)))
def test_a_written_file_needs_what_the_plan_counts(
    stack: str, name: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    job = load_job(EXAMPLES / f"{name}.yaml", overrides)
    plan = plan_for(job, stack)
    written = emit(EXAMPLES / f"{name}.yaml", tmp_path, overrides, target=stack)
    answer = checked(tmp_path, stack, plan)
    assert answer.fits
    assert answer.plan is not None
    planned, counted = plan.binding.num_bytes, answer.plan.binding.num_bytes
    if abs(counted - planned) > SAME_PEAK * planned:
        note, readme = " ".join(written.notes), (tmp_path / "README.md").read_text()
        assert all(format_bytes(size) in note and format_bytes(size) in readme for size in (planned, counted))
    else:
        assert written.notes == ()


def test_a_loss_that_the_job_itself_says_is_refused_where_the_files_need_more(tmp_path: Path) -> None:
    """NeMo-RL's file has a word for a fused loss under Megatron alone, and is counted with whole logits under FSDP2."""
    words = ("framework=nemo_rl", "training.backend=fsdp2", "training.logits=fused", CHECKPOINTED)
    plan = plan_of(*words, "workload.micro_batch_size_per_gpu=4", "workload.max_response_len=7168")
    assert plan.memory_fits
    with pytest.raises(EmitError, match=r"NeMo-RL needs [\d.]+ GiB of 78.9 GiB") as caught:
        write_export(plan, "nemo_rl", tmp_path)
    assert "training.logits=plain" in caught.value.way_out
