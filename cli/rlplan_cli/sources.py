"""What a command line speaks of: rlplan/sources.py, asked in the words of typer, and what only commands need."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlplan.errors import HostError
from rlplan.sources import JobWords, Question, executable, fetched, is_hub_id
from rlplan.sources import read_question as read_words
from rlplan.spec.files.job_file import Fetch
from rlplan.spec.files.stages import Stage, chosen_stage, stages_of
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
    """The question of a command line. fetch: brings models; by default their configs. Raises: SpecError."""
    return read_words(verb, JobWords(**vars(asked)), objective, fetch)


def each_stage(asked: JobArguments) -> list[tuple[str, JobArguments]]:
    """(name, words of its job) of every stage that is asked about; of a file with one job that, without a name."""
    stages = stages_in(asked.source, asked.overrides or ())
    return [
        (one.name, replace(asked, overrides=[f"stage={one.name}", *(asked.overrides or ())])) for one in stages
    ] or [("", asked)]


def stages_in(source: object, overrides: Sequence[str]) -> tuple[Stage, ...]:
    """The stages of a job file of which no one is chosen; none of anything else. Raises: SpecError."""
    path = Path(source) if isinstance(source, str | Path) else None
    if path is None or path.suffix not in (".yaml", ".yml") or not path.is_file() or chosen_stage(overrides):
        return ()
    return stages_of(read_yaml(path, "the job file"), str(path))


def read_foreign(asked: "ForeignArguments") -> "tuple[Settings, Asked]":
    """What a configuration of another stack says, and what is asked of it. Raises: SpecError, HostError."""
    from rlplan.foreign.check import Asked
    from rlplan.foreign.source import read_source
    from rlplan.foreign.unread.stacks import Nearest

    nearest = Nearest(asked.hardware, asked.model)
    settings = read_source(asked.file, asked.source, asked.outside or (), nearest)
    return settings, Asked(asked.hardware, asked.model, tuple(asked.overrides or ()), fetched)


def as_it_runs(name: str, folder: Path, key: str) -> str:
    """The path of a model as a run takes it: in its place or in the hub's cache; else that of its config."""
    return _on_this_machine(name, folder) or fetched(name, folder, key)


def _on_this_machine(name: str, folder: Path) -> str | None:
    from rlplan.runtime.models.snapshots import cached_model

    if not is_hub_id(name, folder) or (folder / MODELS / name).exists():
        return name
    cached = cached_model(name)
    return None if cached is None else str(cached)


def with_models(
    verb: str, source: Path, overrides: tuple[str, ...], address: str | None, *, downloads: bool = True
) -> "Plan":
    """The plan that would run, with a folder for every model that is named by hub id: in the hub's cache, or fetched.

    Nothing is fetched for a plan that does not fit, or that this host cannot run, or without `downloads`.
    address: of a Ray cluster.
    Raises: SpecError, NoFeasiblePlanError, EmitError, HostError.
    """
    from rlplan.runtime.models.snapshots import download_data, download_model

    absent: list[str] = []
    asked = JobWords(str(source), [*overrides])

    def found(name: str, folder: Path, key: str) -> str:
        """As `as_it_runs`, and noted where it is to be downloaded."""
        if _on_this_machine(name, folder) is None:
            absent.append(name)
        return as_it_runs(name, folder, key)

    plan = executable(verb, asked, found)
    if absent:
        from rlplan.planner.executable import check_complete
        from rlplan.runtime.driver.preflight import check_packages
        from rlplan.runtime.host.devices import check_devices

        check_complete(plan.job, str(source), plan.job.named_models)
        check_devices(plan.job, address)
        check_packages(plan.job)
        if not downloads:
            raise HostError(
                f"not on this machine: {', '.join(dict.fromkeys(absent))}",
                where=str(source),
                rule="a run would download it now; --dry-run downloads nothing, and all else up to here is right",
                way_out=f"hf download {absent[0]}, or run without --dry-run",
            )
        for name in dict.fromkeys(absent):
            download_model(name, f"{source}: {name}", note)
        plan = executable(verb, asked, found)
    if downloads and (data := plan.job.data) is not None:
        download_data((place for _, place in data.files), f"{source}: data", note)
    return plan
