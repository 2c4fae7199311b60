"""`rlplan estimate JOB`: how much memory each phase, process and kind will need."""

from rlplan.planner.search import plan_from_file
from rlplan_cli.options import AsJson, JobOrPlan, Overrides
from rlplan_cli.render import print_json, show_estimate

NAME = "estimate"


def command(job: JobOrPlan, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Predict memory per phase, process and kind. Starts nothing and needs no torch."""
    plan = plan_from_file(job, tuple(overrides or ()))
    if as_json:
        print_json(plan.estimate())
    else:
        show_estimate(plan)
