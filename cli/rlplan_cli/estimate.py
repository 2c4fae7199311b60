"""`rlplan estimate`: how much memory each phase, process and kind will need, of a job or of a budget on GPUs."""

from pathlib import Path
from typing import Annotated

import typer

from rlplan.errors import NoFeasiblePlanError, SpecError
from rlplan.planner.budget import Budget, Verdict
from rlplan.planner.gpu_remedies import find_budget
from rlplan.planner.search import plan_from_file
from rlplan.spec.budget import BudgetSpec, load_budget, make_budget
from rlplan.spec.yaml import read_yaml
from rlplan.units import format_bytes
from rlplan_cli.options import AsJson
from rlplan_cli.render import print_json, show_estimate
from rlplan_cli.render_budget import describe_choice, show_budget

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
Gpus = Annotated[str | None, typer.Option(help="How many of which GPU, such as 8xH100.", show_default=False)]


def command(
    job: Source = None,
    overrides: Overrides = None,
    model: Model = None,
    algorithm: AlgorithmName = None,
    gpus: Gpus = None,
    as_json: AsJson = False,
) -> None:
    """Predict memory per phase, process and kind. Starts nothing and needs no torch."""
    changes = tuple(overrides or ())
    if model is not None or gpus is not None:
        answers = {"model": model, "algorithm": algorithm, "gpus": gpus}
        _show(make_budget(answers, ((job, *changes) if job else changes)), as_json=as_json)
        return
    if job is None:
        raise SpecError(
            "nothing to estimate",
            where="command line",
            rule="a job or budget file, or --model and --gpus",
            way_out="for example: rlplan estimate --model Qwen/Qwen2.5-7B --algorithm grpo --gpus 8xH100",
        )
    path = Path(job)
    if path.suffix != ".json" and "gpus" in (read_yaml(path, "the job file") or ()):
        _show(load_budget(path, changes), as_json=as_json)
        return
    plan = plan_from_file(path, changes)
    if as_json:
        print_json(plan.estimate())
    else:
        show_estimate(plan)


def _show(spec: BudgetSpec, *, as_json: bool) -> None:
    """A budget on stdout. Raises: NoFeasiblePlanError after it where nothing fits."""
    budget = find_budget(spec)
    if as_json:
        print_json(budget.as_json())
    else:
        show_budget(budget)
    if budget.verdict is Verdict.DOES_NOT_FIT:
        raise _does_not_fit(budget)


def _does_not_fit(budget: Budget) -> NoFeasiblePlanError:
    peak = budget.binding
    process, _, kind, size = peak.rows[0]
    return NoFeasiblePlanError(
        f"{budget.spec.model} needs {format_bytes(peak.num_bytes)} per GPU in {peak.action_id}, "
        f"{format_bytes(budget.setting.capacity)} available ({describe_choice(budget)})",
        where=f"largest: {kind} of {process}, {format_bytes(size)}",
        rule="the worst moment of a step fits into a GPU, the host's part into the host, one longest sequence into "
        "the KV cache",
        way_out=budget.remedies[0].change if budget.remedies else "a smaller model, shorter lengths or larger GPUs",
    )
