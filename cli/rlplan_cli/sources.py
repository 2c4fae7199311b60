"""What a command line speaks of: a budget on GPUs or a job, by its own words, a file or a plan. Decided here only.

In: the arguments of estimate, plan, explain and simulate. Out: a Question. Left out: answering it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlplan.errors import NoFeasiblePlanError, SpecError
from rlplan.planner.answers.plan_file import is_gpu_plan, read_gpu_plan
from rlplan.planner.budget import Budget, Verdict
from rlplan.planner.gpu.remedies import find_budget
from rlplan.spec.budget import BudgetSpec, load_budget, make_budget
from rlplan.spec.models.catalogue import load_catalogue, model_path
from rlplan.spec.yaml import read_yaml
from rlplan.units import format_bytes
from rlplan_cli.render_budget import describe_choice

if TYPE_CHECKING:
    from rlplan.planner.plan import Plan


@dataclass(frozen=True)
class Question:
    """One of three: spec (a budget), budget (a plan for GPUs, read), job (the path of a job or of its plan)."""

    spec: BudgetSpec | None = None
    budget: Budget | None = None
    job: Path | None = None
    overrides: tuple[str, ...] = ()

    @property
    def needed_job(self) -> Path:
        """The path, of a question about a job."""
        assert self.job is not None
        return self.job

    def answered(self, *, with_pareto: bool = False) -> Budget | None:
        """The budget that was read, or is found now; None for a job. Raises: SpecError, NoFeasiblePlanError."""
        return find_budget(self.spec, with_pareto=with_pareto) if self.spec is not None else self.budget


def read_question(
    verb: str, source: str | None, overrides: tuple[str, ...], answers: Mapping[str, str | None]
) -> Question:
    """The question of a command line. answers: options that are keys of a budget. Raises: SpecError."""
    asks = tuple(f"{key}={json.dumps(value)}" for key, value in answers.items() if value is not None)
    if source is None or ("=" in source and asks):
        if not asks:
            raise _nothing_asked(verb)
        words = overrides if source is None else (source, *overrides)
        return Question(spec=with_hub_models(make_budget(dict(answers), words)))
    path = Path(source)
    if path.suffix == ".json":
        if not is_gpu_plan(path):
            return _job(path, overrides, asks)
        _refuse_changes(path, (*overrides, *asks))
        return Question(budget=read_gpu_plan(path))
    if _is_budget_file(path):
        return Question(spec=with_hub_models(load_budget(path, (*overrides, *asks))))
    return _job(path, overrides, asks)


def is_budget(source: str | None) -> bool:
    """Whether a command line speaks of a budget: by its own words, or by a file with the key gpus."""
    if source is None or ("=" in source and not Path(source).exists()):
        return True
    path = Path(source)
    return is_gpu_plan(path) if path.suffix == ".json" else _is_budget_file(path)


def _is_budget_file(path: Path) -> bool:
    data = read_yaml(path, "the job file")
    return isinstance(data, dict) and "gpus" in data


def executable_plan(path: Path, overrides: tuple[str, ...]) -> "Plan":
    """The plan that would run: of a job, of a budget that says what a run trains on, or one that was written.

    Raises: SpecError, NoFeasiblePlanError, EmitError.
    """
    from rlplan.planner.lowering import executable_plan as lowered
    from rlplan.planner.search import plan_from_file

    question = read_question("run", str(path), overrides, {})
    if question.job is not None:
        return plan_from_file(path, overrides)
    budget = question.answered()
    assert budget is not None, "a question that is not about a job is about a budget"
    if budget.verdict is Verdict.DOES_NOT_FIT:
        raise does_not_fit(budget)
    return lowered(budget)


def _job(path: Path, overrides: tuple[str, ...], asks: tuple[str, ...]) -> Question:
    if asks:
        raise needs_budget(f"--{asks[0].partition('=')[0]}", path)
    return Question(job=path, overrides=overrides)


def needs_budget(option: str, path: Path) -> SpecError:
    """Something that only a budget has was asked of a job."""
    return SpecError(
        f"{option} goes with a budget, {path} is none",
        where="command line",
        rule="a budget file (it has the key gpus), its plan, or --model and --gpus",
        way_out="rlplan plan --model Qwen/Qwen2.5-7B --gpus 8xH100",
    )


def _refuse_changes(path: Path, changes: tuple[str, ...]) -> None:
    if changes:
        raise SpecError(
            f"'{changes[0]}' cannot change the plan {path}",
            where="command line",
            rule="changes go with a budget file; a plan stands as it was made",
            way_out=f"rlplan explain {path} --set {changes[0]} asks what the change would bring; or plan again with it",
        )


def _nothing_asked(verb: str) -> SpecError:
    return SpecError(
        f"nothing to {verb}",
        where="command line",
        rule="a job or budget file, a plan, or --model and --gpus",
        way_out=f"for example: rlplan {verb} --model Qwen/Qwen2.5-7B --algorithm grpo --gpus 8xH100",
    )


def with_hub_models(spec: BudgetSpec) -> BudgetSpec:
    """The same with a fetched config in place of every hub id that is neither a path nor bundled."""
    changed = {}
    for key in ("model", "value_model", "reward_model"):
        name = getattr(spec, key)
        if name and model_path(name) is None and name not in load_catalogue():
            from rlplan.runtime.hub import fetch_config, looks_like_an_id

            if looks_like_an_id(name) and not _is_misspelt(name):
                changed[key] = str(fetch_config(name))
    return spec.model_copy(update=changed)


def _is_misspelt(name: str) -> bool:
    """Whether a bundled id differs in case only: then it is that one which was meant."""
    return name.lower() in {known.lower() for known in load_catalogue()}


def does_not_fit(budget: Budget) -> NoFeasiblePlanError:
    """The answer where nothing fits, as an error for people; the page stands on stdout already."""
    of, needed, room = budget.shortage or ("a GPU", budget.binding.num_bytes, budget.binding_capacity)
    peak = budget.ledger.host_peak() if of == "a host's memory" else budget.binding
    others = "" if of != "a host's memory" else " and those like it"
    process, _, kind, size = peak.rows[0]
    return NoFeasiblePlanError(
        f"{budget.spec.model} needs {format_bytes(needed)} of {of}, {format_bytes(room)} available; the worst moment "
        f"is {peak.action_id} ({describe_choice(budget)})",
        where=f"largest: {kind} of {process}{others}, {format_bytes(size)}",
        rule="the worst moment of a step fits into a GPU, the host's part into the host, one longest sequence into "
        "the KV cache",
        way_out=budget.remedies[0].change if budget.remedies else "a smaller model, shorter lengths or larger GPUs",
    )
