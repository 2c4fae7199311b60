"""The plan of a job, on a CPU host or on GPUs: the best that there is, and the one that runs.

In: a JobSpec. Out: a Plan. Left out: how candidates are looked at (cpu/search.py, gpu/search.py).
"""

from typing import Any

from rlplan import __version__
from rlplan.dataflow.build import build_schedule
from rlplan.errors import SpecError
from rlplan.planner.cpu.candidates import list_choices
from rlplan.planner.executable import executable_plan
from rlplan.planner.machine import search_of
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Verdict
from rlplan.planner.remedies import list_remedies
from rlplan.spec.base import shorten
from rlplan.spec.fingerprints import take_fingerprints
from rlplan.spec.job import JobSpec


def best_plan(asked: JobSpec, *, with_pareto: bool = False) -> Plan:
    """The best plan of a job, whatever its verdict; where it does not surely fit, with remedies, the cheapest first.

    Raises: SpecError (the job is wrong), NoFeasiblePlanError (nothing can be built).
    """
    search = search_of(asked)
    plan = search.run()
    found: dict[str, Any] = {"fingerprints": take_fingerprints(plan.job)}
    if with_pareto:
        found["pareto"] = search.on(plan.num_devices).pareto()
    if plan.verdict not in (Verdict.FITS, Verdict.REFUSED):  # no bytes help against a refusal
        found["remedies"] = list_remedies(plan)
    return plan.model_copy(update=found)


def find_plan(asked: JobSpec) -> Plan:
    """The plan of a job that can run.

    Raises: SpecError (the job is wrong), NoFeasiblePlanError (nothing fits), EmitError (its target refuses it).
    """
    return executable_plan(best_plan(asked))


def check_schedule(plan: Plan, where: str) -> None:
    """A plan's schedule is one that its job gives: none that was changed afterwards is run. Raises: SpecError."""
    choices, _ = list_choices(plan.job)
    if any(build_schedule(plan.job, choice) == plan.schedule for choice in choices):
        return
    raise SpecError(
        "the schedule of the plan is none that its job gives"
        + (f" (it was made by rlplan {shorten(plan.rlplan_version)})" if plan.rlplan_version != __version__ else ""),
        where=f"{where}: schedule",
        rule="placement, layouts and actions follow from the job, and are not edited",
        way_out="change the job (placement.placement, training.zero_stage, …) and plan it again: rlplan plan JOB",
    )
