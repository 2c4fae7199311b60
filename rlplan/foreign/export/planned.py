"""The plan of a job for another stack: what the job leaves open takes values that the stack has.

In: a JobSpec, its best plan, the name of a stack. Out: the best plan that the stack can say, and the overrides that
make it so; or a refusal whose way out was tried. Left out: what a stack can say (backwards.py).
"""

from rlplan.errors import EmitError, NoFeasiblePlanError, SpecError
from rlplan.foreign.export.counted import LOGITS
from rlplan.foreign.export.folders import render_export
from rlplan.foreign.export.refusals import ReadBackError, with_tried_way_out
from rlplan.foreign.settings import word_of
from rlplan.foreign.table import load_table
from rlplan.planner.executable import check_memory
from rlplan.planner.plan import Plan
from rlplan.planner.search import best_plan
from rlplan.spec.files.job_file import changed
from rlplan.spec.job import JobSpec

MAX_ROUNDS = 8
"""Searches at most: a value that one round settles may open another difference."""


def planned_for(asked: JobSpec, plan: Plan, stack: str) -> tuple[Plan, tuple[str, ...]]:
    """(a plan of the job that the stack can say, what the job left open and is settled for that, as overrides).

    plan: the job's best one. Raises: EmitError where something that the job itself says is in the way.
    """
    try:
        return _settle(asked, plan, stack)
    except (EmitError, SpecError) as error:
        raise _tried(error, asked, stack, is_planned=False) from None


def check_export(plan: Plan, stack: str) -> None:
    """Raises: EmitError where a stack cannot say a plan as it is, with overrides that plan its job for the stack."""
    try:
        render_export(plan, stack)
    except (EmitError, SpecError) as error:
        raise _tried(error, plan.asked, stack, is_planned=True) from None


def _tried(error: EmitError | SpecError, asked: JobSpec, stack: str, *, is_planned: bool) -> EmitError:
    def plan_for_stack(job: JobSpec) -> tuple[str, ...]:
        plan, settled = _settle(job, best_plan(job, with_others=False), stack)
        check_memory(plan)
        return settled

    return with_tried_way_out(error, asked, plan_for_stack, is_planned=is_planned)


def _settle(asked: JobSpec, plan: Plan, stack: str) -> tuple[Plan, tuple[str, ...]]:
    """Do the work of `planned_for`, and pass each refusal on as it is raised."""
    settled: tuple[str, ...] = ()
    for _ in range(MAX_ROUNDS):
        before = settled
        try:
            count = render_export(plan, stack).export.count
        except ReadBackError as error:
            for key, value in error.read_back.items():
                settled = _with(asked, settled, key, value)
            if settled == before:
                raise
        else:  # how the loss is taken is compared by its bytes alone
            settled = _with(asked, settled, LOGITS, count.logits) if count is not None and count.differs else settled
            if settled == before:
                return plan, settled
        plan = _plan_settled(asked, settled, stack)
    render_export(plan, stack)
    return plan, settled


def _plan_settled(asked: JobSpec, settled: tuple[str, ...], stack: str) -> Plan:
    """The best plan with what is settled. Raises: EmitError where that and the job's own values exclude each other."""
    try:
        return best_plan(changed(asked, settled), with_others=False)
    except (SpecError, NoFeasiblePlanError) as error:
        title = load_table(stack).title
        raise EmitError(
            f"{title} takes the job with {' '.join(settled)} alone, and then {error.what}",
            where=f"{asked.name}: {error.where}",
            rule=error.rule,
            way_out=error.way_out,
        ) from None


def _with(asked: JobSpec, settled: tuple[str, ...], key: str, value: object) -> tuple[str, ...]:
    """The overrides and one more, where the job leaves the key open and takes the value; in place of one for the same
    key, which followed from what another plan chose.

    A value that it does not take follows from another key that is read back, such as tokens of one rank of several.
    """
    others = tuple(one for one in settled if not one.startswith(f"{key}="))
    part: object = changed(asked, others)
    for name in key.split("."):
        part = getattr(part, name, None)
    if part != "auto":
        return settled
    more = (*others, f"{key}={word_of(value)}")
    try:
        changed(asked, more)
    except SpecError:
        return settled
    return more
