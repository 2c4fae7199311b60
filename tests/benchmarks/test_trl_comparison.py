"""The comparison with TRL: what is done with the numbers that it measures. The measuring itself is `make trl`."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.trl.comparison import JOBS, draw_lengths, measure_union, merge, phases, prepare
from benchmarks.trl.model import PROMPT_LEN, SIZES, write_tokenizer
from benchmarks.trl.report import rate, speedups, spread, values


def test_seconds_that_overlap_count_once() -> None:
    assert measure_union([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]) == pytest.approx(4.0)
    assert measure_union([]) == 0.0


def test_spans_are_summed_by_phase_over_processes_and_what_is_no_work_is_left_out() -> None:
    spans = [
        {"action_id": "generate", "start_s": 0.0, "end_s": 4.0},
        {"action_id": "train_forward_backward", "start_s": 4.5, "end_s": 6.5},
        {"action_id": "train_forward_backward", "start_s": 4.5, "end_s": 7.0},
        {"action_id": "optimizer_step", "start_s": 7.0, "end_s": 7.5},
        {"action_id": "compute_advantages", "start_s": 4.0, "end_s": 4.4},
        {"action_id": "sync_weights", "start_s": 7.6, "end_s": 8.0},
    ]
    seconds = phases(spans)
    assert seconds["train_s"] == pytest.approx(3.0)
    assert seconds["work_s"] == pytest.approx(4.0 + 3.0 + 0.4)


def make_side(*steps: tuple[float, int]) -> dict[str, Any]:
    return {"steps": [{"step_s": seconds, "num_tokens": tokens} for seconds, tokens in steps]}


def test_the_first_step_counts_for_nothing_and_the_others_as_their_median() -> None:
    ours = make_side((100.0, 1), (2.0, 50), (4.0, 80), (1.0, 90))
    assert values(ours, "step_s") == [2.0, 4.0, 1.0]
    assert rate(ours) == 25.0
    assert spread(values(ours, "step_s")) == "2.00 (1.00 to 4.00)"


def test_the_two_sides_are_compared_step_by_step_and_only_where_their_steps_are_the_same() -> None:
    theirs = make_side((300.0, 1), (12.0, 50), (32.0, 80))
    assert speedups(make_side((100.0, 1), (2.0, 50), (4.0, 80)), theirs) == [6.0, 8.0]
    with pytest.raises(AssertionError):
        speedups(make_side((100.0, 1), (2.0, 50), (4.0, 81)), theirs)


def test_a_new_measurement_replaces_its_own_side_of_its_own_job() -> None:
    old = {"tried": {"a": 1}, "jobs": {"even": {"trl": 1, "rlplan": 2}}}
    new = {"jobs": {"even": {"trl": 3}, "long-tail": {"trl": 4}}}
    jobs = {"even": {"trl": 3, "rlplan": 2}, "long-tail": {"trl": 4}}
    assert merge(old, new) == {"tried": {"a": 1}, "jobs": jobs}


@pytest.mark.parametrize(("name", "num_rollouts", "prompt_len"), [("long-tail", 64, PROMPT_LEN), ("even", 32, 128)])
def test_the_jobs_are_those_of_the_report(tmp_path: Path, name: str, num_rollouts: int, prompt_len: int) -> None:
    (tmp_path / "model").mkdir()
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **SIZES}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    write_tokenizer(tmp_path / "model")
    job = prepare(tmp_path, name, 2)
    assert job.workload.num_rollouts_per_step == job.workload.rollouts_per_mini_batch == num_rollouts
    assert job.workload.max_prompt_len == prompt_len
    assert 39e6 < job.load_model().num_parameters < 42e6
    assert job.algorithm.kl_coef == 0
    lengths = draw_lengths(job, 1)
    assert (len(set(lengths)) == 1) is (name == "even")
    assert max(lengths) <= job.workload.max_response_len
    assert set(JOBS) == {"long-tail", "even"}
