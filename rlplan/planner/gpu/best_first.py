"""Best first: candidates that fit, the fastest first, exactly, without making all of them.

In: a GpuSpace and a CandidateScorer. Out: scored candidates in order. Left out: how bytes (roles.py) and
seconds (times.py) are computed, and what is made of the best (search.py).

Best first: a heap holds arrangements, pairs of a trainer and an engine, and scored candidates, each by a lower bound of
its seconds; what is popped is refined and pushed back, and a scored candidate that is popped is the best of all that
remain. This is exact, for no bound is above the seconds of anything that it stands for:
- an arrangement stands for its pairs: its fastest engine (rollouts with all the KV cache that it has alone) with the
  FLOPs of its trainer at their best rate, then with its fastest trainer, whether it fits or not;
- a pair stands for itself and for those behind it in both streams (streams.py). Seconds are a sum (or, where
  generation runs beside training, the larger) of the trainer's, the engine's and the weight sync's, and each is at its
  least: rollouts take no longer with more KV cache (a property test), waking it no shorter;
- the refined bound of a pair takes the KV cache that the trainer's states leave, which its passes can only lessen;
- where generation runs ahead a step is no shorter with more beside it (a property test), so that the first pair of a
  trainer, whose engine makes the shortest step beside it, stands for all slower trainers too.
A pair that does not fit with the trainer's states alone does not fit, for bytes add up.
Candidates whose seconds are the same come in a fixed total order (`simplicity`), so that the answer does not depend on
the order of anything.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import count

from rlplan.dataflow.choice import Arrangement, Choice, EngineChoice, TrainerChoice, WeightSyncMode
from rlplan.planner import rules
from rlplan.planner.gpu.candidates import GpuSpace
from rlplan.planner.gpu.scored_candidates import (
    CandidateScorer,
    EngineEntry,
    Key,
    ScoredCandidate,
    rank_simplicity,
    round_key,
)
from rlplan.planner.gpu.streams import Engines, EnginesInOrder, Trainers, may_fit_without_engine
from rlplan.planner.memo import memoize

BOUND_FACTOR = 1 - 1e-12
"""Bounds are sums in another order than the seconds that they bound: lowered by this factor they stay below in spite of
rounding."""
NEVER: Key = (float("inf"), float("inf"))
"""The bound of what does not fit."""


class PairBounds:
    """The pairs of one arrangement, by lower bounds."""

    def __init__(self, scorer: CandidateScorer, space: GpuSpace, arrangement: Arrangement, rank: int) -> None:
        self.scorer, self.space, self.arrangement, self.rank = scorer, space, arrangement, rank
        self._trainers: Trainers | None = None
        self._rows: list[EnginesInOrder] = []
        """Engines whose rollouts run ahead: beside the fastest trainer, whether it fits or not, and beside each."""
        self.known = scorer.memo.create_table()

    @cached_property
    def engines(self) -> Engines:
        """The engines, made when they are first asked for."""
        return Engines(self.scorer, self.space, self.arrangement, self.rank)

    @property
    def trainers(self) -> Trainers:
        """The trainers, made when they are first asked for."""
        if self._trainers is None:
            self._trainers = Trainers(self.scorer, self.space, self.arrangement, self.engines, self.rank)
        return self._trainers

    @cached_property
    def may_fit(self) -> bool:
        """Whether some trainer fits where no engine is."""
        return may_fit_without_engine(self.scorer, self.space, self.arrangement, self.rank)

    @property
    def floor(self) -> Key:
        """Lower bound of all candidates of the arrangement, of which no engine is looked at: its passes alone."""
        return self._build_key(self.scorer.times.bound_seconds(self.arrangement), 0.0)

    @cached_property
    def first_bound(self) -> Key:
        """Lower bound of all candidates of the arrangement, before any trainer is made: passes and weight sync at their
        least; infinite where no engine fits.
        """
        if not self.engines.entries:
            return NEVER
        sync_s = min(self._least_syncs)
        floor_s = self.scorer.times.bound_seconds(self.arrangement)
        return self._build_key(floor_s + sync_s, self.engines.entries[0].seconds)

    @property
    def bound(self) -> Key:
        """Lower bound of all candidates of the arrangement."""
        least = self.trainers.bound
        engine = self._get_engine(0, 0, least) if least < float("inf") else None
        return NEVER if engine is None else self._build_key(least, engine.seconds, self._twice_s)

    @cached_property
    def _twice_s(self) -> float:
        """Seconds at most that a trainer's bound and an engine's both have: the fastest sync, which is part of a step
        with rollouts ahead.
        """
        return max(self._least_syncs) if self.scorer.roles.count_versions_ahead(self.arrangement) else 0.0

    @property
    def _least_syncs(self) -> Iterator[float]:
        """Seconds of the fastest sync to any engine, of sharded weights and of whole ones."""
        firsts = [sweep.choices[0] for sweep in self.space.sweeps(self.arrangement)]
        return map(self.engines.least_sync_s, {choice.zero_stage == 3: choice for choice in firsts}.values())

    def _get_engine(self, row: int, index: int, others_s: float) -> EngineEntry | None:
        """The engines by seconds; where their rollouts run ahead, by the shortest step beside so many seconds of
        everything else, which are more in each row: no step is shorter than in the row before.
        """
        arrangement, times = self.arrangement, self.scorer.times
        if not self.scorer.roles.count_versions_ahead(arrangement):
            entries = self.engines.entries
            return entries[index] if index < len(entries) else None
        if row == len(self._rows):
            known = self._rows[-1].entries if self._rows else self.engines.entries
            self._rows.append(
                EnginesInOrder(
                    known, lambda entry: times.bound_async_step(arrangement, entry.choice, entry.kv_cache, others_s)
                )
            )
        return self._rows[row].get(index)

    def get_pair(self, i: int, j: int) -> tuple[Key, TrainerChoice, EngineChoice] | None:
        """The pair of the i-th trainer and the j-th engine with its bound; None beyond the end."""
        trainer = self.trainers.get(i)
        engine = self._get_engine(i + 1, j, trainer.seconds) if trainer is not None else None
        if trainer is None or engine is None:
            return None
        return self._build_key(trainer.seconds, engine.seconds, self._twice_s), trainer.choice, engine.choice

    def refine_bound(self, trainer: TrainerChoice, engine: EngineChoice, transport: WeightSyncMode) -> Key | None:
        """The bound with the KV cache that the trainer's states leave; None where nothing fits beside them."""
        cache = self._size_cache_beside_states(trainer.without_passes, engine, keeps_sent=transport == "delta")
        if cache is None:
            return None
        times, arrangement = self.scorer.times, self.arrangement
        sync = times.syncs.predict_cost(arrangement, trainer, engine, transport).seconds
        own = times.predict_trainer_seconds(arrangement, trainer)
        if self.scorer.roles.count_versions_ahead(arrangement):
            step = max(own + sync, times.bound_async_step(arrangement, engine, cache[0], own, sync))
            return round_key(step * BOUND_FACTOR, (own + cache[1] + sync) * BOUND_FACTOR)
        if arrangement.is_async:
            return round_key((max(own, cache[1]) + sync) * BOUND_FACTOR, (own + cache[1] + sync) * BOUND_FACTOR)
        return self._build_key(own + sync, cache[1])

    @memoize
    def _size_cache_beside_states(
        self, trainer: TrainerChoice, engine: EngineChoice, *, keeps_sent: bool
    ) -> tuple[int, float] | None:
        """(bytes of KV cache at most, seconds of the engine with it) beside a trainer's states alone.

        keeps_sent: beside copies of what was sent last too, where changes alone are sent.
        """
        scorer, arrangement = self.scorer, self.arrangement
        states = scorer.roles.sum_state_bytes(arrangement, trainer, keeps_sent=keeps_sent)
        most = scorer.find_max_kv_cache(arrangement, engine, states, self.rank, keeps_sent=keeps_sent)
        return None if most is None else (most, scorer.times.predict_engine_seconds(arrangement, engine, most))

    def _build_key(self, trainer: float, engine: float, twice: float = 0.0) -> Key:
        """twice: seconds that both have."""
        seconds = max(trainer, engine) if self.arrangement.is_async else trainer + engine
        return round_key(seconds * BOUND_FACTOR, (trainer + engine - twice) * BOUND_FACTOR)


@dataclass(frozen=True, slots=True)
class Pair:
    """The i-th trainer and the j-th engine of an arrangement."""

    bounds: PairBounds
    i: int
    j: int
    trainer: TrainerChoice
    engine: EngineChoice


@dataclass(frozen=True, slots=True)
class RefinedPair:
    """A pair with a refined bound, and a mode of weight sync."""

    pair: Pair
    transport: WeightSyncMode


class BestFirst:
    """Candidates of some arrangements that fit with their rank, the best first. num_scored: that have been scored.

    Whoever reads it again reads what was found before, and goes on from there.
    """

    def __init__(self, bounds: Sequence[PairBounds]) -> None:
        self.bounds, self.num_scored = bounds, 0
        self._found: list[ScoredCandidate] = []
        self._heap: list[tuple[Key, int, tuple[object, ...], object]] = []
        self._count = count()
        self._unopened = [*reversed(bounds)]

    def __iter__(self) -> Iterator[ScoredCandidate]:
        return self.read_until(float("inf"))

    def read_until(self, limit: float) -> Iterator[ScoredCandidate]:
        """Those whose steps take at most so many seconds; nothing is looked at beyond."""
        for index in count():
            while index == len(self._found) and self._has_more(limit):
                self._look_at_next()
            if index == len(self._found) or self._found[index].timing.seconds > limit:
                return
            yield self._found[index]

    def _has_more(self, limit: float) -> bool:
        while self._unopened:
            bounds = self._unopened.pop()
            self._push(bounds.floor, bounds)
        return bool(self._heap) and self._heap[0][0][0] <= limit

    def _look_at_next(self) -> None:
        key, _, _, item = heappop(self._heap)
        if isinstance(item, ScoredCandidate):
            self._found.append(item)
        elif isinstance(item, PairBounds):
            self._refine_arrangement(item, key)
        elif isinstance(item, Pair):
            self._refine(item)
        elif isinstance(item, RefinedPair):
            self._score(item)

    @property
    def least(self) -> float:
        """Seconds that nothing falls below that is still to come."""
        return self._heap[0][0][0] if self._heap else float("inf")

    def _refine_arrangement(self, bounds: PairBounds, key: Key) -> None:
        """Its first pair, or itself with the next tighter bound."""
        if (bounds.scorer.is_tight and not bounds.may_fit) or not bounds.engines.entries:
            return
        for tighter in ("first_bound", "bound"):
            if (bound := getattr(bounds, tighter)) > key:
                self._push(bound, bounds)
                return
        self._push_pair(bounds, 0, 0)

    def _push_pair(self, bounds: PairBounds, i: int, j: int) -> None:
        pair = bounds.get_pair(i, j)
        if pair is not None:
            key, trainer, engine = pair
            self._push(key, Pair(bounds, i, j, trainer, engine))

    def _refine(self, pair: Pair) -> None:
        """Pushes its successors, and itself with a refined bound for each mode of weight sync."""
        self._push_pair(pair.bounds, pair.i, pair.j + 1)
        if pair.j == 0:  # else (i + 1, j) would be opened once from (i + 1, j - 1) and once from here
            self._push_pair(pair.bounds, pair.i + 1, 0)
        bounds = pair.bounds
        for transport in bounds.space.list_transports(bounds.arrangement, pair.engine):
            key = bounds.refine_bound(pair.trainer, pair.engine, transport)
            if key is not None:
                self._push(key, RefinedPair(pair, transport))

    def _score(self, refined: RefinedPair) -> None:
        pair, bounds = refined.pair, refined.pair.bounds
        candidate = Choice(bounds.arrangement, pair.trainer, pair.engine, refined.transport)
        if any(rules.find_choice_refusals(bounds.scorer.job, candidate)):
            return
        scored = bounds.scorer.score(candidate)
        self.num_scored += 1
        if scored.rank <= bounds.rank:
            # 1 behind the 0 of bounds: a candidate is the answer only when no bound as low as it is left
            heappush(self._heap, (scored.key, 1, rank_simplicity(candidate), scored))

    def _push(self, key: Key, item: object) -> None:
        heappush(self._heap, (key, 0, (next(self._count),), item))
