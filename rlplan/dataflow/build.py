"""From a job to its StepGraph: which calls the algorithm needs and in what order they may run.

In: a JobSpec. Out: a StepGraph. Left out: where anything runs.
"""

from rlplan.dataflow.graph import Call, StepGraph
from rlplan.spec.job import JobSpec
from rlplan.vocabulary import ActionKind, Phase, Role

SAVING = (ActionKind.SAVE_STATES, ActionKind.WRITE_STATES)
"""Actions in which a trained role keeps what a resumed run needs of it."""


def build_step_graph(job: JobSpec) -> StepGraph:
    """The calls of a synchronous on-policy step: rollouts, scores beside rewards, training, weight sync."""
    return StepGraph(start=_start_calls(job), step=_step_calls(job), finish=_finish_calls())


def _start_calls(job: JobSpec) -> tuple[Call, ...]:
    """Processes come up side by side; the first sync makes the engine's weights the trainer's own."""
    calls = [
        Call("start_trainer", ActionKind.START_TRAINER, Role.POLICY, Phase.START),
        Call("start_engine", ActionKind.START_ENGINE, Role.POLICY, Phase.START),
    ]
    for role in job.trained_roles[1:]:
        calls.append(Call(f"start_trainer/{role}", ActionKind.START_TRAINER, role, Phase.START))
    for role in job.frozen_roles:
        calls.append(Call(f"start_scorer/{role}", ActionKind.START_SCORER, role, Phase.START))
    ready = tuple(call.id for call in calls)
    calls.append(_sync_call(job, ready))
    calls.append(Call("evaluate", ActionKind.EVALUATE, Role.POLICY, Phase.EVALUATE, after=("sync_weights",)))
    return tuple(calls)


def _step_calls(job: JobSpec) -> tuple[Call, ...]:
    calls = _experience_calls(job)
    before = calls[0].id
    for role in job.scored_roles:  # one after the other: they compute on the same devices
        holder = job.holder_of(role)
        held_by = None if holder is role else holder
        calls.append(Call(f"score/{role}", ActionKind.SCORE, role, Phase.SCORE, after=(before,), held_by=held_by))
        before = f"score/{role}"
    scored = tuple(call.id for call in calls[1:]) or (before,)
    calls.append(Call("compute_advantages", ActionKind.COMPUTE_ADVANTAGES, Role.POLICY, Phase.TRAIN, after=scored))
    before = "compute_advantages"
    for role in reversed(job.trained_roles):  # the policy last: its weights are handed over next
        for index in range(job.workload.num_mini_batches):
            calls += _mini_batch_calls(job, role, index, before)
            before = calls[-1].id
        calls += _saving_calls(job, role, before)
    calls.append(_sync_call(job, (before, *(call.id for call in calls if call.kind in SAVING))))
    every = job.workload.evaluate_every
    calls.append(Call("evaluate", ActionKind.EVALUATE, Role.POLICY, Phase.EVALUATE, ("sync_weights",), every))
    return tuple(calls)


def _experience_calls(job: JobSpec) -> list[Call]:
    """Where a step's answers come from: the engine, and rules that judge them; or the data."""
    if not job.algorithm.declaration.has_rollouts:
        return [Call("take_answers", ActionKind.TAKE_ROLLOUTS, Role.POLICY, Phase.ROLLOUT)]
    return [
        Call("generate", ActionKind.GENERATE, Role.POLICY, Phase.ROLLOUT),
        Call("verify", ActionKind.VERIFY, Role.VERIFIER, Phase.SCORE, after=("generate",)),
    ]


def _sync_call(job: JobSpec, after: tuple[str, ...]) -> Call:
    takes_all = job.placement.sync_senders == "each"
    return Call("sync_weights", ActionKind.SYNC_WEIGHTS, Role.POLICY, Phase.SYNC, after, takes_all=takes_all)


def _mini_batch_calls(job: JobSpec, role: Role, index: int, before: str) -> list[Call]:
    """Passes and optimizer step of one role's mini-batch; the policy's bear no name, for every job has them."""
    suffix = f"/{role}" if role is not Role.POLICY else ""
    suffix += f"/{index}" if job.workload.num_mini_batches > 1 else ""
    passes, step = f"train_forward_backward{suffix}", f"optimizer_step{suffix}"
    first = 1 + (job.algorithm.value_warmup_steps if role is Role.POLICY else 0)
    return [
        Call(passes, ActionKind.TRAIN_FORWARD_BACKWARD, role, Phase.TRAIN, (before,), 1, index, first=first),
        Call(step, ActionKind.OPTIMIZER_STEP, role, Phase.TRAIN, (passes,), 1, index, first=first),
    ]


def _saving_calls(job: JobSpec, role: Role, before: str) -> list[Call]:
    """What a role keeps of itself for a resumed run, right after its last optimizer step."""
    if not job.checkpoints.every:
        return []
    kind = ActionKind.WRITE_STATES if job.checkpoints.writes == "waiting" else ActionKind.SAVE_STATES
    suffix = f"/{role}" if role is not Role.POLICY else ""
    return [Call(f"save_states{suffix}", kind, role, Phase.CHECKPOINT, (before,), job.checkpoints.every)]


def _finish_calls() -> tuple[Call, ...]:
    """The last evaluation and the trained policy in Hugging Face layout."""
    return (
        Call("evaluate", ActionKind.EVALUATE, Role.POLICY, Phase.EVALUATE),
        Call("checkpoint", ActionKind.CHECKPOINT, Role.POLICY, Phase.CHECKPOINT),
    )
