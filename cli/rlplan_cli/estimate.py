"""`rlplan estimate`: how much memory each phase, process and kind will need, of a job or of a budget on GPUs."""

import json
from pathlib import Path
from typing import Annotated

import typer

from rlplan.errors import NoFeasiblePlanError, SpecError
from rlplan.planner.budget import Budget, Verdict
from rlplan.planner.gpu_remedies import find_budget
from rlplan.planner.search import plan_from_file
from rlplan.spec.budget import BudgetSpec, load_budget, make_budget
from rlplan.spec.models.catalogue import load_catalogue, model_path
from rlplan.spec.yaml import read_yaml
from rlplan.units import format_bytes
from rlplan_cli.options import AsJson
from rlplan_cli.render import print_json, show_estimate
from rlplan_cli.render_budget import describe_choice, show_budget, show_trace

NAME = "estimate"

Source = Annotated[
    str | None,
    typer.Argument(
        metavar="[JOB]", help="A job or budget file (.yaml) or a plan (.json); or use --model.", show_default=False
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Overrides, such as workload.max_response_len=8192.", show_default=False),
]
Model = Annotated[
    str | None, typer.Option(help="A hub id of the catalogue, a model folder or a config.json.", show_default=False)
]
AlgorithmName = Annotated[str | None, typer.Option("--algorithm", help="grpo (the default), ppo, dpo ...")]
Trace = Annotated[
    bool, typer.Option("--trace", help="Trace the model's own code without running it: for unknown architectures.")
]
Gpus = Annotated[str | None, typer.Option(help="How many of which GPU, such as 8xH100.", show_default=False)]


def command(
    job: Source = None,
    overrides: Overrides = None,
    model: Model = None,
    algorithm: AlgorithmName = None,
    gpus: Gpus = None,
    trace: Trace = False,
    as_json: AsJson = False,
) -> None:
    """Predict memory per phase, process and kind. Starts nothing and, without --trace, needs no torch."""
    changes = tuple(overrides or ())
    answers = {"model": model, "algorithm": algorithm, "gpus": gpus}
    asks = [f"{key}={json.dumps(value)}" for key, value in answers.items() if value is not None]
    if asks and (job is None or "=" in job):
        _answer(make_budget(answers, ((job, *changes) if job else changes)), trace=trace, as_json=as_json)
        return
    if job is None:
        raise SpecError(
            "nothing to estimate",
            where="command line",
            rule="a job or budget file, or --model and --gpus",
            way_out="for example: rlplan estimate --model Qwen/Qwen2.5-7B --algorithm grpo --gpus 8xH100",
        )
    path = Path(job)
    data = None if path.suffix == ".json" else read_yaml(path, "the job file")
    if isinstance(data, dict) and "gpus" in data:
        _answer(load_budget(path, (*changes, *asks)), trace=trace, as_json=as_json)
        return
    if trace or asks:
        raise SpecError(
            f"{'--trace' if trace else '--' + asks[0].partition('=')[0]} goes with a budget, {path} is none",
            where="command line",
            rule="a budget file (it has the key gpus), or --model and --gpus",
            way_out="rlplan estimate --trace --model config.json --gpus 8xH100",
        )
    plan = plan_from_file(path, changes)
    if as_json:
        print_json(plan.estimate())
    else:
        show_estimate(plan)


def _answer(spec: BudgetSpec, *, trace: bool, as_json: bool) -> None:
    budget = _with_hub_models(spec)
    if trace:
        _show_trace(budget, as_json=as_json)
    else:
        _show(budget, as_json=as_json)


def _show(spec: BudgetSpec, *, as_json: bool) -> None:
    """A budget on stdout. Raises: NoFeasiblePlanError after it where nothing fits."""
    budget = find_budget(spec)
    if as_json:
        print_json(budget.as_json())
    else:
        show_budget(budget)
    if budget.verdict is Verdict.DOES_NOT_FIT:
        raise _does_not_fit(budget)


def _show_trace(spec: BudgetSpec, *, as_json: bool) -> None:
    if model_path(spec.model) is None:
        raise SpecError(
            f"model '{spec.model}' is no path",
            where="model",
            rule="a trace builds the model from its own whole config.json",
            way_out="give the path of its config.json, or leave --trace out: the formulas know the bundled models",
        )
    from rlplan.runtime.trace_estimate import trace_estimate

    estimate = trace_estimate(spec)
    if as_json:
        print_json(estimate.as_json())
    else:
        show_trace(estimate)


def _with_hub_models(spec: BudgetSpec) -> BudgetSpec:
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


def _does_not_fit(budget: Budget) -> NoFeasiblePlanError:
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
