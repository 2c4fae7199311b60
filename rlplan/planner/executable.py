"""What a plan needs to be emitted and run, and the plan of a job on GPUs that a bundle is made of.

In: a GpuPlan, a ResolvedJob. Out: a Plan with the same schedule, bytes and seconds; or what is missing, by name.
Left out: the rules of what can run (rules.py), and which choice is best (gpu/search.py).
"""

from collections.abc import Iterator

from rlplan.errors import EmitError, NoFeasiblePlanError, SpecError
from rlplan.planner.answers.plan_results import choice_words
from rlplan.planner.candidates import list_choices
from rlplan.planner.gpu.remedies import find_gpu_plan
from rlplan.planner.gpu_plan import GpuPlan, Verdict
from rlplan.planner.plan import Plan
from rlplan.planner.resolve import resolve
from rlplan.spec.fingerprints import take_fingerprints
from rlplan.spec.job import JobSpec
from rlplan.spec.resolved import ResolvedJob
from rlplan.units import format_bytes
from rlplan.vocabulary import Role


def find_plan_on_gpus(asked: JobSpec) -> Plan:
    """The plan for a job on GPUs. Raises: SpecError, NoFeasiblePlanError, EmitError (rules.py)."""
    found = find_gpu_plan(asked)
    if found.verdict is Verdict.DOES_NOT_FIT:
        raise does_not_fit(found)
    return executable_plan(found)


def executable_plan(found: GpuPlan) -> Plan:
    """The plan that runs what was found: the same schedule, bytes and seconds, of a job with nothing open.

    Raises: EmitError where rlplan's own runtime does not run it.
    """
    for reason in found.refusals:
        raise _refused(reason)
    job = resolve(found.job, found.choice, found.kv.kv_cache_memory_bytes if found.kv else 0)
    plan = Plan(job=job, schedule=found.schedule, ledger=found.ledger, timing=found.timing)
    return plan.model_copy(update={"fingerprints": take_fingerprints(job)})


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


def does_not_fit(found: GpuPlan) -> NoFeasiblePlanError:
    """The answer where nothing fits, as an error for people."""
    of, needed, room = found.shortage or ("a GPU", found.binding.num_bytes, found.binding_capacity)
    peak = found.ledger.host_peak() if of == "a host's memory" else found.binding
    others = "" if of != "a host's memory" else " and those like it"
    process, _, kind, size = peak.rows[0]
    words = ", ".join(
        f"{key.partition('.')[2]}={value}" for key, value in choice_words(found.choice, found.job).items()
    )
    return NoFeasiblePlanError(
        f"{found.model_name} needs {format_bytes(needed)} of {of}, {format_bytes(room)} available; the worst moment "
        f"is {peak.action_id} ({words})",
        where=f"largest: {kind} of {process}{others}, {format_bytes(size)}",
        rule="the worst moment of a step fits into a GPU, the host's part into the host, one longest sequence into "
        "the KV cache",
        way_out=found.remedies[0].change if found.remedies else "a smaller model, shorter lengths or larger GPUs",
    )


def _refused(reason: str) -> EmitError:
    key, _, rule = reason.partition(": ")
    return EmitError(
        f"{key} is chosen, which the runtime lacks",
        where=key,
        rule=rule or reason,
        way_out="rlplan explain shows what else would fit; docs/job.md says what each key takes",
    )
