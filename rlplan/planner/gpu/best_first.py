"""Best-first search: list candidates that fit, the fastest first, exactly and without building all of them.

In: a GpuSpace and a CandidateScorer. Out: scored candidates in order. Left out: bytes (roles.py), seconds (times.py),
and what happens to the best candidate (search.py).

A heap holds arrangements, pairs of a trainer and an engine, and scored candidates, each with a lower bound of its step
seconds. A popped item is refined and pushed back. A popped scored candidate is the best of all that remain. The search
is exact because no bound exceeds the seconds of anything it stands for:

- An arrangement stands for its pairs. Its first bound takes its fastest engine, with all the KV cache that engine could
  have alone, and its trainer's FLOPs at their best rate. Its second bound takes its fastest trainer, which need not
  fit.
- A pair stands for itself and its successors in both streams (streams.py). Step seconds are the sum of trainer, engine
  and weight sync, or the larger side if generation runs beside training. Each part is at its minimum: more KV cache
  never slows rollouts (a property test), and waking less cache is never slower.
- A refined pair takes the KV cache that the trainer's states leave. Its micro-batches can only reduce that.
- With async rollouts, a step is never shorter with more work beside it (a property test). So the first pair of a
  trainer, whose engine gives the shortest step, also stands for all slower trainers.

A pair that does not fit with the trainer's states alone cannot fit, because bytes add up. Equally fast candidates
follow a fixed total order (`rank_simplicity`), so the answer does not depend on any iteration order.
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
"""Bounds add the same terms in another order than exact seconds. This factor keeps them below despite rounding."""
NEVER: Key = (float("inf"), float("inf"))
"""Bound of something that does not fit."""


class PairBounds:
    """Pairs of trainer and engine in one arrangement, with lower bounds."""

    def __init__(self, scorer: CandidateScorer, space: GpuSpace, arrangement: Arrangement, rank: int) -> None:
        self.scorer, self.space, self.arrangement, self.rank = scorer, space, arrangement, rank
        self._rows: list[EnginesInOrder] = []
        """Orders of the engines under async rollouts: first beside the fastest trainer, then beside each trainer."""
        self.known = scorer.memo.create_table()

    @cached_property
    def engines(self) -> Engines:
        """Engines of the arrangement, built on first use."""
        return Engines(self.scorer, self.space, self.arrangement, self.rank)

    @cached_property
    def trainers(self) -> Trainers:
        """Trainers of the arrangement, built on first use."""
        return Trainers(self.scorer, self.space, self.arrangement, self.engines, self.rank)

    @cached_property
    def may_fit(self) -> bool:
        """Whether any trainer fits without an engine."""
        return may_fit_without_engine(self.scorer, self.space, self.arrangement, self.rank)

    @property
    def floor(self) -> Key:
        """Lower bound of the arrangement from its training passes alone, without looking at engines."""
        return self._build_key(self.scorer.times.bound_seconds(self.arrangement), 0.0)

    @cached_property
    def first_bound(self) -> Key:
        """Lower bound of the arrangement before any trainer is built: fastest passes, weight sync and engine.

        It is infinite if no engine fits.
        """
        if not self.engines.entries:
            return NEVER
        sync_s = min(self._least_syncs)
        floor_s = self.scorer.times.bound_seconds(self.arrangement)
        return self._build_key(floor_s + sync_s, self.engines.entries[0].seconds)

    @property
    def bound(self) -> Key:
        """Lower bound of the arrangement from its fastest trainer."""
        least = self.trainers.bound
        engine = self._get_engine(0, 0, least) if least < float("inf") else None
        return NEVER if engine is None else self._build_key(least, engine.seconds, self._twice_s)

    @cached_property
    def _twice_s(self) -> float:
        """Upper limit of the seconds counted in both the trainer's and the engine's bound.

        With async rollouts, the fastest weight sync is part of both.
        """
        return max(self._least_syncs) if self.scorer.roles.count_versions_ahead(self.arrangement) else 0.0

    @property
    def _least_syncs(self) -> Iterator[float]:
        """Seconds of the fastest sync to any engine, from sharded and from full weights."""
        firsts = [sweep.choices[0] for sweep in self.space.list_sweeps(self.arrangement)]
        return map(self.engines.least_sync_s, {choice.zero_stage == 3: choice for choice in firsts}.values())

    def _get_engine(self, row: int, index: int, others_s: float) -> EngineEntry | None:
        """Get the `index`-th fastest engine.

        With async rollouts, engines are ordered by the step they give beside `others_s` seconds of other work. Each row
        has more of that, so no step is shorter than in the row before.
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
        """Get (bound, trainer, engine) for the i-th trainer and j-th engine; None past the end."""
        trainer = self.trainers.get(i)
        engine = self._get_engine(i + 1, j, trainer.seconds) if trainer is not None else None
        if trainer is None or engine is None:
            return None
        return self._build_key(trainer.seconds, engine.seconds, self._twice_s), trainer.choice, engine.choice

    def refine_bound(self, trainer: TrainerChoice, engine: EngineChoice, transport: WeightSyncMode) -> Key | None:
        """Bound with the KV cache that the trainer's states leave; None if nothing fits beside them."""
        cache = self._size_cache_beside_states(trainer.without_passes, engine, keeps_sent=transport == "delta")
        if cache is None:
            return None
        times, arrangement = self.scorer.times, self.arrangement
        sync = times.syncs.predict_cost(arrangement, trainer, engine, transport).seconds
        own = times.predict_trainer_seconds(arrangement, trainer)
        if self.scorer.roles.count_versions_ahead(arrangement):
            step = max(own + sync, times.bound_async_step(arrangement, engine, cache[0], own, sync))
            # the second part counts all work, which breaks ties between async steps
            return round_key(step * BOUND_FACTOR, (own + cache[1] + sync) * BOUND_FACTOR)
        if arrangement.is_async:
            return round_key((max(own, cache[1]) + sync) * BOUND_FACTOR, (own + cache[1] + sync) * BOUND_FACTOR)
        return self._build_key(own + sync, cache[1])

    @memoize
    def _size_cache_beside_states(
        self, trainer: TrainerChoice, engine: EngineChoice, *, keeps_sent: bool
    ) -> tuple[int, float] | None:
        """Size (largest KV cache, seconds of the engine with it) beside a trainer's states alone.

        keeps_sent: count the copies of last-sent weights that delta sync keeps.
        """
        scorer, arrangement = self.scorer, self.arrangement
        states = scorer.roles.sum_state_bytes(arrangement, trainer, keeps_sent=keeps_sent)
        most = scorer.find_max_kv_cache(arrangement, engine, states, self.rank, keeps_sent=keeps_sent)
        return None if most is None else (most, scorer.times.predict_engine_seconds(arrangement, engine, most))

    def _build_key(self, trainer: float, engine: float, twice: float = 0.0) -> Key:
        """Build a key from both sides' seconds. twice: seconds that both sides include."""
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
    """A pair with a refined bound and a mode of weight sync."""

    pair: Pair
    transport: WeightSyncMode


class BestFirst:
    """Candidates of some arrangements that fit with a rank, the best first. num_scored: candidates scored so far.

    Iterating again replays earlier results and then continues.
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
        """Iterate over candidates with steps of at most `limit` seconds; slower ones are not examined."""
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
        """Lower bound of the seconds of all candidates still to come."""
        return self._heap[0][0][0] if self._heap else float("inf")

    def _refine_arrangement(self, bounds: PairBounds, key: Key) -> None:
        """Push the arrangement's first pair, or the arrangement with its next tighter bound."""
        # when memory is scarce, checking it first avoids bounding hopeless arrangements
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
        """Push the pair's successors, and the pair with a refined bound per weight-sync mode."""
        self._push_pair(pair.bounds, pair.i, pair.j + 1)
        if pair.j == 0:  # otherwise (i + 1, j) would be opened twice: from here and from (i + 1, j - 1)
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
            # 1 sorts after the 0 of bounds: a candidate is an answer only once no bound is as low
            heappush(self._heap, (scored.key, 1, rank_simplicity(candidate), scored))

    def _push(self, key: Key, item: object) -> None:
        heappush(self._heap, (key, 0, (next(self._count),), item))
