"""Run lock: ensures that only one run at a time uses a run folder.

In: a folder. Out: a file lock that the process holds during the run; the system releases it when the process ends.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from rlplan.errors import SpecError
from rlplan.runtime.run_folder.disk_errors import writing_file
from rlplan.runtime.run_folder.following import LOCK_NAME
from rlplan.spec.base import explain_write_errors


@contextmanager
def lock_run_folder(run_folder: Path, *, is_resumed: bool = False) -> Iterator[None]:
    """Context that holds the lock on a run folder. Folders created here are removed if they are empty at the end.

    is_resumed: whether the folder has an earlier run, which is resumed.
    Raises: SpecError when the folder is not empty, or another run holds the lock.
    """
    if not is_resumed:
        _check_empty(run_folder)
    elif (run_folder / LOCK_NAME).exists() and _is_held(run_folder):
        raise _in_use_error(run_folder)
    created = _create_folders(run_folder)
    lock = FileLock(run_folder / LOCK_NAME, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise _in_use_error(run_folder) from None
    try:
        if not is_resumed:
            _check_empty(run_folder)  # another run may have used the folder before the lock was acquired
        with writing_file(run_folder / LOCK_NAME):
            (run_folder / LOCK_NAME).write_text(f"{os.getpid()}\n", encoding="ascii")
        yield
    finally:
        (run_folder / LOCK_NAME).unlink(missing_ok=True)  # before the release, after which it may be the next run's
        lock.release()
        for folder in created:
            with suppress(OSError):
                folder.rmdir()


def _create_folders(run_folder: Path) -> list[Path]:
    """Create the folder; return the created folders, the deepest first."""
    created = [folder for folder in (run_folder, *run_folder.parents) if not folder.exists()]
    with explain_write_errors(run_folder):
        run_folder.mkdir(parents=True, exist_ok=True)
    return created


def _check_empty(run_folder: Path) -> None:
    if not run_folder.exists():
        return
    is_folder = run_folder.is_dir()
    others = [path.name for path in run_folder.iterdir()] if is_folder else []
    if is_folder and set(others) <= {LOCK_NAME}:
        return
    if LOCK_NAME in others and _is_held(run_folder):
        raise _in_use_error(run_folder)
    raise SpecError(
        f"{run_folder} is not empty",
        where=str(run_folder),
        rule="a run needs a new or empty folder",
        way_out="name another folder with --out, or remove this one",
    )


def _is_held(run_folder: Path) -> bool:
    """Whether another living process holds the lock."""
    lock = FileLock(run_folder / LOCK_NAME, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        return True
    lock.release()
    return False


def _in_use_error(run_folder: Path) -> SpecError:
    owner = "another process"
    with suppress(OSError, ValueError):
        owner = f"process {int((run_folder / LOCK_NAME).read_text(encoding='ascii'))}"
    return SpecError(
        f"{run_folder} is in use by another run ({owner})",
        where=str(run_folder / LOCK_NAME),
        rule="only one run at a time uses a run folder",
        way_out="name another folder with --out, or wait for that run to end",
    )
