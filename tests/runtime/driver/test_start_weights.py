"""Start weights of a run's own: written while Ray starts, whole under their name, and once a run folder."""

import sys
from pathlib import Path
from typing import Any

import pytest

from rlplan.emit.execution import execution_spec
from rlplan.errors import RunError
from rlplan.runtime.driver import launch
from tests.factories import make_plan

SPEC = execution_spec(make_plan(**{"policy.init": "random"}))
WRITES = (
    "import pathlib, sys; folder = pathlib.Path(sys.argv[2]); folder.mkdir(); (folder / 'seed').write_text(sys.argv[3])"
)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


def as_child(monkeypatch: pytest.MonkeyPatch, program: str) -> list[str]:
    """A program in the writer's place; what is asked of it, call by call."""
    asked: list[str] = []

    def command(module: str, *arguments: str) -> list[str]:
        asked.append(module)
        return [sys.executable, "-I", "-S", "-c", program, *arguments]

    monkeypatch.setattr(launch, "make_module_command", command)
    return asked


def test_they_are_waited_for_when_they_are_needed_and_kept_for_a_run_that_begins_again(
    monkeypatch: pytest.MonkeyPatch, run_folder: Path
) -> None:
    asked = as_child(monkeypatch, WRITES)
    for _ in range(2):
        with launch._start_weights(SPEC, run_folder) as start_weights:
            assert start_weights() == run_folder / "start_policy"
    assert asked == ["rlplan.runtime.models.start_checkpoint"]
    assert (run_folder / "start_policy" / "seed").read_text() == str(SPEC.job.seed)
    assert not (run_folder / "start_policy.draft").exists()


def test_what_was_not_finished_has_another_name_and_is_written_anew(
    monkeypatch: pytest.MonkeyPatch, run_folder: Path
) -> None:
    as_child(monkeypatch, WRITES + "; import time; time.sleep(60)")
    with pytest.raises(KeyboardInterrupt), launch._start_weights(SPEC, run_folder):
        raise KeyboardInterrupt
    (run_folder / "start_policy.draft").mkdir(exist_ok=True)
    assert not (run_folder / "start_policy").exists()
    as_child(monkeypatch, WRITES)
    with launch._start_weights(SPEC, run_folder) as start_weights:
        assert (start_weights() / "seed").is_file()


def test_a_writer_that_fails_is_said_with_its_log(monkeypatch: pytest.MonkeyPatch, run_folder: Path) -> None:
    as_child(monkeypatch, "raise SystemExit(1)")
    with (
        launch._start_weights(SPEC, run_folder) as start_weights,
        pytest.raises(RunError, match="exit status 1") as caught,
    ):
        start_weights()
    assert caught.value.where == str(run_folder / "logs" / "start_checkpoint.log")


def test_a_policy_with_weights_of_its_own_is_loaded_from_where_it_lies(run_folder: Path) -> None:
    spec: Any = execution_spec(make_plan())
    with launch._start_weights(spec, run_folder) as start_weights:
        assert str(start_weights()) == spec.job.policy.path
