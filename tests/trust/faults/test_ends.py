"""Ends that a run does not choose: signals, a kill while it starts, a jumping clock, the memory of a control group.

Each ends with a message and an exit code, leaves no process, and goes on to the same files as a run without it.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlplan.planner.plan import PLAN_SCHEMA_VERSION, compute_digest
from rlplan.runtime.checkpoints.manifest import MANIFEST, Manifest
from rlplan.units import MIB
from tests.runtime.conftest import FEW_PROCESSES, ROOT, FinishedRun, alive, finish, list_descendants, start
from tests.trust.faults.test_fault_matrix import SIZES, assert_same
from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(1800)]
JOB = ("run", "examples/quickstart.yaml", *SIZES, *FEW_PROCESSES, "workload.num_steps=8")
EARLIER = "0.0.9"
"""A version before this one."""
ENDS = {
    "SIGHUP": (signal.SIGHUP,),
    "SIGTERM": (signal.SIGTERM,),
    "Ctrl-C twice": (signal.SIGINT, signal.SIGINT),
}


@pytest.fixture(autouse=True)
def hears_hangups() -> Iterator[None]:
    """Let runs hear SIGHUP: they ignore it where they are started by a process that does, such as below `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run = finish(start(*JOB, "--out", str(folder)), folder)
    assert run.exit_code == 0, run.stderr
    return run


def resume(folder: Path) -> FinishedRun:
    return finish(start("run", "--resume", str(folder)), folder)


def wait_for_step(folder: Path, count: int) -> None:
    metrics = folder / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > count, 180)


@pytest.mark.parametrize("end", ENDS)
def test_a_run_that_a_signal_ends_is_resumed_to_the_same_files(end: str, whole: FinishedRun, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(*JOB, "--out", str(folder))
    wait_for_step(folder, 3)
    children = list_descendants(process.pid)
    for number in ENDS[end]:
        process.send_signal(number)
    run = finish(process, folder)
    assert (run.exit_code, run.status["exit_code"], run.status["state"]) == (75, 75, "interrupted"), run.stderr
    assert alive(children) == []
    resumed = resume(folder)
    assert resumed.exit_code == 0, resumed.stderr
    assert_same("synchronous", resumed, whole)


@pytest.mark.parametrize("num_children", [1, 4])
def test_a_run_that_is_killed_while_it_starts_begins_anew(
    num_children: int, whole: FinishedRun, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    process = start(*JOB, "--out", str(folder))
    wait_until(lambda: len(list_descendants(process.pid)) >= num_children and (folder / "status.json").exists(), 120)
    children = list_descendants(process.pid)
    process.kill()
    process.communicate()
    wait_until(lambda: alive(children) == [], 60)
    refused = resume(folder)
    assert refused.exit_code == 2, "there is no checkpoint yet"
    again = finish(start(*JOB, "--out", str(tmp_path / "again")), tmp_path / "again")
    assert again.exit_code == 0, again.stderr
    assert_same("synchronous", again, whole)


@pytest.mark.parametrize("jump_s", [86_400.0, -86_400.0])
def test_a_clock_that_jumps_ends_no_run(jump_s: float, whole: FinishedRun, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "tests.trust.faults.jumping_clock", str(jump_s), "20", *JOB, "--out", str(folder)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    run = finish(process, folder)
    assert run.exit_code == 0, run.stderr
    assert_same("synchronous", run, whole)


@pytest.fixture
def control_group() -> Iterator[Path]:
    """A control group for memory. Skips where none can be created."""
    root = Path("/sys/fs/cgroup")
    is_v1 = (root / "memory" / "memory.limit_in_bytes").exists()
    folder = (root / "memory" if is_v1 else root) / f"rlplan-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(700 * MIB))
    except OSError:
        pytest.skip("no control group for memory can be created here")
    yield folder
    wait_until(lambda: not (folder / "cgroup.procs").read_text(), 60)
    folder.rmdir()


def test_a_run_that_meets_the_memory_limit_of_its_control_group_ends_with_a_message(
    control_group: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    joins = f"import os; open({str(control_group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))"
    arguments = [str(Path(sys.executable).parent / "rlplan"), *JOB, "--out", str(folder)]
    code = f"{joins}; os.execv({arguments[0]!r}, {arguments!r})"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    run = finish(process, folder)
    assert run.exit_code in (2, 4, 5, 75, -signal.SIGKILL), run.stderr
    assert run.exit_code < 0 or "error: " in run.stderr
    assert "Traceback" not in run.stderr


def interrupt(folder: Path) -> None:
    """Start a run, and end it after its third step."""
    process = start(*JOB, "--out", str(folder))
    wait_for_step(folder, 3)
    process.send_signal(signal.SIGTERM)
    assert finish(process, folder).exit_code == 75


def test_a_run_is_not_resumed_by_a_changed_plan_and_is_by_its_own(whole: FinishedRun, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    interrupt(folder)
    plan = folder / "bundle" / "plan.json"
    content = plan.read_text()
    changed = json.loads(content)
    changed["job"]["algorithm"]["learning_rate"] = 0.5
    plan.write_text(json.dumps(changed))
    refused = resume(folder)
    assert refused.exit_code == 2, refused.stderr
    plan.write_text(content)
    resumed = resume(folder)
    assert resumed.exit_code == 0, resumed.stderr
    assert_same("synchronous", resumed, whole)


def write_as_earlier_version(folder: Path) -> None:
    """Rewrite a run folder as the release before this one would have left it: its files name their version."""
    for path in (folder / "plan.json", folder / "bundle" / "plan.json"):
        stored = json.loads(path.read_text())
        stored["rlplan_version"] = EARLIER
        stored["digest"] = compute_digest(
            {key: value for key, value in stored.items() if key not in ("schema_version", "digest")}
        )
        path.write_text(json.dumps(stored, indent=1) + "\n")
    for path in (folder / "checkpoints").glob(f"*/{MANIFEST}"):
        manifest = Manifest.model_validate_json(path.read_text())
        path.write_text(manifest.model_copy(update={"rlplan_version": EARLIER}).seal().model_dump_json())


def test_a_run_is_resumed_after_an_upgrade_unless_its_plan_has_another_schema(
    whole: FinishedRun, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    interrupt(folder)
    write_as_earlier_version(folder)
    plan = folder / "bundle" / "plan.json"
    content = plan.read_text()
    plan.write_text(json.dumps(json.loads(content) | {"schema_version": PLAN_SCHEMA_VERSION - 1}))
    refused = resume(folder)
    assert refused.exit_code == 2, refused.stderr
    assert f"reads version {PLAN_SCHEMA_VERSION}" in refused.stderr
    plan.write_text(content)
    resumed = resume(folder)
    assert resumed.exit_code == 0, resumed.stderr
    assert "it is skipped" not in (folder / "alarms.jsonl").read_text(), "the last checkpoint is taken"
    assert_same("synchronous", resumed, whole)


def test_a_run_whose_folder_was_moved_is_resumed_to_the_same_files(whole: FinishedRun, tmp_path: Path) -> None:
    interrupt(tmp_path / "run")
    folder = (tmp_path / "run").rename(tmp_path / "moved")
    resumed = resume(folder)
    assert resumed.exit_code == 0, resumed.stderr
    assert_same("synchronous", resumed, whole)
