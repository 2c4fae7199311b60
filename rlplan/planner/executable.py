"""What a plan needs to be emitted and run.

In: a Plan, a ResolvedJob. Out: the plan, or what is in the way: it does not fit, the runtime lacks something, the job
does not say something. Left out: the rules of what can run (rules.py), and which choice is best (search.py).
"""

from collections.abc import Collection, Iterator
from itertools import chain
from pathlib import Path

from rlplan.errors import NoFeasiblePlanError, SpecError
from rlplan.planner import rules
from rlplan.planner.answers.plan_results import choice_words
from rlplan.planner.cpu.candidates import list_choices
from rlplan.planner.plan import Plan
from rlplan.spec.job import JobSpec
from rlplan.spec.resolved import ResolvedJob
from rlplan.units import format_bytes
from rlplan.vocabulary import Role, words_of

MAX_REMEDIES = 6
"""Remedies that a message names; a page has them all."""
ACCEPTED = "limits.accepts_oom_risk=true"
"""The override with which a plan that fits in expectation only is emitted and run."""
WITHOUT = "estimate, plan, explain and simulate do not"


def check_fits(plan: Plan) -> None:
    """Raises: EmitError where the job's framework refuses it, NoFeasiblePlanError where it does not fit."""
    for reason in plan.refusals:
        raise rules.build_refusal(reason, is_for_rlplan=plan.job.is_for_rlplan)
    check_memory(plan)


def check_memory(plan: Plan) -> None:
    """Raises: NoFeasiblePlanError where it does not fit; what rlplan's own runtime lacks, another stack may have."""
    if not plan.memory_fits:
        raise does_not_fit(plan)


def executable_plan(plan: Plan) -> Plan:
    """The plan itself, where it can run.

    Raises: NoFeasiblePlanError where it does not fit, EmitError where its framework or rlplan's own runtime refuses it.
    """
    check_fits(plan)
    for reason in chain(rules.job_refusals(plan.job), rules.find_choice_refusals(plan.job, plan.choice)):
        raise rules.build_refusal(reason)  # of a plan for another framework
    return plan


def check_executable(job: ResolvedJob, where: str) -> None:
    """A job has everything that a run needs, and rlplan's own runtime runs it. Raises: SpecError, EmitError."""
    check_complete(job, where)
    choices, rejections = list_choices(job)
    if not choices:
        raise rules.build_refusal(rejections[0].reason)


def check_complete(job: JobSpec, where: str, absent: Collection[str] = ()) -> None:
    """A job says everything that a run needs. absent: keys whose models are yet to be fetched. Raises: SpecError."""
    for what, key, rule, way_out in missing(job):
        if key not in absent:
            raise SpecError(what, where=f"{where}: {key}", rule=rule, way_out=way_out)


def missing(job: JobSpec) -> Iterator[tuple[str, str, str, str]]:
    """(what, key, rule, way out) of everything that a run needs beside a plan and that a job does not say."""
    for key, path in job.named_models.items():
        if Path(path).is_file():
            rule = f"emit and run need a folder with weights; {WITHOUT}"
            yield f"{key} is a config alone, {path}", key, rule, f"{key}=FOLDER"
    if job.data is None:
        yield (
            "the job says nothing to train on",
            "data",
            "emit and run need data: {prompts: FILE}, and heldout: FILE where it has one of its own; " + WITHOUT,
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
            "emit and run need what judges a rollout; " + WITHOUT,
            "rewards=[{kind: answer_matcher}]",
        )


def does_not_fit(plan: Plan) -> NoFeasiblePlanError:
    """The answer where nothing fits, as an error for people: everything that is too small, and the ways out."""
    shortages = plan.shortages
    assert shortages, "what does not fit is short of something"
    peak, chosen = shortages[0].peak, choice_words(plan.choice, plan.job, plan.asked)
    words = ", ".join(f"{key.partition('.')[2]}={value}" for key, value in chosen.items())
    process, role, kind, size = peak.rows[0]
    ways_out = ", or ".join(remedy.change for remedy in plan.remedies[:MAX_REMEDIES])
    needs = " and ".join(short.needs for short in shortages)
    accepts = f"; {ACCEPTED} takes the plan as it is" if plan.fit.may_fit else ""
    others = f"a smaller model, shorter lengths or {'more memory' if plan.is_on_host else 'larger GPUs'}"
    return NoFeasiblePlanError(
        f"{plan.model_name}{' fits in expectation only: it' * plan.fit.may_fit} needs {needs}; the worst moment is "
        f"{peak.action_id} "
        f"({peak.run_phase}; {words})",
        where=f"largest: {words_of(kind)} of {role} in {process}, {format_bytes(size)}",
        rule="the worst moment of a step fits into a device, all that a host holds into its memory, one longest "
        "sequence into the KV cache",
        way_out=(f"each of these alone helps: {ways_out}" if ways_out else others) + accepts,
    )
