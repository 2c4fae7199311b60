"""The comparison with TRL: what is done with the numbers that it measures. The measuring itself is `make trl`."""

import json
from pathlib import Path

import pytest

from benchmarks.trl.comparison import JOB, covered, phases, rate, steady
from benchmarks.trl.model import PROMPT_LEN, SIZES, write_prompts
from rlplan.spec.files.job_file import load_job


def test_seconds_that_overlap_count_once() -> None:
    assert covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]) == pytest.approx(4.0)
    assert covered([]) == 0.0


def test_spans_are_summed_by_phase_over_processes_and_what_is_no_work_is_left_out() -> None:
    spans = [
        {"action_id": "generate", "start_s": 0.0, "end_s": 4.0},
        {"action_id": "train_forward_backward", "start_s": 4.5, "end_s": 6.5},
        {"action_id": "train_forward_backward", "start_s": 4.5, "end_s": 7.0},
        {"action_id": "optimizer_step", "start_s": 7.0, "end_s": 7.5},
        {"action_id": "compute_advantages", "start_s": 4.0, "end_s": 4.4},
        {"action_id": "sync_weights", "start_s": 7.6, "end_s": 8.0},
    ]
    found = phases(spans)
    assert found["train_s"] == pytest.approx(3.0)
    assert found["work_s"] == pytest.approx(4.0 + 3.0 + 0.4)


def test_the_first_step_counts_for_nothing() -> None:
    side = {
        "steps": [
            {"step_s": 100.0, "num_tokens": 1},
            {"step_s": 2.0, "num_tokens": 50},
            {"step_s": 4.0, "num_tokens": 70},
        ]
    }
    assert steady(side, "step_s") == 3.0
    assert rate(side) == 20.0


def test_the_job_has_64_rollouts_with_a_long_tail(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **SIZES}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    write_prompts(tmp_path / "prompts.jsonl", 24)
    write_prompts(tmp_path / "heldout.jsonl", 1, seed=1)
    (tmp_path / "job.yaml").write_bytes(JOB.read_bytes())
    job = load_job(tmp_path / "job.yaml")
    assert job.workload.num_rollouts_per_step == 64
    assert job.workload.max_prompt_len == PROMPT_LEN
    assert 39e6 < job.load_model().num_parameters < 42e6
    assert job.algorithm.kl_coef == 0
