"""What a command line speaks of: a job by its own words or in a file, a plan, or a bundle. Decided here only.

In: the arguments of a verb. Out: a Question. Left out: answering it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlplan.errors import SpecError
from rlplan.planner.answers.plan_file import is_gpu_plan, read_gpu_plan
from rlplan.planner.gpu.remedies import find_gpu_plan
from rlplan.planner.gpu_plan import GpuPlan, Verdict
from rlplan.spec.job import JobSpec
from rlplan.spec.job_file import job_from, load_job
from rlplan.spec.models.catalogue import MAX_ID, bundled_id, nearest_id

if TYPE_CHECKING:
    from rlplan.planner.plan import Plan

KEYS = {"model": "policy", "gpus": "hardware"}
"""Options of a command line that are keys of a job by another name."""


@dataclass(frozen=True)
class Question:
    """One of three: asked (a job), gpu_plan (a plan of a job on GPUs, read), plan (one that runs, of a bundle too)."""

    asked: JobSpec | None = None
    gpu_plan: GpuPlan | None = None
    plan: "Plan | None" = None

    @property
    def job(self) -> JobSpec:
        """The job that it is about."""
        if self.gpu_plan is not None:
            return self.gpu_plan.asked
        if self.plan is not None:
            return self.plan.job
        assert self.asked is not None, "one of the three"
        return self.asked

    @property
    def is_on_gpus(self) -> bool:
        """Whether its devices are GPUs. Raises: SpecError for an unknown profile."""
        return self.job.device_kind == "cuda"

    def on_gpus(self, *, with_pareto: bool = False) -> GpuPlan:
        """The plan on GPUs that was read, or is found now: of a bundle's job everything is chosen already.

        Raises: SpecError, NoFeasiblePlanError.
        """
        return self.gpu_plan or find_gpu_plan(self.job, with_pareto=with_pareto)

    def on_host(self) -> "Plan":
        """The plan on a CPU host that was read, or is found now. Raises: SpecError, NoFeasiblePlanError."""
        from rlplan.planner.search import find_plan

        return self.plan or find_plan(self.job)


def read_question(
    verb: str, source: str | Path | None, overrides: tuple[str, ...], answers: Mapping[str, str | None]
) -> Question:
    """The question of a command line. answers: options that are keys of a job. Raises: SpecError."""
    given = {KEYS.get(key, key): value for key, value in answers.items() if value is not None}
    text = None if source is None else str(source)
    if text is None or ("=" in text and given):
        if not given:
            raise _nothing_asked(verb)
        words = overrides if text is None else (text, *overrides)
        return Question(asked=job_from(given, words, fetch=fetched))
    path, asks = Path(text), tuple(f"{key}={json.dumps(value)}" for key, value in given.items())
    if path.is_dir() or path.suffix == ".json":
        _refuse_changes(path, (*overrides, *asks))
        return _read(path)
    return Question(asked=load_job(path, (*overrides, *asks), fetch=fetched))


def _read(path: Path) -> Question:
    """A plan or a bundle. Raises: SpecError, EmitError."""
    from rlplan.planner.plan import read_plan

    if path.is_dir():
        from rlplan.emit.bundle import read_bundle

        read_bundle(path)
        return Question(plan=read_plan(path / "plan.json"))
    return Question(gpu_plan=read_gpu_plan(path)) if is_gpu_plan(path) else Question(plan=read_plan(path))


def executable(verb: str, source: Path, overrides: tuple[str, ...]) -> "Plan":
    """The plan that would run, of a job, a plan or a bundle. Raises: SpecError, NoFeasiblePlanError, EmitError."""
    from rlplan.planner.executable import does_not_fit, executable_plan

    question = read_question(verb, source, overrides, {})
    if question.gpu_plan is None:
        return question.on_host()
    if question.gpu_plan.verdict is Verdict.DOES_NOT_FIT:
        raise does_not_fit(question.gpu_plan)
    return executable_plan(question.gpu_plan)


def only_on_gpus(option: str, question: Question) -> SpecError:
    """Something that only plans for GPUs have was asked of a CPU host."""
    return SpecError(
        f"{option} is for jobs on GPUs, job '{question.job.name}' is on {question.job.hardware.profile}",
        where="command line",
        rule="a CPU host has a handful of layouts: `rlplan plan` names each and says why it was not taken",
        way_out="rlplan plan JOB, or name GPUs: hardware=8xH100",
    )


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
            way_out=f"plan the job again with it; of a job on GPUs, rlplan explain {path} --set {changes[0]} asks what "
            "the change would bring",
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
    from rlplan.runtime.hub import fetch_config, looks_like_an_id

    if not looks_like_an_id(name) or nearest_id(name):
        return name  # a bundled id in another case is what was meant
    return str(fetch_config(name, "policy"))
