"""A point is a job: what is said of it is what its plan says; rlplan.accuracy computes no bytes and no seconds."""

import ast
from pathlib import Path

import pytest

import rlplan
from rlplan.accuracy.compare import load_predictors, predict
from rlplan.accuracy.files.reading import bundled_points
from rlplan.accuracy.measured_jobs import PHASES
from rlplan.accuracy.points import Statistic
from rlplan.accuracy.predict import in_its_unit, peak_in_training
from rlplan.accuracy.registry import Prediction
from rlplan.accuracy.rl_steps.job import rl_job
from rlplan.accuracy.training.job import training_job
from tests.factories import ROOT

ACCURACY = ROOT / "rlplan/accuracy"
FORMULAS = ("rlplan.memory", "rlplan.timing")
STILL_OF_THEIR_OWN = {
    "serving/engine.py": "an engine alone is no job yet",
    "serving/latency.py": "an engine under a fixed concurrency is no job yet",
    "serving/other_engines.py": "engines that no job names",
    "named_models.py": "names of quantised checkpoints",
    "predict.py": "types of a ledger's rows",
}
"""Modules that import formulas, and why."""
POINTS = {point.id: point for point in bundled_points()}


def imported(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_no_other_module_of_accuracy_imports_a_formula() -> None:
    having = {
        path.relative_to(ACCURACY).as_posix()
        for path in ACCURACY.rglob("*.py")
        if any(name.startswith(FORMULAS) for name in imported(path))
    }
    assert having == set(STILL_OF_THEIR_OWN)


@pytest.fixture(autouse=True)
def predictors() -> None:
    load_predictors()


def said_of(id_of_point: str) -> Prediction:
    answer = predict(POINTS[id_of_point])
    assert isinstance(answer, Prediction), answer
    return answer


@pytest.mark.parametrize(
    "name", ["simumax-llama3-70b-l12-tp1-pp2-dp4-mbc4-mem", "simumax-llama3-70b-tp2-pp1-dp4-l12-mbc4-mem"]
)
def test_a_peak_is_that_of_the_job_given_to_plan(name: str) -> None:
    found = rlplan.plan(training_job(POINTS[name])).plan
    assert in_its_unit(POINTS[name], peak_in_training(found, Statistic.ALLOCATED), found).parts == said_of(name).parts


@pytest.mark.parametrize("name", ["nemorl-dsv3-512", "nemorl-dsv3-256"])
def test_seconds_are_those_of_the_job_given_to_plan(name: str) -> None:
    assert rlplan.plan(rl_job(POINTS[name])).step_s == pytest.approx(said_of(name).value)


@pytest.mark.parametrize("phase", ["generate", "score", "train"])
def test_seconds_of_a_phase_are_those_of_the_job_in_the_point(phase: str) -> None:
    point = POINTS[f"verl-dapo-7b-h20-32-phases:{phase}"]
    found = rlplan.plan(point.settings["job"]).plan
    seconds = sum(action.cost.seconds for action in found.timing.step.actions if action.phase in PHASES[phase])
    assert seconds == pytest.approx(said_of(point.id).value)
