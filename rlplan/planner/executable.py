"""What a plan needs to be emitted and run.

In: a Plan, a ResolvedJob. Out: the plan, or what is in the way: it does not fit, the runtime lacks something, the job
does not say something. Left out: the rules of what can run (rules.py), and which choice is best (search.py).
"""

from collections.abc import Iterator

from rlplan.errors import EmitError, NoFeasiblePlanError, SpecError
from rlplan.planner.answers.plan_results import choice_words
from rlplan.planner.candidates import list_choices
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Verdict
from rlplan.spec.job import JobSpec
from rlplan.spec.resolved import ResolvedJob
from rlplan.units import format_bytes
from rlplan.vocabulary import Role

MAX_WAYS_OUT = 6
"""Remedies that a message names; a page has them all."""


def executable_plan(plan: Plan) -> Plan:
    """The plan itself, where it can run.

    Raises: NoFeasiblePlanError where it does not fit, EmitError where rlplan's own runtime does not run it.
    """
    if plan.verdict is Verdict.DOES_NOT_FIT:
        raise does_not_fit(plan)
    for reason in plan.refusals:
        raise _refused(reason)
    return plan


def check_executable(job: ResolvedJob, where: str) -> None:
    """A job has everything that a run needs, and rlplan's own runtime runs it. Raises: SpecError, EmitError."""
    for what, key, rule, way_out in missing(job):
        raise SpecError(what, where=f"{where}: {key}", rule=rule, way_out=way_out)
    choices, rejections = list_choices(job)
    if not choices:
        raise _refused(rejections[0].reason)


def missing(job: JobSpec) -> Iterator[tuple[str, str, str, str]]:
    """(what, key, rule, way out) of everything that a run needs beside a plan and that a job does not say."""
    if job.data is None:
        yield (
            "the job says nothing to train on",
            "data",
            "emit and run need data: {prompts: FILE, heldout: FILE}; estimate, plan, explain and simulate do not",
            "data.prompts=train.jsonl data.heldout=heldout.jsonl",
        )
    judged = {Role.REWARD, Role.TEACHER} & set(job.roles.paths) or job.has_turns
    if not job.rewards and not judged and job.has_rollouts:
        yield (
            (
                "rewards is [], and there is neither a reward model (roles.reward.path) nor a teacher "
                "(roles.teacher.path): one of the three is needed"
            ),
            "rewards",
            "emit and run need what judges a rollout; estimate, plan, explain and simulate do not",
            "rewards=[{kind: answer_matcher}]",
        )


def does_not_fit(plan: Plan) -> NoFeasiblePlanError:
    """The answer where nothing fits, as an error for people."""
    short = plan.shortage
    assert short is not None, "what does not fit is short of something"
    peak, chosen = short.peak, choice_words(plan.choice, plan.job)
    words = ", ".join(f"{key.partition('.')[2]}={value}" for key, value in chosen.items())
    process, role, kind, size = peak.rows[0]
    ways_out = ", or ".join(remedy.change for remedy in plan.remedies[:MAX_WAYS_OUT])
    others = f"a smaller model, shorter lengths or {'more memory' if plan.is_on_host else 'larger GPUs'}"
    return NoFeasiblePlanError(
        f"{plan.model_name} needs {format_bytes(short.needed_bytes)} of {short.of}, "
        f"{format_bytes(short.available_bytes)} available; the worst moment is {peak.action_id} "
        f"({peak.moment}; {words})",
        where=f"largest: {kind} of {role} in {process}, {format_bytes(size)}",
        rule="the worst moment of a step fits into a device, all that a host holds into its memory, one longest "
        "sequence into the KV cache",
        way_out=f"each of these alone helps: {ways_out}" if ways_out else others,
    )


def _refused(reason: str) -> EmitError:
    key, _, rule = reason.partition(": ")
    return EmitError(
        f"{key} is chosen, which the runtime lacks",
        where=key,
        rule=rule or reason,
        way_out="rlplan explain shows what else would fit; docs/job.md says what each key takes",
    )
