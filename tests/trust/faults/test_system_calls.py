"""A run of three steps, killed before each system call that changes the disk, and refused each of its writes.

No step that was committed is lost, at most one is done again, the last checkpoint always loads, and the run that goes
on ends as one without faults, to the byte. Faults are injected by strace; the run is in small_run.py.
"""

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlplan.api import plan as plan_of
from rlplan.errors import SpecError
from rlplan.planner.plan import Plan
from rlplan.runtime.checkpoints.finding import find_checkpoint
from rlplan.runtime.checkpoints.manifest import POINTER, checkpoints_folder
from rlplan.runtime.data.prompt_sets import PromptSets, load_prompts
from tests.factories import EXAMPLES
from tests.trust.faults.small_run import NUM_STEPS, small_run

CHANGES = (
    *("write", "pwrite64", "writev", "fsync", "fdatasync", "ftruncate", "truncate", "link", "linkat", "symlink"),
    *(
        "rename",
        "renameat",
        "renameat2",
        "mkdir",
        "mkdirat",
        "unlink",
        "unlinkat",
        "rmdir",
        "copy_file_range",
        "sendfile",
    ),
)
"""System calls that change a disk; `openat` is left out, which mostly reads: what it makes is empty until a write."""
REFUSED = ("write", "fsync", "rename", "mkdir")
"""Those that a disk refuses which is full or broken."""
OVERRIDES = (
    "checkpoints.every=1",
    "checkpoints.keep_last=2",
    f"workload.num_steps={NUM_STEPS}",
    "hardware.num_devices=2",
)
ENDS = (0, 2, 5)
"""Exit codes: all went well, nothing was begun, and the disk takes no more."""
_PR_SET_PTRACER = 0x59616D61

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3000)]


class FaultyRun:
    """Small runs, each in a process of its own."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.plan: Plan = plan_of(str(EXAMPLES / "quickstart.yaml"), OVERRIDES).plan
        self.prompts: PromptSets = load_prompts(self.plan.job)
        self.whole = place / "whole"
        assert self.run(self.whole) == 0

    def run(self, folder: Path, *, resumes: bool = False, inject: str = "", log: Path | None = None) -> int:
        """Its exit code; negative: the signal that ended it. inject: of strace, such as `write:signal=KILL:when=7`."""
        stopped, release = os.pipe()
        child = os.fork()
        if not child:
            os.close(release)
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)
            os.read(stopped, 1)
            code = 70
            try:
                code = small_run(self.plan, self.prompts, folder, resumes=resumes)
            except BaseException:
                (self.place / "traceback").write_text(traceback.format_exc())
            finally:
                os._exit(code)
        os.close(stopped)
        tracer = self._trace(child, inject, log) if inject or log else None
        os.write(release, b"x")
        os.close(release)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if tracer is not None:
            tracer.communicate(timeout=30)
        return code

    def _trace(self, pid: int, inject: str, log: Path | None) -> "subprocess.Popen[str]":
        what = f"inject={inject}" if inject else f"trace={','.join(f'?{call}' for call in CHANGES)}"
        command = ["strace", "-p", str(pid), "-o", str(log or "/dev/null"), "-e", what]
        tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert tracer.stderr is not None
        assert "attached" in tracer.stderr.readline()
        return tracer

    def counts(self, folder: Path, *, resumes: bool = False) -> Counter[str]:
        """How often a run makes each of the calls."""
        log = self.place / "calls"
        assert self.run(folder, resumes=resumes, log=log) == 0
        return Counter(re.findall(r"^(\w+)\(", log.read_text(), flags=re.MULTILINE))

    def assert_resumes(self, folder: Path, what: str) -> int:
        """See the module's docstring. Gives how many finished steps are done again.

        A checkpoint that the disk refused is an alarm, and one more step that may be done again.
        """
        committed = step_of_pointer(folder)
        finished = len(lines(folder / "metrics.jsonl")) - 1
        refused = sum("no checkpoint of step" in row["text"] for row in lines(folder / "alarms.jsonl"))
        try:
            checkpoint = find_checkpoint(folder)
        except SpecError:
            assert committed == 0, what
            assert finished <= 1 + refused, what
            shutil.rmtree(folder, ignore_errors=True)
            assert self.run(folder) == 0, what
            assert_same(folder, self.whole, what)
            return max(0, finished)
        assert checkpoint.problems == (), what
        assert checkpoint.step >= committed, what
        assert checkpoint.step >= finished - 1 - refused, what
        code = self.run(folder, resumes=True)
        assert code == 0 or (code == 2 and read_state(folder) == "finished"), (what, code, self.trace_back())
        assert_same(folder, self.whole, what)
        return max(0, finished - checkpoint.step)

    def trace_back(self) -> str:
        path = self.place / "traceback"
        return path.read_text() if path.exists() else ""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> FaultyRun:
    return FaultyRun(tmp_path_factory.mktemp("faulty"))


def lines(path: Path) -> list[Any]:
    """Whole lines."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def step_of_pointer(folder: Path) -> int:
    pointer = checkpoints_folder(folder) / POINTER
    return int(json.loads(pointer.read_text())["checkpoint"].removeprefix("step-")) if pointer.exists() else 0


def read_state(folder: Path) -> str:
    return str(json.loads((folder / "status.json").read_text())["state"])


def assert_same(folder: Path, whole: Path, what: str) -> None:
    for name in ("metrics.jsonl", "timings.jsonl", "prompts.jsonl", "lengths.json"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes(), (what, name)
    checkpoint, other = find_checkpoint(folder), find_checkpoint(whole)
    assert (checkpoint.manifest.files, checkpoint.state) == (other.manifest.files, other.state), what


@pytest.mark.parametrize("resumes", [False, True], ids=["a new run", "one that was resumed"])
def test_killed_before_any_system_call_no_committed_step_is_lost(
    faulty: FaultyRun, resumes: bool, tmp_path: Path
) -> None:
    """The one that was resumed has its first step from an earlier run, which was killed in its second."""
    begun = tmp_path / "begun"
    if resumes:
        assert faulty.run(begun, inject="rename:signal=KILL:when=11") == -signal.SIGKILL
        assert step_of_pointer(begun) == 1
    again, num_kills = Counter[int](), 0
    for call, count in faulty.counts(_copy(begun, tmp_path / "counted"), resumes=resumes).items():
        for number in range(1, count + 1):
            folder, what = _copy(begun, tmp_path / f"{call}-{number}"), f"{call} {number} of {count}"
            code = faulty.run(folder, resumes=resumes, inject=f"{call}:signal=KILL:when={number}")
            assert code == -signal.SIGKILL, (what, code, faulty.trace_back())
            again[faulty.assert_resumes(folder, what)] += 1
            num_kills += 1
            shutil.rmtree(folder)
    print(f"resumed: {resumes}; {num_kills} kills; finished steps done again: {dict(again)}")
    assert num_kills >= (70 if resumes else 140), "over 200 in all"
    assert max(again) <= 1


def _copy(begun: Path, folder: Path) -> Path:
    """A run folder like another, if there is one."""
    if begun.exists():
        shutil.copytree(begun, folder)
    return folder


@pytest.mark.parametrize(
    ("error", "lasts"), [("ENOSPC", True), ("EDQUOT", True), ("EIO", False)], ids=["full", "quota", "broken"]
)
def test_refused_any_write_a_run_ends_in_a_message_or_goes_on_without(
    faulty: FaultyRun, error: str, lasts: bool, tmp_path: Path
) -> None:
    """lasts: every call from that one on is refused, and there is room again when the run is resumed."""
    ends, num_points = Counter[int](), 0
    counts = faulty.counts(tmp_path / "counted")
    for call in REFUSED:
        for number in range(1, counts[call] + 1):
            folder, what = tmp_path / f"{call}-{number}", f"{error} at {call} {number} of {counts[call]}"
            code = faulty.run(folder, inject=f"{call}:error={error}:when={number}{'+' if lasts else ''}")
            assert code in ENDS, (what, code, faulty.trace_back())
            if code == 0:
                assert read_state(folder) == "finished", what
            if code == 2:
                assert not folder.exists() or not any(folder.iterdir()), what
            ends[code] += 1
            num_points += 1
            faulty.assert_resumes(folder, what) if code else None
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{error}: {num_points} points; exit codes: {dict(ends)}")
    assert num_points >= 50
