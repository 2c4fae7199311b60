"""Placements: the device groups of a choice, the roles on each, and the order that sharing devices imposes.

Under time sharing, trainer and engine take turns on the same devices, and the one that waits frees its memory. An
engine that can sleep (CUDA) drops weights and KV cache and keeps its process. It wakes in three actions: weights,
weight sync, KV cache. In this order the KV cache and the trainer's states are never in memory together. An engine that
cannot sleep is stopped, the weights are saved, and it starts again from them.

In: a job and a choice. Out: device groups and role layouts; a StepGraph arranged for the placement.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from rlplan.dataflow.choice import Arrangement, Choice, TrainerChoice
from rlplan.dataflow.schedule import AsyncRollouts, Call, DeviceGroup, RoleLayout, StepGraph, Worker
from rlplan.spec.resolved import SettledJob
from rlplan.vocabulary import ActionKind, Phase, Placement, Role

_BESIDE = (ActionKind.VERIFY,)
"""Actions that need no device, and may run at the same time as any other."""


@dataclass(frozen=True, slots=True)
class TimeSharing:
    """How roles on the same devices free memory for each other."""

    sleeps: bool
    """Whether the engine sleeps instead of being stopped."""
    offloaded: tuple[Role, ...] = ()
    """Roles that are offloaded while they wait."""
    stages: bool = False
    """Whether a checkpoint copies trained states first and writes the copy while other roles compute."""


def share_time(graph: StepGraph, sharing: TimeSharing) -> StepGraph:
    """Let the engine free its memory after it has generated, and bring it back with the new weights."""
    return replace(
        graph,
        start=_order_start(graph.start, sharing),
        step=_order_step(graph.step, sharing),
        finish=_order_finish(graph.finish, sharing),
    )


def offload_between(graph: StepGraph, roles: tuple[Role, ...]) -> StepGraph:
    """Offload roles whenever they do not compute, while the engine stays."""
    offloads = [replace(_build_offload(role), after=(f"start_scorer/{role}",)) for role in roles]
    ready = tuple(call.id for call in offloads)
    start = []
    for call in graph.start:
        if call.kind is ActionKind.SYNC_WEIGHTS:
            start += [*offloads, replace(call, after=(*call.after, *ready))]
        else:
            start.append(call)
    return replace(graph, start=tuple(start), step=_chain_calls(_add_offloads(list(graph.step), roles)))


def _order_start(calls: tuple[Call, ...], sharing: TimeSharing) -> tuple[Call, ...]:
    """Order the start: roles that stay in parallel, then offloaded roles one by one, then the engine.

    Each offloaded role leaves before the next one starts, so that no two of them share a device's memory. The engine
    needs no weight sync: it loads the start checkpoint.
    """
    others = [call for call in calls if call.kind in (ActionKind.START_TRAINER, ActionKind.START_SCORER)]
    chain = [call for call in others if call.role not in sharing.offloaded]
    before = tuple(call.id for call in chain)
    for call in others:
        if call.role in sharing.offloaded:
            chain += [replace(call, after=before), replace(_build_offload(call.role), after=(call.id,))]
            before = (chain[-1].id,)
    engine = next(call for call in calls if call.kind is ActionKind.START_ENGINE)
    evaluations = [replace(call, after=(engine.id,)) for call in calls if call.kind is ActionKind.EVALUATE]
    return (*chain, replace(engine, after=before), *evaluations)


def _order_step(calls: tuple[Call, ...], sharing: TimeSharing) -> tuple[Call, ...]:
    chain: list[Call] = []
    for call in calls:
        if call.kind is ActionKind.SYNC_WEIGHTS:
            chain += _bring_engine_back(call, sharing)
            continue
        if call.kind is ActionKind.SAVE_STATES and not sharing.stages:
            call = replace(call, kind=ActionKind.WRITE_STATES)
        chain.append(call)
        if call.kind is ActionKind.GENERATE:
            chain.append(_remove_engine_call(sharing))
    return _chain_calls(_add_offloads(chain, sharing.offloaded))


def _order_finish(calls: tuple[Call, ...], sharing: TimeSharing) -> tuple[Call, ...]:
    """Let the engine leave before the trainer writes the policy."""
    chain: list[Call] = []
    for call in calls:
        if call.kind is ActionKind.CHECKPOINT:
            chain.append(_remove_engine_call(sharing))
            if Role.POLICY in sharing.offloaded:
                chain.append(_build_reload(Role.POLICY))
        chain.append(call)
    return _chain_calls(chain)


def _remove_engine_call(sharing: TimeSharing) -> Call:
    kind = ActionKind.SLEEP_ENGINE if sharing.sleeps else ActionKind.STOP_ENGINE
    return Call(kind.value, kind, Role.POLICY, Phase.SWITCH)


def _bring_engine_back(sync: Call, sharing: TimeSharing) -> list[Call]:
    """Calls that bring the engine back with the new weights."""
    if sharing.sleeps:
        return [
            Call("wake_weights", ActionKind.WAKE_WEIGHTS, Role.POLICY, Phase.SWITCH),
            sync,
            Call("wake_kv_cache", ActionKind.WAKE_KV_CACHE, Role.POLICY, Phase.SWITCH),
        ]
    return [
        Call("save_weights", ActionKind.SAVE_WEIGHTS, Role.POLICY, Phase.SYNC),
        Call("start_engine", ActionKind.START_ENGINE, Role.POLICY, Phase.SWITCH),
    ]


_USES = (
    ActionKind.SCORE,
    ActionKind.TRAIN_FORWARD_BACKWARD,
    ActionKind.OPTIMIZER_STEP,
    ActionKind.SYNC_WEIGHTS,
    ActionKind.SAVE_WEIGHTS,
    ActionKind.SAVE_STATES,
    ActionKind.WRITE_STATES,
    ActionKind.CHECKPOINT,
)


def _add_offloads(chain: list[Call], roles: tuple[Role, ...]) -> list[Call]:
    """Reload each offloaded role right before its first call of the chain, and offload it right after its last one.

    A policy that has scored is offloaded again while the value model trains, so that the states of the two are never
    on the device together.
    """
    for role in roles:
        uses = [index for index, call in enumerate(chain) if call.kind in _USES and _find_holder(call) is role]
        if not uses:
            continue
        first, last = uses[0], uses[-1] + 1
        later = [index for index in uses if chain[index].kind is not ActionKind.SCORE]
        # The role stays in memory from its first to its last call, unless it scores and another role then trains first.
        if uses[0] in later or not later or not _trains_another(chain[first : later[0]], role):
            chain = [*chain[:first], _build_reload(role), *chain[first:last], _build_offload(role), *chain[last:]]
            continue
        end = uses[uses.index(later[0]) - 1] + 1
        reload, offload = (replace(call, id=f"{call.id}/score") for call in (_build_reload(role), _build_offload(role)))
        scores = [reload, *chain[first:end], offload]
        trains = [_build_reload(role), *chain[later[0] : last], _build_offload(role)]
        chain = [*chain[:first], *scores, *chain[end : later[0]], *trains, *chain[last:]]
    return chain


def _trains_another(calls: list[Call], role: Role) -> bool:
    return any(call.kind is ActionKind.TRAIN_FORWARD_BACKWARD and _find_holder(call) is not role for call in calls)


def _find_holder(call: Call) -> Role:
    return call.runs_on or call.role


def _build_offload(role: Role) -> Call:
    return Call(f"offload_role/{role}", ActionKind.OFFLOAD_ROLE, role, Phase.SWITCH)


def _build_reload(role: Role) -> Call:
    return Call(f"reload_role/{role}", ActionKind.RELOAD_ROLE, role, Phase.SWITCH)


def _chain_calls(calls: list[Call]) -> tuple[Call, ...]:
    """Make each call wait for the one before it. Calls that need no device keep their own dependencies."""
    done: list[Call] = []
    before: tuple[str, ...] = ()
    for call in calls:
        if call.kind in _BESIDE:
            done.append(call)
            continue
        # the chain replaces all other dependencies
        independent = tuple(name for name in call.after if any(c.id == name and c.kind in _BESIDE for c in done))
        done.append(replace(call, after=tuple(dict.fromkeys((*before, *independent)))))
        # A call that is skipped in most steps must not cut the chain, so its successor waits for its predecessor too.
        before = (call.id,) if call.every == 1 else (*before, call.id)
    return tuple(done)


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
    (simulate/staleness.py). interrupts: see `schedule.AsyncRollouts`.
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
