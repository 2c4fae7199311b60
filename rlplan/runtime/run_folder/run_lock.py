"""Run lock: a run folder belongs to one run at a time.

In: a folder. Out: a lock that is held while the run goes on, and is gone with the process however that ends.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from rlplan.errors import SpecError
from rlplan.runtime.run_folder.disk_errors import writing_file
from rlplan.runtime.run_folder.following import LOCK_NAME
from rlplan.spec.base import writing


@contextmanager
def locked_run_folder(run_folder: Path, *, is_resumed: bool = False) -> Iterator[None]:
    """Hold a run folder. A folder that the block leaves empty is removed again where it was made here.

    is_resumed: it holds an earlier run, which goes on.
    Raises: SpecError when it holds something already, or another run holds it.
    """
    if not is_resumed:
        _check_empty(run_folder)
    elif (run_folder / LOCK_NAME).exists() and _is_held(run_folder):
        raise _locked_by_another(run_folder)
    made = _make(run_folder)
    lock = FileLock(run_folder / LOCK_NAME, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise _locked_by_another(run_folder) from None
    try:
        if not is_resumed:
            _check_empty(run_folder)  # another run may have ended here since
        with writing_file(run_folder / LOCK_NAME):
            (run_folder / LOCK_NAME).write_text(f"{os.getpid()}\n", encoding="ascii")
        yield
    finally:
        (run_folder / LOCK_NAME).unlink(missing_ok=True)
        lock.release()
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


def _make(run_folder: Path) -> list[Path]:
    """Make the folder; gives what was made, the deepest first."""
    made = [folder for folder in (run_folder, *run_folder.parents) if not folder.exists()]
    with writing(run_folder):
        run_folder.mkdir(parents=True, exist_ok=True)
    return made


def _check_empty(run_folder: Path) -> None:
    if not run_folder.exists():
        return
    is_folder = run_folder.is_dir()
    others = [path.name for path in run_folder.iterdir()] if is_folder else []
    if is_folder and set(others) <= {LOCK_NAME}:
        return
    if LOCK_NAME in others and _is_held(run_folder):
        raise _locked_by_another(run_folder)
    raise SpecError(
        f"{run_folder} already holds something",
        where=str(run_folder),
        rule="a run has a folder of its own",
        way_out="name another folder with --out, or remove this one",
    )


def _is_held(run_folder: Path) -> bool:
    """Whether a living process holds the lock. Our own hold does not count."""
    lock = FileLock(run_folder / LOCK_NAME, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        return True
    lock.release()
    return False


def _locked_by_another(run_folder: Path) -> SpecError:
    who = "another process"
    with suppress(OSError, ValueError):
        who = f"process {int((run_folder / LOCK_NAME).read_text(encoding='ascii'))}"
    return SpecError(
        f"{run_folder} belongs to a run that is going on, of {who}",
        where=str(run_folder / LOCK_NAME),
        rule="a run has a folder of its own",
        way_out="name another folder with --out, or wait for that run to end",
    )
