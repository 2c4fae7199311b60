"""`rlplan plan`: chooses a layout for a job, and writes the plan."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from rlplan.errors import SpecError
from rlplan_cli.options import AsJson, JobArguments, Verbose, flatten_options

NAME = "plan"

Objective = Annotated[
    str | None, typer.Option(help="What to optimize: step_time (default), tokens_per_s, cost or gpus.")
]
Lengths = Annotated[Path | None, typer.Option(help="Run folder whose measured response lengths to plan with.")]
Pareto = Annotated[bool, typer.Option("--pareto", help="Also show the Pareto front of step time and headroom.")]


@flatten_options
def command(
    job: JobArguments,
    objective: Objective = None,
    pareto: Pareto = False,
    verbose: Verbose = False,
    lengths: Lengths = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the plan to this JSON file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Choose the best layout for a job. Also shows why others were rejected."""
    from rlplan.planner.plan import dump_plan, write_plan
    from rlplan.sources import check_inputs, is_job_path
    from rlplan_cli.render.answer import end_with_verdict, show_answer
    from rlplan_cli.render.plan import show_pareto, show_plan
    from rlplan_cli.render.terminal import hint, note, print_stages, show_stage
    from rlplan_cli.render.waiting import waiting
    from rlplan_cli.sources import read_question, split_stages

    stages, plans = split_stages(job if lengths is None else _add_lengths(job, lengths)), {}
    if out is not None and stages[0][0]:
        raise _refuse_stages(out, stages[0][0])
    for name, asked in stages:
        question = read_question(NAME, asked, objective=objective)
        with waiting("searching"):
            plans[name] = plan = question.answer(with_pareto=pareto)
        if out is not None and question.plan is None and is_job_path(asked.source or "") and not asked.model:
            check_inputs(Path(asked.source or ""), asked.overrides or ())
        if out is not None and plan.fits:
            write_plan(plan, out)
        if not as_json:
            show_stage(name)
            show_answer(plan, question.assumed, leads_with_speed=True)
            if verbose:
                show_plan(plan)
            else:
                show_pareto(plan)
    if not as_json and not verbose:
        hint("-v shows the seconds of each phase and action, and the next best layouts")
    if as_json:
        print_stages({name: dump_plan(plan, Path.cwd()) for name, plan in plans.items()})
    for plan in plans.values():
        end_with_verdict(plan)
    if out is not None:
        run = "`rlplan run {0}` runs it" if plan.job.is_for_rlplan else "`rlplan emit {0} -o FOLDER` writes its files"
        uses = f"`rlplan explain {out}` explains it, `rlplan simulate {out}` simulates it, {run.format(out)}"
        note(f"plan written to {out}; {uses}")


def _add_lengths(job: JobArguments, run: Path) -> JobArguments:
    from rlplan.spec.measured_lengths import read_run_lengths

    return replace(job, overrides=[*read_run_lengths(run), *(job.overrides or ())])


def _refuse_stages(out: Path, name: str) -> SpecError:
    return SpecError(
        f"{out} would hold one plan, but the file has several stages",
        where="command line",
        rule="a plan file is for one job; stages are planned when they run",
        way_out=f"leave --out out, or choose one: stage={name}",
    )
