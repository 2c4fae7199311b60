"""Crash-safe commits of checkpoints: the checkpoint that the pointer names is complete at every moment.

1. The files are written into a folder whose name begins with a dot.
2. The files and the folder are synced, and only then renamed to the final name.
3. The pointer is moved to it.
4. Older checkpoints are deleted. A run that is killed at any point still has the previous checkpoint.

Source of the order: SQLite, "Atomic Commit".
In: files that are already synced, and their manifest. Out: a committed checkpoint.
"""

import os
import shutil
from pathlib import Path

from rlplan.runtime.checkpoints.manifest import (
    BEST,
    MANIFEST,
    POINTER,
    Manifest,
    Pointer,
    checkpoints_folder,
    folder_name,
    parse_step,
)
from rlplan.spec.base import Spec


class CheckpointFolder:
    def __init__(self, run_folder: Path, keep_last: int) -> None:
        self.root, self.keep_last = checkpoints_folder(run_folder), keep_last

    def stage(self, step: int) -> Path:
        """Create an empty folder for a new checkpoint, and delete what an earlier run left unfinished."""
        for unfinished in self.root.glob(".step-*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        staged = self.root / f".{folder_name(step)}"
        staged.mkdir(parents=True)
        return staged

    def commit(self, staged: Path, manifest: Manifest, best: int | None = None) -> Path:
        """Give a staged checkpoint its final name, move the pointers to it, and delete checkpoints beyond `keep_last`.

        best: the step whose checkpoint is never deleted. Raises: OSError.
        """
        final = self.root / folder_name(manifest.step)
        write_durably(staged / MANIFEST, manifest.seal())
        sync_folder(staged)
        if final.is_symlink():  # delete the link only: its target is not ours
            final.unlink()
        elif final.exists():  # a run that was resumed from an earlier step reaches this step again
            shutil.rmtree(final)
        staged.rename(final)
        sync_folder(self.root)
        self._write_pointer(POINTER, final.name)
        if best is not None and (self.root / folder_name(best)).is_dir():
            self._write_pointer(BEST, folder_name(best))
        self._prune(manifest.step, best)
        return final

    def _write_pointer(self, pointer: str, name: str) -> None:
        write_durably(self.root / f"{pointer}.partial", Pointer(checkpoint=name))
        (self.root / f"{pointer}.partial").replace(self.root / pointer)
        sync_folder(self.root)

    def _prune(self, newest: int, best: int | None) -> None:
        """Delete all but the last `keep_last` checkpoints and the best.

        Checkpoints later than the newest are deleted too: the run was resumed from before them. Only folders named
        exactly like a checkpoint are deleted, never backups or links.
        """
        checkpoints = sorted(
            (step, folder)
            for folder in self.root.iterdir()
            if (step := parse_step(folder.name)) is not None and folder.is_dir() and not folder.is_symlink()
        )
        later = [folder for step, folder in checkpoints if step > newest]
        earlier = [(step, folder) for step, folder in checkpoints if step <= newest]
        surplus = [folder for step, folder in earlier[: -self.keep_last] if step != best]
        for folder in [*later, *surplus]:
            # without its manifest, a folder whose deletion was interrupted is no checkpoint
            (folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)


def write_durably(path: Path, value: Spec) -> None:
    """Write a value as JSON and sync the file to disk."""
    write_text_durably(path, value.model_dump_json(indent=1) + "\n")


def write_text_durably(path: Path, text: str) -> None:
    with path.open("wb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
