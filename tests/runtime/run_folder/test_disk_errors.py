"""A disk that is full, really: what is said, what is on record, and what stays behind."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlplan.errors import RunError
from rlplan.runtime.fault_tolerance.resuming import add_resume_command
from rlplan.runtime.run_folder.disk_errors import disk_number, reporting_disk_errors, writing_file
from rlplan.runtime.run_folder.run_files import overwrite_status
from rlplan.runtime.weight_sync.transports.arena import SHARED_FOLDER, create_arena
from rlplan.runtime.workers.worker import _make_errors_portable
from rlplan.units import format_bytes
from tests.factories import QUICKSTART
from tests.runtime.run_folder.small_disk import small_disk


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), errno.ENOSPC),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "x"), errno.EDQUOT),
        (ValueError("Error while serializing: I/O error: No space left on device (os error 28)"), errno.ENOSPC),
        (RuntimeError("OSError: [Errno 5] Input/output error"), errno.EIO),
        (FileNotFoundError(2, "No such file or directory"), None),
        (RunError("another process: [Errno 28] No space left on device"), None),
        (ValueError("28"), None),
    ],
)
def test_a_disk_error_is_known_by_its_number_in_any_exception(error: Exception, number: int | None) -> None:
    assert disk_number(error) == number


def test_the_message_says_what_was_to_be_written_what_is_free_and_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(RunError) as caught, writing_file(path, 5 << 20, "write less"):
        raise OSError(errno.ENOSPC, "No space left on device")
    statistics = os.statvfs(tmp_path)
    free = format_bytes(statistics.f_bavail * statistics.f_frsize).split()[1]
    what, where, rule, way_out = str(caught.value).splitlines()
    assert what.startswith("metrics.jsonl cannot be written: the disk is full (5.00 MiB to write, ")
    assert what.endswith(f"{free} free)")
    assert where == f"  where: {path}"
    assert rule == "  rule: the disk must accept all writes of a run"
    assert way_out == "  way out: make room there, or write less"
    assert caught.value.exit_code == 5


def test_a_file_that_the_system_names_is_the_one_that_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="inner cannot be written: the disk is read-only"), writing_file(tmp_path):
        raise OSError(errno.EROFS, "Read-only file system", "/nowhere/inner")


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), writing_file(tmp_path):
        (tmp_path / "b" / "c").write_text("")
    with pytest.raises(OSError, match="terminal"), reporting_disk_errors(tmp_path):
        raise OSError(errno.EIO, "the terminal is gone")


def test_a_worker_says_what_its_own_disk_did(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunError, match="cannot be written: the disk is full"), _make_errors_portable(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "x"))
    assert "Traceback" in capfd.readouterr().err, "its log has the whole story"


def test_shared_memory_that_is_full_is_said_and_no_file_stays_there() -> None:
    path = Path(SHARED_FOLDER) / f"rlplan-test-{os.getpid()}"
    statistics = os.statvfs(SHARED_FOLDER)
    too_many = (statistics.f_blocks + 1) * statistics.f_frsize
    with pytest.raises(RunError, match=f"the disk is full .{format_bytes(too_many)} to write"):
        create_arena(str(path), too_many)
    assert not path.exists()


def test_a_status_that_is_written_over_keeps_to_the_room_that_it_has(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    path.write_text(json.dumps({"state": "running"}))
    room = max(path.stat().st_blocks * 512, path.stat().st_size)
    overwrite_status(path, {"state": "failed", "message": "\n" * 100_000})
    assert json.loads(path.read_text())["state"] == "failed"
    assert path.stat().st_size <= room


def test_the_message_says_how_to_resume(tmp_path: Path) -> None:
    error = RunError("x cannot be written", where="x", rule="r", way_out="make room there")
    assert add_resume_command(error, tmp_path).way_out == "make room there"
    (tmp_path / "bundle").mkdir()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest.json").write_text("{}")
    way_out = add_resume_command(error, tmp_path).way_out
    assert way_out == f"make room there; resume with `rlplan run --resume {tmp_path}`"


def test_a_standard_output_that_is_full_is_no_bug() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "rlplan_cli", "plan", str(QUICKSTART)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 5, done.stderr
    assert done.stderr.startswith("error: the output cannot be written: the disk is full\n")


# ------------------------------------------------------------------------------------------- on a disk that is full

FILL = """
import json, os, sys
from pathlib import Path
disk = Path(sys.argv[1])
def fill():
    found = os.statvfs(disk)
    with (disk / "filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize)
from rlplan.errors import RunError
"""

RUN = (
    FILL
    + """
from rlplan.planner.search import find_plan
from rlplan.runtime.run_folder.run_lock import lock_run_folder
from rlplan.runtime.driver.launch import prepare_run_folder, prepare_task, run_task
from rlplan.spec.files.job_file import load_job
plan, run = find_plan(load_job(Path(sys.argv[2]))), disk / "run"
with lock_run_folder(run), prepare_task(plan) as task:
    task = prepare_run_folder(task, run, writes_bundle=True)
    try:
        run_task(task, run, lambda event: (disk / "filler").exists() or fill())
    except RunError as error:
        print(error)
print(json.loads((run / "status.json").read_text())["state"])
print(json.loads((run / "status.json").read_text())["message"])
print(sorted(path.name for path in run.iterdir() if "partial" in path.name))
"""
)


def test_a_run_whose_disk_is_full_has_failed_and_says_so_in_its_folder_too(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "512k") as disk:
        done = disk.python(RUN, str(QUICKSTART))
    lines = done.stdout.splitlines()
    assert lines[0].startswith("data.json cannot be written: the disk is full ("), done.stderr
    assert lines[0].endswith(" to write, 0 B free)")
    assert lines[1:4] == [
        f"  where: {tmp_path / 'disk' / 'run' / 'data.json'}",
        "  rule: the disk must accept all writes of a run",
        "  way out: make room there",
    ]
    assert lines[4] == "failed"
    assert lines[5:] == [*lines[:4], "[]"]


RECORD = (
    FILL
    + """
from rlplan.runtime.run_folder.recorder import Recorder
recorder = Recorder(disk, {})
recorder.write_status("running", None)
recorder.write_row("metrics.jsonl", {"step": 1})
fill()
try:
    for step in range(2, 2000):
        recorder.write_row("metrics.jsonl", {"step": step, "reward/mean": 0.5})
except RunError as error:
    print(error.where)
try:
    recorder.write_status("finished", 0)
except RunError as error:
    print(error.where)
recorder.write_status("failed", 5, "full")
recorder.close()
(disk / "filler").unlink()
recorder = Recorder(disk, {}, after_step=1)
recorder.close()
print((disk / "metrics.jsonl").read_text().strip())
"""
)


def test_lines_that_a_disk_does_not_take_are_told_and_a_resumed_run_goes_on_after_whole_ones(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "128k") as disk:
        done = disk.python(RECORD)
        status = json.loads(disk.path("status.json").read_text())
    folder = tmp_path / "disk"
    assert done.stdout.splitlines() == [str(folder / "metrics.jsonl"), str(folder / "status.json"), '{"step": 1}'], (
        done.stderr
    )
    assert (status["state"], status["exit_code"], status["message"]) == ("failed", 5, "full")


WRITE_TENSORS = (
    FILL
    + """
from types import SimpleNamespace
import torch
from rlplan.runtime.models.start_checkpoint import save_policy
from rlplan.runtime.workers.trainer.offloaded_states import OffloadedStates
from rlplan.runtime.workers.trainer.state_saver import _write_with_receipt
from rlplan.runtime.checkpoints.tensor_file import Piece
tensor = torch.ones(1_000_000)
piece = Piece("a", "F32", memoryview(tensor.numpy()).cast("B"))
_write_with_receipt(disk / "policy.safetensors", [piece], {})
print(json.loads((disk / "policy.receipt").read_text())["error"])
for write in (
    lambda: OffloadedStates().offload([tensor.untyped_storage()]),
    lambda: save_policy(SimpleNamespace(architectures=["Qwen3ForCausalLM"]), [("a", tensor)], disk / "policy", disk),
):
    try:
        write()
    except RunError as error:
        print(error.what)
print(float(tensor.sum()), sorted(path.name for path in disk.iterdir()))
"""
)


HAND_OVER = (
    FILL
    + """
import threading, time
import torch
from rlplan.runtime.weight_sync.channel import GivenUpError, Update
from rlplan.runtime.weight_sync.source import WeightSource
from rlplan.vocabulary import Transport
from tests.runtime.weight_sync.test_transports import Channel, Weights
(disk / "sync").mkdir()
channel = Channel(Transport.DISK, 4000, torch.float32, 2, disk)
weights = Weights(1, torch.float32)
fill()
update, start = Update(1, 1, True, 60.0), time.monotonic()
def receive(receiver):
    try:
        list(receiver.tensors(update))
    except GivenUpError:
        given_up.append("given up")
given_up = []
readers = [threading.Thread(target=receive, args=(receiver,)) for receiver in channel.receivers]
for reader in readers:
    reader.start()
try:
    channel.sender.send(WeightSource(weights), update)
except RunError as error:
    what = error.what
for reader in readers:
    reader.join()
for line in given_up:
    print(line)
print(what)
print(time.monotonic() - start < 10)
(disk / "filler").unlink()
fed = channel.update(weights, Update(2, 1, True, 60.0))
print(all(torch.equal(each[name], tensor) for each in fed for name, tensor in weights.whole.items()))
"""
)


Answers = tuple[list[str], list[str]]


@pytest.fixture(scope="module")
def torch_answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Answers of both programs that need torch, one after the other in one process."""
    with small_disk(tmp_path_factory.mktemp("small") / "disk", "256k") as disk:
        done = disk.python(f"{WRITE_TENSORS}\nprint('then')\n{HAND_OVER}", TMPDIR=str(disk.folder))
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split("then\n")
    return first.splitlines(), second.splitlines()


def test_tensors_that_a_disk_does_not_take_are_told_and_leave_room_for_the_receipt(torch_answers: Answers) -> None:
    size = "3.81 MiB to write"
    receipt, offloaded, policy, left = torch_answers[0]
    assert receipt.startswith(f"policy.safetensors cannot be written: the disk is full ({size}, ")
    assert offloaded.startswith(f"disk cannot be written: the disk is full ({size}, ")
    assert policy.startswith(f"model.safetensors cannot be written: the disk is full ({size}, ")
    assert left == "1000000.0 ['policy', 'policy.receipt']"


def test_a_weight_sync_through_a_full_disk_fails_at_once_on_both_sides_and_works_again_with_room(
    torch_answers: Answers,
) -> None:
    *readers, what, is_soon, is_whole = torch_answers[1]
    assert readers == ["given up", "given up"]
    assert what.startswith("packet-0000.safetensors cannot be written: the disk is full (")
    assert (is_soon, is_whole) == ("True", "True")
