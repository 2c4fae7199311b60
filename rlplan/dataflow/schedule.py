"""Schedule: the graph of Actions that is estimated, executed and reported.

In: a StepGraph and the layouts of a candidate. Out: Actions, each with its device group, stream and processes.
Left out: bytes (memory/) and how an action is done (runtime/).
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from rlplan.dataflow.graph import AsyncRollouts, Call, StepGraph
from rlplan.dataflow.layouts import DeviceGroup, RoleLayout
from rlplan.vocabulary import ActionKind, Phase, Placement, Role, Stream

Part = Literal["start", "step", "finish"]
Beside = tuple[Part, str, str]
"""A part of a schedule and two of its actions that may run at the same time."""

HOST_GROUP = "host"
DRIVER_PROCESS = "driver/0"
VERIFIER_PROCESS = "verifiers"
"""All processes that judge responses, counted together."""
SINK_PROCESS = "sinks"
"""All processes that hand metrics on, counted together."""
HOST_DEVICE = "host:0"

_STREAMS = {
    ActionKind.GENERATE: Stream.GENERATION,
    ActionKind.START_ENGINE: Stream.GENERATION,
    ActionKind.EVALUATE: Stream.GENERATION,
    ActionKind.SYNC_WEIGHTS: Stream.TRANSFER,
    ActionKind.STOP_ENGINE: Stream.GENERATION,
    ActionKind.TAKE_ROLLOUTS: Stream.HOST,
    ActionKind.VERIFY: Stream.HOST,
    ActionKind.COMPUTE_ADVANTAGES: Stream.HOST,
}

_WORKERS: dict[ActionKind, tuple[str, ...]] = {
    ActionKind.START_TRAINER: ("policy_trainer", "value_trainer"),
    ActionKind.START_ENGINE: ("rollout_engine",),
    ActionKind.START_SCORER: ("scorer",),
    ActionKind.STOP_ENGINE: ("rollout_engine",),
    ActionKind.SLEEP_ENGINE: ("rollout_engine",),
    ActionKind.WAKE_WEIGHTS: ("rollout_engine",),
    ActionKind.WAKE_KV_CACHE: ("rollout_engine",),
    ActionKind.GENERATE: ("rollout_engine",),
    ActionKind.EVALUATE: ("rollout_engine",),
    ActionKind.SCORE: ("scorer", "policy_trainer", "value_trainer"),
    ActionKind.TRAIN_FORWARD_BACKWARD: ("policy_trainer", "value_trainer"),
    ActionKind.OPTIMIZER_STEP: ("policy_trainer", "value_trainer"),
    ActionKind.SYNC_WEIGHTS: ("policy_trainer", "rollout_engine"),
    ActionKind.SAVE_WEIGHTS: ("policy_trainer",),
    ActionKind.CHECKPOINT: ("policy_trainer",),
    ActionKind.SAVE_STATES: ("policy_trainer", "value_trainer"),
    ActionKind.WRITE_STATES: ("policy_trainer", "value_trainer"),
    ActionKind.OFFLOAD_ROLE: ("policy_trainer", "value_trainer", "scorer"),
    ActionKind.RELOAD_ROLE: ("policy_trainer", "value_trainer", "scorer"),
    ActionKind.TAKE_ROLLOUTS: (),
    ActionKind.VERIFY: (),
    ActionKind.COMPUTE_ADVANTAGES: (),
}

_FROM_ONE_RANK = (ActionKind.SYNC_WEIGHTS, ActionKind.SAVE_WEIGHTS, ActionKind.CHECKPOINT)


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that happens to one role on one device group, when everything in `after` has finished."""

    id: str
    kind: ActionKind
    role: Role
    phase: Phase
    device_group: str
    stream: Stream
    processes: tuple[str, ...]
    """The worker processes that take part; empty for what the driver does itself."""
    after: tuple[str, ...] = ()
    every: int = 1
    """It happens in steps that are a multiple of this, from `first` on."""
    mini_batch: int | None = None
    first: int = 1
    repeat: int = 1
    """In a view of a schedule (build.py): how many actions alike follow one another, this one the first. Else 1."""

    def happens_in(self, step: int) -> bool:
        """Whether this action belongs to RL step `step` (from 1; start and finish actions always happen)."""
        return step < 1 or (step >= self.first and step % self.every == 0)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A whole job on device groups."""

    placement: Placement
    groups: tuple[DeviceGroup, ...]
    layouts: tuple[RoleLayout, ...]
    start: tuple[Action, ...]
    """Once, before the first step."""
    step: tuple[Action, ...]
    """In every step."""
    finish: tuple[Action, ...]
    """Once, after the last step."""
    async_rollouts: AsyncRollouts | None = None
    """None of a synchronous schedule."""

    @property
    def parts(self) -> tuple[tuple[Part, tuple[Action, ...]], ...]:
        """The three parts by name, in order."""
        return (("start", self.start), ("step", self.step), ("finish", self.finish))

    @property
    def async_action(self) -> Action | None:
        """The action of async rollouts; None of a synchronous step."""
        return next(
            (action for action in self.step if self.async_rollouts and action.id == self.async_rollouts.action_id), None
        )

    @property
    def processes(self) -> tuple[tuple[str, str], ...]:
        """(process, device) of every worker process."""
        return tuple(pair for layout in self.layouts for pair in layout.processes)

    @property
    def concurrent(self) -> tuple[Beside, ...]:
        """Pairs of actions that may run at the same time: neither must come before the other.

        Each with its part: actions of the same names may be a pair while starting and come in turn in a step.
        """
        pairs: list[Beside] = []
        for part, actions in self.parts:
            before: dict[str, set[str]] = {}
            for action in actions:
                before[action.id] = set(action.after).union(*(before.get(name, set()) for name in action.after))
            names = [action.id for action in actions if action.processes]
            for index, one in enumerate(names):
                others = (two for two in names[index + 1 :] if one not in before[two] and two not in before[one])
                pairs += [(part, one, two) for two in others]
        return tuple(pairs)

    def actions_of(self, step: int) -> tuple[Action, ...]:
        """The actions of an RL step. What waits for one that is left out waits for what that one waits for."""
        left_out = {action.id: action.after for action in self.step if not action.happens_in(step)}

        def waits_for(names: tuple[str, ...]) -> tuple[str, ...]:
            found = [waits_for(left_out[name]) if name in left_out else (name,) for name in names]
            return tuple(dict.fromkeys(name for part in found for name in part))

        return tuple(
            replace(action, after=waits_for(action.after)) if left_out else action
            for action in self.step
            if action.id not in left_out
        )

    def with_processes(self, names: Collection[str]) -> "Schedule":
        """The same with some of its processes alone, such as those that stand for all that are alike."""

        def kept(actions: tuple[Action, ...]) -> tuple[Action, ...]:
            return tuple(replace(one, processes=tuple(p for p in one.processes if p in names)) for one in actions)

        layouts = tuple(
            replace(one, devices=tuple(device for process, device in one.processes if process in names))
            for one in self.layouts
        )
        start, step, finish = map(kept, (self.start, self.step, self.finish))
        return replace(self, layouts=layouts, start=start, step=step, finish=finish)

    def layout(self, worker: str, role: Role = Role.POLICY) -> RoleLayout:
        """The layout of a role's worker. Raises: KeyError."""
        for layout in self.layouts:
            if layout.worker == worker and layout.role == role:
                return layout
        raise KeyError(f"{worker} of {role}")


def located(
    graph: StepGraph, placement: Placement, groups: tuple[DeviceGroup, ...], layouts: tuple[RoleLayout, ...]
) -> Schedule:
    """Give every call of the graph its place."""

    names = [tuple(process for process, _ in layout.processes) for layout in layouts]  # thousands, asked by each call

    def actions(calls: tuple[Call, ...]) -> tuple[Action, ...]:
        return tuple(_locate(call, layouts, names) for call in calls)

    parts = actions(graph.start), actions(graph.step), actions(graph.finish)
    return Schedule(placement, groups, layouts, *parts, graph.async_rollouts)


def _locate(call: Call, layouts: tuple[RoleLayout, ...], names: list[tuple[str, ...]]) -> Action:
    workers, role = _WORKERS[call.kind], call.held_by or call.role
    mine = [index for index, layout in enumerate(layouts) if layout.worker in workers and layout.role == role]
    return Action(
        id=call.id,
        kind=call.kind,
        role=call.role,
        phase=call.phase,
        device_group=layouts[mine[-1]].group if mine else HOST_GROUP,
        stream=_STREAMS.get(call.kind, Stream.TRAINING),
        processes=tuple(chain.from_iterable(_taking_part(call, layouts[index], names[index]) for index in mine)),
        after=call.after,
        every=call.every,
        mini_batch=call.mini_batch,
        first=call.first,
        repeat=call.repeat,
    )


def _taking_part(call: Call, layout: RoleLayout, names: tuple[str, ...]) -> tuple[str, ...]:
    """The layout's processes that an action needs.

    Up to ZeRO-2 the first group of ranks that each hold a part of every layer, or one rank that holds all of it, hands
    weights on; in ZeRO-3 all of them gather them.
    """
    is_whole = layout.worker == "policy_trainer" and layout.zero_stage < 3
    return names[: layout.tp] if call.kind in _FROM_ONE_RANK and is_whole and not call.takes_all else names
