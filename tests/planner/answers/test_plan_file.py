"""Plan files of GPU budgets: equal after a round trip, held to their totals, refused when they are something else."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rlplan.errors import SpecError
from rlplan.planner.answers import plan_file
from rlplan.planner.answers.plan_file import dump_gpu_plan, is_gpu_plan, read_gpu_plan, results_as_json, write_gpu_plan
from rlplan.planner.gpu.remedies import find_gpu_plan
from rlplan.planner.gpu_plan import GpuPlan
from rlplan.spec.job_file import job_from
from tests.factories import EXAMPLES, QUICKSTART

SMALL = "Qwen/Qwen2.5-0.5B"


def budget(*overrides: str, model: str = SMALL, gpus: str = "2xH100", algorithm: str = "grpo") -> GpuPlan:
    return find_gpu_plan(job_from({"policy": model, "hardware": gpus, "algorithm": algorithm}, overrides))


BUDGETS: dict[str, Callable[[], GpuPlan]] = {
    "small": budget,
    "ppo": lambda: budget("workload.mini_batch_size=256", algorithm="ppo"),
    "dpo": lambda: budget(algorithm="dpo"),
    "lengths": lambda: budget(
        "workload.response_lengths={kind: lognormal, median: 500, sigma: 0.7}", "workload.num_steps=7"
    ),
    "adapters": lambda: budget("training.lora={rank: 8, target_modules: [q_proj]}", "rollout.kv_cache_memory=2GiB"),
    "does not fit": lambda: budget("training.zero_stage=2", model="Qwen/Qwen2.5-7B", gpus="1xRTX4090"),
}


@cache
def searched(name: str) -> GpuPlan:
    """One of BUDGETS; searched for when a test asks, not while tests are collected."""
    return BUDGETS[name]()


@pytest.fixture
def answer(request: pytest.FixtureRequest) -> GpuPlan:
    return searched(request.param)


budgets = pytest.mark.parametrize("answer", BUDGETS, indirect=True)


def written(tmp_path: Path, name: str = "small") -> tuple[Path, dict[str, Any]]:
    path = tmp_path / "plan.json"
    write_gpu_plan(searched(name), path)
    return path, json.loads(path.read_text())


@budgets
def test_a_plan_is_read_as_it_was_written(answer: GpuPlan, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "plan.json"
    write_gpu_plan(answer, path)
    again = read_gpu_plan(path)
    assert again.asked == answer.asked
    assert again.choice == answer.choice
    assert again.ledger == answer.ledger
    assert again.timing == answer.timing
    assert again.runners_up == answer.runners_up
    assert again.remedies == answer.remedies
    assert results_as_json(again) == results_as_json(answer)
    assert dump_gpu_plan(again, path.parent) + "\n" == path.read_text()


def test_a_plan_tells_people_and_other_tools_what_they_ask_first(tmp_path: Path) -> None:
    _, data = written(tmp_path)
    step = data["results"]["step"]
    assert (data["schema_version"], data["kind"]) == (2, "gpu_plan")
    assert step["seconds"] == pytest.approx(sum(phase["seconds"] for phase in step["phases"].values()))
    assert step["phases"]["rollout"]["bound_by"] in step["phases"]["rollout"]["parts"]
    assert data["results"]["verdict"] == "fits"
    assert data["choice"]["trainer"]["zero_stage"] in (0, 1, 2, 3)


def test_a_model_s_path_stands_relative_to_the_plan_and_moves_with_it(tmp_path: Path) -> None:
    here = tmp_path / "here"
    (here / "shapes").mkdir(parents=True)
    config = (EXAMPLES / "models" / "decoder-160m" / "config.json").read_bytes()
    (here / "shapes" / "config.json").write_bytes(config)
    short = ("workload.max_prompt_len=100", "workload.max_response_len=100")
    answer = budget(*short, model=str(here / "shapes" / "config.json"))
    write_gpu_plan(answer, here / "plan.json")
    assert json.loads((here / "plan.json").read_text())["asked"]["policy"]["path"] == "shapes/config.json"
    assert str(tmp_path) not in (here / "plan.json").read_text()
    here.rename(tmp_path / "there")
    again = read_gpu_plan(tmp_path / "there" / "plan.json")
    assert again.asked.policy.path == str(tmp_path / "there" / "shapes" / "config.json")


@pytest.mark.parametrize("version", [0, 1, "2", None, 1.5, [2]])
def test_another_schema_version_is_refused(tmp_path: Path, version: Any) -> None:
    path, data = written(tmp_path)
    path.write_text(json.dumps(data | {"schema_version": version}))
    with pytest.raises(SpecError, match="plan schema version is") as caught:
        read_gpu_plan(path)
    assert (caught.value.exit_code, caught.value.where) == (2, f"{path}: schema_version")


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "{}", '{"schema_version": 2, "kind": "gpu_plan"}'])
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(SpecError) as caught:
        read_gpu_plan(tmp_path / "plan.json")
    assert caught.value.where.startswith(str(tmp_path / "plan.json"))
    assert caught.value.way_out


def test_a_plan_that_was_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    path, _ = written(tmp_path)
    text = path.read_text()
    for end in range(0, len(text) - 2, max(1, len(text) // 40)):
        path.write_text(text[:end])
        with pytest.raises(SpecError):
            read_gpu_plan(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("asked.hardware.num_devices", 4),
        ("choice.trainer.zero_stage", 0),
        ("choice.engine.tp", 0),
        ("choice.arrangement.num_training", -1),
        ("totals.step_s", 1.0),
        ("results.verdict", "fits well"),
    ],
)
def test_a_plan_that_was_changed_by_hand_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    path, data = written(tmp_path)
    *parents, last = key.split(".")
    part = data
    for parent in parents:
        part = part[parent]
    part[last] = value
    path.write_text(json.dumps(data))
    with pytest.raises(SpecError, match="changed after it was made"):
        read_gpu_plan(path)


@pytest.mark.parametrize(
    ("part", "changes", "words"),
    [
        ("totals", {"device_peak_bytes": 17}, "device_peak_bytes = 17, it is"),
        ("totals", {"step_s": 1.25}, "step_s = 1.25, it is"),
        ("totals", {"verdict": "does not fit"}, "verdict = 'does not fit'"),
    ],
)
def test_a_plan_of_other_formulas_is_refused_with_both_numbers(
    tmp_path: Path, part: str, changes: dict[str, Any], words: str
) -> None:
    path, data = written(tmp_path)
    data[part] |= changes
    data["digest"] = plan_file._digest({key: data[key] for key in plan_file._STORED})
    path.write_text(json.dumps(data))
    with pytest.raises(SpecError, match="it is") as caught:
        read_gpu_plan(path)
    assert words in caught.value.what
    assert "rlplan plan" in caught.value.way_out


@pytest.mark.parametrize(
    ("name", "value"), [("zero_stage", "2"), ("zero_stage", None), ("gradient_checkpointing", 1), ("colour", "blue")]
)
def test_a_choice_of_another_version_is_refused_at_its_key(tmp_path: Path, name: str, value: Any) -> None:
    path, data = written(tmp_path)
    data["choice"]["trainer"][name] = value
    data["digest"] = plan_file._digest({key: data[key] for key in plan_file._STORED})
    path.write_text(json.dumps(data))
    with pytest.raises(SpecError) as caught:
        read_gpu_plan(path)
    assert caught.value.where.startswith(f"{path}: choice.trainer")


def test_plans_of_jobs_are_told_apart(tmp_path: Path) -> None:
    path, _ = written(tmp_path)
    assert is_gpu_plan(path)
    (tmp_path / "job.json").write_text(json.dumps({"schema_version": 1, "job": str(QUICKSTART)}))
    assert not is_gpu_plan(tmp_path / "job.json")


def test_a_plan_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SpecError, match="cannot be written"):
        write_gpu_plan(searched("small"), tmp_path / "file" / "plan.json")
