"""`rlplan plan JOB`: choose a layout and write the plan."""

from pathlib import Path
from typing import Annotated

import typer

from rlplan.planner.plan import dump_plan, write_plan
from rlplan.planner.search import plan_from_file
from rlplan_cli.options import AsJson, JobOrPlan, Overrides
from rlplan_cli.render import note, show_plan

NAME = "plan"


def command(
    job: JobOrPlan,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the plan to this JSON file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Choose a layout for a job. Says what was rejected and why."""
    plan = plan_from_file(job, tuple(overrides or ()))
    if out is not None:
        write_plan(plan, out)
    if as_json:
        print(dump_plan(plan, Path.cwd()))
    else:
        show_plan(plan)
    if out is not None:
        note(f"plan written to {out}; run it with `rlplan run {out}`")
