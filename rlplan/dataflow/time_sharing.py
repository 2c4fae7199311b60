"""Time sharing: trainer and engine take turns on the same devices, and the one that waits frees its memory.

An engine that can sleep (CUDA) drops weights and KV cache and keeps its process. It wakes in three actions: weights,
weight sync, KV cache. In this order the KV cache and the trainer's states are never in memory together. An engine that
cannot sleep is stopped, the weights are saved, and it starts again from them.

In: a StepGraph in which all roles stay in memory. Out: one in which the engine leaves before other roles compute and
returns with the new weights, and in which the chosen roles are offloaded while they wait.
Left out: devices.
"""

from dataclasses import dataclass, replace

from rlplan.dataflow.graph import Call, StepGraph
from rlplan.vocabulary import ActionKind, Phase, Role

_BESIDE = (ActionKind.VERIFY,)
"""Actions that need no device, and may run beside any other."""


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
    """Let the engine of a step leave and return."""
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
        # One stay in memory, unless the role scores first and another role trains before this one does.
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
        independent = tuple(name for name in call.after if any(c.id == name and c.kind in _BESIDE for c in done))
        done.append(replace(call, after=tuple(dict.fromkeys((*before, *independent)))))
        # A call that is skipped in most steps must not cut the chain, so its successor waits for its predecessor too.
        before = (call.id,) if call.every == 1 else (*before, call.id)
    return tuple(done)
