"""The planned schedule is the executed one, action by action, for every example and random jobs."""

from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rlplan.dataflow.schedule import Schedule
from rlplan.emit.bundle import read_bundle, write_bundle
from rlplan.errors import NoFeasiblePlanError
from rlplan.memory.ledger import MemoryLedger
from rlplan.planner.executable import require_executable
from rlplan.planner.plan import Plan, read_plan
from rlplan.planner.plan_parts import Verdict
from rlplan.planner.search import find_best_plan, find_plan
from rlplan.spec.files.job_file import job_from, load_job
from rlplan.spec.job import JobSpec
from rlplan.timing.step import JobTiming
from tests.factories import EXAMPLES
from tests.repository.at_night import mark_nightly

HERE = {"prompts": "data/sort_digits/train.jsonl", "heldout": "data/sort_digits/heldout.jsonl"}
DATA = {key: str(EXAMPLES / place) for key, place in HERE.items()}
ALL_EXAMPLES = sorted(
    path
    for path in EXAMPLES.rglob("*.yaml")
    if "policy:" in (text := path.read_text("utf-8")) and "\nstages:" not in text and "backend: " not in text
)
"""But for those that say of themselves that another trainer runs them, and files with several jobs."""
MODELS = ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B", "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-0.6B")
GPUS = ("1xH100", "2xA100", "4xL40S", "8xH100", "16xH100", "2xdgx-h100", "32xA100", "64xH100")
ALGORITHMS = ("grpo", "ppo", "rloo", "dapo", "dr_grpo", "remax", "online_dpo", "cispo")


def said(schedule: Schedule, ledger: MemoryLedger, timing: JobTiming | None) -> dict[str, Any]:
    """Everything that two plans must agree on."""
    actions = [(part, *_facts(action)) for part, of in schedule.parts for action in of]
    times = () if timing is None else chain(timing.start.actions, timing.step.actions, timing.sometimes.actions)
    return {
        "actions": actions,
        "groups": schedule.groups,
        "layouts": schedule.layouts,
        "bytes": ledger.rows,
        "seconds": [(time.action_id, time.start_s, time.cost.seconds) for time in times],
    }


def _facts(action: Any) -> tuple[Any, ...]:
    return (action.id, action.kind, action.role, action.after, action.device_group, action.processes, action.every)


def check(asked: JobSpec, folder: Path) -> None:
    """The plan of a job, and the plan in the bundle that is made of it."""
    try:
        planned = find_plan(asked)
    except NoFeasiblePlanError:
        return
    if asked.device_kind == "cuda":
        plan = find_best_plan(asked)
        assert said(plan.schedule, plan.ledger, plan.timing) == _read(planned), "the page says what is emitted"
        planned = require_executable(plan)
    write_bundle(planned, folder)
    executed = read_plan(folder / "plan.json")
    assert _read(executed) == _read(planned)
    assert read_bundle(folder).schedule == planned.schedule
    again = find_plan(executed.job)
    assert _read(again) == _read(planned), "a bundle's job, planned again, is its plan"


def _read(plan: Plan) -> dict[str, Any]:
    return said(plan.schedule, plan.ledger, plan.timing)


SOME = 6
"""One of this many examples runs by default; the others run at night."""


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=str(path.relative_to(EXAMPLES)), marks=pytest.mark.nightly if number % SOME else ())
        for number, path in enumerate(ALL_EXAMPLES)
    ],
)
def test_the_bundle_of_an_example_is_its_plan(path: Path, tmp_path: Path) -> None:
    overrides = [] if "\ndata:" in path.read_text("utf-8") else [f"data={DATA}", "rewards=[{kind: answer_matcher}]"]
    check(load_job(path, overrides), tmp_path)


def random_job(seed: int) -> JobSpec:
    """A job on GPUs with random choices, some of them left open."""
    random = Random(seed)
    prompts, samples = random.choice((32, 64, 128)), random.choice((4, 8))
    workload = {
        "num_prompts_per_step": prompts,
        "num_samples_per_prompt": samples,
        "mini_batch_size": random.choice((None, prompts * samples // 2, prompts * samples // 4)),
        "max_prompt_len": 512,
        "max_response_len": random.choice((1024, 3072)),
        "response_lengths": {"kind": "lognormal", "median": 400, "sigma": 0.8},
    }
    placement = random.choice(("auto", "auto", "colocated", "hybrid", "disaggregated"))
    may_be_async = placement in ("auto", "disaggregated")
    job = {
        "policy": random.choice(MODELS),
        "algorithm": random.choice(ALGORITHMS),
        "hardware": random.choice(GPUS if placement != "disaggregated" else GPUS[1:]),
        "workload": workload,
        "placement": {"placement": placement, "max_staleness": random.choice((0, 0, 2)) if may_be_async else 0},
        "training": {"lora": random.choice((None, None, {"rank": 32}))},
        "checkpoints": {"every": random.choice((0, 1, 20))},
        "data": DATA,
        "rewards": [{"kind": "answer_matcher"}],
    }
    return job_from(job)


@pytest.mark.parametrize("seed", mark_nightly(range(2), but=1))
def test_the_bundle_of_a_random_job_is_its_plan(seed: int, tmp_path: Path) -> None:
    check(random_job(seed), tmp_path)


@pytest.mark.parametrize(
    "num_gpus", [9, pytest.param(14, marks=pytest.mark.nightly), pytest.param(3, marks=pytest.mark.nightly)]
)
def test_gpus_that_a_plan_leaves_idle_stay_idle_in_its_bundle(num_gpus: int, tmp_path: Path) -> None:
    asked = load_job(EXAMPLES / "grpo-7b-8xh100.yaml", [f"hardware={num_gpus}xH100"])
    check(asked, tmp_path)
    bundle = read_bundle(tmp_path)
    assert bundle.job.hardware.num_devices == len({device for _, device in bundle.schedule.processes})
    assert (bundle.job.hardware.num_devices < num_gpus) == (num_gpus != 3)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(2, 84))
def test_the_bundle_of_more_random_jobs_is_their_plan(seed: int, tmp_path: Path) -> None:
    check(random_job(seed), tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(1000, 1500, 50))
def test_each_of_many_random_jobs_that_fits_is_emitted(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 50):
        asked = random_job(seed)
        try:
            plan = find_best_plan(asked)
        except NoFeasiblePlanError:
            continue
        if plan.verdict is Verdict.FITS:
            write_bundle(require_executable(plan), tmp_path / str(seed))
