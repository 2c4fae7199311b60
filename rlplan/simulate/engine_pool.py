"""EnginePool: the engines of a simulated run, with the rewards of their rollouts.

In: groups to start. Out: events at the end of all generation and for each rewarded group; pause and resume.
Left out: when groups may start (run.py, staleness.py).
"""

import heapq
import math
import random
from collections.abc import Callable, Sequence
from itertools import islice

from simpy import AllOf, Environment, Event

from rlplan.simulate.engine import Engine, Group, RememberedSpeed, Rollout, Speed, Timeout
from rlplan.simulate.setting import SimulationSetting, StepRollouts
from rlplan.spec.parts.lengths import Lengths

TABLE = 1 << 14
"""Intervals of the quantile table; a length between two entries is interpolated."""

TAIL = 64
"""Intervals at either end of the table where quantiles bend too much to interpolate; there they are computed
exactly."""


class LengthSampler:
    """Draws lengths by inverting the distribution; the same seed draws the same lengths.

    >>> from rlplan.spec.parts.lengths import ConstantLengths, UniformLengths
    >>> LengthSampler(Lengths(ConstantLengths(value=7), 100), seed=1).draw(3)
    [7, 7, 7]
    >>> sampler = LengthSampler(Lengths(UniformLengths(kind="uniform", low=100, high=300), 250), seed=1)
    >>> drawn = sampler.draw(10_000)
    >>> min(drawn) >= 100, max(drawn), 193 < sum(drawn) / 10_000 < 195
    (True, 250, True)
    """

    def __init__(self, lengths: Lengths, seed: int) -> None:
        self._lengths, self._random = lengths, random.Random(seed)
        self._table: list[float] = []

    def draw(self, count: int) -> list[int]:
        """Draw the next `count` lengths in tokens."""
        if not self._table:
            self._table = [self._lengths.quantile(index / TABLE) for index in range(TABLE + 1)]
        table, draw = self._table, self._random.random
        drawn = []
        for _ in range(count):
            place = draw() * TABLE
            index = int(place)
            if TAIL <= index < TABLE - TAIL:
                low = table[index]
                length = low + (place - index) * (table[index + 1] - low)
            else:
                length = self._lengths.quantile(place / TABLE)
            drawn.append(int(length + 0.5) or 1)
        return drawn


def count_most_unfinished(setting: SimulationSetting, work: StepRollouts) -> int:
    """Most units of dispatch that are unfinished at once; no more engines are used, as free ones are chosen first."""
    staleness = setting.asynchrony.max_staleness if setting.asynchrony else 0.0
    return work.num_prompts * (work.num_samples if work.splits_groups else 1) * (1 + math.ceil(staleness))


class EnginePool:
    """All engines that receive prompts. on_rewarded: called with each group whose rollouts all have rewards."""

    def __init__(
        self,
        env: Environment,
        setting: SimulationSetting,
        work: StepRollouts,
        speed: Speed,
        seed: int,
        on_rewarded: Callable[[Group], None],
    ) -> None:
        self.env, self.work, self.on_rewarded = env, work, on_rewarded
        self.sampler = LengthSampler(work.lengths, seed)
        remembered = RememberedSpeed(speed)
        num_used = min(work.num_engines, count_most_unfinished(setting, work))
        keeps = setting.asynchrony is not None and setting.asynchrony.keeps_versions
        self.engines = [
            Engine(env, remembered, work.limits, self._finish_rollout, keeps_versions=keeps) for _ in range(num_used)
        ]
        self.latency_s = setting.reward_latency_s
        self.num_groups = self.num_running = self.num_rewards = 0
        self._at_reward = [lambda event: self._reward_group(event.value)]
        self._when_idle: Event | None = None

    def make(self, batch: int, count: int) -> list[Group]:
        """Make new groups with sampled lengths."""
        groups = []
        for _ in range(count):
            groups.append(Group(self.num_groups, self.work.prompt_len, self.sampler.draw(self.work.num_samples)))
            groups[-1].batch = batch
            self.num_groups += 1
        return groups

    def begin(self, groups: Sequence[Group]) -> None:
        """Start groups together. Each group, or each rollout, takes a place on the engine with the fewest rollouts.

        Single rollouts fill the places of an engine in order, so that neighbours of one prompt share its blocks.
        """
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        sizes = [1] * len(rollouts) if self.work.splits_groups else [len(group.rollouts) for group in groups]
        # a heap instead of a minimum per group: a step may start 100,000 groups
        load = [(engine.num_unfinished, index) for index, engine in enumerate(self.engines)]
        heapq.heapify(load)
        places = []
        for size in sizes:
            busy, index = load[0]
            places.append((index, size))
            heapq.heapreplace(load, (busy + size, index))
        if self.work.splits_groups:
            places.sort()
        assigned: dict[int, list[Rollout]] = {}
        remaining = iter(rollouts)
        for index, size in places:
            assigned.setdefault(index, []).extend(islice(remaining, size))
        self.num_running += len(rollouts)
        for index, started in assigned.items():
            self.engines[index].submit(started)

    def wait_until_idle(self) -> Event:
        """Event that occurs when no rollout is running or waiting."""
        self._when_idle = self.env.event()
        if not self.num_running:
            self._when_idle.succeed()
        return self._when_idle

    def pause(self) -> Event:
        """Stop every engine after its step in progress."""
        return AllOf(self.env, [engine.pause() for engine in self.engines])

    def resume(self, version: int) -> None:
        """Continue on every engine with new weights."""
        for engine in self.engines:
            engine.resume(version)

    def _finish_rollout(self, rollout: Rollout) -> None:
        self.num_running -= 1
        if self.latency_s:
            Timeout(self.env, self.latency_s, self._at_reward, rollout.group)
        else:
            self._reward_group(rollout.group)
        if not self.num_running and self._when_idle is not None and not self._when_idle.triggered:
            self._when_idle.succeed()

    def _reward_group(self, group: Group) -> None:
        self.num_rewards += 1
        group.left -= 1
        if not group.left:
            self.on_rewarded(group)
