"""`rlplan estimate`: how much memory each phase, process and kind will need, of a job or of a budget on GPUs."""

from typing import TYPE_CHECKING, Annotated

import typer

from rlplan_cli.options import AlgorithmName, AsJson, Gpus, Model, Overrides, Source

if TYPE_CHECKING:
    from rlplan.planner.budget import Budget
    from rlplan_cli.sources import Question

NAME = "estimate"

Trace = Annotated[
    bool, typer.Option("--trace", help="Trace the model's own code without running it: for unknown architectures.")
]


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
    from rlplan.planner.search import plan_from_file
    from rlplan_cli.render import print_json, show_estimate
    from rlplan_cli.sources import read_question
    from rlplan_cli.waiting import waiting

    answers = {"model": model, "algorithm": algorithm, "gpus": gpus}
    question = read_question(NAME, job, tuple(overrides or ()), answers)
    if trace:
        _show_trace(question, as_json=as_json)
        return
    with waiting("searching"):
        budget = question.answered()
    if budget is not None:
        _show(budget, as_json=as_json)
        return
    plan = plan_from_file(question.needed_job, question.overrides)
    if as_json:
        print_json(plan.estimate())
    else:
        show_estimate(plan)


def _show(budget: "Budget", *, as_json: bool) -> None:
    """A budget on stdout. Raises: NoFeasiblePlanError after it where nothing fits."""
    from rlplan.planner.budget import Verdict
    from rlplan_cli.render import print_json
    from rlplan_cli.render_budget import show_budget
    from rlplan_cli.sources import does_not_fit

    if as_json:
        print_json(budget.as_json())
    else:
        show_budget(budget)
    if budget.verdict is Verdict.DOES_NOT_FIT:
        raise does_not_fit(budget)


def _show_trace(question: "Question", *, as_json: bool) -> None:
    from rlplan.errors import SpecError
    from rlplan.spec.models.catalogue import model_path
    from rlplan_cli.render import print_json
    from rlplan_cli.render_budget import show_trace
    from rlplan_cli.sources import needs_budget

    spec = question.spec or (question.budget.spec if question.budget else None)
    if spec is None:
        raise needs_budget("--trace", question.needed_job)
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
