"""The plan of a job for another stack: what the job leaves open takes values that the stack has.

In: a JobSpec, its best plan, the name of a stack. Out: the best plan that the stack can say, and the overrides that
make it so. Left out: what a stack can say (backwards.py).
"""

from rlplan.errors import SpecError
from rlplan.foreign.export.backwards import UnsaidError, exported
from rlplan.foreign.settings import word_of
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
    settled: tuple[str, ...] = ()
    for _ in range(MAX_ROUNDS):
        try:
            exported(plan, stack)
            return plan, settled
        except UnsaidError as error:
            before = settled
            for key, value in error.read_back.items():
                settled = _with(asked, settled, key, value)
            if settled == before:
                raise
            plan = best_plan(changed(asked, settled), with_others=False)
    exported(plan, stack)
    return plan, settled


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
