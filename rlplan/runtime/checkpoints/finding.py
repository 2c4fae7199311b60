"""Search for the newest valid checkpoint of a run that belongs to the job.

Every byte is compared with the manifest's digests before anything is used. A damaged, foreign or unreadable checkpoint
is skipped with one line that gives the reason, and the one before it is tried.
An intact checkpoint that is newer than the pointer is also taken: the run was killed before it moved the pointer.
In: a run folder, and the identity of the resumed job. Out: a Resumption. Raises: SpecError when there is none.
"""

import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rlplan.errors import SpecError
from rlplan.runtime.checkpoints.identity import ForeignCheckpointError, compare
from rlplan.runtime.checkpoints.manifest import (
    BEST,
    MANIFEST,
    POINTER,
    RUN,
    SCHEMA_VERSION,
    Manifest,
    Pointer,
    RunState,
    checkpoints_folder,
    folder_name,
    parse_step,
)
from rlplan.runtime.checkpoints.tensor_file import TensorFile, compute_digest
from rlplan.spec.base import Spec, read_json, validate

MAX_JSON_BYTES = 1 << 28
"""Largest JSON file of a checkpoint that is read, so that a foreign file cannot fill the memory."""

SpecType = TypeVar("SpecType", bound=Spec)


@dataclass(frozen=True)
class Resumption:
    folder: Path
    manifest: Manifest
    state: RunState
    """The run's state at that step."""

    problems: tuple[str, ...] = ()
    """Reasons why newer checkpoints were skipped, a line each."""

    changes: tuple[str, ...] = ()
    """Differences between the resumed job and the checkpoint's, a line each."""

    @property
    def step(self) -> int:
        return self.manifest.step

    def paths(self, role: str) -> list[str]:
        """The files of a role's ranks. Raises: SpecError when the checkpoint lacks the role."""
        if role not in self.manifest.roles:
            raise _wrong(f"it has no {role}", self.folder, "a checkpoint contains every trained role of the job")
        return [str((self.folder / name).resolve()) for name in self.manifest.roles[role].files]

    def facts(self, role: str) -> dict[str, Any]:
        """Optimizer steps and loss-scaler state that a role's ranks need besides their files."""
        return self.manifest.roles[role].model_dump(include={"num_steps", "scaler"})


def find_checkpoint(run_folder: Path, identity: Mapping[str, str] | None = None) -> Resumption:
    """Find the newest valid checkpoint. identity: that of the resumed job; None accepts a checkpoint of any job.

    Raises: SpecError; ForeignCheckpointError when every checkpoint is intact but belongs to another job.
    """
    check_run_folder(run_folder)
    folders, problems = _list_candidates(checkpoints_folder(run_folder))
    foreign: list[ForeignCheckpointError] = []
    for folder in folders:
        try:
            manifest, state = verify(folder)
            changes = () if identity is None else tuple(compare(identity, manifest.identity, folder))
        except SpecError as error:
            problems.append(f"{folder.name}: {error.what}")
            foreign += [error] if isinstance(error, ForeignCheckpointError) else []
            continue
        return Resumption(folder, manifest, state, tuple(problems), changes)
    if foreign and len(foreign) == len(problems):
        raise foreign[0]
    raise SpecError(
        f"no checkpoint to resume from in {run_folder}: {'; '.join(problems) or 'there is none'}",
        where=str(checkpoints_folder(run_folder)),
        rule="an intact checkpoint of the job; a run writes one every `checkpoints.every` steps",
        way_out="run the job again; checkpoints.every=1 writes a checkpoint after each step",
    )


def find_best(run_folder: Path) -> Resumption:
    """Find the checkpoint with the best `checkpoints.best_metric`. Raises: SpecError when it is missing or damaged."""
    check_run_folder(run_folder)
    path = checkpoints_folder(run_folder) / BEST
    if not path.is_file():
        raise SpecError(
            f"{run_folder} has kept no best checkpoint",
            where=str(path),
            rule="a run keeps its best checkpoint only if the job sets checkpoints.best_metric",
            way_out="leave --best out to take the last checkpoint",
        )
    folder = path.parent / _validate_version(Pointer, _json(path), path).checkpoint
    return Resumption(folder, *verify(folder))


def check_run_folder(run_folder: Path) -> None:
    """Check that the folder of an earlier run exists. Raises: SpecError."""
    try:
        what = "" if stat.S_ISDIR(run_folder.stat().st_mode) else "is no folder"
    except (FileNotFoundError, NotADirectoryError):
        what = "does not exist"
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
    if what:
        raise SpecError(
            f"the run folder {run_folder} {what}",
            where=str(run_folder),
            rule="the folder of an earlier run",
            way_out="give the folder that the run printed when it started",
        )


def _list_candidates(root: Path) -> tuple[list[Path], list[str]]:
    """List (folders named like a checkpoint, newest first; a line for each link or file with such a name)."""
    try:
        names = [path.name for path in root.iterdir()]
    except FileNotFoundError:
        return [], []
    except OSError as error:
        raise _wrong(f"{root} cannot be read: {error.strerror}", root, "a folder of checkpoints") from None
    folders, problems = [], _problems_of_pointer(root, names)
    for _, name in sorted(((parse_step(name) or 0, name) for name in names), reverse=True):
        if parse_step(name) is None:
            continue
        path = root / name
        if path.is_symlink():
            problems.append(f"{name}: it is a link; a checkpoint must be a folder")
        elif not path.is_dir():
            problems.append(f"{name}: it is not a folder")
        else:
            folders.append(path)
    return folders, problems


def _problems_of_pointer(root: Path, names: list[str]) -> list[str]:
    """List one line if the pointer cannot be read or names a missing checkpoint, else none."""
    if POINTER not in names:
        return []
    try:
        pointer = _validate_version(Pointer, _json(root / POINTER), root / POINTER)
    except SpecError as error:
        return [f"{POINTER}: {error.what}"]
    return [] if pointer.checkpoint in names else [f"{POINTER}: it names {pointer.checkpoint}, which is not there"]


def verify(folder: Path) -> tuple[Manifest, RunState]:
    """Verify every byte of a checkpoint against its digests. Returns its manifest and state. Raises: SpecError."""
    try:
        return _verify(folder)
    except OSError as error:
        name = Path(error.filename).name if error.filename else "a file"
        raise _wrong(f"{name} cannot be read: {error.strerror or error}", folder, "every file is readable") from None


def _verify(folder: Path) -> tuple[Manifest, RunState]:
    manifest = _validate_version(Manifest, _json(folder / MANIFEST), folder / MANIFEST)
    # the digest comes first: step, roles and files can only be trusted after it
    if not manifest.is_as_sealed:
        raise _wrong("its manifest has changed: the digest differs", folder, "a manifest is never edited")
    if folder.name != folder_name(manifest.step):
        raise _wrong(f"it holds the checkpoint of step {manifest.step}", folder, "a folder is named after its step")
    for name in manifest.files:
        _check_file(folder, name, manifest)
    for role in manifest.roles.values():
        for name in role.files:
            TensorFile(folder / name).close()  # opening it checks the header
    state = _validate_version(RunState, _json(folder / RUN), folder / RUN)
    if RUN not in manifest.files or state.step != manifest.step:
        raise _wrong(f"{RUN} belongs to another step", folder, "its step is that of the manifest")
    return manifest, state


def _check_file(folder: Path, name: str, manifest: Manifest) -> None:
    path, expected = folder / name, manifest.files[name]
    if path.is_symlink() or not path.is_file():
        raise _wrong(f"{name} is missing", folder, "every file of the manifest exists")
    size = path.stat().st_size
    if size != expected.num_bytes:
        raise _wrong(f"{name} has {size} bytes instead of {expected.num_bytes}", folder, "files are complete")
    if compute_digest(path).sha256 != expected.sha256:
        raise _wrong(f"{name} has changed: its SHA-256 differs", folder, "files are never edited")


def _json(path: Path) -> Any:
    if path.is_symlink() or not path.is_file():
        raise _wrong(f"{path.name} is missing", path.parent, f"a checkpoint has a {MANIFEST} and a {RUN}")
    return read_json(path, f"the checkpoint's {path.name}", limit=MAX_JSON_BYTES)


def _validate_version(kind: type[SpecType], data: Any, path: Path) -> SpecType:
    """Validate JSON as a `kind`, after a check that no newer rlplan wrote it. Raises: SpecError."""
    version = data.get("schema_version") if isinstance(data, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise _wrong(
            f"it was written by a newer rlplan (schema version {json.dumps(version)})",
            path.parent,
            f"this rlplan reads version {SCHEMA_VERSION}",
        )
    return validate(kind, data, file=str(path), way_out="resume from another checkpoint")


def _wrong(what: str, folder: Path, rule: str) -> SpecError:
    return SpecError(what, where=str(folder), rule=rule, way_out="resume from another checkpoint, or run the job again")
