"""From a job to its StepGraph: which calls the algorithm needs and in what order they may run.

In: a JobSpec. Out: a StepGraph. Left out: where anything runs.
"""

from rlplan.dataflow.graph import Call, StepGraph
from rlplan.spec.job import JobSpec
from rlplan.vocabulary import ActionKind, Phase, Role


def build_step_graph(job: JobSpec) -> StepGraph:
    """The calls of a synchronous on-policy step: rollouts, scores beside rewards, training, weight sync."""
    return StepGraph(start=_start_calls(job), step=_step_calls(job), finish=_finish_calls())


def _start_calls(job: JobSpec) -> tuple[Call, ...]:
    """Processes come up side by side; the first sync makes the engine's weights the trainer's own."""
    calls = [
        Call("start_trainer", ActionKind.START_TRAINER, Role.POLICY, Phase.START),
        Call("start_engine", ActionKind.START_ENGINE, Role.POLICY, Phase.START),
    ]
    for role in job.algorithm.frozen_roles:
        calls.append(Call(f"start_scorer/{role}", ActionKind.START_SCORER, role, Phase.START))
    ready = tuple(call.id for call in calls)
    calls.append(Call("sync_weights", ActionKind.SYNC_WEIGHTS, Role.POLICY, Phase.SYNC, after=ready))
    calls.append(Call("evaluate", ActionKind.EVALUATE, Role.POLICY, Phase.EVALUATE, after=("sync_weights",)))
    return tuple(calls)


def _step_calls(job: JobSpec) -> tuple[Call, ...]:
    calls = [
        Call("generate", ActionKind.GENERATE, Role.POLICY, Phase.ROLLOUT),
        Call("verify", ActionKind.VERIFY, Role.VERIFIER, Phase.SCORE, after=("generate",)),
    ]
    for role in job.algorithm.frozen_roles:
        calls.append(Call(f"score/{role}", ActionKind.SCORE, role, Phase.SCORE, after=("generate",)))
    scored = tuple(call.id for call in calls[1:])
    calls.append(Call("compute_advantages", ActionKind.COMPUTE_ADVANTAGES, Role.POLICY, Phase.TRAIN, after=scored))
    before = "compute_advantages"
    for index in range(job.workload.num_mini_batches):
        suffix = f"/{index}" if job.workload.num_mini_batches > 1 else ""
        forward_backward = f"train_forward_backward{suffix}"
        calls.append(
            Call(forward_backward, ActionKind.TRAIN_FORWARD_BACKWARD, Role.POLICY, Phase.TRAIN, (before,), 1, index)
        )
        before = f"optimizer_step{suffix}"
        calls.append(Call(before, ActionKind.OPTIMIZER_STEP, Role.POLICY, Phase.TRAIN, (forward_backward,), 1, index))
    calls.append(Call("sync_weights", ActionKind.SYNC_WEIGHTS, Role.POLICY, Phase.SYNC, after=(before,)))
    every = job.workload.evaluate_every
    calls.append(Call("evaluate", ActionKind.EVALUATE, Role.POLICY, Phase.EVALUATE, ("sync_weights",), every))
    return tuple(calls)


def _finish_calls() -> tuple[Call, ...]:
    """The last evaluation and the trained policy in Hugging Face layout."""
    return (
        Call("evaluate", ActionKind.EVALUATE, Role.POLICY, Phase.EVALUATE),
        Call("checkpoint", ActionKind.CHECKPOINT, Role.POLICY, Phase.CHECKPOINT),
    )
