"""How a job file, or a command line, becomes a JobSpec.

In: a YAML file or a few answers, and dotted overrides. Out: a frozen JobSpec with absolute paths, or a SpecError.
"""

import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlplan.errors import MisspeltError, SpecError
from rlplan.spec.base import validate
from rlplan.spec.declaration import read_declaration
from rlplan.spec.files.hub_data import HUB_DATA
from rlplan.spec.files.stages import CHOICE, KEY, select_job
from rlplan.spec.files.yaml import apply_overrides, read_yaml
from rlplan.spec.job import JobSpec
from rlplan.spec.models.catalogue import find_bundled_id, find_nearest_id
from rlplan.spec.parts.rewards import FunctionSpec

WAY_OUT = "docs/job.md shows every key and a whole job"
COMMAND_LINE = "command line"
OPTIONS = {
    "policy": ("no model is named", "--model Qwen/Qwen2.5-7B-Instruct"),
    "hardware": ("no GPUs are named", "--gpus 8xH100, or --gpus cpu-host"),
}
"""The message for each required key that a command line lacks, and the option that sets it."""

Fetch = Callable[[str, Path, str], str]
"""Downloads a model. Arguments: its name, the folder that its path is relative to, and its key in the job. Result: the
local path."""

MAX_SHOWN_PATH = 1_000
"""Limit on the characters of a path in a message."""


def load_job(path: Path, overrides: Sequence[str] = (), *, fetch: Fetch | None = None) -> JobSpec:
    """The job in a YAML file, with dotted overrides applied. fetch: downloads models that are not on disk.

    Raises: SpecError.
    """
    contents = read_yaml(path, "the job file")
    _refuse_stage_overrides(contents, overrides, path)
    job_data, own_overrides = select_job(contents, overrides, str(path))
    data = apply_overrides(JobSpec.expand_short_forms(job_data), own_overrides)
    _read_algorithm_file(data, path.parent, own_overrides)
    try:
        job = _locate(validate(JobSpec, data, file=str(path)), path.parent, fetch)
    except SpecError as error:
        raise _blame_override(error, overrides, str(path)) from None
    for key, name in _models_on_disk(job).items():
        _check_model(name, f"{path}: {key}")
    data_files = () if job.data is None else job.data.files
    for key, place in (
        *((key, place) for key, place in data_files if not place.startswith(HUB_DATA)),
        *((f"rewards[].path of {r.label}", r.file) for r in job.rewards if isinstance(r, FunctionSpec)),
        *job.rollout.environment.files,
    ):
        fault = _fault(Path(place))
        if fault:
            raise SpecError(
                f"'{_cut(str(place))}' {fault}",
                where=f"{path}: {key}",
                rule="a file or a folder, its path relative to the job file",
                way_out="correct the path or make the file",
            )
    return job


def _refuse_stage_overrides(data: Any, overrides: Sequence[str], path: Path) -> None:
    """Raises: SpecError where an override addresses a stage and the file has none."""
    about = [
        override for override in overrides if override.partition("=")[0].partition(".")[0].strip() in (CHOICE, KEY)
    ]
    if about and isinstance(data, dict) and KEY not in data:
        raise SpecError(
            f"{path} has no stages",
            where=f"override '{_cut(about[0])}'",
            rule=f"{CHOICE}=NAME chooses one of a file with {KEY}:",
            way_out=f"leave {_cut(about[0])} out",
        )


def _cut(path: str) -> str:
    """A path for a message, cut only if it is longer than any file system allows."""
    return path if len(path) <= MAX_SHOWN_PATH else path[: MAX_SHOWN_PATH - 1] + "…"


def _locate(job: JobSpec, folder: Path, fetch: Fetch | None) -> JobSpec:
    """The job with absolute paths, and with models fetched that are not on disk."""
    if fetch is not None:
        keys = {name: key.removeprefix("policy.path") or "policy" for key, name in _models_on_disk(job).items()}
        job = job.map_paths(lambda path: path, lambda name: fetch(name, folder, keys[name]) if name in keys else name)
    return job.resolve_paths(folder)


def _models_on_disk(job: JobSpec) -> dict[str, str]:
    """The models that are read from files, by key: all but a policy whose config is in the job."""
    has_config = job.policy.config is not None
    return {key: name for key, name in job.named_models.items() if key != "policy.path" or not has_config}


def job_from(
    answers: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    fetch: Fetch | None = None,
    where: str = COMMAND_LINE,
) -> JobSpec:
    """The job of a command line, whose paths are relative to the working directory. answers: top-level keys.

    where: the source of the answers, for messages. Raises: SpecError.
    """
    keys = {key: value for key, value in answers.items() if value is not None}
    data = apply_overrides(JobSpec.expand_short_forms(keys), overrides)
    for key, (what, option) in OPTIONS.items():
        if where == COMMAND_LINE and isinstance(data, dict) and key not in data:
            raise SpecError(what, where=where, rule="a job of a command line has a model and GPUs", way_out=option)
    _read_algorithm_file(data, Path.cwd(), overrides)
    try:
        return _locate(validate(JobSpec, data, file=where, way_out=WAY_OUT), Path.cwd(), fetch)
    except SpecError as error:
        raise _blame_override(error, overrides, where) from None


def override_job(spec: JobSpec, overrides: Sequence[str]) -> JobSpec:
    """The job with overrides applied. Raises: SpecError."""
    data = apply_overrides(spec.model_dump(mode="json"), overrides)
    if "algorithm.path" in _keys(overrides):
        _read_algorithm_file(data, Path.cwd(), overrides)
    return validate(JobSpec, data, file=COMMAND_LINE, way_out=WAY_OUT)


def _blame_override(error: SpecError, overrides: Sequence[str], file: str) -> SpecError:
    """The error of a key, attributed to the last override that sets the key, if there is one."""
    path = error.where.removeprefix(f"{file}: ")
    for override in reversed(overrides):
        key = override.partition("=")[0].strip()
        stage = ".".join(key.split(".")[:2]) + "." if key.startswith(f"{KEY}.") else ""
        own = key.removeprefix(stage)
        if path != own and not path.startswith(f"{own}."):
            continue
        where = f"override '{_cut(override)}'" + f": {path}" * (path != own)
        way_out = error.way_out.replace("write ", f"write {stage}", 1) if stage else error.way_out
        blamed = type(error)(error.what, where=where, rule=error.rule, way_out=way_out)
        if isinstance(error, MisspeltError) and isinstance(blamed, MisspeltError):
            blamed.key, blamed.word, blamed.value_text = error.key, error.word, error.value_text
        return blamed
    return error


def _read_algorithm_file(data: Any, folder: Path, overrides: Sequence[str]) -> None:
    """Copy the declaration at `algorithm.path` into the job, so that later steps need not read the file.

    An override of the path alone also sets the declared name, replacing the name that the job had before.
    """
    part = data.get("algorithm") if isinstance(data, dict) else None
    if not isinstance(part, dict) or not isinstance(part.get("path"), str):
        return
    part["path"], part["custom"] = read_declaration(part["path"], folder)
    keys = _keys(overrides)
    brings_name = "algorithm.path" in keys and not keys & {"algorithm", "algorithm.name"}
    if brings_name or "name" not in part:
        part["name"] = part["custom"]["name"]


def _keys(overrides: Sequence[str]) -> set[str]:
    """The keys that overrides set."""
    return {override.partition("=")[0].strip() for override in overrides}


def _check_model(name: str, where: str) -> None:
    """Raises: SpecError where a model is neither a folder or file nor bundled."""
    fault = _fault(Path(name))
    if not fault or find_bundled_id(name) is not None:
        return
    near = find_nearest_id(name)
    raise SpecError(
        f"'{_cut(name)}' {fault}",
        where=where,
        rule="a folder or a config.json, its path relative to the job file, or the id of a bundled model"
        + (f". Did you mean '{near}'?" if near else ""),
        way_out=f"write {near}, or correct the path" if near else "correct the path, or make the folder",
    )


def _fault(path: Path) -> str:
    """The problem with a path, empty if it is readable. A path too long for the file system does not exist; a pipe or a
    device has no end.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return "does not exist"
    return "" if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else "is neither a file nor a folder"
