"""Finding: the newest checkpoint of a run that is whole and the job's own, and why newer ones are not taken.

In: a run folder, and the identity of the job that goes on. Out: a Resumption. Every byte is read and compared with the
manifest's digests before anything is used; a damaged, foreign, unreadable or newer checkpoint is passed over with one
line that says why, and the one before it is taken.
One that is newer than the pointer was about to count when the run was killed: it does if it is whole.
Raises: SpecError when there is none.
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
    checkpoints_of,
    folder_name,
    step_of,
)
from rlplan.runtime.checkpoints.tensor_file import TensorFile, digest_of
from rlplan.spec.base import Spec, read_json, validate

MAX_JSON_BYTES = 1 << 28

SpecType = TypeVar("SpecType", bound=Spec)


@dataclass(frozen=True)
class Resumption:
    folder: Path
    manifest: Manifest
    state: RunState
    """Where the run stood."""

    problems: tuple[str, ...] = ()
    """Of newer checkpoints that were passed over, a line each."""

    changes: tuple[str, ...] = ()
    """What the run that goes on does otherwise, a line each."""

    @property
    def step(self) -> int:
        return self.manifest.step

    def paths(self, role: str) -> list[str]:
        """The files of a role's ranks. Raises: SpecError when the role is not in it."""
        if role not in self.manifest.roles:
            raise _wrong(f"it has no {role}", self.folder, "every trained role of the job is in the checkpoint")
        return [str((self.folder / name).resolve()) for name in self.manifest.roles[role].files]

    def facts(self, role: str) -> dict[str, Any]:
        """What a role's ranks need beside their files."""
        return self.manifest.roles[role].model_dump(include={"num_steps", "scaler"})


def find_checkpoint(run_folder: Path, identity: Mapping[str, str] | None = None) -> Resumption:
    """See the module docstring. identity: of the job that goes on from it; None takes a checkpoint of any job.

    Raises: SpecError; ForeignCheckpointError where every checkpoint is whole and another job's.
    """
    check_run_folder(run_folder)
    folders, problems = _candidates(checkpoints_of(run_folder))
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
        where=str(checkpoints_of(run_folder)),
        rule="a whole checkpoint of the job, as a run writes it every `checkpoints.every` steps",
        way_out="run the job anew, with checkpoints.every=1 to have one after each step",
    )


def find_best(run_folder: Path) -> Resumption:
    """The checkpoint with the best `checkpoints.best_metric`. Raises: SpecError where none is, or it is damaged."""
    check_run_folder(run_folder)
    path = checkpoints_of(run_folder) / BEST
    if not path.is_file():
        raise SpecError(
            f"{run_folder} has kept no best checkpoint",
            where=str(path),
            rule="a run keeps it whose job has checkpoints.best_metric, from its first checkpoint on",
            way_out="the last checkpoint, without --best",
        )
    folder = path.parent / _versioned(Pointer, _json(path), path).checkpoint
    return Resumption(folder, *verify(folder))


def check_run_folder(run_folder: Path) -> None:
    """An earlier run's folder is there. Raises: SpecError."""
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
            way_out="name the folder that the run said when it began",
        )


def _candidates(root: Path) -> tuple[list[Path], list[str]]:
    """(the folders that have a checkpoint's name, the newest first; a line for each thing that only looks like one)."""
    try:
        names = [path.name for path in root.iterdir()]
    except FileNotFoundError:
        return [], []
    except OSError as error:
        raise _wrong(f"{root} cannot be read: {error.strerror}", root, "a folder of checkpoints") from None
    folders, problems = [], _problems_of_pointer(root, names)
    for _, name in sorted(((step_of(name) or 0, name) for name in names), reverse=True):
        if step_of(name) is None:
            continue
        path = root / name
        if path.is_symlink():
            problems.append(f"{name}: it is a link, a checkpoint is a folder of its own")
        elif not path.is_dir():
            problems.append(f"{name}: it is no folder")
        else:
            folders.append(path)
    return folders, problems


def _problems_of_pointer(root: Path, names: list[str]) -> list[str]:
    """A line when the pointer cannot be read, or names what is gone."""
    if POINTER not in names:
        return []
    try:
        pointer = _versioned(Pointer, _json(root / POINTER), root / POINTER)
    except SpecError as error:
        return [f"{POINTER}: {error.what}"]
    return [] if pointer.checkpoint in names else [f"{POINTER}: it names {pointer.checkpoint}, which is not there"]


def verify(folder: Path) -> tuple[Manifest, RunState]:
    """The manifest of a checkpoint every byte of which is as it was written. Raises: SpecError."""
    try:
        return _verify(folder)
    except OSError as error:
        name = Path(error.filename).name if error.filename else "a file"
        raise _wrong(f"{name} cannot be read: {error.strerror or error}", folder, "every file can be read") from None


def _verify(folder: Path) -> tuple[Manifest, RunState]:
    manifest = _versioned(Manifest, _json(folder / MANIFEST), folder / MANIFEST)
    if not manifest.is_as_sealed:
        raise _wrong("its manifest has changed: its digest is another one", folder, "it is as it was written")
    if folder.name != folder_name(manifest.step):
        raise _wrong(f"it holds the checkpoint of step {manifest.step}", folder, "a folder has its step's name")
    for name in manifest.files:
        _check_file(folder, name, manifest)
    for role in manifest.roles.values():
        for name in role.files:
            TensorFile(folder / name).close()  # its header says where tensors lie
    state = _versioned(RunState, _json(folder / RUN), folder / RUN)
    if RUN not in manifest.files or state.step != manifest.step:
        raise _wrong(f"{RUN} is of another step", folder, "the manifest's step")
    return manifest, state


def _check_file(folder: Path, name: str, manifest: Manifest) -> None:
    path, expected = folder / name, manifest.files[name]
    if path.is_symlink() or not path.is_file():
        raise _wrong(f"{name} is missing", folder, "every file of the manifest is there")
    size = path.stat().st_size
    if size != expected.num_bytes:
        raise _wrong(f"{name} has {size} bytes instead of {expected.num_bytes}", folder, "files are whole")
    if digest_of(path).sha256 != expected.sha256:
        raise _wrong(f"{name} has changed: its SHA-256 is another one", folder, "files are as they were written")


def _json(path: Path) -> Any:
    if path.is_symlink() or not path.is_file():
        raise _wrong(f"{path.name} is missing", path.parent, "a checkpoint has a manifest and says where its run stood")
    return read_json(path, f"the checkpoint's {path.name}", limit=MAX_JSON_BYTES)


def _versioned(kind: type[SpecType], data: Any, path: Path) -> SpecType:
    version = data.get("schema_version") if isinstance(data, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise _wrong(
            f"it was written by a newer rlplan (schema version {json.dumps(version)})",
            path.parent,
            f"this rlplan reads version {SCHEMA_VERSION}",
        )
    return validate(kind, data, file=str(path), way_out="resume from another checkpoint")


def _wrong(what: str, folder: Path, rule: str) -> SpecError:
    return SpecError(what, where=str(folder), rule=rule, way_out="resume from another checkpoint, or run the job anew")
