"""Checkpoints on a disk: killed before any change of the disk, the last one that counts is whole; damage is seen."""

import errno
import hashlib
import json
import os
import pickle
import random
import shutil
import signal
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rlplan.errors import RunError, SpecError
from rlplan.runtime.checkpoints.finding import find_checkpoint
from rlplan.runtime.checkpoints.folder import CheckpointFolder, write_durably, write_text_durably
from rlplan.runtime.checkpoints.identity import ForeignCheckpointError
from rlplan.runtime.checkpoints.manifest import (
    BEST,
    EXPERIENCE,
    MANIFEST,
    POINTER,
    RUN,
    Manifest,
    RoleStates,
    RunState,
    StoredFile,
    checkpoints_folder,
)
from rlplan.runtime.checkpoints.tensor_file import Piece, compute_digest, write

CHANGES = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "write")
"""Calls of `os` that change a disk; a run is killed before each of them in turn."""

STATES = "policy-00000-of-00001.safetensors"


def save(
    run: Path, step: int, keep_last: int = 2, identity: dict[str, str] | None = None, best: int | None = None
) -> None:
    """A checkpoint of a step, in the order in which a run makes one."""
    folder = CheckpointFolder(run, keep_last)
    staged = folder.stage(step)
    write(staged / STATES, [Piece("master/a@0", "F32", memoryview(array("f", [float(step)] * 64)))])
    write_durably(staged / RUN, RunState(step=step, version=step + 1))
    write_text_durably(staged / EXPERIENCE, "[]")
    files = {name: compute_digest(staged / name) for name in (STATES, RUN, EXPERIENCE)}
    roles = {"policy": RoleStates(files=(STATES,), num_steps=step)}
    folder.commit(staged, Manifest(job="a", step=step, identity=identity or {}, files=files, roles=roles), best)


def steps_of(run: Path) -> list[str]:
    return sorted(path.name for path in checkpoints_folder(run).iterdir())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        save(tmp_path, step)
    return tmp_path


def test_the_last_ones_are_kept_and_the_newest_is_found(run: Path) -> None:
    assert steps_of(run) == [POINTER, "step-000002", "step-000003"]
    result = find_checkpoint(run)
    assert (result.step, result.state.version, result.problems) == (3, 4, ())
    assert result.paths("policy") == [str(run / "checkpoints" / "step-000003" / STATES)]
    with pytest.raises(SpecError, match="it has no value"):
        result.paths("value")


def killed_before(change: int, run: Path, step: int) -> bool:
    """Save a checkpoint in a process that is killed before its n-th change of the disk; whether it was."""
    child = os.fork()
    if not child:
        count = 0

        def counted(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                nonlocal count
                count += 1
                if count == change:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*arguments, **options)

            return call

        for name in CHANGES:
            setattr(os, name, counted(getattr(os, name)))
        try:
            save(run, step)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_killed_before_any_change_of_the_disk_nothing_committed_is_lost(tmp_path: Path) -> None:
    save(tmp_path, 1)
    step, num_kills = 1, 0
    for change in range(1, 200):
        was_killed = killed_before(change, tmp_path, step + 1)
        result = find_checkpoint(tmp_path)
        assert result.step in (step, step + 1)
        assert result.problems == ()
        num_kills += was_killed
        if not was_killed:
            break
        step = result.step
    assert num_kills >= 15, "every change of the disk was tried"
    assert result.step == step + 1
    assert len(steps_of(tmp_path)) == 3, "what was killed leaves nothing behind"


def damages() -> Iterator[tuple[str, str, Callable[[Path], object]]]:
    """(name, what is said, how it is done) for the newest checkpoint."""
    for name in (STATES, RUN, EXPERIENCE, MANIFEST):
        message = {MANIFEST: "manifest"}.get(name, name)
        yield f"{name} truncated", message, lambda folder, name=name: os.truncate(folder / name, 1)
        yield f"{name} flipped", message, lambda folder, name=name: flip(folder / name, 3)
        yield f"{name} missing", "missing", lambda folder, name=name: (folder / name).unlink()
    yield "newer", "newer rlplan", lambda folder: edit(folder / MANIFEST, schema_version=2)
    yield "foreign", "kind", lambda folder: edit(folder / MANIFEST, kind="other")
    yield (
        "a path that leads out",
        "plain file name",
        lambda folder: edit(folder / MANIFEST, files={"../../x": {"num_bytes": 1, "sha256": "0" * 64}}),
    )
    yield "states that are no tensors", "not a safetensors header", pickled
    yield "a link", "missing", lambda folder: link(folder / STATES)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    at = min(at, len(data) - 1)
    data[at] ^= 1 if data[at] != ord('"') else 2
    path.write_bytes(data)


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def pickled(folder: Path) -> None:
    """Other bytes under a manifest that was sealed anew."""
    content = (12).to_bytes(8, "little") + pickle.dumps("a policy")
    (folder / STATES).write_bytes(content)
    manifest = Manifest.model_validate_json((folder / MANIFEST).read_text())
    file = StoredFile(num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    write_durably(folder / MANIFEST, manifest.model_copy(update={"files": {**manifest.files, STATES: file}}).seal())


def link(path: Path) -> None:
    path.rename(path.with_suffix(".away"))
    path.symlink_to(path.with_suffix(".away"))


@pytest.mark.parametrize(("message", "damage"), [pytest.param(*case[1:], id=case[0]) for case in damages()])
@pytest.mark.parametrize("has_pointer", [True, False])
def test_a_damaged_checkpoint_is_said_and_the_one_before_is_taken(
    run: Path, message: str, damage: Callable[[Path], object], has_pointer: bool
) -> None:
    if not has_pointer:
        (run / "checkpoints" / POINTER).unlink()
    damage(run / "checkpoints" / "step-000003")
    result = find_checkpoint(run)
    assert (result.step, len(result.problems)) == (2, 1)
    assert result.problems[0].startswith("step-000003: ")
    assert message in result.problems[0]


def test_every_bit_of_the_states_counts(run: Path) -> None:
    path = run / "checkpoints" / "step-000003" / STATES
    whole, draw = path.read_bytes(), random.Random(0)
    for _ in range(64):
        data = bytearray(whole)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        assert find_checkpoint(run).step == 2
        path.write_bytes(whole[: draw.randrange(len(whole))])
        assert find_checkpoint(run).step == 2
    path.write_bytes(whole)
    assert find_checkpoint(run).step == 3


def test_without_a_whole_one_there_is_one_message(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    for step in (2, 3):
        os.truncate(run / "checkpoints" / f"step-00000{step}" / STATES, 10)
    with pytest.raises(SpecError, match=r"step-000003: .*; step-000002: ") as raised:
        find_checkpoint(run)
    assert raised.value.exit_code == 2
    with pytest.raises(SpecError, match="there is none"):
        find_checkpoint(tmp_path_factory.mktemp("empty"))


def test_a_damaged_pointer_leaves_the_checkpoints_themselves(run: Path) -> None:
    (run / "checkpoints" / POINTER).write_text("{")
    assert find_checkpoint(run).step == 3


def test_a_future_that_was_given_up_goes(run: Path) -> None:
    os.truncate(run / "checkpoints" / "step-000003" / STATES, 10)
    assert find_checkpoint(run).step == 2
    save(run, 3)
    assert (find_checkpoint(run).step, find_checkpoint(run).problems) == (3, ())
    for step in (4, 5):
        save(run, step)
    save(run, 4)
    assert steps_of(run) == [POINTER, "step-000003", "step-000004"] or steps_of(run) == [POINTER, "step-000004"]
    assert find_checkpoint(run).step == 4


def test_a_full_disk_leaves_the_one_before(run: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", _no_room)
        with pytest.raises(RunError, match="the disk is full"):
            save(run, 4)
    assert find_checkpoint(run).step == 3


def _no_room(descriptor: int) -> None:
    raise OSError(28, os.strerror(28))


def test_a_role_s_files_are_files_of_the_checkpoint() -> None:
    roles = {"policy": RoleStates(files=("../elsewhere.safetensors",), num_steps=1)}
    with pytest.raises(ValidationError, match="is not a file of the checkpoint"):
        Manifest(job="a", step=1, identity={}, files={}, roles=roles)


@pytest.mark.parametrize("roles", [{}, {"policy": {"files": [], "num_steps": 1}}])
def test_a_checkpoint_has_roles_and_each_has_files(roles: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="at least 1 item"):
        Manifest(job="a", step=1, identity={}, files={}, roles=roles)


def test_a_foreign_checkpoint_is_passed_over_and_where_all_are_the_first_key_is_named(tmp_path: Path) -> None:
    for step, seed in ((1, "0"), (2, "0"), (3, "5")):
        save(tmp_path, step, 3, {"seed": seed})
    result = find_checkpoint(tmp_path, {"seed": "0"})
    assert result.step == 2
    assert result.problems == ("step-000003: the checkpoint belongs to another job: seed is 0, in the checkpoint 5",)
    assert find_checkpoint(tmp_path).step == 3, "who has no job takes any"
    with pytest.raises(ForeignCheckpointError, match="belongs to another job: seed is 7, in the checkpoint 5"):
        find_checkpoint(tmp_path, {"seed": "7"})
    os.truncate(tmp_path / "checkpoints" / "step-000003" / STATES, 10)
    with pytest.raises(
        SpecError, match=r"step-000003: .* bytes instead.*; step-000002: .*seed is 7, in the checkpoint 0"
    ):
        find_checkpoint(tmp_path, {"seed": "7"})


def test_a_folder_has_its_step_s_name(run: Path) -> None:
    root = run / "checkpoints"
    shutil.copytree(root / "step-000002", root / "step-000009")
    result = find_checkpoint(run)
    assert (result.step, result.problems) == (3, ("step-000009: it holds the checkpoint of step 2",))


def test_backups_and_links_are_not_taken_and_stay(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    root, away = run / "checkpoints", tmp_path_factory.mktemp("away") / "step-000008"
    names = ("step-000003.bak", "step-0000003", "step-000003 (copy)")
    for name in names:
        shutil.copytree(root / "step-000003", root / name)
    (root / "step-000003").rename(away)
    (root / "step-000003").symlink_to(away)
    (root / "step-000004").write_text("x")
    result = find_checkpoint(run)
    assert result.step == 2
    assert result.problems == (
        "step-000004: it is not a folder",
        "step-000003: it is a link; a checkpoint must be a folder",
    )
    (root / "step-000004").unlink()
    (root / "step-000008").symlink_to(away)
    save(run, 3, keep_last=1)
    assert set(steps_of(run)) == {POINTER, "step-000003", "step-000008", *names}
    assert (away / MANIFEST).is_file(), "what a link leads to stays"
    assert (find_checkpoint(run).step, len(find_checkpoint(run).problems)) == (3, 1)


def test_steps_are_sorted_as_numbers(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000):
        save(tmp_path, step)
    assert steps_of(tmp_path) == [POINTER, "step-1000000", "step-999999"], "the one before is kept"
    assert find_checkpoint(tmp_path).step == 1_000_000
    save(tmp_path, 1_000_001)
    assert steps_of(tmp_path) == [POINTER, "step-1000000", "step-1000001"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"schema_version": 1, "checkpoint": "step-000009"}', "it names step-000009, which is not there"),
        ("{", "is not JSON"),
        ('{"schema_version": 1, "checkpoint": "../../etc"}', "checkpoint is '../../etc'"),
    ],
)
def test_a_pointer_that_leads_nowhere_is_said(run: Path, content: str, message: str) -> None:
    (run / "checkpoints" / POINTER).write_text(content)
    result = find_checkpoint(run)
    assert (result.step, len(result.problems)) == (3, 1)
    assert result.problems[0].startswith(f"{POINTER}: ")
    assert message in result.problems[0]


def test_a_file_that_cannot_be_read_is_passed_over(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hashlib.file_digest

    def broken(file: Any, kind: str) -> Any:
        if "step-000003" in str(file.name):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return digest(file, kind)

    with monkeypatch.context() as patch:
        patch.setattr("hashlib.file_digest", broken)
        result = find_checkpoint(run)
    assert (result.step, len(result.problems)) == (2, 1)
    assert "cannot be read: Input/output error" in result.problems[0]
    look = os.stat

    def denied(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if "step-000003/" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return look(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr("os.stat", denied)
        result = find_checkpoint(run)
    assert result.problems == (f"step-000003: {MANIFEST} cannot be read: Permission denied",)


def test_a_file_in_place_of_the_checkpoints_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("x")
    with pytest.raises(SpecError, match="checkpoints cannot be read: Not a directory"):
        find_checkpoint(tmp_path)


def test_the_best_checkpoint_stays_beside_the_last_ones_and_has_a_pointer(tmp_path: Path) -> None:
    def names() -> set[str]:
        return {path.name for path in checkpoints_folder(tmp_path).glob("step-*")}

    for step, best in ((1, 1), (2, 2), (3, 2), (4, 2), (5, 2)):
        save(tmp_path, step, keep_last=1, best=best)
    assert names() == {"step-000002", "step-000005"}
    assert json.loads((checkpoints_folder(tmp_path) / BEST).read_text())["checkpoint"] == "step-000002"
    assert find_checkpoint(tmp_path).step == 5
    save(tmp_path, 6, keep_last=1, best=6)
    assert names() == {"step-000006"}
