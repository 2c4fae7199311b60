"""Placements: which device groups there are, which role lies on which, and who waits for whom because of it.

In: a job and a choice. Out: device groups and role layouts; a StepGraph arranged for the placement.
"""

from dataclasses import replace
from functools import lru_cache

from rlplan.dataflow.choice import Arrangement, Choice, TrainerChoice
from rlplan.dataflow.graph import AsyncRollouts, Call, StepGraph
from rlplan.dataflow.layouts import DeviceGroup, RoleLayout, Worker
from rlplan.dataflow.time_sharing import TimeSharing, offload_between, share_time
from rlplan.spec.resolved import SettledJob
from rlplan.vocabulary import ActionKind, Phase, Placement, Role

SHARED, TRAINING, GENERATION, SCORING = "shared", "training", "generation", "scoring"
"""Names of device groups: where training and generation share devices, and where each has its own."""


def arrange(graph: StepGraph, job: SettledJob, arrangement: Arrangement) -> StepGraph:
    """What the arrangement makes of a step.

    hybrid: as it is. colocated: engine and trainer share time. disaggregated: as it is, or, where rollouts may be some
    versions old, with generation that runs ahead. Roles are offloaded while they wait where that was chosen.
    """
    roles = offloaded_roles(job, arrangement)
    if arrangement.placement is Placement.COLOCATED and (arrangement.sleeps or job.device_kind == "cpu"):
        return share_time(graph, TimeSharing(arrangement.sleeps, roles, job.checkpoints.writes == "beside"))
    if roles:
        graph = offload_between(graph, roles)
    if arrangement.is_async:
        return with_async_rollouts(graph, job.placement.max_staleness, interrupts=job.placement.partial_rollouts)
    return graph


def offloaded_roles(job: SettledJob, arrangement: Arrangement) -> tuple[Role, ...]:
    """Roles that are moved away while they wait. Frozen roles are read from their own files again, or from the host."""
    if arrangement.offloaded == "none":
        return ()
    return (*(job.trained_roles if arrangement.offloaded == "all" else ()), *job.frozen_roles)


def place(job: SettledJob, choice: Choice) -> tuple[tuple[DeviceGroup, ...], tuple[RoleLayout, ...]]:
    """Groups and layouts of a choice.

    hybrid, colocated: every role on the same devices; the trainer has a rank on each, a scorer one process (or one on
    each too), engines a process on each of the last. disaggregated: the last devices generate, those before them score
    (where no device scores alone: those that train do), the others train.
    """
    groups = _groups(job.device_kind, choice.arrangement, has_engine=bool(choice.sync_mode))
    training, scoring, generation = groups[0], groups[-2 if len(groups) > 1 else 0], groups[-1]
    trainer = choice.trainer
    layouts = [_trainer(job, choice, Role.POLICY, "policy_trainer", training)]
    if choice.sync_mode:
        count, ranks = choice.engines, choice.engine.ranks
        layouts.append(
            RoleLayout(
                Role.POLICY, "rollout_engine", generation.name, generation.devices[-count * ranks :], dp=count, tp=ranks
            )
        )
    layouts += [_trainer(job, choice, role, "value_trainer", training) for role in job.trained_roles[1:]]
    on = scoring.devices if job.placement.spreads_scoring else scoring.devices[:1]
    shared = 3 if trainer.zero_stage == 3 and len(on) > 1 else 0
    for role in job.frozen_roles:
        layouts.append(RoleLayout(role, "scorer", scoring.name, on, dp=len(on), zero_stage=shared))
    return groups, tuple(layouts)


def representative(layout: RoleLayout) -> RoleLayout:
    """The layout with its first process alone, which stands for all."""
    return replace(layout, devices=layout.devices[:1], dp=1, tp=1)


def trainer_of(job: SettledJob, role: Role, trainer: TrainerChoice) -> TrainerChoice:
    """The choice for a trained role: the policy's, or the value model's own where the job has it."""
    asked = job.roles.value.training
    if role is not Role.VALUE:
        return trainer
    own = {key: getattr(asked, key) for key in _OF_VALUE if getattr(asked, key) != "auto"}
    tokens, size, longest = asked.max_tokens_per_micro_batch, asked.micro_batch_size_per_gpu, job.workload.max_seq_len
    if tokens != "auto":
        own |= {"max_tokens": tokens, "micro_batch": max(1, tokens // longest)}
    elif size != "auto":
        own |= {"micro_batch": size, "max_tokens": size * longest if trainer.max_tokens else 0}
    return replace(trainer, **own) if own else trainer


_OF_VALUE = ("zero_stage", "gradient_checkpointing", "ulysses", "tp", "pp", "cp", "ep")


def _trainer(job: SettledJob, choice: Choice, role: Role, worker: Worker, group: DeviceGroup) -> RoleLayout:
    """A rank on each device; some of them compute a pass together."""
    trainer = trainer_of(job, role, choice.trainer)
    replicas = len(group.devices) // trainer.ranks_per_sequence
    return RoleLayout(role, worker, group.name, group.devices, replicas, trainer.tp, trainer.zero_stage)


def group_size(arrangement: Arrangement, group: str) -> int:
    """Devices of a device group of an arrangement."""
    if group == GENERATION:
        return arrangement.num_generation
    return arrangement.num_scoring if group == SCORING else arrangement.num_training


def scoring_group(arrangement: Arrangement) -> str:
    """The device group of the frozen roles."""
    return SCORING if arrangement.num_scoring else SHARED if arrangement.shares_devices else TRAINING


@lru_cache(maxsize=256)
def _groups(kind: str, arrangement: Arrangement, *, has_engine: bool) -> tuple[DeviceGroup, ...]:
    """Training, scoring where it has devices of its own, generation; or one that all share."""
    devices = tuple(f"{kind}:{index}" for index in range(arrangement.num_devices))
    if arrangement.shares_devices:
        return (DeviceGroup(SHARED, devices),)
    first = arrangement.num_training
    last = first + arrangement.num_scoring
    groups = [DeviceGroup(TRAINING, devices[:first])]
    if last > first:
        groups.append(DeviceGroup(SCORING, devices[first:last]))
    return (*groups, DeviceGroup(GENERATION, devices[last:])) if has_engine else tuple(groups)


def with_async_rollouts(graph: StepGraph, max_staleness: int, *, interrupts: bool) -> StepGraph:
    """The same step, with generation up to `max_staleness` versions ahead: it waits for nothing and nothing waits for
    it, and `take_rollouts` stands where a step's complete groups come from. interrupts: see `graph.AsyncRollouts`.
    Which rollouts may be begun and are taken is one rule for the simulator and the runtime (simulate/staleness.py).
    """
    generate = next(call for call in graph.step if call.kind is ActionKind.GENERATE)
    take = Call("take_rollouts", ActionKind.TAKE_ROLLOUTS, Role.POLICY, Phase.ROLLOUT)
    rest = [
        replace(call, after=tuple(take.id if name == generate.id else name for name in call.after))
        for call in graph.step
        if call is not generate
    ]
    async_rollouts = AsyncRollouts(generate.id, max_staleness, interrupts)
    return replace(graph, step=(generate, take, *rest), async_rollouts=async_rollouts)
