"""Schedule: the graph of Actions that is estimated, executed and reported.

Also the calls of a step before they have devices (StepGraph), and the device groups and processes of each role.

A device is named `cpu:0`, a process slot of a host, or `cuda:0`. Devices are numbered over all hosts.

In: a StepGraph and the layouts of a candidate. Out: Actions, each with its device group, stream and processes.
Left out: bytes (memory/) and how an action is done (runtime/).
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from rlplan.vocabulary import ActionKind, Phase, Placement, Role, Stream


@dataclass(frozen=True, slots=True)
class Call:
    """One action of one role, without its devices."""

    id: str
    kind: ActionKind
    role: Role
    phase: Phase
    after: tuple[str, ...] = ()
    """Ids of calls of the same part (start, step or finish) that must finish first."""
    every: int = 1
    """Interval in steps: the call runs in steps that are a multiple of this."""
    mini_batch: int | None = None
    """Index of the mini-batch, for train calls."""
    runs_on: Role | None = None
    """The role whose processes run the call, where that is not `role`."""
    needs_all_ranks: bool = False
    """Whether every rank of the role takes part although one would suffice."""
    first: int = 1
    """First step in which the call runs."""
    repeat: int = 1
    """Consecutive equal calls that this one represents in a view, itself included."""


@dataclass(frozen=True, slots=True)
class AsyncRollouts:
    """Asynchronous rollouts: generation runs during training steps, off-policy."""

    action_id: str
    """Id of the generating action."""
    max_staleness: int
    """Policy versions by which a rollout may lag, enforced by a bounded queue."""
    interrupts: bool
    """Whether new weights reach the engine while it generates. Otherwise it finishes the running rollouts first."""


@dataclass(frozen=True, slots=True)
class StepGraph:
    """All calls of a job: those before the first step, of every step, and after the last step."""

    start: tuple[Call, ...]
    step: tuple[Call, ...]
    finish: tuple[Call, ...]
    async_rollouts: AsyncRollouts | None = None


Worker = Literal["policy_trainer", "value_trainer", "rollout_engine", "scorer"]


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Devices that a role uses together."""

    name: str
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RoleLayout:
    """The worker processes of one role on a device group: one process per device, from the first device on."""

    role: Role
    worker: Worker
    group: str
    devices: tuple[str, ...]
    dp: int = 1
    """Data parallel size: groups of ranks that compute passes of their own. Ranks of a group are consecutive."""
    tp: int = 1
    """Tensor parallel size of one replica. An engine counts all its ranks, data-parallel attention included."""
    zero_stage: int = 0
    """ZeRO stage. A frozen role has 3 where its ranks share the weights, else 0."""

    @property
    def shares_frozen_weights(self) -> bool:
        """Whether these are ranks of a frozen role that shard its weights."""
        return self.worker == "scorer" and self.zero_stage == 3

    @property
    def num_ranks_per_pass(self) -> int:
        """Ranks that compute one pass together."""
        return len(self.devices) // self.dp

    @property
    def num_shards(self) -> int:
        """Ranks over which ZeRO shards a state. Ranks of one Ulysses group hold the same weights, so they count."""
        return len(self.devices) // self.tp

    @property
    def processes(self) -> tuple[tuple[str, str], ...]:
        """(process, device) of every worker process, such as `policy_trainer/0` on `cpu:0`."""
        name = self.worker if self.worker != "scorer" else f"scorer/{self.role}"
        return tuple((f"{name}/{rank}", device) for rank, device in enumerate(self.devices))


Part = Literal["start", "step", "finish"]
Beside = tuple[Part, str, str]
"""A part of a schedule, and the ids of two of its actions that may run at the same time."""

HOST_GROUP = "host"
DRIVER_PROCESS = "driver/0"
VERIFIER_PROCESS = "verifiers"
"""All verifier processes, counted together."""
SINK_PROCESS = "sinks"
"""All processes that forward metrics to loggers, counted together."""
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
    """One action of one role on one device group. It starts when all actions in `after` have finished."""

    id: str
    kind: ActionKind
    role: Role
    phase: Phase
    device_group: str
    stream: Stream
    processes: tuple[str, ...]
    """The worker processes that take part; empty for an action of the driver."""
    after: tuple[str, ...] = ()
    every: int = 1
    """Interval in steps: the action runs in steps from `first` on that are a multiple of this."""
    mini_batch: int | None = None
    first: int = 1
    repeat: int = 1
    """Consecutive equal actions that this one represents in a view (build.py), itself included; otherwise 1."""

    def runs_in_step(self, step: int) -> bool:
        """Whether this action runs in RL step `step`, counted from 1. Start and finish actions ask with 0."""
        return step < 1 or (step >= self.first and step % self.every == 0)


@dataclass(frozen=True, slots=True)
class Schedule:
    """All actions of a job on their device groups."""

    placement: Placement
    groups: tuple[DeviceGroup, ...]
    layouts: tuple[RoleLayout, ...]
    start: tuple[Action, ...]
    """Actions that run once, before the first step."""
    step: tuple[Action, ...]
    """Actions of every step."""
    finish: tuple[Action, ...]
    """Actions that run once, after the last step."""
    async_rollouts: AsyncRollouts | None = None
    """The asynchronous generation; None in a synchronous schedule."""

    @property
    def parts(self) -> tuple[tuple[Part, tuple[Action, ...]], ...]:
        """The three parts by name, in order."""
        return (("start", self.start), ("step", self.step), ("finish", self.finish))

    @property
    def async_action(self) -> Action | None:
        """The generating action of asynchronous rollouts; None in a synchronous schedule."""
        return next(
            (action for action in self.step if self.async_rollouts and action.id == self.async_rollouts.action_id), None
        )

    @property
    def processes(self) -> tuple[tuple[str, str], ...]:
        """(process, device) of every worker process."""
        return tuple(pair for layout in self.layouts for pair in layout.processes)

    @property
    def concurrent(self) -> tuple[Beside, ...]:
        """Pairs of actions that may run at the same time, because neither depends on the other.

        Each pair names its part: actions with the same ids may be concurrent at the start and sequential in a step.
        """
        pairs: list[Beside] = []
        for part, actions in self.parts:
            before: dict[str, set[str]] = {}  # one pass suffices: an action is listed after those that it waits for
            for action in actions:
                before[action.id] = set(action.after).union(*(before.get(name, set()) for name in action.after))
            names = [action.id for action in actions if action.processes]
            for index, name in enumerate(names):
                others = (o for o in names[index + 1 :] if name not in before[o] and o not in before[name])
                pairs += [(part, name, other) for other in others]
        return tuple(pairs)

    def list_actions(self, step: int) -> tuple[Action, ...]:
        """The actions of an RL step. An action that waits for a skipped one inherits what that one waits for."""
        skipped = {action.id: action.after for action in self.step if not action.runs_in_step(step)}

        def resolve(names: tuple[str, ...]) -> tuple[str, ...]:
            dependencies = [resolve(skipped[name]) if name in skipped else (name,) for name in names]
            return tuple(dict.fromkeys(chain.from_iterable(dependencies)))

        return tuple(
            replace(action, after=resolve(action.after)) if skipped else action
            for action in self.step
            if action.id not in skipped
        )

    def keep_processes(self, names: Collection[str]) -> "Schedule":
        """The same schedule reduced to some of its processes, such as one of each kind."""

        def keep(actions: tuple[Action, ...]) -> tuple[Action, ...]:
            return tuple(replace(a, processes=tuple(p for p in a.processes if p in names)) for a in actions)

        layouts = tuple(
            replace(layout, devices=tuple(device for process, device in layout.processes if process in names))
            for layout in self.layouts
        )
        start, step, finish = map(keep, (self.start, self.step, self.finish))
        return replace(self, layouts=layouts, start=start, step=step, finish=finish)

    def find_layout(self, worker: str, role: Role = Role.POLICY) -> RoleLayout:
        """The layout of a role's worker. Raises: KeyError."""
        for layout in self.layouts:
            if layout.worker == worker and layout.role == role:
                return layout
        raise KeyError(f"{worker} of {role}")


def locate_calls(
    graph: StepGraph, placement: Placement, groups: tuple[DeviceGroup, ...], layouts: tuple[RoleLayout, ...]
) -> Schedule:
    """Build the schedule of a graph: each call becomes an action with its device group, stream and processes."""
    # Computed once: a large job has thousands of processes, and every call needs their names.
    names = [tuple(process for process, _ in layout.processes) for layout in layouts]

    def actions(calls: tuple[Call, ...]) -> tuple[Action, ...]:
        return tuple(_locate_call(call, layouts, names) for call in calls)

    parts = actions(graph.start), actions(graph.step), actions(graph.finish)
    return Schedule(placement, groups, layouts, *parts, graph.async_rollouts)


def _locate_call(call: Call, layouts: tuple[RoleLayout, ...], names: list[tuple[str, ...]]) -> Action:
    workers, role = _WORKERS[call.kind], call.runs_on or call.role
    indices = [index for index, layout in enumerate(layouts) if layout.worker in workers and layout.role == role]
    processes = (_select_processes(call, layouts[index], names[index]) for index in indices)
    return Action(
        id=call.id,
        kind=call.kind,
        role=call.role,
        phase=call.phase,
        device_group=layouts[indices[-1]].group if indices else HOST_GROUP,
        stream=_STREAMS.get(call.kind, Stream.TRAINING),
        processes=tuple(chain.from_iterable(processes)),
        after=call.after,
        every=call.every,
        mini_batch=call.mini_batch,
        first=call.first,
        repeat=call.repeat,
    )


def _select_processes(call: Call, layout: RoleLayout, names: tuple[str, ...]) -> tuple[str, ...]:
    """The processes of a layout that take part in an action.

    Up to ZeRO-2 the first tensor parallel group holds all weights and sends them by itself. Under ZeRO-3 all ranks
    take part, because they gather the weights.
    """
    is_whole = layout.worker == "policy_trainer" and layout.zero_stage < 3
    return names[: layout.tp] if call.kind in _FROM_ONE_RANK and is_whole and not call.needs_all_ranks else names
