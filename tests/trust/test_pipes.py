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


def in_place_of(path: Path) -> Path:
    """A pipe where a file may have been."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def of_a_bundle(folder: Path, name: str) -> Path:
    write_bundle(make_plan(), folder / "bundle")
    in_place_of(folder / "bundle" / name)
    return folder / "bundle"


def of_a_run(folder: Path, name: str) -> Path:
    run = make_run(folder / "run")
    in_place_of(run / name)
    return run


def of_a_model(folder: Path, name: str) -> list[object]:
    for path in (EXAMPLES / "models" / "sorter").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    in_place_of(folder / name)
    return ["estimate", QUICKSTART, f"policy.path={folder}"]


PLACES: dict[str, Callable[[Path], list[object]]] = {
    "a job": lambda folder: ["plan", in_place_of(folder / "job.yaml")],
    "a job without a name that says so": lambda folder: ["plan", in_place_of(folder / "job")],
    "a plan": lambda folder: ["plan", in_place_of(folder / "plan.json")],
    "a plan of a bundle": lambda folder: ["emit", of_a_bundle(folder, "plan.json"), "-o", folder / "again"],
    "a file of a bundle": lambda folder: ["plan", of_a_bundle(folder, "ray.json")],
    "a model's config": lambda folder: of_a_model(folder, "config.json"),
    "a model's tokenizer": lambda folder: of_a_model(folder, "tokenizer.json"),
    "a model's weights": lambda folder: of_a_model(folder, "more.safetensors"),
    "an algorithm": lambda folder: ["plan", QUICKSTART, f"algorithm.path={in_place_of(folder / 'a.py')}:MINE"],
    "points": lambda folder: ["accuracy", in_place_of(folder / "points")],
    "points by name": lambda folder: ["accuracy", in_place_of(folder / "points.json")],
    "a trace": lambda folder: ["report", of_a_run(folder, "trace.jsonl"), "--out", folder / "out"],
    "metrics": lambda folder: ["report", of_a_run(folder, "metrics.jsonl"), "--out", folder / "out"],
    "timings": lambda folder: ["report", of_a_run(folder, "timings.jsonl"), "--out", folder / "out"],
    "a script of another stack": lambda folder: ["import", in_place_of(folder / "run.sh"), *GPUS],
    "a configuration of another stack": lambda folder: ["check", in_place_of(folder / "run.yaml"), *GPUS],
    "a program of another stack": lambda folder: ["import", in_place_of(folder / "run.py"), *GPUS],
    "lengths of a run": lambda folder: ["plan", write_job(folder), "--lengths", of_a_run(folder, "lengths.json")],
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", PLACES)
def test_a_pipe_in_place_of_a_file_ends_in_a_message_or_is_left_alone(rlplan: Call, tmp_path: Path, name: str) -> None:
    answer = rlplan(*PLACES[name](tmp_path))
    assert answer.exit_code in (0, 2, 3), answer.err
    assert "a bug in rlplan" not in answer.err
