"""How a job file becomes a JobSpec.

In: a YAML file and dotted overrides. Out: a frozen JobSpec whose paths are absolute, or a SpecError.
"""

import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlplan.errors import SpecError
from rlplan.spec.base import validate
from rlplan.spec.declaration import read_declaration
from rlplan.spec.job import JobSpec
from rlplan.spec.models.catalogue import load_catalogue
from rlplan.spec.rewards import FunctionSpec
from rlplan.spec.yaml import apply_overrides, read_yaml


def load_job(path: Path, overrides: Sequence[str] = ()) -> JobSpec:
    """The job in a YAML file, with dotted overrides laid over it. Raises: SpecError."""
    data = apply_overrides(read_yaml(path, "the job file"), overrides)
    if isinstance(data, dict) and "gpus" in data:
        raise SpecError(
            f"{path} is a budget for GPUs, not a job",
            where=f"{path}: gpus",
            rule="a job says what runs, with every path; a budget says what it may take",
            way_out=f"rlplan plan, emit or run {path}; `job:` in it says what a run of it needs",
        )
    _take_in_the_algorithms_file(data, path.parent)
    job = validate(JobSpec, data, file=str(path)).resolved(path.parent)
    for key, place in (
        ("policy.path", job.policy.path),
        *((f"roles.{role}.path", path) for role, path in job.roles.paths.items()),
        ("workload.prompts", job.workload.prompts),
        ("workload.heldout_prompts", job.workload.heldout_prompts),
        *((f"rewards[].path of {r.label}", r.file) for r in job.rewards if isinstance(r, FunctionSpec)),
        *([("rollout.environment.path", str(job.rollout.environment.file))] if job.has_turns else []),
    ):
        fault = _fault(Path(place))
        if fault and not (key.endswith("path") and _is_bundled(Path(place))):
            raise SpecError(
                f"'{place}' {fault}",
                where=f"{path}: {key}",
                rule="a file or a folder, its path relative to the job file",
                way_out="correct the path or make the file",
            )
    return job


def _take_in_the_algorithms_file(data: Any, folder: Path) -> None:
    """What `algorithm.path` declares becomes part of the job, so that nobody after has to read the file."""
    part = data.get("algorithm") if isinstance(data, dict) else None
    if isinstance(part, dict) and isinstance(part.get("path"), str):
        part["path"], part["custom"] = read_declaration(part["path"], folder)
        part.setdefault("name", part["custom"]["name"])


def _is_bundled(path: Path) -> bool:
    """Whether a folder's shape is known although it is not there."""
    return "/".join(path.parts[-2:]) in load_catalogue()


def _fault(path: Path) -> str:
    """What is wrong with a path. One that the file system cannot hold does not exist; a pipe or a device has no end."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return "does not exist"
    return "" if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else "is neither a file nor a folder"
