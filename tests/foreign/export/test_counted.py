"""`rlplan check` of what `emit` wrote needs what the plan counted, or both figures are told."""

from pathlib import Path

import pytest

from rlplan.api import emit
from rlplan.errors import EmitError, RlplanError
from rlplan.foreign.check import Asked, Checked, check
from rlplan.foreign.export.counted import SAME_PEAK, name_hardware
from rlplan.foreign.export.folders import write_export
from rlplan.foreign.export.planned import planned_for
from rlplan.foreign.source import read_source
from rlplan.planner.plan import Plan
from rlplan.planner.search import best_plan
from rlplan.spec.files.job_file import changed, load_job
from rlplan.units import format_bytes
from tests.factories import EXAMPLES
from tests.foreign.export.plans import ASKED, plan_of
from tests.foreign.export.test_folders import STARTED
from tests.repository.at_night import at_night

NEMO_LENGTHS = ("workload.max_prompt_len=2304", "workload.max_response_len=6912")
SLIME_CRITIC = ("algorithm.value_learning_rate=5e-7",)
FIRST = [
    ("verl", "grpo-7b-8xh100", ()),
    ("openrlhf", "ppo-70b-64xh100", ()),
    ("nemo_rl", "grpo-7b-8xh100", NEMO_LENGTHS),
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
    ("nemo_rl", "grpo-671b-1024xh200", ("workload.max_prompt_len=4352", "workload.max_response_len=13056")),
    ("slime", "grpo-7b-8xh100", ()),
    ("slime", "grpo-671b-1024xh200", ()),
    ("slime", "exercises/ppo-7b", ()),
    ("slime", "exercises/grpo-70b", ()),
    ("trl", "exercises/grpo-7b", ()),
    ("trl", "exercises/grpo-70b", ()),
    ("trl", "dpo-8b-8xa100", ("workload.max_response_len=1024",)),
]


def checked(folder: Path, stack: str, plan: Plan) -> Checked:
    return check(read_source(folder / STARTED[stack], None), Asked(name_hardware(plan)))


@pytest.mark.parametrize(("stack", "name", "overrides"), at_night([*FIRST, *AT_NIGHT], but=len(FIRST)))
def test_a_written_file_needs_what_the_plan_counts(
    stack: str, name: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    job = load_job(EXAMPLES / f"{name}.yaml", overrides)
    plan, settled = planned_for(job, best_plan(job, with_others=False), stack)
    written = emit(EXAMPLES / f"{name}.yaml", tmp_path, overrides, target=stack)
    assert written.settled == settled
    answer = checked(tmp_path, stack, plan)
    assert answer.fits
    assert answer.plan is not None
    planned, counted = plan.binding.num_bytes, answer.plan.binding.num_bytes
    if abs(counted - planned) > SAME_PEAK * planned:
        note, readme = " ".join(written.notes), (tmp_path / "README.md").read_text()
        assert all(format_bytes(size) in note and format_bytes(size) in readme for size in (planned, counted))
    else:
        assert written.notes == ()


def without_loss(stack: str) -> tuple[str, ...]:
    """Overrides that keep a job to what a stack can say, except for how the stack takes its loss."""
    return tuple(word for word in ASKED[stack] if not word.startswith("training.logits="))


COSTLIER = {
    "openrlhf": ("ppo-70b-64xh100", without_loss("openrlhf")),
    "nemo_rl": ("grpo-7b-8xh100", (*NEMO_LENGTHS, *without_loss("nemo_rl"))),
    "slime": ("ppo-70b-64xh100", (*SLIME_CRITIC, *without_loss("slime"))),
}
"""Jobs that say everything that the stack has, but for its loss."""


@pytest.mark.parametrize("stack", COSTLIER)
def test_a_plan_with_another_loss_than_the_stack_s_is_told_of_or_refused(stack: str, tmp_path: Path) -> None:
    """The more rows a pass has, the more the stack's logits take: from a number on they do not fit."""
    name, overrides = COSTLIER[stack]
    job = load_job(EXAMPLES / f"{name}.yaml", overrides)
    outcomes = set()
    for tokens in (None, 16_384, 24_576, 32_768, 49_152, 65_536):
        given = () if tokens is None else (f"training.max_tokens_per_micro_batch={tokens}",)
        try:
            plan = best_plan(changed(job, given), with_others=False)
        except RlplanError:
            continue
        if not plan.memory_fits:
            continue
        outcomes.add(outcome(plan, stack, tmp_path / str(tokens)))
    assert outcomes >= {"told"} or outcomes >= {"refused"}


def outcome(plan: Plan, stack: str, folder: Path) -> str:
    """Whether a plan is refused, or written as it fits, with or without a word."""
    refusal, readme = None, ""
    try:
        readme = write_export(plan, stack, folder)[-1].read_text()
    except EmitError as error:
        refusal = error
    if refusal is not None:
        assert "training.logits=" in refusal.way_out
        assert " of 78.9 GiB (range " in refusal.what
        return "refused"
    answer = checked(folder, stack, plan)
    assert answer.fits
    return "told" if "the plan counts" in readme else "alike"


def test_a_loss_that_the_job_itself_says_is_refused_where_the_stack_s_does_not_fit(tmp_path: Path) -> None:
    """OpenRLHF keeps the logits of a pass: 32,768 rows of 152,064 words take 19.9 GB in fp32 alone, and their
    gradient as many.
    """
    words = (
        *without_loss("openrlhf"),
        "training.logits=by_rows",
        "workload.micro_batch_size_per_gpu=16",
        "training.dtype=bfloat16",
    )
    words += ("workload.max_prompt_len=1024", "workload.max_response_len=3072")
    plan = plan_of(*words, model="Qwen/Qwen2.5-7B")
    assert plan.memory_fits
    with pytest.raises(EmitError, match=r"OpenRLHF needs \d+ GiB of 78.9 GiB") as caught:
        write_export(plan, "openrlhf", tmp_path)
    assert "training.logits=kept" in caught.value.way_out
