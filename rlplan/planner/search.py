"""The plan of a job, on a CPU host or on GPUs: the best that there is, and the one that runs.

In: a JobSpec. Out: a Plan. Left out: how candidates are looked at (cpu/search.py, gpu/search.py).
"""

import math
from collections.abc import Iterator
from typing import Any

from rlplan.dataflow.build import build_schedule
from rlplan.errors import NoFeasiblePlanError, SpecError
from rlplan.planner.cpu.candidates import list_choices
from rlplan.planner.executable import executable_plan
from rlplan.planner.machine import search_of
from rlplan.planner.margins import HOST_COMPLICATIONS, drop_host_choices, find_assumed_host, has_complication
from rlplan.planner.memo import Memo
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Verdict
from rlplan.planner.remedies import list_remedies
from rlplan.spec.base import shorten
from rlplan.spec.fingerprints import take_fingerprints
from rlplan.spec.job import JobSpec
from rlplan.spec.parts.conduct import MAX_TIMEOUT_S
from rlplan.spec.resolved import LEAST_SECONDS
from rlplan.units import format_bytes, format_seconds
from rlplan.version import __version__

DEADLINE_FACTOR = 4.0
"""Deadline over predicted seconds: twice for a prediction on a machine that was not measured, twice for a policy whose
responses are far longer than the job says (an untrained one runs to the limit)."""


def best_plan(asked: JobSpec, *, with_pareto: bool = False, with_others: bool = True, memo: Memo | None = None) -> Plan:
    """The best plan of a job, whatever its verdict; where it does not surely fit, with remedies, the mildest first.

    with_others: and the next best ones, which take a search each. memo: of searches for jobs like it.

    Raises: SpecError (the job is wrong), NoFeasiblePlanError (nothing can be built).
    """
    memo = memo or Memo()
    search = search_of(asked, memo)
    plan = add_deadlines(search.run(with_others=with_others))
    updates: dict[str, Any] = {"fingerprints": take_fingerprints(plan.job)}
    if with_pareto:
        updates["pareto"] = search.of(plan).pareto()
    if plan.verdict not in (Verdict.FITS, Verdict.REFUSED):  # no bytes help against a refusal
        updates["remedies"] = list_remedies(plan, memo)
    uncorrected = plan.job.uncorrected_staleness
    updates["notes"] = (*plan.notes, *((uncorrected,) if uncorrected else ()), *assumptions(plan, memo))
    return plan.model_copy(update=updates)


def assumptions(plan: Plan, memo: Memo | None = None) -> Iterator[str]:
    """A host's memory that is only assumed, and what the job comes to without it."""
    node = find_assumed_host(plan.job)
    if node is None:
        return
    needed, room = format_bytes(plan.ledger.host_peak().num_bytes), format_bytes(node.host_memory.value)
    words = f"assumes hosts of {room} ({node.name}), of which it takes {needed}: hardware.host_memory says another size"
    chosen = [(part, key) for part, key, _ in HOST_COMPLICATIONS if has_complication(plan.choice, key)]
    if chosen and all(getattr(getattr(plan.asked, part), key) == "auto" for part, key in chosen):
        words += f"; with nothing offloaded it {_predict_without_host(plan, memo)}"
    yield words


def _predict_without_host(plan: Plan, memo: Memo | None) -> str:
    """What the job comes to with nothing on a host."""
    try:
        other = search_of(drop_host_choices(plan.asked), memo).run(with_others=False)
    except NoFeasiblePlanError:
        return Verdict.DOES_NOT_FIT.value
    step = f", {format_seconds(other.seconds)} a step" if other.fit is not Verdict.DOES_NOT_FIT else ""
    return f"{other.fit.value}{step}"


def add_deadlines(plan: Plan) -> Plan:
    """The plan with the deadlines that its job leaves open: DEADLINE_FACTOR times the longest action that is predicted.

    At least LEAST_SECONDS. Of async rollouts a step waits for a whole step of the other side.
    """
    timing = plan.timing
    if timing is None:
        return plan
    longest = {
        "start_timeout_s": 0.0,
        "action_timeout_s": 0.0 if plan.schedule.async_rollouts is None else plan.seconds,
    }
    for part in (timing.start, timing.step, timing.sometimes, timing.finish):
        for action in part.actions:
            key = "start_timeout_s" if action.action_id.startswith("start") else "action_timeout_s"
            longest[key] = max(longest[key], action.cost.seconds)
    deadlines = {
        key: min(MAX_TIMEOUT_S, max(LEAST_SECONDS[key], math.ceil(DEADLINE_FACTOR * seconds)))
        for key, seconds in longest.items()
        if getattr(plan.asked.limits, key) == "auto"
    }
    limits = plan.job.limits.model_copy(update=deadlines)
    return plan.model_copy(update={"job": plan.job.model_copy(update={"limits": limits})})


def find_plan(asked: JobSpec) -> Plan:
    """The plan of a job that can run.

    Raises: SpecError (the job is wrong), NoFeasiblePlanError (nothing fits), EmitError (its framework refuses it).
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
