"""How long a sequence may be: the model's own limit, or the one that a trainer overrides it with."""

import pytest

from rlplan.errors import SpecError
from rlplan.planner.rules import find_model_refusals
from rlplan.planner.search import find_best_plan
from rlplan.spec.files.job_file import job_from
from rlplan.spec.job import JobSpec
from rlplan.spec.resolved import settle

ASKED = {"policy": "Qwen/Qwen2.5-Math-7B", "hardware": "8xH100", "algorithm": "grpo"}


def job(*overrides: str) -> JobSpec:
    return job_from(ASKED, overrides)


@pytest.mark.parametrize("buffer", [0, 1024, 4096])
def test_the_lengths_that_are_named_instead_of_too_long_ones_can_be_typed(buffer: int) -> None:
    longer = (f"algorithm.overlong_buffer={buffer}", "workload.max_prompt_len=2048", "workload.max_response_len=8192")
    with pytest.raises(SpecError, match="the model's limit is 4,096") as caught:
        job(*longer).load_model()
    typed = caught.value.way_out.partition(",")[0].split()
    assert job(*longer, *typed).load_model().max_position_embeddings == 4096


def test_a_context_that_is_overridden_is_the_limit_whether_longer_or_shorter() -> None:
    job("policy.max_position_embeddings=16384", "workload.max_response_len=8192").load_model()
    with pytest.raises(SpecError, match="the model's limit is 1,536"):
        job("policy.max_position_embeddings=1536", "workload.max_response_len=8192").load_model()


def test_a_context_that_is_overridden_is_planned_for_trainers_of_others_alone() -> None:
    asked = job("policy.max_position_embeddings=16384")
    assert next(find_model_refusals(settle(asked))).startswith(
        "policy.max_position_embeddings: the runtime uses the value in"
    )
    assert find_best_plan(asked, with_others=False).job.backend == "fsdp2"


def test_a_table_of_learned_positions_has_as_many_rows_as_the_context_that_is_overridden() -> None:
    """GPT-2's has 1,024 rows of 768."""
    small = {"policy": "openai-community/gpt2", "hardware": "8xH100", "algorithm": "grpo"}
    lengths = ["workload.max_prompt_len=256", "workload.max_response_len=512"]
    usual = job_from(small, lengths).load_model()
    longer = job_from(small, [*lengths, "policy.max_position_embeddings=2048"]).load_model()
    assert longer.num_parameters - usual.num_parameters == 1024 * 768
