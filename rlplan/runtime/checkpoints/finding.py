"""Finding: the newest checkpoint of a run that is whole, and why newer ones are not taken.

In: a run folder. Out: a Resumption. Every byte is read and compared with the manifest's digests before anything is
used; a damaged, foreign or newer checkpoint is left alone with one line that says why, and the one before it is taken.
One that is newer than the pointer was about to count when the run was killed: it does if it is whole.
Raises: SpecError when there is none.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rlplan.errors import SpecError
from rlplan.runtime.checkpoints.manifest import (
    MANIFEST,
    RUN,
    SCHEMA_VERSION,
    Manifest,
    RunState,
    checkpoints_of,
)
from rlplan.runtime.checkpoints.tensor_file import digest_of
from rlplan.spec.base import Spec, read_json, validate

MAX_JSON_BYTES = 1 << 28

SpecType = TypeVar("SpecType", bound=Spec)


@dataclass(frozen=True)
class Resumption:
    """A whole checkpoint. problems: of newer ones that were passed over, a line each.

    changes: what the run that goes on does otherwise, a line each.
    """

    folder: Path
    manifest: Manifest
    state: RunState
    problems: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """The last step that is in it."""
        return self.manifest.step

    def paths(self, role: str) -> list[str]:
        """The files of a role's ranks. Raises: SpecError when the role is not in it."""
        if role not in self.manifest.roles:
            raise _wrong(f"it has no {role}", self.folder, "every trained role of the job is in the checkpoint")
        return [str((self.folder / name).resolve()) for name in self.manifest.roles[role].files]

    def facts(self, role: str) -> dict[str, Any]:
        """What a role's ranks need beside their files."""
        return self.manifest.roles[role].model_dump(include={"num_steps", "scaler"})


def find_checkpoint(run_folder: Path) -> Resumption:
    """See the module docstring."""
    problems: list[str] = []
    root = checkpoints_of(run_folder)
    for folder in sorted((f for f in root.glob("step-*") if f.is_dir() and not f.is_symlink()), reverse=True):
        try:
            manifest, state = verify(folder)
        except SpecError as error:
            problems.append(f"{folder.name}: {error.what}")
            continue
        return Resumption(folder, manifest, state, tuple(problems))
    said = "; ".join(problems) or "there is none"
    raise SpecError(
        f"no checkpoint to resume from in {run_folder}: {said}",
        where=str(checkpoints_of(run_folder)),
        rule="a whole checkpoint, as a run writes it every `checkpoints.every` steps",
        way_out="run the job anew, with checkpoints.every=1 to have one after each step",
    )


def verify(folder: Path) -> tuple[Manifest, RunState]:
    """The manifest of a checkpoint every byte of which is as it was written. Raises: SpecError."""
    manifest = _versioned(Manifest, _json(folder / MANIFEST), folder / MANIFEST)
    if not manifest.is_as_sealed:
        raise _wrong("its manifest has changed: its digest is another one", folder, "it is as it was written")
    for name, expected in manifest.files.items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            raise _wrong(f"{name} is missing", folder, "every file of the manifest is there")
        size = path.stat().st_size
        if size != expected.num_bytes:
            raise _wrong(f"{name} has {size} bytes instead of {expected.num_bytes}", folder, "files are whole")
        if digest_of(path).sha256 != expected.sha256:
            raise _wrong(f"{name} has changed: its SHA-256 is another one", folder, "files are as they were written")
    state = _versioned(RunState, _json(folder / RUN), folder / RUN)
    if RUN not in manifest.files or state.step != manifest.step:
        raise _wrong(f"{RUN} is of another step", folder, "the manifest's step")
    return manifest, state


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
