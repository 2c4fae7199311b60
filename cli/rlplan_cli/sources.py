"""Jobs, plans and configurations named on a command line: rlplan/sources.py for typer's arguments, and stages."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlplan.errors import HostError
from rlplan.sources import JobWords, Question, fetch_model, find_executable, is_hub_id, read_options
from rlplan.sources import read_question as read_words
from rlplan.spec.files.job_file import Fetch
from rlplan.spec.files.stages import Stage, find_chosen_stage, stages_of
from rlplan.spec.files.yaml import read_yaml
from rlplan.spec.job import MODELS
from rlplan_cli.options import JobArguments
from rlplan_cli.render.terminal import note

if TYPE_CHECKING:
    from rlplan.foreign.check import Asked
    from rlplan.foreign.settings import Settings
    from rlplan.planner.plan import Plan
    from rlplan_cli.options import ForeignArguments


def read_question(verb: str, asked: JobArguments, objective: str | None = None, fetch: Fetch | None = None) -> Question:
    """Read the question of a command line. fetch: gets models; by default only their configs. Raises: SpecError."""
    return read_words(verb, JobWords(**vars(asked)), objective, fetch)


def split_stages(asked: JobArguments) -> list[tuple[str, JobArguments]]:
    """List (name, arguments of its job) of every stage; a file without stages is one job with an empty name."""
    overrides = asked.overrides or []
    stages = read_stages(asked.source, overrides)
    return [(stage.name, replace(asked, overrides=[f"stage={stage.name}", *overrides])) for stage in stages] or [
        ("", asked)
    ]


def read_stages(source: object, overrides: Sequence[str]) -> tuple[Stage, ...]:
    """Read the stages of a job file; none if one stage is chosen, or if it is not a job file. Raises: SpecError."""
    path = Path(source) if isinstance(source, str | Path) else None
    if path is None or path.suffix not in (".yaml", ".yml") or not path.is_file() or find_chosen_stage(overrides):
        return ()
    return stages_of(read_yaml(path, "the job file"), str(path))


def read_foreign(asked: "ForeignArguments") -> "tuple[Settings, Asked]":
    """Read another framework's configuration and the question about it. Raises: SpecError, HostError."""
    from rlplan.foreign.check import Asked
    from rlplan.foreign.source import read_source
    from rlplan.foreign.unread.stacks import Nearest

    reading = read_options({"policy": asked.model}, asked.overrides or ())
    hardware, model = asked.gpus or reading.keys.get("hardware", ""), reading.keys.get("policy")
    settings = read_source(asked.file, asked.source, asked.outside or (), Nearest(hardware, model))
    return settings, Asked(hardware, model, tuple(reading.overrides), fetch_model)


def resolve_model(name: str, folder: Path, key: str) -> str:
    """Resolve a model to the path that a run uses: its own, or one in the hub's cache; otherwise that of its config."""
    return _find_local(name, folder) or fetch_model(name, folder, key)


def _find_local(name: str, folder: Path) -> str | None:
    from rlplan.runtime.models.snapshots import find_cached_model

    if not is_hub_id(name, folder) or (folder / MODELS / name).exists():
        return name
    cached = find_cached_model(name)
    return None if cached is None else str(cached)


def plan_with_models(
    verb: str, source: Path, overrides: tuple[str, ...], address: str | None, *, downloads: bool = True
) -> "Plan":
    """Return the plan to run, after downloading the models that are named by hub id and not in the hub's cache.

    Nothing is downloaded if the plan does not fit, if this host cannot run it, or without `downloads`.
    address: that of a Ray cluster.
    Raises: SpecError, NoFeasiblePlanError, EmitError, HostError.
    """
    from rlplan.runtime.models.snapshots import download_data, download_model

    absent: list[str] = []
    asked = JobWords(str(source), [*overrides])

    def resolve(name: str, folder: Path, key: str) -> str:
        """Resolve a model, and remember it if it must be downloaded."""
        if _find_local(name, folder) is None:
            absent.append(name)
        return resolve_model(name, folder, key)

    plan = find_executable(verb, asked, resolve)
    if absent:
        from rlplan.planner.executable import check_complete
        from rlplan.runtime.driver.preflight import check_packages
        from rlplan.runtime.host.detect import check_devices

        # everything that could stop the run is checked before gigabytes are downloaded
        check_complete(plan.job, str(source), plan.job.named_models)
        check_devices(plan.job, address)
        check_packages(plan.job)
        if not downloads:
            raise HostError(
                f"not on this machine: {', '.join(dict.fromkeys(absent))}",
                where=str(source),
                rule="a run would download it now, but --dry-run downloads nothing; all other checks passed",
                way_out=f"hf download {absent[0]}, or run without --dry-run",
            )
        for name in dict.fromkeys(absent):
            download_model(name, f"{source}: {name}", note)
        plan = find_executable(verb, asked, resolve)
    if downloads and (data := plan.job.data) is not None:
        download_data((place for _, place in data.files), f"{source}: data", note)
    return plan
