"""A run folder belongs to one run, and a folder that was refused or left empty looks as it did before."""

import subprocess
import sys
from pathlib import Path

import pytest

from rlplan.errors import SpecError
from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.runtime.run_folder.run_lock import LOCK_NAME, lock_run_folder

HOLD = """
import sys
from pathlib import Path
from rlplan.runtime.run_folder.run_lock import lock_run_folder
with lock_run_folder(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_runs_do_not_write_into_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with (
            pytest.raises(SpecError, match=f"is in use by another run .process {other.pid}"),
            lock_run_folder(folder),
        ):
            pass
        (folder / "metrics.jsonl").write_text("{}")
        with pytest.raises(SpecError, match="in use by another run"), lock_run_folder(folder):
            pass
        other.communicate("", timeout=scale_seconds(10))
    assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]


def test_the_lock_of_a_run_that_was_killed_blocks_no_other_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        other.kill()
    assert (folder / LOCK_NAME).exists()
    with lock_run_folder(folder):
        pass


def test_a_folder_that_holds_something_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(SpecError, match="is not empty"), lock_run_folder(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


def test_a_run_that_is_refused_leaves_no_folder_behind(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="refused"), lock_run_folder(tmp_path / "runs" / "one"):
        raise RuntimeError("refused")
    assert list(tmp_path.iterdir()) == []
