"""What a command line speaks of: a job by its own words or in a file, a plan, or a bundle. Decided here only.

In: the arguments of a verb. Out: a Question. Left out: answering it.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlplan.errors import SpecError
from rlplan.spec.files.job_file import job_from, load_job
from rlplan.spec.job import JobSpec
from rlplan.spec.models.catalogue import MAX_ID, bundled_id, nearest_id
from rlplan_cli.options import JobArguments

if TYPE_CHECKING:
    from rlplan.foreign.check import Asked
    from rlplan.foreign.settings import Settings
    from rlplan.planner.plan import Plan
    from rlplan_cli.options import ForeignArguments


@dataclass(frozen=True)
class Question:
    """A job that is asked about, or a plan that was read: of a file, or of a bundle."""

    job: JobSpec
    """Of a plan the one that it answers."""
    plan: "Plan | None" = None
    """None where it is still to be found."""

    def answer(self, *, with_pareto: bool = False) -> "Plan":
        """The plan that was read, or the best one, whatever its verdict. Raises: SpecError, NoFeasiblePlanError."""
        from rlplan.planner.machine import search_of
        from rlplan.planner.search import best_plan

        if self.plan is None:
            return best_plan(self.job, with_pareto=with_pareto)
        if not with_pareto or self.plan.pareto:
            return self.plan
        return self.plan.model_copy(update={"pareto": search_of(self.job).on(self.plan.num_devices).pareto()})


def read_question(verb: str, asked: JobArguments, objective: str | None = None) -> Question:
    """The question of a command line. Raises: SpecError."""
    keys = {"policy": asked.model, "algorithm": asked.algorithm, "hardware": asked.gpus, "objective": objective}
    given = {key: value for key, value in keys.items() if value is not None}
    text, overrides = asked.source, tuple(asked.overrides or ())
    if text is None or ("=" in text and given):
        if not given:
            raise _nothing_asked(verb)
        words = overrides if text is None else (text, *overrides)
        return Question(job_from(given, words, fetch=fetched))
    path, asks = Path(text), tuple(f"{key}={json.dumps(value)}" for key, value in given.items())
    if path.is_dir() or path.suffix == ".json" or _is_json_by_content(path):
        _refuse_changes(path, (*overrides, *asks))
        plan = _read(path)
        return Question(plan.asked, plan)
    return Question(load_job(path, (*overrides, *asks), fetch=fetched))


def read_foreign(asked: "ForeignArguments") -> "tuple[Settings, Asked]":
    """What a configuration of another stack says, and what is asked of it. Raises: SpecError, HostError."""
    from rlplan.foreign.check import Asked
    from rlplan.foreign.source import read_source

    settings = read_source(asked.file, asked.source, asked.outside or ())
    return settings, Asked(asked.hardware, asked.model, tuple(asked.overrides or ()), fetched)


def _is_json_by_content(path: Path) -> bool:
    """A plan, whatever `--out` called it. A job that is written as JSON is called .yaml."""
    if path.suffix in (".yaml", ".yml") or not path.is_file():  # a pipe is not read twice
        return False
    try:
        with path.open("rb") as file:
            return file.read(1) == b"{"
    except OSError:
        return False


def _read(path: Path) -> "Plan":
    """Of a plan file or a bundle. Raises: SpecError, EmitError."""
    from rlplan.planner.plan import read_plan

    if not path.is_dir():
        return read_plan(path)
    from rlplan.emit.bundle import read_bundle

    read_bundle(path)
    return read_plan(path / "plan.json")


def executable(verb: str, source: Path, overrides: tuple[str, ...]) -> "Plan":
    """The plan that would run, of a job, a plan or a bundle. Raises: SpecError, NoFeasiblePlanError, EmitError."""
    from rlplan.planner.executable import executable_plan

    return executable_plan(read_question(verb, JobArguments(str(source), [*overrides])).answer())


def _refuse_changes(path: Path, changes: tuple[str, ...]) -> None:
    if changes and path.is_dir():
        raise SpecError(
            f"override '{changes[0]}' cannot change the bundle {path}",
            where="command line",
            rule="overrides go with a job file; a bundle runs as it stands",
            way_out="run the job with the override, or emit a new bundle",
        )
    if changes:
        raise SpecError(
            f"override '{changes[0]}' cannot change the plan {path}",
            where="command line",
            rule="overrides go with a job file; a plan stands as it was made",
            way_out=f"plan the job again with it; rlplan explain {path} --set {changes[0]} asks what it would bring",
        )


def _nothing_asked(verb: str) -> SpecError:
    return SpecError(
        f"nothing to {verb}",
        where="command line",
        rule="a job file, a plan or a bundle, or --model and --gpus",
        way_out=f"for example: rlplan {verb} --model Qwen/Qwen2.5-7B --algorithm grpo --gpus 8xH100",
    )


def fetched(name: str, folder: Path) -> str:
    """The path of a hub id's config, which is fetched; a path or a bundled id as it is.

    Raises: SpecError, HostError.
    """
    parts = Path(name).parts
    if bundled_id(name) or len(name) > MAX_ID or "\0" in name or len(parts) != 2 or (folder / parts[0]).exists():
        return name  # bundled, no id, or a path whose first folder is there
    from rlplan.runtime.models.hub import fetch_config, looks_like_an_id

    if not looks_like_an_id(name) or nearest_id(name):
        return name  # a bundled id in another case is what was meant
    return str(fetch_config(name, "policy"))
