"""Time sharing: trainer and engine use the same devices one after the other; the one that waits gives up its memory.

In: a StepGraph in which both are always there. Out: one in which the engine goes before anybody else computes and comes
back with the new weights, and in which trained and frozen roles are offloaded while they wait, where that was chosen.
Left out: where anything runs; how an engine goes (the actions say it).

The engine goes in one of two ways. Where it can sleep (CUDA) it drops weights and KV cache and keeps its process; it
wakes in three actions, weights, weight sync, KV cache, so that KV cache and the trainer's states never meet. Where it
cannot, it is stopped, the weights are saved, and it is started again from them.
"""

from dataclasses import dataclass, replace

from rlplan.dataflow.graph import Call, StepGraph
from rlplan.vocabulary import ActionKind, Phase, Role

_BESIDE = (ActionKind.VERIFY,)
"""What needs no device, and may run beside anything."""


@dataclass(frozen=True, slots=True)
class TimeSharing:
    """How roles on the same devices give up memory to each other."""

    sleeps: bool
    """The engine sleeps instead of being stopped."""
    offloaded: tuple[Role, ...] = ()
    """Roles that are moved away while they wait."""
    stages: bool = False
    """Trained states may be copied for a checkpoint, and the copy stays while others compute."""


def share_time(graph: StepGraph, sharing: TimeSharing) -> StepGraph:
    """The same step with an engine that goes and comes back."""
    return replace(
        graph,
        start=_start(graph.start, sharing),
        step=_step(graph.step, sharing),
        finish=_finish(graph.finish, sharing),
    )


def offload_between(graph: StepGraph, roles: tuple[Role, ...]) -> StepGraph:
    """The same step, in which an engine stays and frozen roles are there only while they score."""
    offloads = [replace(_offload(role), after=(f"start_scorer/{role}",)) for role in roles]
    ready = tuple(call.id for call in offloads)
    start = []
    for call in graph.start:
        if call.kind is ActionKind.SYNC_WEIGHTS:
            start += [*offloads, replace(call, after=(*call.after, *ready))]
        else:
            start.append(call)
    return replace(graph, start=tuple(start), step=_chained(_with_offloads(list(graph.step), roles)))


def _start(calls: tuple[Call, ...], sharing: TimeSharing) -> tuple[Call, ...]:
    """Roles that stay come up side by side; then those that are offloaded, each gone before the next one comes, so that
    no two of them lie on a device together; then the engine: its weights are the start checkpoint's already.
    """
    others = [call for call in calls if call.kind in (ActionKind.START_TRAINER, ActionKind.START_SCORER)]
    chain = [call for call in others if call.role not in sharing.offloaded]
    before = tuple(call.id for call in chain)
    for call in (one for one in others if one.role in sharing.offloaded):
        chain += [replace(call, after=before), replace(_offload(call.role), after=(call.id,))]
        before = (chain[-1].id,)
    engine = next(call for call in calls if call.kind is ActionKind.START_ENGINE)
    rest = [call for call in calls if call.kind is ActionKind.EVALUATE]
    return (*chain, replace(engine, after=before), *(replace(call, after=(engine.id,)) for call in rest))


def _step(calls: tuple[Call, ...], sharing: TimeSharing) -> tuple[Call, ...]:
    chain: list[Call] = []
    for call in calls:
        if call.kind is ActionKind.SYNC_WEIGHTS:
            chain += _hand_over(call, sharing)
            continue
        if call.kind is ActionKind.SAVE_STATES and not sharing.stages:
            call = replace(call, kind=ActionKind.WRITE_STATES)
        chain.append(call)
        if call.kind is ActionKind.GENERATE:
            chain.append(_leave(sharing))
    return _chained(_with_offloads(chain, sharing.offloaded))


def _finish(calls: tuple[Call, ...], sharing: TimeSharing) -> tuple[Call, ...]:
    """The engine goes before the trainer writes the policy."""
    chain: list[Call] = []
    for call in calls:
        if call.kind is ActionKind.CHECKPOINT:
            chain.append(_leave(sharing))
            if Role.POLICY in sharing.offloaded:
                chain.append(_reload(Role.POLICY))
        chain.append(call)
    return _chained(chain)


def _leave(sharing: TimeSharing) -> Call:
    kind = ActionKind.SLEEP_ENGINE if sharing.sleeps else ActionKind.STOP_ENGINE
    return Call(kind.value, kind, Role.POLICY, Phase.SWITCH)


def _hand_over(sync: Call, sharing: TimeSharing) -> list[Call]:
    """The engine comes back with the new weights; what follows is offloaded before its KV cache is there."""
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


def _with_offloads(chain: list[Call], roles: tuple[Role, ...]) -> list[Call]:
    """An offloaded role comes back right before what it first does, and goes right after what it does last.

    A policy that has scored goes while the value model is trained, so that the states of the two never meet there.
    """
    for role in roles:
        uses = [index for index, call in enumerate(chain) if call.kind in _USES and _holder(call) is role]
        if not uses:
            continue
        first, last = uses[0], uses[-1] + 1
        later = [index for index in uses if chain[index].kind is not ActionKind.SCORE]
        if uses[0] in later or not later or not _trains_another(chain[first : later[0]], role):
            chain = [*chain[:first], _reload(role), *chain[first:last], _offload(role), *chain[last:]]
            continue
        end = uses[uses.index(later[0]) - 1] + 1
        back, gone = (replace(call, id=f"{call.id}/score") for call in (_reload(role), _offload(role)))
        scores = [back, *chain[first:end], gone]
        trains = [_reload(role), *chain[later[0] : last], _offload(role)]
        chain = [*chain[:first], *scores, *chain[end : later[0]], *trains, *chain[last:]]
    return chain


def _trains_another(calls: list[Call], role: Role) -> bool:
    return any(call.kind is ActionKind.TRAIN_FORWARD_BACKWARD and _holder(call) is not role for call in calls)


def _holder(call: Call) -> Role:
    return call.held_by or call.role


def _offload(role: Role) -> Call:
    return Call(f"offload_role/{role}", ActionKind.OFFLOAD_ROLE, role, Phase.SWITCH)


def _reload(role: Role) -> Call:
    return Call(f"reload_role/{role}", ActionKind.RELOAD_ROLE, role, Phase.SWITCH)


def _chained(calls: list[Call]) -> tuple[Call, ...]:
    """Each call after the one before, but for those that run beside: these keep what they wait for."""
    done: list[Call] = []
    before: tuple[str, ...] = ()
    for call in calls:
        if call.kind in _BESIDE:
            done.append(call)
            continue
        beside = tuple(name for name in call.after if any(c.id == name and c.kind in _BESIDE for c in done))
        done.append(replace(call, after=tuple(dict.fromkeys((*before, *beside)))))
        before = (call.id,) if call.every == 1 else (*before, call.id)  # one that is left out blocks nothing
    return tuple(done)
