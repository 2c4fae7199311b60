"""Resumes and sandboxes that are refused: one message, nothing is written, and the same --out can be named again."""

from pathlib import Path

import pytest

from rlplan.emit.bundle import write_bundle
from rlplan.runtime.checkpoints.identity import describe_identity
from tests.cli.conftest import Call
from tests.cli.test_bad_input import check
from tests.factories import QUICKSTART, make_plan, write_job
from tests.repository.at_night import mark_nightly
from tests.runtime.checkpoints.test_folder import save

PROGRAMS = QUICKSTART.parent / "rewards" / "code-executor.yaml"


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A run of `write_job` with two checkpoints, which was stopped."""
    plan = make_plan()
    for step in (1, 2):
        save(tmp_path / "earlier", step, identity=describe_identity(plan.job))
    write_bundle(plan, tmp_path / "earlier" / "bundle")
    return tmp_path / "earlier"


def files_of(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.mark.parametrize(
    ("override", "words"),
    mark_nightly(
        [
            ("training.lora={rank: 4}", ("the checkpoint belongs to another job: training.lora is",)),
            ("workload.num_steps=1", ("the checkpoint is of step 2, the job has 1 steps",)),
            ("rewards=[{kind: function, path: 'OWN:f'}]", ("the reward function cannot",)),
        ],
        but=1,
    ),
)
def test_a_refused_resume_writes_nothing(
    rlplan: Call, earlier: Path, tmp_path: Path, override: str, words: tuple[str, ...]
) -> None:
    job = write_job(tmp_path)
    (tmp_path / "own.py").write_text("raise RuntimeError('no')")
    before = files_of(tmp_path)
    for _ in range(2):
        override = override.replace("OWN", str(tmp_path / "own.py"))
        check(rlplan("run", job, override, "--resume", earlier, "--out", tmp_path / "run"), 2, *words)
        written = files_of(tmp_path) - before
        assert {path for path in written if "__pycache__" not in path.parts} == set()  # Python's own, of own.py


def test_a_resume_in_place_that_is_refused_leaves_the_run_as_it_was(rlplan: Call, earlier: Path) -> None:
    write_bundle(make_plan(seed=5), earlier / "bundle")
    before = {path: path.stat().st_mtime_ns for path in files_of(earlier)}
    check(
        rlplan("run", "--resume", earlier), 2, "the checkpoint belongs to another job: seed is 5, in the checkpoint 0"
    )
    assert {path: path.stat().st_mtime_ns for path in files_of(earlier)} == before


def test_a_missing_sandbox_writes_nothing(rlplan: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    for name, code, word in (("bubblewrap", 4, "no sandbox works on this host"), ("bubblewrp", 2, "Did you mean")):
        check(rlplan("run", PROGRAMS, "--sandbox", name, "--out", tmp_path / "run"), code, word)
        assert list(tmp_path.iterdir()) == []


def test_a_run_folder_that_is_none_is_not_resumed(rlplan: Call, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for name, message in (("nowhere", "does not exist"), ("file", "is no folder")):
        check(rlplan("run", "--resume", tmp_path / name), 2, message)
        check(rlplan("run", QUICKSTART, "--resume", tmp_path / name, "--out", tmp_path / "run"), 2, message)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
