"""Best first: candidates that fit, the fastest first, exactly, without making all of them.

In: a GpuSpace and what rates its candidates. Out: Rated candidates in order. Left out: how bytes (roles.py) and
seconds (times.py) are worked out, and what is made of the best (search.py).

Best first: a heap holds frames, pairs of a trainer and an engine, and rated candidates, each by a lower bound of its
seconds; what is taken from it is looked at more closely and put back, and a rated candidate that comes up is the best
of all that have not come up. This is exact, for no bound is above the seconds of anything that it stands for:
- a frame stands for its pairs: its fastest engine (rollouts with all the KV cache that is ever useful) with the FLOPs
  of its trainer at their best rate, then with its fastest trainer, whether it fits or not;
- a pair stands for itself and for those behind it in both streams (streams.py). Seconds are a sum (or, where
  generation runs beside training, the larger) of the trainer's, the engine's and the hand-over's, and each is at its
  least: rollouts take no longer with more KV cache (a property test), waking it no shorter;
- a closer look at a pair takes the KV cache that the trainer's states leave, which its passes can only lessen.
A pair that does not fit with the trainer's states alone does not fit, for bytes add up.
Candidates whose seconds are the same come in a fixed total order (`simplicity`), so that the answer does not depend on
the order of anything.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from rlplan.dataflow.choice import Arrangement, EngineChoice, TrainerChoice, Way
from rlplan.planner.gpu.candidates import GpuSpace
from rlplan.planner.gpu.rated import Key, Rated, Rater, rounded, simplicity
from rlplan.planner.gpu.streams import Engines, Trainers
from rlplan.planner.gpu.tables import fit

HAIR = 1 - 1e-12
"""Bounds are sums in another order than the seconds that they bound: they are lowered by more than that can make."""


class FrameFront:
    """The pairs of one frame, by lower bounds."""

    def __init__(self, rater: Rater, space: GpuSpace, frame: Arrangement, rank: int) -> None:
        self.rater, self.space, self.frame, self.rank = rater, space, frame, rank
        self.engines = Engines(rater, space, frame)
        self._trainers: Trainers | None = None
        self._close: dict[object, tuple[int, float] | None] = {}

    @property
    def trainers(self) -> Trainers:
        """The trainers, made when they are first asked for."""
        if self._trainers is None:
            self._trainers = Trainers(self.rater, self.space, self.frame, self.engines, self.rank)
        return self._trainers

    @property
    def first_bound(self) -> Key:
        """Of all candidates of the frame, before any trainer is looked at: passes and hand-over at their least."""
        times, chains = self.rater.times, self.space.chains(self.frame)
        by_stage = {chain.choices[0].zero_stage == 3: chain.choices[0] for chain in chains}
        syncs = (times.least_sync_seconds(self.frame, one, self.engines.transports) for one in by_stage.values())
        return self._key(times.floor_seconds(self.frame) + min(syncs), self.engines.entries[0].seconds)

    @property
    def bound(self) -> Key:
        """Of all candidates of the frame."""
        return self._key(self.trainers.bound, self.engines.entries[0].seconds)

    def pair(self, i: int, j: int) -> tuple[Key, TrainerChoice, EngineChoice] | None:
        """The pair of the i-th trainer and the j-th engine with its bound; None beyond the end."""
        trainer = self.trainers.get(i)
        if trainer is None or j >= len(self.engines.entries):
            return None
        engine = self.engines.entries[j]
        return self._key(trainer.seconds, engine.seconds), trainer.choice, engine.choice

    def closer(self, trainer: TrainerChoice, engine: EngineChoice, transport: Way) -> Key | None:
        """The bound with the KV cache that the trainer's states leave; None where nothing fits beside them."""
        holding = trainer.zero_stage, trainer.offloads_optimizer, trainer.offloads_parameters
        axes = trainer.ulysses, trainer.tp, trainer.pp, trainer.cp, trainer.ep
        key = holding, axes, engine
        if key not in self._close:
            self._close[key] = self._beside_states(trainer, engine)
        found = self._close[key]
        if found is None:
            return None
        times, frame = self.rater.times, self.frame
        sync = times.sync(frame, trainer, engine, transport).seconds
        own = times.trainer_seconds(frame, trainer)
        if frame.is_async:
            return rounded((max(own, found[1]) + sync) * HAIR, (own + found[1] + sync) * HAIR)
        return self._key(own + sync, found[1])

    def _beside_states(self, trainer: TrainerChoice, engine: EngineChoice) -> tuple[int, float] | None:
        """(bytes of KV cache at most, seconds of the engine with it) beside a trainer's states alone."""
        roles, parts = self.rater.roles, self.rater.roles.parts(self.frame)
        one, other = roles.holding_vector(self.frame, trainer), roles.engine_vector(self.frame, engine)
        need = roles.without_host_memory(fit(one, other, parts.room))
        slack = need.slack_expected if self.rank else need.slack_high
        if slack < 0 or need.slack_host < 0:
            return None
        room = need.room_expected if self.rank else need.room_high
        most, rank = self.rater.kv_cache(self.frame, engine, room, room)
        if rank > self.rank:
            return None
        return most, self.rater.times.engine_seconds(self.frame, engine, most)

    def _key(self, trainer: float, engine: float) -> Key:
        seconds = max(trainer, engine) if self.frame.is_async else trainer + engine
        return rounded(seconds * HAIR, (trainer + engine) * HAIR)


@dataclass(frozen=True, slots=True)
class Pair:
    """The i-th trainer and the j-th engine of a frame."""

    front: FrameFront
    i: int
    j: int
    trainer: TrainerChoice
    engine: EngineChoice


@dataclass(frozen=True, slots=True)
class Close:
    """A pair that has been looked at more closely, with a way of handing over."""

    pair: Pair
    transport: Way


class BestFirst:
    """Candidates of some frames that fit with their rank, the best first. num_rated: that have been rated.

    limit: seconds of a step beyond which nothing is looked at.
    """

    def __init__(self, fronts: Sequence[FrameFront]) -> None:
        self.fronts, self.num_rated, self.limit = fronts, 0, float("inf")
        self._heap: list[tuple[Key, int, tuple[object, ...], object]] = []
        self._count = count()

    def __iter__(self) -> Iterator[Rated]:
        for front in self.fronts:
            self._push(front.first_bound, front)
        while self._heap and self._heap[0][0][0] <= self.limit:
            key, _, _, item = heappop(self._heap)
            if isinstance(item, Rated):
                yield item
            elif isinstance(item, FrameFront):
                self._open_frame(item, key)
            elif isinstance(item, Pair):
                self._look_closer(item)
            elif isinstance(item, Close):
                self._rate(item)

    def _open_frame(self, front: FrameFront, key: Key) -> None:
        """Its first pair, or itself with a bound that is closer."""
        if front.bound > key:
            self._push(front.bound, front)
        else:
            self._open(front, 0, 0)

    def _open(self, front: FrameFront, i: int, j: int) -> None:
        found = front.pair(i, j)
        if found is not None:
            key, trainer, engine = found
            self._push(key, Pair(front, i, j, trainer, engine))

    def _look_closer(self, pair: Pair) -> None:
        """Those behind it come up, and itself with a closer bound for each way of handing over."""
        self._open(pair.front, pair.i, pair.j + 1)
        if pair.j == 0:
            self._open(pair.front, pair.i + 1, 0)
        front = pair.front
        for transport in front.space.transports(front.frame, pair.engine):
            key = front.closer(pair.trainer, pair.engine, transport)
            if key is not None:
                self._push(key, Close(pair, transport))

    def _rate(self, close: Close) -> None:
        pair, front = close.pair, close.pair.front
        candidate = front.space.choice(front.frame, pair.trainer, pair.engine, close.transport)
        if not front.rater.can_run(candidate):
            return
        rated = front.rater.rate(candidate)
        self.num_rated += 1
        if rated.rank <= front.rank:
            heappush(self._heap, (rated.key, 1, simplicity(candidate), rated))

    def _push(self, key: Key, item: object) -> None:
        heappush(self._heap, (key, 0, (next(self._count),), item))
