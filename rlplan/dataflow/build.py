"""Builds the one schedule of a job and a choice, which is planned, timed, executed and reported.

A view is a short schedule for searches that score thousands of choices. In a view one process stands for all ranks that
are alike, and one action with a count stands for all its repetitions.

In: a JobSpec, a Choice. Out: a Schedule, or a view of it. Left out: bytes and seconds.
"""

from dataclasses import replace

from rlplan.dataflow.choice import NO_ENGINE, NO_TRAINER, Arrangement, Choice
from rlplan.dataflow.placements import arrange, keep_first_process, place
from rlplan.dataflow.schedule import Call, Schedule, StepGraph, locate_calls
from rlplan.spec.resolved import SettledJob
from rlplan.vocabulary import ActionKind, Phase, Role

SAVING = (ActionKind.SAVE_STATES, ActionKind.WRITE_STATES, ActionKind.CHECKPOINT)
"""Actions in which a trained role saves its states for a resumed run, or exports its model."""


def build_schedule(job: SettledJob, choice: Choice) -> Schedule:
    """Build the schedule of a job under a choice."""
    graph = build_step_graph(job, needs_all_ranks=choice.all_ranks_send, has_engine=bool(choice.sync_mode))
    groups, layouts = place(job, choice)
    arrangement = choice.arrangement
    return locate_calls(arrange(graph, job, arrangement), arrangement.placement, groups, layouts)


def build_view(job: SettledJob, arrangement: Arrangement, *, has_engine: bool = True) -> Schedule:
    """Build the view of all choices in an arrangement: the first process of each layout, with repeats counted.

    The second mini-batch stands for all mini-batches except the first.
    """
    graph = build_step_graph(job, has_engine=has_engine, counts_repeats=True)
    # any sync mode stands for an engine here: the graph above does not depend on the mode
    groups, layouts = place(job, Choice(arrangement, NO_TRAINER, NO_ENGINE, "disk" if has_engine else ""))
    layouts = tuple(map(keep_first_process, layouts))
    return locate_calls(arrange(graph, job, arrangement), arrangement.placement, groups, layouts)


def build_step_graph(
    job: SettledJob, *, needs_all_ranks: bool = False, has_engine: bool = True, counts_repeats: bool = False
) -> StepGraph:
    """Build the calls of a synchronous on-policy step: rollouts, scores and rewards, training, weight sync.

    needs_all_ranks: every trainer rank sends weights. has_engine: an engine generates or evaluates.
    """
    start, step = _build_start_calls(job, needs_all_ranks), _build_step_calls(job, needs_all_ranks, counts_repeats)
    graph = StepGraph(start=start, step=step, finish=_build_finish_calls())
    return graph if has_engine else _remove_engine(graph, scores=job.algorithm.declaration.trains_scalar)


def _remove_engine(graph: StepGraph, *, scores: bool) -> StepGraph:
    """Remove the engine's calls from a job whose responses come from its data.

    scores: the trainer itself scores held-out responses, so an evaluation becomes a scoring pass.
    """
    removed = (ActionKind.START_ENGINE, ActionKind.SYNC_WEIGHTS, *(() if scores else (ActionKind.EVALUATE,)))

    def keep(calls: tuple[Call, ...]) -> tuple[Call, ...]:
        remaining = [call for call in calls if call.kind not in removed]
        ids = {call.id for call in remaining}
        # An evaluation waited for the weight sync; now it waits for what the sync waited for.
        before = tuple(name for call in calls if call.kind is ActionKind.SYNC_WEIGHTS for name in call.after)
        before = tuple(name for name in before if name in ids)
        return tuple(
            replace(call, kind=ActionKind.SCORE, after=before) if call.kind is ActionKind.EVALUATE else call
            for call in remaining
        )

    return StepGraph(start=keep(graph.start), step=keep(graph.step), finish=keep(graph.finish))


def _build_start_calls(job: SettledJob, needs_all_ranks: bool) -> tuple[Call, ...]:
    """Calls that start all processes in parallel, send the first weights and evaluate the start policy.

    An engine that shares the trainer's frozen base waits for the trainer, which holds the memory.
    """
    base = ("start_trainer",) if job.rollout.shares_base else ()
    calls = [
        Call("start_trainer", ActionKind.START_TRAINER, Role.POLICY, Phase.START),
        Call("start_engine", ActionKind.START_ENGINE, Role.POLICY, Phase.START, after=base),
    ]
    for role in job.trained_roles[1:]:
        calls.append(Call(f"start_trainer/{role}", ActionKind.START_TRAINER, role, Phase.START))
    for role in job.frozen_roles:
        calls.append(Call(f"start_scorer/{role}", ActionKind.START_SCORER, role, Phase.START))
    ready = tuple(call.id for call in calls)
    calls.append(_build_sync_call(needs_all_ranks, ready))
    calls.append(Call("evaluate", ActionKind.EVALUATE, Role.POLICY, Phase.EVALUATE, after=("sync_weights",)))
    return tuple(calls)


def _build_step_calls(job: SettledJob, needs_all_ranks: bool, counts_repeats: bool) -> tuple[Call, ...]:
    calls = _build_experience_calls(job)
    before = calls[0].id
    for role in job.scored_roles:  # sequential, because the roles compute on the same devices
        holder = job.find_holder(role)
        runs_on = None if holder is role else holder
        calls.append(Call(f"score/{role}", ActionKind.SCORE, role, Phase.SCORE, after=(before,), runs_on=runs_on))
        before = f"score/{role}"
    scored = tuple(call.id for call in calls[1:]) or (before,)
    calls.append(Call("compute_advantages", ActionKind.COMPUTE_ADVANTAGES, Role.POLICY, Phase.TRAIN, after=scored))
    before = "compute_advantages"
    for role in reversed(job.trained_roles):  # the policy last, because its weights are sent next
        for index, repeat in _list_mini_batches(job.workload.num_mini_batches, counts_repeats):
            calls += _build_mini_batch_calls(job, role, index, before, repeat)
            before = calls[-1].id
        calls += _build_saving_calls(job, role, before)
    calls.append(_build_sync_call(needs_all_ranks, (before, *(call.id for call in calls if call.kind in SAVING))))
    every = job.workload.evaluate_every
    calls.append(Call("evaluate", ActionKind.EVALUATE, Role.POLICY, Phase.EVALUATE, ("sync_weights",), every))
    return tuple(calls)


def _build_experience_calls(job: SettledJob) -> list[Call]:
    """Calls that give a step its responses: generation and verification, or one that takes them from the data."""
    if not job.algorithm.declaration.has_rollouts:
        return [Call("take_answers", ActionKind.TAKE_ROLLOUTS, Role.POLICY, Phase.ROLLOUT)]
    return [
        Call("generate", ActionKind.GENERATE, Role.POLICY, Phase.ROLLOUT),
        Call("verify", ActionKind.VERIFY, Role.VERIFIER, Phase.SCORE, after=("generate",)),
    ]


def _build_sync_call(needs_all_ranks: bool, after: tuple[str, ...]) -> Call:
    return Call(
        "sync_weights", ActionKind.SYNC_WEIGHTS, Role.POLICY, Phase.SYNC, after, needs_all_ranks=needs_all_ranks
    )


def _list_mini_batches(num: int, counts_repeats: bool) -> list[tuple[int, int]]:
    """(index, number of mini-batches represented) of each mini-batch that has calls of its own."""
    return [(0, 1), (1, num - 1)] if counts_repeats and num > 2 else [(index, 1) for index in range(num)]


def _build_mini_batch_calls(job: SettledJob, role: Role, index: int, before: str, repeat: int) -> list[Call]:
    """Passes and optimizer step of one role's mini-batch. Ids of the policy's calls have no suffix."""
    suffix = f"/{role}" if role is not Role.POLICY else ""
    suffix += f"/{index}" if job.workload.num_mini_batches > 1 else ""
    passes, step = f"train_forward_backward{suffix}", f"optimizer_step{suffix}"
    # during the warm-up only the value model trains
    first = 1 + (job.algorithm.value_warmup_steps if role is Role.POLICY else 0)
    return [
        Call(
            passes,
            ActionKind.TRAIN_FORWARD_BACKWARD,
            role,
            Phase.TRAIN,
            (before,),
            1,
            index,
            first=first,
            repeat=repeat,
        ),
        Call(step, ActionKind.OPTIMIZER_STEP, role, Phase.TRAIN, (passes,), 1, index, first=first, repeat=repeat),
    ]


def _build_saving_calls(job: SettledJob, role: Role, before: str) -> list[Call]:
    """Calls that save a role's states for a resumed run, right after its last optimizer step."""
    if not job.checkpoints.every:
        return []
    kind = ActionKind.WRITE_STATES if job.checkpoints.writes == "waiting" else ActionKind.SAVE_STATES
    suffix = f"/{role}" if role is not Role.POLICY else ""
    saved = Call(f"save_states{suffix}", kind, role, Phase.CHECKPOINT, (before,), job.checkpoints.every)
    if role is not Role.POLICY or not job.checkpoints.exports_policy:
        return [saved]
    return [saved, replace(saved, id="export", kind=ActionKind.CHECKPOINT, after=(saved.id,))]


def _build_finish_calls() -> tuple[Call, ...]:
    """The last evaluation, and the export of the trained policy in Hugging Face format."""
    return (
        Call("evaluate", ActionKind.EVALUATE, Role.POLICY, Phase.EVALUATE),
        Call("checkpoint", ActionKind.CHECKPOINT, Role.POLICY, Phase.CHECKPOINT),
    )
