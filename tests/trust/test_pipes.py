"""A pipe without a writer, in the place of each file that a command reads, holds no command up."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rlplan.emit.bundle import write_bundle
from tests.cli.conftest import Call, rlplan
from tests.factories import EXAMPLES, QUICKSTART, make_plan, write_job
from tests.report.factory import make_run

__all__ = ["rlplan"]

GPUS = ("--hardware", "8xH100")


def make_pipe(path: Path) -> Path:
    """A pipe where a file may have been."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def make_bundle_pipe(folder: Path, name: str) -> Path:
    write_bundle(make_plan(), folder / "bundle")
    make_pipe(folder / "bundle" / name)
    return folder / "bundle"


def make_run_pipe(folder: Path, name: str) -> Path:
    run = make_run(folder / "run")
    make_pipe(run / name)
    return run


def make_model_pipe(folder: Path, name: str) -> list[object]:
    for path in (EXAMPLES / "models" / "sorter").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    make_pipe(folder / name)
    return ["estimate", QUICKSTART, f"policy.path={folder}"]


PLACES: dict[str, Callable[[Path], list[object]]] = {
    "a job": lambda folder: ["plan", make_pipe(folder / "job.yaml")],
    "a job without a name that says so": lambda folder: ["plan", make_pipe(folder / "job")],
    "a plan": lambda folder: ["plan", make_pipe(folder / "plan.json")],
    "a plan of a bundle": lambda folder: ["emit", make_bundle_pipe(folder, "plan.json"), "-o", folder / "again"],
    "a file of a bundle": lambda folder: ["plan", make_bundle_pipe(folder, "ray.json")],
    "a model's config": lambda folder: make_model_pipe(folder, "config.json"),
    "a model's tokenizer": lambda folder: make_model_pipe(folder, "tokenizer.json"),
    "a model's weights": lambda folder: make_model_pipe(folder, "more.safetensors"),
    "an algorithm": lambda folder: ["plan", QUICKSTART, f"algorithm.path={make_pipe(folder / 'a.py')}:MINE"],
    "points": lambda folder: ["accuracy", make_pipe(folder / "points")],
    "points by name": lambda folder: ["accuracy", make_pipe(folder / "points.json")],
    "a trace": lambda folder: ["report", make_run_pipe(folder, "trace.jsonl"), "--out", folder / "out"],
    "metrics": lambda folder: ["report", make_run_pipe(folder, "metrics.jsonl"), "--out", folder / "out"],
    "timings": lambda folder: ["report", make_run_pipe(folder, "timings.jsonl"), "--out", folder / "out"],
    "a script of another stack": lambda folder: ["import", make_pipe(folder / "run.sh"), *GPUS],
    "a configuration of another stack": lambda folder: ["check", make_pipe(folder / "run.yaml"), *GPUS],
    "a program of another stack": lambda folder: ["import", make_pipe(folder / "run.py"), *GPUS],
    "lengths of a run": lambda folder: ["plan", write_job(folder), "--lengths", make_run_pipe(folder, "lengths.json")],
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", PLACES)
def test_a_pipe_in_place_of_a_file_ends_in_a_message_or_is_left_alone(rlplan: Call, tmp_path: Path, name: str) -> None:
    answer = rlplan(*PLACES[name](tmp_path))
    assert answer.exit_code in (0, 2, 3), answer.err
    assert "a bug in rlplan" not in answer.err
