"""A scoring pass has one size, which holds the longest sequence."""

import pytest

from rlplan.errors import SpecError
from rlplan.spec.files.job_file import job_from
from rlplan.vocabulary import Role

JOB = {"policy": "Qwen/Qwen2.5-1.5B", "hardware": "8xH100", "algorithm": "grpo", "framework": "verl"}
LENGTHS = ["workload.max_prompt_len=1024", "workload.max_response_len=3072"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("micro_batch_size_per_gpu=4", "max_tokens_per_micro_batch=20000"), "both size a pass"),
        (("max_tokens_per_micro_batch=4095",), "must hold one longest sequence"),
    ],
)
@pytest.mark.parametrize("role", [role for role in Role if role is not Role.VERIFIER])
def test_a_size_that_contradicts_is_refused_and_the_way_out_is_taken(
    role: Role, overrides: tuple[str, ...], words: str
) -> None:
    stated = [f"scoring.{role}.{override}" for override in overrides]
    with pytest.raises(SpecError, match=words) as caught:
        job_from(JOB, [*LENGTHS, *stated])
    assert job_from(JOB, [*LENGTHS, *stated, caught.value.way_out])


def test_the_longest_sequence_itself_is_held() -> None:
    job = job_from(JOB, [*LENGTHS, "scoring.policy.max_tokens_per_micro_batch=4096"])
    assert job.scoring.policy.sizes == ("auto", 4096)
