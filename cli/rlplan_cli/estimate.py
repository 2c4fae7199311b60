"""`rlplan estimate`: how much memory each phase, process and kind will need, of a job on a CPU host or on GPUs."""

from typing import TYPE_CHECKING, Annotated

import typer

from rlplan_cli.options import AlgorithmName, AsJson, Gpus, Model, Overrides, Source

if TYPE_CHECKING:
    from rlplan.planner.gpu_plan import GpuPlan
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
    from rlplan_cli.render import print_json, show_estimate
    from rlplan_cli.sources import read_question
    from rlplan_cli.waiting import waiting

    answers = {"model": model, "algorithm": algorithm, "gpus": gpus}
    question = read_question(NAME, job, tuple(overrides or ()), answers)
    if trace:
        _show_trace(question, as_json=as_json)
        return
    if question.is_on_gpus:
        with waiting("searching"):
            found = question.on_gpus()
        _show(found, as_json=as_json)
        return
    plan = question.on_host()
    if as_json:
        print_json(plan.estimate())
    else:
        show_estimate(plan)


def _show(plan: "GpuPlan", *, as_json: bool) -> None:
    """A plan on stdout. Raises: NoFeasiblePlanError after it where nothing fits."""
    from rlplan.planner.executable import does_not_fit
    from rlplan.planner.gpu_plan import Verdict
    from rlplan_cli.render import print_json
    from rlplan_cli.render_gpu import show_gpu_estimate

    if as_json:
        print_json(plan.as_json())
    else:
        show_gpu_estimate(plan)
    if plan.verdict is Verdict.DOES_NOT_FIT:
        raise does_not_fit(plan)


def _show_trace(question: "Question", *, as_json: bool) -> None:
    from rlplan.errors import SpecError
    from rlplan.spec.models.catalogue import model_path
    from rlplan_cli.render import print_json
    from rlplan_cli.render_gpu import show_trace
    from rlplan_cli.sources import only_on_gpus

    if not question.is_on_gpus:
        raise only_on_gpus("--trace", question)
    path = question.job.policy.path
    if model_path(path) is None:
        raise SpecError(
            f"model '{path}' is no path",
            where="policy.path",
            rule="a trace builds the model from its own whole config.json",
            way_out="give the path of its config.json, or leave --trace out: the formulas know the bundled models",
        )
    from rlplan.runtime.trace_estimate import trace_estimate

    estimate = trace_estimate(question.job)
    if as_json:
        print_json(estimate.as_json())
    else:
        show_trace(estimate)
