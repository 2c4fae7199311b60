"""CheckpointFolder: checkpoints on a disk, so that at every moment the last one that counts is whole.

A checkpoint is put together in a folder with a leading dot, every file and the folder itself are on the disk before it
gets its name, and the pointer moves after that. Only then do older ones go, so that a run that is killed anywhere finds
the one before. Source of the order: SQLite, "Atomic Commit"; what others lost by another order is told in
docs/decisions.md.
In: files that are on the disk already, and what is said of them. Out: a committed checkpoint.
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
    checkpoints_of,
    folder_name,
    step_of,
)
from rlplan.spec.base import Spec


class CheckpointFolder:
    def __init__(self, run_folder: Path, keep_last: int) -> None:
        self.root, self.keep_last = checkpoints_of(run_folder), keep_last

    def stage(self, step: int) -> Path:
        """An empty folder in which a checkpoint is put together. What an earlier run left unfinished goes."""
        for left in self.root.glob(".step-*"):
            shutil.rmtree(left, ignore_errors=True)
        staged = self.root / f".{folder_name(step)}"
        staged.mkdir(parents=True)
        return staged

    def commit(self, staged: Path, manifest: Manifest, best: int | None = None) -> Path:
        """Make a staged checkpoint count, and let those go that are too many; but not that of the best step.

        Raises: OSError.
        """
        final = self.root / folder_name(manifest.step)
        write_durably(staged / MANIFEST, manifest.sealed())
        sync_folder(staged)
        if final.is_symlink():  # the link goes, what it leads to is not ours
            final.unlink()
        elif final.exists():  # of a future that was given up: the run went on from before it
            shutil.rmtree(final)
        staged.rename(final)
        sync_folder(self.root)
        self._point(POINTER, final.name)
        if best is not None and (self.root / folder_name(best)).is_dir():
            self._point(BEST, folder_name(best))
        self._prune(manifest.step, best)
        return final

    def _point(self, pointer: str, name: str) -> None:
        write_durably(self.root / f"{pointer}.partial", Pointer(checkpoint=name))
        (self.root / f"{pointer}.partial").replace(self.root / pointer)
        sync_folder(self.root)

    def _prune(self, newest: int, best: int | None) -> None:
        """Keep the last ones up to the newest, and the best; later ones are of a future that was given up.

        Only folders with a checkpoint's own name go: no backups, and nothing behind a link.
        """
        mine = sorted(
            (step, folder)
            for folder in self.root.iterdir()
            if (step := step_of(folder.name)) is not None and folder.is_dir() and not folder.is_symlink()
        )
        future = [folder for step, folder in mine if step > newest]
        past = [(step, folder) for step, folder in mine if step <= newest]
        many = [folder for step, folder in past[: -self.keep_last] if step != best]
        for folder in [*future, *many]:
            (folder / MANIFEST).unlink(missing_ok=True)  # half a checkpoint must not look like one
            shutil.rmtree(folder, ignore_errors=True)


def write_durably(path: Path, value: Spec) -> None:
    """Write a value as JSON and wait until the disk has it."""
    write_text_durably(path, value.model_dump_json(indent=1) + "\n")


def write_text_durably(path: Path, text: str) -> None:
    with path.open("wb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the disk has a folder's names."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
