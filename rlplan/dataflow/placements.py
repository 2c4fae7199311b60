"""Placements: the device groups of a choice, the roles on each, and the order that sharing devices imposes.

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
    """Adapt a step to its placement.

    hybrid: the step is unchanged. colocated: engine and trainer share time. disaggregated: the step is unchanged, or
    generation runs ahead where rollouts may be stale. Waiting roles are offloaded where the arrangement says so.
    """
    roles = list_offloaded_roles(job, arrangement)
    if arrangement.placement is Placement.COLOCATED and (arrangement.sleeps or job.device_kind == "cpu"):
        return share_time(graph, TimeSharing(arrangement.sleeps, roles, job.checkpoints.writes == "beside"))
    if roles:
        graph = offload_between(graph, roles)
    if arrangement.is_async:
        return add_async_rollouts(graph, job.placement.max_staleness, interrupts=job.placement.partial_rollouts)
    return graph


def list_offloaded_roles(job: SettledJob, arrangement: Arrangement) -> tuple[Role, ...]:
    """Roles that are offloaded while they wait. Frozen roles come back from their files, or from the host."""
    if arrangement.offloaded == "none":
        return ()
    return (*(job.trained_roles if arrangement.offloaded == "all" else ()), *job.frozen_roles)


def place(job: SettledJob, choice: Choice) -> tuple[tuple[DeviceGroup, ...], tuple[RoleLayout, ...]]:
    """Build the device groups and role layouts of a choice.

    hybrid, colocated: all roles use the same devices. The trainer has a rank on each; a scorer has one process, or one
    on each; engines have a process on each of the last devices.
    disaggregated: the last devices generate, those before them score, the others train. Without scoring devices the
    training devices score.
    """
    groups = _build_groups(job.device_kind, choice.arrangement, has_engine=bool(choice.sync_mode))
    training, scoring, generation = groups[0], groups[-2 if len(groups) > 1 else 0], groups[-1]
    trainer = choice.trainer
    layouts = [_build_trainer_layout(job, choice, Role.POLICY, "policy_trainer", training)]
    if choice.sync_mode:
        count, ranks = choice.engines, choice.engine.ranks
        layouts.append(
            RoleLayout(
                Role.POLICY, "rollout_engine", generation.name, generation.devices[-count * ranks :], dp=count, tp=ranks
            )
        )
    layouts += [_build_trainer_layout(job, choice, role, "value_trainer", training) for role in job.trained_roles[1:]]
    devices = scoring.devices if job.placement.spreads_scoring else scoring.devices[:1]
    stage = 3 if trainer.zero_stage == 3 and len(devices) > 1 else 0
    for role in job.frozen_roles:
        layouts.append(RoleLayout(role, "scorer", scoring.name, devices, dp=len(devices), zero_stage=stage))
    return groups, tuple(layouts)


def keep_first_process(layout: RoleLayout) -> RoleLayout:
    """Reduce a layout to its first process, which represents all of them in a view."""
    return replace(layout, devices=layout.devices[:1], dp=1, tp=1)


def find_trainer_choice(job: SettledJob, role: Role, trainer: TrainerChoice) -> TrainerChoice:
    """The trainer settings of a role. The value model overrides the policy's by `roles.value.training`."""
    stated = job.roles.value.training
    if role is not Role.VALUE:
        return trainer
    overrides = {key: getattr(stated, key) for key in _VALUE_KEYS if getattr(stated, key) != "auto"}
    tokens, size, longest = stated.max_tokens_per_micro_batch, stated.micro_batch_size_per_gpu, job.workload.max_seq_len
    if tokens != "auto":
        overrides |= {"max_tokens": tokens, "micro_batch": max(1, tokens // longest)}
    elif size != "auto":
        overrides |= {"micro_batch": size, "max_tokens": size * longest if trainer.max_tokens else 0}
    return replace(trainer, **overrides) if overrides else trainer


_VALUE_KEYS = ("zero_stage", "gradient_checkpointing", "ulysses", "tp", "pp", "cp", "ep")


def _build_trainer_layout(
    job: SettledJob, choice: Choice, role: Role, worker: Worker, group: DeviceGroup
) -> RoleLayout:
    """The layout of a trained role: a rank on each device, grouped into data parallel replicas."""
    trainer = find_trainer_choice(job, role, choice.trainer)
    replicas = len(group.devices) // trainer.ranks_per_sequence
    return RoleLayout(role, worker, group.name, group.devices, replicas, trainer.tp, trainer.zero_stage)


def count_group_devices(arrangement: Arrangement, group: str) -> int:
    """Number of devices in a device group of an arrangement."""
    if group == GENERATION:
        return arrangement.num_generation
    return arrangement.num_scoring if group == SCORING else arrangement.num_training


def find_scoring_group(arrangement: Arrangement) -> str:
    """The device group of the frozen roles."""
    return SCORING if arrangement.num_scoring else SHARED if arrangement.shares_devices else TRAINING


@lru_cache(maxsize=256)
def _build_groups(kind: str, arrangement: Arrangement, *, has_engine: bool) -> tuple[DeviceGroup, ...]:
    """The groups in device order: training, scoring where it has its own devices, generation; or one shared group."""
    devices = tuple(f"{kind}:{index}" for index in range(arrangement.num_devices))
    if arrangement.shares_devices:
        return (DeviceGroup(SHARED, devices),)
    first = arrangement.num_training
    last = first + arrangement.num_scoring
    groups = [DeviceGroup(TRAINING, devices[:first])]
    if last > first:
        groups.append(DeviceGroup(SCORING, devices[first:last]))
    return (*groups, DeviceGroup(GENERATION, devices[last:])) if has_engine else tuple(groups)


def add_async_rollouts(graph: StepGraph, max_staleness: int, *, interrupts: bool) -> StepGraph:
    """Let generation run up to `max_staleness` versions ahead of training.

    Generation then waits for no call and no call waits for it. `take_rollouts` takes its place in the step and waits
    for complete groups. The simulator and the runtime share one rule for the rollouts that may be started and taken
    (simulate/staleness.py). interrupts: see `graph.AsyncRollouts`.
    """
    generate = next(call for call in graph.step if call.kind is ActionKind.GENERATE)
    take = Call("take_rollouts", ActionKind.TAKE_ROLLOUTS, Role.POLICY, Phase.ROLLOUT)
    others = [
        replace(call, after=tuple(take.id if name == generate.id else name for name in call.after))
        for call in graph.step
        if call is not generate
    ]
    async_rollouts = AsyncRollouts(generate.id, max_staleness, interrupts)
    return replace(graph, step=(generate, take, *others), async_rollouts=async_rollouts)
