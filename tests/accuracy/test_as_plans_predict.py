"""A point is a job: what is said of it is what its plan says; rlplan.accuracy computes no bytes and no seconds."""

import ast
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import rlplan
from rlplan.accuracy.compare import PREDICTORS, predict
from rlplan.accuracy.files.reading import bundled_points
from rlplan.accuracy.points import MeasuredPoint, Statistic
from rlplan.accuracy.predict import (
    peak_in_training,
    plan_point_job,
    predict_bytes,
    serve_job,
    simulate_load,
    validate_job,
)
from rlplan.accuracy.predictions import Prediction
from rlplan.accuracy.rl_steps.job import rl_job
from rlplan.accuracy.rl_steps.points import PHASES
from rlplan.accuracy.rl_steps.weight_sync import sync_job
from rlplan.accuracy.serving_points import engine_job, latency_job
from rlplan.accuracy.settings_read import watch_settings
from rlplan.accuracy.training.colocated import colocated_job
from rlplan.accuracy.training.job import training_job
from rlplan.accuracy.training.points import score_job
from rlplan.accuracy.training.throughput import step_job
from rlplan.results import PlannedResult, ServingResult
from rlplan.vocabulary import Role
from tests.factories import ROOT

ACCURACY = ROOT / "rlplan/accuracy"
FORMULAS = ("rlplan.memory", "rlplan.timing")
VALUE_TYPES = {
    "predict.py": {"rlplan.memory.ledger": "the type of a ledger's rows, which a peak is read from"},
}
"""All that rlplan.accuracy imports of memory/ and timing/, and why."""
ASKED = {
    "rlplan.planner.machine.open_search": "plan_point_job",
    "rlplan.planner.serving.serve": "serve_job",
    "rlplan.planner.serving.serve_load": "simulate_load",
}
"""Calls of `rlplan plan`, `estimate` and `simulate` by which predictions come about, and who makes them here."""
POINTS = {point.id: point for point in bundled_points()}


def list_imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def list_imported_names(path: Path, module: str) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    having = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == module]
    return {alias.name for node in having for alias in node.names}


def test_accuracy_imports_no_formula_of_bytes_or_seconds() -> None:
    having = {
        path.relative_to(ACCURACY).as_posix(): {name for name in list_imports(path) if name.startswith(FORMULAS)}
        for path in ACCURACY.rglob("*.py")
    }
    assert {name: value for name, value in having.items() if value} == {
        name: set(modules) for name, modules in VALUE_TYPES.items()
    }
    assert list_imported_names(ACCURACY / "predict.py", "rlplan.memory.ledger") == {"LedgerRow", "RunPhase"}


def test_one_module_asks_the_planner_and_every_kind_asks_that_module() -> None:
    """Parameters are counted of the model that a job loads."""
    for called in ASKED:
        module, _, name = called.rpartition(".")
        users = {
            path.relative_to(ACCURACY).as_posix()
            for path in ACCURACY.rglob("*.py")
            if name in list_imported_names(path, module)
        }
        assert users == {"predict.py"}, called
    readers = {*ASKED.values(), "validate_job"}
    for kind, predictor in PREDICTORS.items():
        path = ROOT / Path(predictor.__module__.replace(".", "/")).with_suffix(".py")
        assert list_imported_names(path, "rlplan.accuracy.predict") & readers, kind


def predict_bundled(id_of_point: str) -> Prediction:
    answer = predict(POINTS[id_of_point])
    assert isinstance(answer, Prediction), answer
    return answer


@pytest.mark.parametrize(
    "name", ["simumax-llama3-70b-l12-tp1-pp2-dp4-mbc4-mem", "simumax-llama3-70b-tp2-pp1-dp4-l12-mbc4-mem"]
)
def test_a_peak_is_that_of_the_job_given_to_plan(name: str) -> None:
    plan = rlplan.plan(training_job(POINTS[name])).plan
    assert (
        predict_bytes(POINTS[name], peak_in_training(plan, Statistic.ALLOCATED), plan).parts
        == predict_bundled(name).parts
    )


@pytest.mark.parametrize("name", ["nemorl-dsv3-512", "nemorl-dsv3-256"])
def test_seconds_are_those_of_the_job_given_to_plan(name: str) -> None:
    assert rlplan.plan(rl_job(POINTS[name])).step_s == pytest.approx(predict_bundled(name).value)


@pytest.mark.parametrize("phase", ["generate", "score", "train"])
def test_seconds_of_a_phase_are_those_of_the_job_in_the_point(phase: str) -> None:
    point = POINTS[f"verl-dapo-7b-h20-32-phases:{phase}"]
    plan = rlplan.plan(point.settings["job"]).plan
    seconds = sum(action.cost.seconds for action in plan.timing.step.actions if action.phase in PHASES[phase])
    assert seconds == pytest.approx(predict_bundled(point.id).value)


def job_in_the_point(point: MeasuredPoint) -> dict[str, Any]:
    return dict(point.settings["job"])


def engine_beside_a_trainer(point: MeasuredPoint) -> dict[str, Any]:
    return colocated_job(point, has_passes=False)


PLANNED: Mapping[str, tuple[str, Callable[[MeasuredPoint], dict[str, Any]]]] = {
    "train_peak": ("simumax-llama3-70b-l12-tp1-pp2-dp4-mbc4-mem", training_job),
    "train_steady": ("", lambda point: training_job(point, has_passes=False)),
    "throughput_train": ("", step_job),
    "logprob_peak": ("", lambda point: score_job(point, Role.REFERENCE)),
    "sleeping_engine_residual": ("", engine_beside_a_trainer),
    "rl_step_time": ("nemorl-dsv3-512", rl_job),
    "weight_sync_time": ("", sync_job),
    "phase_time": ("verl-dapo-7b-h20-32-phases:train", job_in_the_point),
}
"""A point of every kind whose job has a step, and the job; without an id the first one that is predicted. Kinds that
are not here have jobs of others: `rl_fits` of `rl_step_time`, `role_peak` of `phase_time`, `rollout_peak` of the engine
asleep."""
SCORED = MeasuredPoint(
    id="scored",
    kind="logprob_peak",
    model="Qwen/Qwen2.5-0.5B",
    gpu="1x H100",
    settings={"seq": 1024, "micro_batch": 2, "role": "reference", "gpus": 1},
    measured={"value": 4.0, "unit": "GiB max allocated"},  # type: ignore[arg-type]
)
"""No bundled point is of this kind."""
SERVED = ("vllm_weights", "vllm_profile_peak", "vllm_activation_peak", "vllm_cuda_graph", "vllm_kv", "kv_per_token")
LOADED = ("serving_tpot", "serving_ttft", "throughput_infer", "kv_saturation")


def first_point(kind: str, name: str = "") -> MeasuredPoint:
    points = (POINTS[name],) if name else (point for point in (*POINTS.values(), SCORED) if point.kind == kind)
    return watch_settings(next(point for point in points if isinstance(predict(point), Prediction)))


def job_file(folder: Path, job: Mapping[str, Any]) -> Path:
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))
    return path


@pytest.mark.parametrize("kind", PLANNED)
def test_a_point_and_the_same_point_as_a_job_file_have_the_same_bytes_and_seconds(tmp_path: Path, kind: str) -> None:
    name, read = PLANNED[kind]
    job = read(first_point(kind, name))
    as_point, as_file = plan_point_job(job), rlplan.plan(job_file(tmp_path, job))
    assert isinstance(as_file, PlannedResult)
    assert as_file.plan.choice == as_point.choice
    assert as_file.plan.ledger == as_point.ledger
    assert as_file.plan.timing == as_point.timing


@pytest.mark.parametrize("kind", [*SERVED, *LOADED])
def test_an_engine_s_point_and_its_job_file_have_the_same_bytes_and_seconds(tmp_path: Path, kind: str) -> None:
    point = first_point(kind)
    job = latency_job(point) if kind in LOADED else engine_job(point)
    path = job_file(tmp_path, job)
    estimated = rlplan.estimate(path)
    assert isinstance(estimated, ServingResult)
    assert estimated.served.memory == serve_job(job).memory
    if kind in LOADED:
        simulated = rlplan.simulate(path)
        assert isinstance(simulated, ServingResult)
        assert simulated.load == simulate_load(job)


def test_a_count_of_parameters_is_of_the_model_that_the_job_loads() -> None:
    assert predict_bundled("params-llama32-3b-lora-r32-qv").value == 9_175_040
    assert (
        validate_job({"policy": "Qwen/Qwen3-32B", "hardware": "1xH100"}).load_model().num_parameters == 32_762_123_264
    )
