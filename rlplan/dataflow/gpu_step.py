"""The schedule of an RL step on GPUs, with the switches between phases: sleep, wake, offload, reload.

In: which roles there are, a placement, and who sleeps or parks. Out: a Schedule whose layouts stand for all ranks: each
has one process, on the first device of its group, and every other rank is like it.
Left out: bytes, and how an action is done.

A synchronous step is a chain. With max_staleness of 1 and more, generation has a stream of its own: it waits for
nothing inside the step, the rest works on rollouts of a step before, new weights are handed over when both are done.

On shared devices the engine wakes in three actions: weights, then the hand-over, then the KV cache, so that old KV
cache and new weights never lie beside the trainer's states at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from rlplan.dataflow.layouts import DeviceGroup, RoleLayout
from rlplan.dataflow.schedule import HOST_GROUP, Action, Schedule
from rlplan.vocabulary import ActionKind, Phase, Placement, Role, Stream

SHARED, TRAINING, GENERATION, SCORING = "shared", "training", "generation", "scoring"
"""Names of device groups: where training and generation share devices, and where each has its own."""
SCORE_BASE = "score/base"
"""The action in which the policy's trainer scores with its adapters off, as a reference."""


@dataclass(frozen=True, slots=True)
class GpuStep:
    """What a step is made of. num_training, num_generation: GPUs of each; on shared devices both are all.

    num_mini_batches: with more than one the policy's log-probs are taken anew before its first optimizer step.
    scores_base: the policy's trainer scores with its adapters off. sleeps: the engine sleeps while others work.
    parks: roles that wait move to the host; parks_frozen: frozen ones alone do. num_scoring: GPUs of the frozen roles'
    own, 0 where they lie with training. max_staleness: policy versions that a rollout may be behind; from 1 on,
    generation runs beside training.
    """

    placement: Placement
    num_training: int
    num_generation: int
    trained_roles: tuple[Role, ...] = (Role.POLICY,)
    frozen_roles: tuple[Role, ...] = ()
    has_rollouts: bool = True
    num_mini_batches: int = 1
    zero_stage: int = 3
    tp: int = 1
    scores_base: bool = False
    sleeps: bool = False
    parks: bool = False
    num_scoring: int = 0
    max_staleness: int = 0
    parks_frozen: bool = False

    @property
    def shares_devices(self) -> bool:
        """Whether training and generation lie on the same devices."""
        return self.placement is not Placement.DISAGGREGATED

    @property
    def is_async(self) -> bool:
        """Whether generation runs beside training."""
        return self.has_rollouts and self.max_staleness > 0

    @property
    def num_frozen(self) -> int:
        """GPUs that the frozen roles lie on."""
        return self.num_scoring or self.num_training

    @property
    def scoring_group(self) -> str:
        """The device group of the frozen roles."""
        return SCORING if self.num_scoring else SHARED if self.shares_devices else TRAINING


def build_gpu_schedule(step: GpuStep) -> Schedule:
    """The schedule of one step, and of what comes before it."""
    assert not (step.is_async and step.shares_devices), "generation beside training needs devices of its own"
    groups, layouts = _place(step)
    maker = _Maker(step, {(layout.worker, layout.role): layout for layout in layouts})
    start, chain = tuple(maker.chained(maker.start())), tuple(maker.chained(maker.step_calls()))
    if step.is_async:
        chain = _beside(chain)
    finish = tuple(maker.chained(maker.finish()))
    return Schedule(step.placement, groups, layouts, start, chain, finish)


def _beside(chain: tuple[Action, ...]) -> tuple[Action, ...]:
    """The same with generation beside the rest: nothing waits for it but the hand-over, and it for nothing."""
    generate = next(action.id for action in chain if action.kind is ActionKind.GENERATE)
    actions = []
    for action in chain:
        after = tuple(name for name in action.after if name != generate)
        if action.kind is ActionKind.SYNC_WEIGHTS:
            after = tuple(dict.fromkeys((*after, generate)))
        actions.append(replace(action, after=after))
    return tuple(actions)


def _place(step: GpuStep) -> tuple[tuple[DeviceGroup, ...], tuple[RoleLayout, ...]]:
    training = DeviceGroup(SHARED if step.shares_devices else TRAINING, _devices(0, step.num_training))
    groups, generation = [training], training
    if not step.shares_devices and step.has_rollouts:
        generation = DeviceGroup(GENERATION, _devices(step.num_training, step.num_generation))
        groups.append(generation)
    scoring = training
    if step.num_scoring and step.frozen_roles:
        taken = sum(len(group.devices) for group in groups)
        scoring = DeviceGroup(SCORING, _devices(taken, step.num_scoring))
        groups.append(scoring)
    first = training.devices[:1]
    layouts = [
        RoleLayout(role, f"{role.value}_trainer", training.name, first, step.num_training, 1, step.zero_stage)  # type: ignore[arg-type]
        for role in step.trained_roles
    ]
    if step.has_rollouts:
        dp = step.num_generation // step.tp
        layouts.append(RoleLayout(Role.POLICY, "rollout_engine", generation.name, generation.devices[:1], dp, step.tp))
    layouts += [
        RoleLayout(role, "scorer", scoring.name, scoring.devices[:1], step.num_frozen) for role in step.frozen_roles
    ]
    return tuple(groups), tuple(layouts)


@lru_cache(maxsize=64)
def _devices(first: int, count: int) -> tuple[str, ...]:
    return tuple(f"cuda:{index}" for index in range(first, first + count))


@dataclass(frozen=True)
class _Call:
    """An action before it has a place in the chain. workers: (worker, role) pairs that take part."""

    id: str
    kind: ActionKind
    role: Role
    phase: Phase
    workers: tuple[tuple[str, Role], ...] = ()
    mini_batch: int | None = None


class _Maker:
    def __init__(self, step: GpuStep, layouts: dict[tuple[str, Role], RoleLayout]) -> None:
        self.step, self.layouts = step, layouts
        self.engine = (("rollout_engine", Role.POLICY),)

    def chained(self, calls: Iterator[_Call]) -> Iterator[Action]:
        """Actions, each after the one before."""
        before: tuple[str, ...] = ()
        for call in calls:
            mine = [self.layouts[worker] for worker in call.workers]
            yield Action(
                id=call.id,
                kind=call.kind,
                role=call.role,
                phase=call.phase,
                device_group=mine[-1].group if mine else HOST_GROUP,
                stream=Stream.GENERATION if call.kind is ActionKind.GENERATE else Stream.TRAINING,
                processes=tuple(process for layout in mine for process, _ in layout.processes),
                after=before,
                mini_batch=call.mini_batch,
            )
            before = (call.id,)

    def start(self) -> Iterator[_Call]:
        """Processes come up one after the other; roles park as soon as they are there."""
        step = self.step
        if step.has_rollouts:
            yield _Call("start_engine", ActionKind.START_ENGINE, Role.POLICY, Phase.START, self.engine)
            yield from self._sleep()
        for role in step.frozen_roles:
            yield _Call(f"start_scorer/{role}", ActionKind.START_SCORER, role, Phase.START, (("scorer", role),))
            yield from self._park(role)
        for role in (*step.trained_roles[1:], *step.trained_roles[:1]):
            yield _Call(f"start_trainer/{role}", ActionKind.START_TRAINER, role, Phase.START, self._trainer(role))
            if role is not Role.POLICY:
                yield from self._park(role)
        yield from self._hand_over()

    def step_calls(self) -> Iterator[_Call]:
        """Rollouts, scores, training of each role, hand-over."""
        step = self.step
        if step.has_rollouts:
            yield _Call("generate", ActionKind.GENERATE, Role.POLICY, Phase.ROLLOUT, self.engine)
            yield from self._sleep()
        for role in step.frozen_roles:
            yield from self._unpark(role)
            yield _Call(f"score/{role}", ActionKind.SCORE, role, Phase.SCORE, (("scorer", role),))
            yield from self._park(role)
        for role in (*step.trained_roles[1:], *step.trained_roles[:1]):
            yield from self._unpark(role)
            if role is Role.POLICY and step.scores_base:
                yield _Call(SCORE_BASE, ActionKind.SCORE, role, Phase.SCORE, self._trainer(role))
            if role is Role.VALUE or (step.has_rollouts and step.num_mini_batches > 1):
                yield _Call(f"score/{role}", ActionKind.SCORE, role, Phase.SCORE, self._trainer(role))
            yield from self._train(role)
            if role is not Role.POLICY:
                yield from self._park(role)
        yield from self._hand_over()

    def finish(self) -> Iterator[_Call]:
        """The trained policy is written."""
        yield from self._sleep()
        yield from self._unpark(Role.POLICY)
        yield _Call("checkpoint", ActionKind.CHECKPOINT, Role.POLICY, Phase.CHECKPOINT, self._trainer(Role.POLICY))

    def _train(self, role: Role) -> Iterator[_Call]:
        for index in range(self.step.num_mini_batches):
            suffix = ("" if role is Role.POLICY else f"/{role}") + (
                f"/{index}" if self.step.num_mini_batches > 1 else ""
            )
            for kind in (ActionKind.TRAIN_FORWARD_BACKWARD, ActionKind.OPTIMIZER_STEP):
                yield _Call(f"{kind}{suffix}", kind, role, Phase.TRAIN, self._trainer(role), index)

    def _hand_over(self) -> Iterator[_Call]:
        step = self.step
        if step.has_rollouts:
            if step.sleeps:
                yield _Call("wake_weights", ActionKind.WAKE_WEIGHTS, Role.POLICY, Phase.SWITCH, self.engine)
            both = (*self._trainer(Role.POLICY), *self.engine)
            yield _Call("sync_weights", ActionKind.SYNC_WEIGHTS, Role.POLICY, Phase.SYNC, both)
            yield from self._park(Role.POLICY)
            if step.sleeps:
                yield _Call("wake_kv_cache", ActionKind.WAKE_KV_CACHE, Role.POLICY, Phase.SWITCH, self.engine)

    def _sleep(self) -> Iterator[_Call]:
        if self.step.sleeps:
            yield _Call("sleep_engine", ActionKind.SLEEP_ENGINE, Role.POLICY, Phase.SWITCH, self.engine)

    def _park(self, role: Role) -> Iterator[_Call]:
        if self._waits_on_host(role):
            yield _Call(f"offload_role/{role}", ActionKind.OFFLOAD_ROLE, role, Phase.SWITCH, self._worker(role))

    def _unpark(self, role: Role) -> Iterator[_Call]:
        if self._waits_on_host(role):
            yield _Call(f"reload_role/{role}", ActionKind.RELOAD_ROLE, role, Phase.SWITCH, self._worker(role))

    def _waits_on_host(self, role: Role) -> bool:
        return self.step.parks or (self.step.parks_frozen and role in self.step.frozen_roles)

    def _trainer(self, role: Role) -> tuple[tuple[str, Role], ...]:
        return ((f"{role.value}_trainer", role),)

    def _worker(self, role: Role) -> tuple[tuple[str, Role], ...]:
        return self._trainer(role) if role in self.step.trained_roles else (("scorer", role),)
