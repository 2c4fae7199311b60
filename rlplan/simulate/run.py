"""Simulation of a schedule, step after step.

In: a SimulationSetting, a seed. Out: a SimulationResult, which is the same for the same seed.
Left out: failures, start and finish of a run, training time that depends on the sampled batch.

    synchronous   every action waits for those in its `after`, and for its devices
    streaming     prompts flow through a queue, and training takes its part as soon as it is there

Very many rollouts are simulated by a sample: some engines with their share of the prompts represent all of them.
Engines are alike and take prompts in order, so an engine in the sample has the same number and lengths of rollouts as
in a full simulation. One thing differs: the slowest of fewer engines is faster, by 0.6 to 1.0 % of a step with half of
the engines and 1.6 % with a quarter (docs/lab-notes.md, A part of the engines). Costs of other actions are not scaled.
"""

import gc
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

from simpy import AllOf, Environment, Event, Resource

from rlplan.dataflow.schedule import Action
from rlplan.simulate.engine import Group
from rlplan.simulate.engine_pool import EnginePool
from rlplan.simulate.record import Recorder
from rlplan.simulate.result import GroupUse, SimulationResult
from rlplan.simulate.setting import Asynchrony, SimulationSetting, StepRollouts
from rlplan.simulate.staleness import StalenessCounts, must_wait, num_allowed
from rlplan.vocabulary import ActionKind, Phase

Play = Generator[Event, Any, None]
STREAM = 0
"""Batch number of all groups of a stream; other groups have the number of their step."""
QUEUE = -1
"""Subject of change events for the queue of trainable groups, as opposed to a batch number."""


def simulate(setting: SimulationSetting, seed: int = 0) -> SimulationResult:
    """Simulate a run. Raises: SpecError for an inconsistent setting.

    Garbage collection is off, because it would take half the time and reference counting frees the memory anyway.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        return _Run(setting, seed).play()
    finally:
        if was_on:
            gc.enable()


class _Run:
    def __init__(self, setting: SimulationSetting, seed: int) -> None:
        self.setting, self.seed, self.env = setting, seed, Environment()
        self.recorder = Recorder(setting)
        self.devices = {group.name: Resource(self.env) for group in setting.schedule.groups}
        self.staleness = StalenessCounts()
        self.step_ends: list[float] = []
        self.arrived = 0
        """Version on the engines; `version` is the trainers' version."""
        self.version = self.num_trained = self.num_begun = self.num_actions = 0
        self.is_syncing = False
        self.queue: deque[Group] = deque()
        self.open: dict[int, int] = {}
        self.unfinished: dict[int, int] = {}
        self.changed: list[tuple[int, Event]] = []
        self.engine_pool: EnginePool | None = None
        if setting.generates and setting.rollouts and setting.speed:
            self.engine_pool = EnginePool(self.env, setting, setting.rollouts, setting.speed, seed, self._queue_group)

    def play(self) -> SimulationResult:
        asynchrony = self.setting.asynchrony
        steps = self._synchronous() if asynchrony is None else self._streaming(asynchrony)
        self.env.run(until=self.env.process(steps))
        return self._result()

    # ---------------------------------------------------------------------------------------------- one action

    def _act(self, action: Action, step: int, share: float = 1.0) -> Play:
        """Run an action on its devices as soon as they are free."""
        names = self.setting.find_groups(action)
        requests = [self.devices[name].request() for name in names]
        for request in requests:  # all actions use the same order, so there is no deadlock
            yield request
        start = self.env.now
        yield self.env.timeout(self.setting.seconds(action) * share)
        self._record(action, step, start)
        for name, request in zip(names, requests, strict=True):
            self.devices[name].release(request)

    def _record(self, action: Action, step: int, start: float) -> None:
        self.num_actions += 1
        self.recorder.add(action, step, start, self.env.now)

    # --------------------------------------------------------------------------------------------- synchronous

    def _synchronous(self) -> Play:
        for step in range(1, self.setting.num_steps + 1):
            ends: dict[str, Event] = {}
            for action in self.setting.schedule.step:
                if action.runs_in_step(step):
                    before = [ends[name] for name in action.after if name in ends]
                    ends[action.id] = self.env.process(self._run_in_order(action, step, before))
            yield AllOf(self.env, list(ends.values()))
            self.version = self.arrived = self.version + 1
            if self.engine_pool:
                self.engine_pool.resume(self.version)
            self.step_ends.append(self.env.now)

    def _run_in_order(self, action: Action, step: int, before: Sequence[Event]) -> Play:
        yield AllOf(self.env, before)
        if self.engine_pool and action is self.setting.generates:
            yield from self._generate(self.engine_pool, action, step)
            self._train(self._take(len(self.queue)))
        else:
            yield from self._act(action, step)

    def _generate(self, engine_pool: EnginePool, action: Action, step: int) -> Play:
        """Generate a full batch. Devices are free when the last rollout ends; rewards may arrive later."""
        name = self.setting.find_groups(action)[0]
        with self.devices[name].request() as request:
            yield request
            start = self.env.now
            self._begin(engine_pool, step, engine_pool.work.num_prompts)
            yield engine_pool.wait_until_idle()
            self.recorder.phase_s[Phase.ROLLOUT] += self.env.now - start
            if step <= self.setting.num_traced_steps:
                self.recorder.sample(action, step, self.env.now)
        while self.open[step]:
            yield self._change(step)

    # ---------------------------------------------------------------------------------------------- streaming

    def _streaming(self, asynchrony: Asynchrony) -> Play:
        assert self.setting.rollouts is not None
        per_take = self.setting.rollouts.num_prompts // asynchrony.num_takes
        self._feed()
        for step in range(1, self.setting.num_steps + 1):
            for take in range(asynchrony.num_takes):
                while len(self.queue) < per_take or (asynchrony.is_bound and self._must_wait(asynchrony, per_take)):
                    yield self._change(QUEUE)
                if asynchrony.is_bound:
                    self.queue = deque(sorted(self.queue, key=lambda group: group.number))
                self._train(self._take(per_take))
                for action, share in self._part(step, take, asynchrony.num_takes):
                    yield from self._act(action, step, share)
            yield from self._sync_weights(step, asynchrony)
            self._feed()

    def _must_wait(self, asynchrony: Asynchrony, per_take: int) -> bool:
        assert self.setting.rollouts is not None
        remaining = sorted(self.queue, key=lambda group: group.number)[per_take:]
        begun = [*self.unfinished.values(), *(group.rollouts[0].version for group in remaining)]
        return must_wait(begun, self.version, asynchrony.max_staleness, self.setting.rollouts.num_prompts)

    def _part(self, step: int, take: int, num_takes: int) -> list[tuple[Action, float]]:
        """Actions of one take: all of its mini-batches, and its share of everything else."""
        num_mini = self.setting.num_mini_batches
        part = []
        for action in self.setting.rest:
            if action.runs_in_step(step):
                if num_takes == 1 or action.mini_batch is None:
                    part.append((action, 1.0 / num_takes))
                elif action.mini_batch * num_takes // num_mini == take:
                    part.append((action, 1.0))
        return part

    def _feed(self) -> None:
        """Start as many prompts as the limits allow."""
        asynchrony, engine_pool = self.setting.asynchrony, self.engine_pool
        if engine_pool is None or asynchrony is None or self.is_syncing:
            return
        size = engine_pool.work.num_prompts
        allowed = min(num_allowed(self.arrived, asynchrony.max_staleness, size), self.setting.num_steps * size)
        count = allowed - self.num_begun
        if asynchrony.max_groups_at_once is not None:
            count = min(count, asynchrony.max_groups_at_once - self.open.get(STREAM, 0))
        if count > 0:
            self._begin(engine_pool, STREAM, count)

    # ------------------------------------------------------------------------------------------------- shared

    def _begin(self, engine_pool: EnginePool, batch: int, count: int) -> None:
        self.num_begun += count
        self.open[batch] = self.open.get(batch, 0) + count
        groups = engine_pool.make(batch, count)
        self.unfinished |= {group.number: self.arrived for group in groups}
        engine_pool.begin(groups)

    def _queue_group(self, group: Group) -> None:
        """Queue a complete group for training; in a stream, further prompts may start."""
        self.queue.append(group)
        del self.unfinished[group.number]
        self.open[group.batch] -= 1
        if group.batch == STREAM:
            self._feed()
            self._notify(QUEUE)
        elif not self.open[group.batch]:
            self._notify(group.batch)

    def _take(self, count: int) -> list[Group]:
        return [self.queue.popleft() for _ in range(count)]

    def _train(self, groups: Sequence[Group]) -> None:
        self.num_trained += self.staleness.add(groups, self.version)
        # trained rollouts are not needed again, and long runs would accumulate them
        for group in groups:
            group.rollouts.clear()

    def _sync_weights(self, step: int, asynchrony: Asynchrony) -> Play:
        """Sync weights to all engines."""
        yield from self._stop_and_load(step, asynchrony)
        self.version += 1
        self.step_ends.append(self.env.now)

    @property
    def _syncs(self) -> list[Action]:
        return [action for action in self.setting.schedule.step if action.kind is ActionKind.SYNC_WEIGHTS]

    def _stop_and_load(self, step: int, asynchrony: Asynchrony) -> Play:
        """Pause the engines, at once or after their last rollout, and load new weights."""
        assert self.engine_pool is not None
        self.is_syncing = True
        if not asynchrony.interrupts:
            yield self.engine_pool.wait_until_idle()
        yield self.engine_pool.pause()
        for action in self._syncs:
            start = self.env.now
            yield self.env.timeout(self.setting.seconds(action))
            self._record(action, step, start)
        self.arrived += 1
        self.engine_pool.resume(self.arrived)
        self.is_syncing = False

    def _change(self, subject: int) -> Event:
        """Event of the next change to a batch (by number) or to the QUEUE."""
        event = self.env.event()
        self.changed.append((subject, event))
        return event

    def _notify(self, subject: int) -> None:
        waiting = [event for changed_subject, event in self.changed if changed_subject == subject]
        self.changed = [pair for pair in self.changed if pair[0] != subject]
        for event in waiting:
            event.succeed()

    def _result(self) -> SimulationResult:
        engines = self.engine_pool.engines if self.engine_pool else []
        if self.engine_pool and self.setting.generates:
            mean_s = self.recorder.add_engines(self.setting.generates, engines, self.step_ends)
            if self.setting.asynchrony:
                self.recorder.phase_s[Phase.ROLLOUT] += mean_s
        seconds = self.env.now
        busy = self.recorder.busy_s
        return SimulationResult(
            seed=self.seed,
            seconds=seconds,
            step_s=tuple(end - start for start, end in zip([0.0, *self.step_ends], self.step_ends, strict=False)),
            phase_s=dict(self.recorder.phase_s),
            groups=tuple(
                GroupUse(group.name, len(group.devices), busy[group.name], max(0.0, seconds - busy[group.name]))
                for group in self.setting.schedule.groups
            ),
            token_staleness=dict(sorted(self.staleness.tokens.items())),
            rollout_staleness=dict(sorted(self.staleness.rollouts.items())),
            num_tokens=sum(engine.num_tokens for engine in engines),
            num_trained_tokens=self.num_trained,
            num_prefill_tokens=sum(engine.num_prefill_tokens for engine in engines),
            num_preemptions=sum(engine.num_preemptions for engine in engines),
            kv_use=max((engine.max_blocks_used / engine.limits.num_blocks for engine in engines), default=0.0),
            num_events=sum(engine.num_segments for engine in engines)
            + self.num_actions
            + (self.engine_pool.num_rewards if self.engine_pool else 0),
            trace=self.recorder.trace,
        )


MOST_ROLLOUTS = 1 << 16
"""Most rollouts of a step that is simulated in full; each takes some 25 microseconds."""
LEAST_ENGINES = 16
"""Fewest engines of a sample."""


def simulate_sampled(setting: SimulationSetting, seed: int = 0, most: int = MOST_ROLLOUTS) -> SimulationResult:
    """Simulate all engines, or a sample where a step has over `most` rollouts. Raises: SpecError as `simulate`."""
    work = setting.rollouts
    part = work and choose_sample(work, most)
    if part is None or work is None or part is work or _counts_more(setting):
        return simulate(setting, seed)
    scale = work.num_prompts / part.num_prompts
    result = simulate(replace(setting, rollouts=part), seed)
    counts = ("num_tokens", "num_trained_tokens", "num_prefill_tokens", "num_preemptions")
    return replace(
        result,
        **{name: round(scale * getattr(result, name)) for name in counts},
        token_staleness={age: round(scale * count) for age, count in result.token_staleness.items()},
        rollout_staleness={age: round(scale * count) for age, count in result.rollout_staleness.items()},
        simulated_share=1 / scale,
    )


def choose_sample(work: StepRollouts, most: int) -> StepRollouts:
    """Choose the sample with about `most` rollouts. Small steps, few engines or few prompts keep everything.

    Counts: e of E engines with p = P e / E of P prompts, p >= 1. e is between max(16, E most / (P samples)) and twice
    that, chosen so that p is nearest to a whole number.
    """
    num_engines = work.num_engines
    share = max(most / (work.num_prompts * work.num_samples), 1 / work.num_prompts)
    least = max(LEAST_ENGINES, round(num_engines * share))
    if least >= num_engines or work.num_prompts * work.num_samples <= most:
        return work

    def measure_rounding(engines: int) -> float:
        exact = work.num_prompts * engines / num_engines
        return abs(round(exact) / exact - 1)

    engines = min(range(least, min(2 * least, num_engines) + 1), key=measure_rounding)
    return replace(work, num_engines=engines, num_prompts=round(work.num_prompts * engines / num_engines))


def _counts_more(setting: SimulationSetting) -> bool:
    """Whether the setting has other limits in rollouts, which a sample would have to scale."""
    asynchrony = setting.asynchrony
    return asynchrony is not None and (asynchrony.max_groups_at_once is not None or asynchrony.num_takes > 1)
