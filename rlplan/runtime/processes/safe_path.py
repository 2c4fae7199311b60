"""Safe path: processes of a run import what is installed, never what lies in the current folder (as `python -P`).

`python -m` and Ray put the current folder at the front of a new process's search path, so that a `torch.py` in a
bundle, or beside a job file, would be run. A file that the job names (a reward's, an environment's) brings its own
folder along.

In: a module of ours. Out: the command that runs it; for Ray, a job that leaves the path alone.
"""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

BASE_EXECUTABLE: str = getattr(sys, "_base_executable", sys.executable)
"""The interpreter beneath a virtual environment, by CPython's own name for it, which typeshed does not have."""


def alone_command(code: str) -> list[str]:
    """`python -c CODE` with Python's own library alone."""
    return [sys.executable, "-I", "-S", "-c", code]


def module_command(module: str, *arguments: str) -> list[str]:
    """`python -m MODULE ARGUMENTS`, without the current folder on its path."""
    return [sys.executable, "-P", "-m", module, *arguments]


def run_file(path: str, name: str) -> ModuleType:
    """A Python file that the job names, as a module; it finds what lies beside it. Raises: whatever the file does."""
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None, "a Python file"
    assert found.loader is not None, "a Python file"
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    sys.path.insert(0, str(Path(path).resolve().parent))
    found.loader.exec_module(module)
    return module


def ray_job() -> Any:
    """A Ray job whose workers are given neither the script's folder nor the current one.

    Ray leaves both out where a job brings a folder of its own, and asks the job whether it does. Source: Ray 2.60.0,
    _private/worker.py, `connect`.
    """
    from ray.job_config import JobConfig

    class OwnPathJob(JobConfig):
        def _runtime_env_has_working_dir(self) -> bool:
            return True

    return OwnPathJob()


SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""As `python -P`, for all that a process starts in its turn."""


def keep_path_in_children() -> None:
    """In a worker: the programs that its engine starts do not look into the current folder either."""
    os.environ.update(SAFE_PATH)
