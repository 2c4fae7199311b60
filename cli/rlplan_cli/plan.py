"""`rlplan plan`: choose a layout for a job or for GPUs, and write the plan."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlplan_cli.options import AlgorithmName, AsJson, Gpus, Model, Overrides, Source

if TYPE_CHECKING:
    from rlplan_cli.sources import Question

NAME = "plan"
SHOWN_FIRST = 3
"""Next best layouts that are shown unless somebody asks for more."""

Objective = Annotated[
    str | None,
    typer.Option(help="What to make best: step_time (usual), tokens_per_s, cost or gpus.", show_default=False),
]
Top = Annotated[int, typer.Option(min=0, max=100, help="How many of the next best layouts to show.")]
Lengths = Annotated[
    Path | None, typer.Option(help="Count with the lengths that a run measured: its folder.", show_default=False)
]
Pareto = Annotated[bool, typer.Option("--pareto", help="Show every trade of time against headroom too.")]


def command(
    job: Source = None,
    overrides: Overrides = None,
    model: Model = None,
    algorithm: AlgorithmName = None,
    gpus: Gpus = None,
    objective: Objective = None,
    top: Top = SHOWN_FIRST,
    pareto: Pareto = False,
    lengths: Lengths = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the plan to this JSON file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Choose a layout for a job or for GPUs. Says what was rejected and why."""
    from rlplan_cli.sources import only_on_gpus, read_question

    if lengths is not None:
        from rlplan.spec.measured_lengths import lengths_of_run

        overrides = [*lengths_of_run(lengths), *(overrides or ())]
    answers = {"model": model, "algorithm": algorithm, "gpus": gpus, "objective": objective}
    question = read_question(NAME, job, tuple(overrides or ()), answers)
    if question.is_on_gpus:
        _plan_gpus(question, out=out, as_json=as_json, top=top, pareto=pareto)
    elif pareto or top != SHOWN_FIRST or objective is not None:
        raise only_on_gpus("--pareto, --top or --objective", question)
    else:
        _plan_host(question, out=out, as_json=as_json)


def _plan_gpus(question: "Question", *, out: Path | None, as_json: bool, top: int, pareto: bool) -> None:
    from rlplan.planner.answers.plan_file import dump_gpu_plan, write_gpu_plan
    from rlplan.planner.executable import does_not_fit
    from rlplan.planner.gpu_plan import Verdict
    from rlplan_cli.render import note
    from rlplan_cli.render_plan import show_gpu_plan
    from rlplan_cli.waiting import waiting

    with waiting("searching"):
        plan = question.on_gpus(with_pareto=pareto)
    fits = plan.verdict is not Verdict.DOES_NOT_FIT
    if out is not None and fits:
        write_gpu_plan(plan, out)
    if as_json:
        print(dump_gpu_plan(plan, Path.cwd()))
    else:
        show_gpu_plan(plan, top=top)
    if not fits:
        raise does_not_fit(plan)
    if out is not None:
        note(f"plan written to {out}; `rlplan explain {out}` says why, `rlplan simulate {out}` plays it")


def _plan_host(question: "Question", *, out: Path | None, as_json: bool) -> None:
    from rlplan.planner.plan import dump_plan, write_plan
    from rlplan_cli.render import note, show_plan

    plan = question.on_host()
    if out is not None:
        write_plan(plan, out)
    if as_json:
        print(dump_plan(plan, Path.cwd()))
    else:
        show_plan(plan)
    if out is not None:
        note(f"plan written to {out}; run it with `rlplan run {out}`")
