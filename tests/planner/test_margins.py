"""Margins of a plan: measured errors, a reserve on each GPU, and the simpler of two equally fast layouts."""

import json
from pathlib import Path

from rlplan.planner.margins import (
    DISPLAY_RESERVE,
    ENOUGH_ROOM,
    RESERVE,
    SAME_SPEED,
    get_reserve,
)
from rlplan.planner.search import find_best_plan
from rlplan.spec.files.job_file import load_job
from rlplan.spec.hardware.catalogue import get_gpu
from tests.factories import gpu_job

ROOT = Path(__file__).parents[2]
CARD = {"policy": "Qwen/Qwen2.5-0.5B", "algorithm": "grpo", "hardware": {"profile": "rtx-4090", "num_devices": 1}}


def test_errors_of_seconds_are_larger_than_what_counts_as_equally_fast() -> None:
    report = json.loads((ROOT / "reports" / "accuracy" / "accuracy.json").read_text("utf-8"))
    assert all(report["summary"][kind]["median_abs"] > SAME_SPEED for kind in ("rl_step_time", "throughput_train"))


def test_a_gpu_with_outputs_for_a_display_keeps_more_free() -> None:
    assert get_reserve(get_gpu("h100-sxm", where="")) == RESERVE
    assert get_reserve(get_gpu("rtx-4090", where="")) == DISPLAY_RESERVE > RESERVE
    plan = find_best_plan(gpu_job(CARD))
    assert plan.binding_capacity == plan.job.load_gpu().memory.value - DISPLAY_RESERVE


def test_the_7b_example_gives_up_seconds_that_nobody_can_measure_for_room() -> None:
    job = load_job(ROOT / "examples" / "grpo-7b-8xh100.yaml", [])
    plan = find_best_plan(job)
    enough = ENOUGH_ROOM * plan.binding_capacity
    fastest = min(plan.runners_up, key=lambda runner_up: runner_up.seconds)
    assert fastest.seconds < plan.seconds <= fastest.seconds * (1 + SAME_SPEED)
    assert fastest.headroom_bytes < enough <= plan.headroom_bytes


def test_what_the_kv_cache_fills_is_told_apart_from_what_is_needed() -> None:
    plan = find_best_plan(gpu_job(CARD, ["placement.placement=hybrid"]))
    assert plan.kv is not None
    more = plan.kv.kv_cache_memory_bytes - plan.kv.least_bytes
    assert more > 0
    assert plan.row_interval()[1] - more <= plan.needed_bytes < plan.row_interval()[1]


def test_a_host_that_was_assumed_is_said_with_what_goes_without_it() -> None:
    words = ["policy=Qwen/Qwen2.5-3B"]
    [note] = [note for note in find_best_plan(gpu_job(CARD, words)).notes if "assumes hosts of 256 GiB" in note]
    assert "with nothing offloaded it" in note
    assert not find_best_plan(gpu_job(CARD, [*words, "hardware.host_memory=64GiB"])).notes
