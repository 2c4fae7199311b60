"""`rlplan estimate`: predicts a job's memory by phase, process and kind, on a CPU host or on GPUs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlplan_cli.options import AsJson, ForeignArguments, JobArguments, Verbose, flatten_options

if TYPE_CHECKING:
    from rlplan.runtime.measure.trace_estimate import TraceEstimate
    from rlplan.sources import Question

NAME = "estimate"

Trace = Annotated[
    bool, typer.Option("--trace", help="Trace the model's code without running it, for unknown architectures.")
]


@flatten_options
def command(job: JobArguments, trace: Trace = False, verbose: Verbose = False, as_json: AsJson = False) -> None:
    """Predict memory by phase, process and kind. Starts nothing; needs torch only with --trace."""
    from rlplan.planner.answers.plan_results import estimate_as_json
    from rlplan.sources import is_foreign
    from rlplan_cli.render.answer import end_with_verdict, show_answer
    from rlplan_cli.render.estimate import show_estimate, show_trace
    from rlplan_cli.render.terminal import hint, print_stages, show_stage
    from rlplan_cli.render.waiting import waiting
    from rlplan_cli.sources import read_question, split_stages

    if job.source is not None and is_foreign(Path(job.source)):
        from rlplan_cli.commands.check import check_file

        foreign = ForeignArguments(Path(job.source), job.overrides, job.gpus, job.model)
        check_file(foreign, is_verbose=verbose, as_json=as_json)
        return
    plans, texts = {}, {}
    for name, asked in split_stages(job):
        question = read_question(NAME, asked)
        if question.serves:
            from rlplan_cli.render.serving import answer_served

            answer_served(question, as_json=as_json)
            continue
        if trace:
            estimate = _trace(question)
            texts[name] = json.dumps(estimate.as_json(), indent=1)
            if not as_json:
                show_stage(name)
                show_trace(estimate)
            continue
        with waiting("searching"):
            plans[name] = plan = question.answer()
        if not as_json:
            show_stage(name)
            show_answer(plan, question.assumed)
            if question.asks_cost and plan.seconds:
                from rlplan_cli.render.compare import show_cost

                show_cost(plan)
            if verbose:
                show_estimate(plan)
        else:
            texts[name] = json.dumps(estimate_as_json(plan), indent=1)
    if as_json and texts:
        print_stages(texts)
    elif plans and not verbose:
        hint("-v shows the memory of each action, process and kind")
    for plan in plans.values():
        end_with_verdict(plan)


def _trace(question: "Question") -> "TraceEstimate":
    from rlplan.errors import SpecError
    from rlplan.spec.models.catalogue import find_model_path

    if not question.job.is_on_gpus:
        raise SpecError(
            f"--trace needs a job on GPUs, this one runs on {question.job.hardware.profile}",
            where="command line",
            rule="a trace counts the memory of a pass on a GPU; formulas cover every model that a CPU host trains",
            way_out="leave --trace out, or set GPUs: hardware=8xH100",
        )
    path = question.job.policy.path
    if find_model_path(path) is None:
        raise SpecError(
            f"model '{path}' is not a path",
            where="policy.path",
            rule="a trace builds the model from its complete config.json",
            way_out="give the path of its config.json, or leave --trace out: formulas cover the bundled models",
        )
    from rlplan.runtime.measure.trace_estimate import trace_estimate

    return trace_estimate(question.job)
