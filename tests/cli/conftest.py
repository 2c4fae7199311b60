"""The command line, called as a user calls it: in this process where that is enough, as a real one where it is not."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from rlplan_cli import app

from rlplan.runtime.processes.machine_speed import scale_seconds
from tests.factories import ROOT

RLPLAN = Path(sys.executable).parent / "rlplan"


@dataclass(frozen=True)
class Answer:
    """How a command ended."""

    exit_code: int
    out: str
    err: str


Call = Callable[..., Answer]


@pytest.fixture
def rlplan(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """Runs `rlplan ARGUMENTS` in this process, from the root of the repository."""
    monkeypatch.chdir(ROOT)

    def call(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["rlplan", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            app.main()
        captured = capfd.readouterr()
        assert isinstance(caught.value.code, int)
        return Answer(caught.value.code, captured.out, captured.err)

    return call


def start(*arguments: object, **environment: str) -> Answer:
    """Runs `rlplan ARGUMENTS` as a process of its own, into pipes."""
    done = subprocess.run(
        [RLPLAN, *map(str, arguments)],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **environment},
        capture_output=True,
        text=True,
        timeout=scale_seconds(60),
        check=False,
    )
    return Answer(done.returncode, done.stdout, done.stderr)
