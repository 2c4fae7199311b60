"""The largest value that fits: it fits, the next does not, for the reason that is said; what has none is refused."""

import math
from pathlib import Path

import pytest

from rlplan.errors import NoFeasiblePlanError, SpecError
from rlplan.planner.answers.changes import Change, ask
from rlplan.planner.answers.solve import KEYS, LADDER, expand_key, solve
from rlplan.planner.plan_parts import Verdict
from rlplan.spec.files.job_file import job_from, load_job
from rlplan.spec.job import JobSpec
from tests.factories import EXAMPLES, QUICKSTART
from tests.repository.at_night import mark_nightly


def small(**overrides: str) -> JobSpec:
    words = [f"{key.replace('__', '.')}={value}" for key, value in overrides.items()]
    return job_from({"policy": "Qwen/Qwen2.5-0.5B", "algorithm": "grpo", "hardware": "1xRTX4090"}, words)


@pytest.mark.parametrize(
    ("key", "job"),
    mark_nightly(
        [
            ("max_response_len", EXAMPLES / "grpo-lora-8b-1xrtx4090.yaml"),
            ("num_samples_per_prompt", None),
            ("max_num_seqs", None),
        ],
        but=1,
    ),
)
def test_the_value_fits_and_the_next_one_does_not_as_it_is_typed(key: str, job: Path | None) -> None:
    asked = load_job(job) if job else small(hardware__host_memory="24GiB", rollout__kv_cache_memory="2GiB")
    solution = solve(asked, key)
    again = ask(asked, Change((solution.override,)))
    assert again.verdict is Verdict.FITS
    assert again.seconds == solution.plan.seconds
    if solution.next is None:
        assert key == "max_num_seqs"
        assert solution.value == asked.workload.num_rollouts_per_step
        return
    assert solution.next.value == solution.value + 1
    beyond = ask(asked, Change((f"{solution.key}={solution.next.value}",)))
    assert beyond.verdict is not Verdict.FITS
    assert beyond.why == solution.next.why
    if beyond.plan is not None and (short := beyond.plan.shortage) is not None:
        assert (solution.next.needed_bytes, solution.next.available_bytes) == (
            short.needed_bytes,
            short.available_bytes,
        )
        assert solution.next.needed_bytes > solution.next.available_bytes
        assert solution.next.device == short.peak.scope
        assert solution.next.phase in ("rollout", "train", "score", "sync", "evaluate", "switch", "start")


def test_a_rule_that_forbids_the_next_value_is_said_with_its_number() -> None:
    solution = solve(load_job(QUICKSTART), "workload.max_response_len")
    assert solution.next is not None
    assert solution.next.value == solution.value + 1
    assert "limit is 256" in solution.next.why
    assert solution.next.device == ""


def test_samples_that_no_mini_batch_divides_are_skipped() -> None:
    asked = small(hardware__host_memory="24GiB", workload__mini_batch_size="384", workload__num_samples_per_prompt="12")
    solution = solve(asked, "num_samples_per_prompt")
    work = asked.workload
    assert work.mini_batch_size is not None
    unit = work.mini_batch_size // math.gcd(work.mini_batch_size, work.num_prompts_per_step)
    assert solution.value % unit == 0
    assert solution.next is not None
    assert solution.next.value - solution.value == unit


@pytest.mark.nightly
def test_a_smaller_value_is_found_where_the_job_s_own_does_not_fit() -> None:
    asked = load_job(EXAMPLES / "grpo-lora-8b-1xrtx4090.yaml", ["workload.max_response_len=30000"])
    other = solve(load_job(EXAMPLES / "grpo-lora-8b-1xrtx4090.yaml"), "max_response_len").value
    assert abs(solve(asked, "max_response_len").value - other) < 16, "bytes are rounded up to a block of tokens"


def test_where_no_value_fits_that_is_an_answer() -> None:
    asked = job_from({"policy": "Qwen/Qwen2.5-7B", "algorithm": "grpo", "hardware": "1xL4"})
    with pytest.raises(NoFeasiblePlanError, match="not even 1") as caught:
        solve(asked, "max_num_seqs")
    assert "too much for a GPU" in caught.value.rule


@pytest.mark.parametrize("key", [*KEYS, *KEYS.values()])
def test_a_key_is_short_or_dotted(key: str) -> None:
    assert expand_key(key) in KEYS.values()


@pytest.mark.parametrize("key", ["max_respons_len", "training.zero_stage", "", "workload.max_num_seqs"])
def test_another_key_is_refused_with_those_there_are(key: str) -> None:
    with pytest.raises(SpecError, match="cannot be solved for") as caught:
        expand_key(key)
    assert "max_response_len, num_samples_per_prompt, max_num_seqs" in caught.value.rule


def test_what_generates_nothing_has_no_sequences_at_once() -> None:
    with pytest.raises(SpecError, match="dpo generates nothing"):
        solve(load_job(EXAMPLES / "dpo-8b-8xa100.yaml"), "max_num_seqs")


def test_the_largest_model_fits_and_the_next_one_of_the_ladder_does_not() -> None:
    job = job_from({"policy": LADDER[0], "hardware": "1xrtx-4090", "algorithm": "sft"}, ["training.zero_stage=0"])
    solution = solve(job, "model")
    place = LADDER.index(str(solution.value))
    assert solution.override == f"policy={LADDER[place]}"
    assert solution.next is not None
    assert solution.next.value == LADDER[place + 1]
