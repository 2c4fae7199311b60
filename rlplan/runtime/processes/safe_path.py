"""Safe path: processes of a run import installed packages only, never files of the current folder (as `python -P`).

`python -m` and Ray put the current folder first on a new process's search path. A module called `torch` in a bundle or
beside a job file would then run. Only a file named by the job (a reward, an environment) may import modules from its
own folder.

In: a module of rlplan. Out: the command that runs it; for Ray, a job that does not change the path.
"""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

EXECUTABLE = sys.executable
"""This interpreter, for a user's own program."""
BASE_EXECUTABLE: str = getattr(sys, "_base_executable", sys.executable)
"""The base interpreter of a virtual environment; typeshed lacks this private attribute of CPython."""


def make_isolated_command(code: str) -> list[str]:
    """`python -c CODE` with the standard library only."""
    return [sys.executable, "-I", "-S", "-c", code]


def make_module_command(module: str, *arguments: str) -> list[str]:
    """`python -m MODULE ARGUMENTS`, without the current folder on its path."""
    return [sys.executable, "-P", "-m", module, *arguments]


def load_file(path: str, name: str) -> ModuleType:
    """Load a Python file named by the job; it may import from its own folder. Raises: any error of the file."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a Python file"
    assert spec.loader is not None, "a Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec.loader.exec_module(module)
    return module


def make_ray_job() -> Any:
    """A Ray job whose workers get neither the script's folder nor the current one on their path.

    Ray omits both for a job that claims its own working directory. Source: Ray 2.60.0, _private/worker.py, `connect`.
    """
    from ray.job_config import JobConfig

    class OwnPathJob(JobConfig):
        def _runtime_env_has_working_dir(self) -> bool:
            return True

    return OwnPathJob()


SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Environment variable with the effect of `python -P` on all descendants of a process."""


def keep_path_in_children() -> None:
    """Keep the current folder off the path of programs that a worker's engine starts."""
    os.environ.update(SAFE_PATH)
