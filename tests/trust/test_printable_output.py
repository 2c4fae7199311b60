"""Control and reordering characters of files, keys, paths and ids reach no terminal."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Call, rlplan
from tests.factories import QUICKSTART, write_job
from tests.report.factory import make_run

__all__ = ["rlplan"]

GPUS = ("--hardware", "8xH100", "--model", "Qwen/Qwen2.5-7B")
HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202eevil\u2066\x9b1m"


def hostile_run(folder: Path) -> Path:
    run = make_run(folder / f"run{HOSTILE}")
    (run / "metrics.jsonl").write_text(f'{{"{HOSTILE}": 1}}\n{{"step": 2}}\n')
    return run


def file(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def points(folder: Path) -> Path:
    point = {"id": HOSTILE, "kind": HOSTILE[:90], "model": HOSTILE, "gpu": HOSTILE}
    return file(folder, "p.json", json.dumps([point | {"measured": {"value": 1.0, "unit": f"GiB {HOSTILE}"}}]))


PLACES: dict[str, Callable[[Path], list[object]]] = {
    "a key of a job": lambda folder: ["plan", file(folder, "job.yaml", json.dumps({HOSTILE: 1}))],
    "a value of a job": lambda folder: ["plan", write_job(folder), f"placement.placement={json.dumps(HOSTILE)}"],
    "a name of a job": lambda folder: ["plan", QUICKSTART, f"name={json.dumps(HOSTILE)}"],
    "an override": lambda folder: ["plan", QUICKSTART, f"{HOSTILE}=1"],
    "a path of a job": lambda folder: ["plan", folder / HOSTILE],
    "a path in a job": lambda folder: ["plan", QUICKSTART, f"data.prompts={json.dumps(HOSTILE)}"],
    "a model": lambda folder: ["estimate", "--model", HOSTILE, "--gpus", "8xH100"],
    "a GPU": lambda folder: ["estimate", "--model", "Qwen/Qwen2.5-7B", "--gpus", f"8x{HOSTILE}"],
    "an option": lambda folder: ["plan", f"--{HOSTILE}"],
    "a command": lambda folder: [HOSTILE],
    "points": lambda folder: ["accuracy", points(folder), "--all"],
    "a run": lambda folder: ["report", hostile_run(folder), "--out", folder / "out"],
    "a script": lambda folder: [
        "import",
        file(folder, f"{HOSTILE}.sh", f"python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo '{HOSTILE}=1'\n"),
        *GPUS,
    ],
    "a configuration": lambda folder: [
        "check",
        file(
            folder,
            f"{HOSTILE}.yaml",
            json.dumps({"actor_rollout_ref": {HOSTILE: 1}, "algorithm": {"adv_estimator": "grpo"}}),
        ),
        *GPUS,
    ],
}


@pytest.mark.parametrize("place", PLACES)
def test_untrusted_text_is_printed_without_its_control_characters(rlplan: Call, tmp_path: Path, place: str) -> None:
    answer = rlplan(*PLACES[place](tmp_path))
    assert answer.exit_code in (0, 1, 2, 3), answer.err
    written = answer.out + answer.err
    assert [each for each in written if not each.isprintable() and each not in "\n\t\xa0"] == []
    assert "owned" in written or answer.exit_code == 0  # the rest of a long name may be cut off
