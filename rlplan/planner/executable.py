"""Checks before a plan is emitted or run: memory, what the runtime supports, and a complete job.

In: a Plan, a ResolvedJob. Out: the plan, or an error with the way out. Left out: the rules of what can run (rules.py)
and which choice is best (search.py).
"""

from collections.abc import Collection, Iterator
from itertools import chain
from pathlib import Path

from rlplan.errors import NoFeasiblePlanError, SpecError
from rlplan.planner import rules
from rlplan.planner.answers.plan_results import list_overrides
from rlplan.planner.cpu.candidates import list_choices
from rlplan.planner.plan import Plan
from rlplan.spec.job import JobSpec
from rlplan.spec.resolved import ResolvedJob
from rlplan.units import format_bytes
from rlplan.vocabulary import Role, format_name

MAX_REMEDIES = 6
"""Most remedies named in an error message; a page lists all."""
ACCEPTED = "limits.accepts_oom_risk=true"
"""Override that allows emitting and running a plan that fits in expectation only."""
WITHOUT = "estimate, plan, explain and simulate do not"


def check_fits(plan: Plan) -> None:
    """Raise EmitError if the job's framework refuses the plan, NoFeasiblePlanError if it does not fit."""
    for reason in plan.refusals:
        raise rules.build_refusal(reason, is_for_rlplan=plan.job.is_for_rlplan)
    check_memory(plan)


def check_memory(plan: Plan) -> None:
    """Raise NoFeasiblePlanError if the plan does not fit; ignore rules of rlplan's own runtime, which other stacks do
    not share.
    """
    if not plan.memory_fits:
        raise explain_misfit(plan)


def require_executable(plan: Plan) -> Plan:
    """Return the plan if it can run.

    Raises: NoFeasiblePlanError if it does not fit, EmitError if its framework or rlplan's own runtime refuses it.
    """
    check_fits(plan)
    for reason in chain(rules.find_job_refusals(plan.job), rules.find_choice_refusals(plan.job, plan.choice)):
        raise rules.build_refusal(reason)  # a plan for another framework never passed these rules
    return plan


def check_executable(job: ResolvedJob, where: str) -> None:
    """Check that a job is complete and that rlplan's runtime can run it. Raises: SpecError, EmitError."""
    check_complete(job, where)
    choices, rejections = list_choices(job)
    if not choices:
        raise rules.build_refusal(rejections[0].reason)


def check_complete(job: JobSpec, where: str, absent: Collection[str] = ()) -> None:
    """Check that a job states everything a run needs. absent: keys of models to be downloaded. Raises: SpecError."""
    for what, key, rule, way_out in list_missing(job):
        if key not in absent:
            raise SpecError(what, where=f"{where}: {key}", rule=rule, way_out=way_out)


def list_missing(job: JobSpec) -> Iterator[tuple[str, str, str, str]]:
    """List what a run needs in addition to a plan and the job lacks, as (what, key, rule, way out)."""
    for key, path in job.named_models.items():
        if Path(path).is_file():
            rule = f"emit and run need a folder with weights; {WITHOUT}"
            yield f"{key} is a config alone, {path}", key, rule, f"{key}=FOLDER"
    if job.data is None:
        yield (
            "the job states no training data",
            "data",
            "emit and run need data: {prompts: FILE}, optionally with heldout: FILE; " + WITHOUT,
            "data.prompts=train.jsonl",
        )
    judged = {Role.REWARD, Role.TEACHER} & set(job.roles.paths) or job.rollout.environment.has_environment
    if not job.rewards and not judged and job.has_rollouts:
        yield (
            (
                "rewards is [], and there is neither a reward model (roles.reward.path) nor a teacher "
                "(roles.teacher.path): one of the three is needed"
            ),
            "rewards",
            "emit and run need something that scores a rollout; " + WITHOUT,
            "rewards=[{kind: answer_matcher}]",
        )


def explain_misfit(plan: Plan) -> NoFeasiblePlanError:
    """Build the error for a plan that does not fit: everything that is too small, and the remedies."""
    shortages = plan.shortages
    assert shortages, "what does not fit is short of something"
    peak, chosen = shortages[0].peak, list_overrides(plan.choice, plan.job, plan.asked)
    words = ", ".join(f"{key.partition('.')[2]}={value}" for key, value in chosen.items())
    process, role, kind, size = peak.rows[0]
    ways_out = ", or ".join(remedy.change for remedy in plan.remedies[:MAX_REMEDIES])
    needs = " and ".join(short.needs for short in shortages)
    accepts = f"; {ACCEPTED} accepts the plan as it is" if plan.fit.may_fit else ""
    others = f"a smaller model, shorter lengths or {'more memory' if plan.is_on_host else 'larger GPUs'}"
    return NoFeasiblePlanError(
        f"{plan.model_name}{' fits in expectation only: it' * plan.fit.may_fit} needs {needs}; the peak is in "
        f"{peak.action_id} "
        f"({peak.run_phase}; {words})",
        where=f"largest: {format_name(kind)} of {role} in {process}, {format_bytes(size)}",
        rule="the peak of a step must fit into each device and host, and one longest sequence into the KV cache",
        way_out=(f"each of these alone helps: {ways_out}" if ways_out else others) + accepts,
    )
