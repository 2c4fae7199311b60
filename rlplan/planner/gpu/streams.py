"""Streams yield trainers or engines by increasing seconds, computed only as far as they are read.

In: an arrangement's micro-batch sweeps, bytes and seconds of each choice. Out: choices ordered by a lower bound of
their seconds, without those that can never fit. Left out: combining them (best_first.py).

No choice comes too late or is missing, for these reasons:

- Bytes add up over processes. A trainer that does not fit beside the smallest engine fits beside none. An engine that
  does not fit alone fits beside none, and it never has more KV cache beside a trainer than alone.
- Fewer tokens per micro-batch never need more bytes (a property test). So in a sweep, everything after the first that
  fits also fits, and need not be counted.
- More memory savings never need more device bytes (a property test). If the leanest choice of a chain does not fit,
  none does. It is checked after the first misfit, and first of all once many chains failed.
- Recomputation and offload only add work (a property test). A sweep with one more of them has no faster passes than the
  sweep without, so it is opened only when the stream reaches those. It may still be faster overall if roles move to the
  host, because offloaded parts need not move.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import count

from rlplan.dataflow.choice import NO_TRAINER, Arrangement, EngineChoice, TrainerChoice
from rlplan.planner.gpu.candidates import GpuSpace, MemorySavings, MicroBatchSweep
from rlplan.planner.gpu.scored_candidates import CandidateScorer, EngineEntry, TwoParts
from rlplan.planner.gpu.tables import BytesByMoment
from rlplan.planner.memo import memoize

Chain = dict[MemorySavings, MicroBatchSweep]
"""Sweeps that differ only in memory savings."""


@dataclass(frozen=True, slots=True)
class TrainerEntry:
    """A trainer with a lower bound of its seconds."""

    seconds: float
    """Seconds of everything except rollouts, with the fastest weight sync to any engine."""
    choice: TrainerChoice


class Engines:
    """Engines of an arrangement that fit alone, by seconds, and the minimum bytes of any of them.

    rank: 0 must fit in the worst case, 1 in expectation.
    """

    def __init__(self, scorer: CandidateScorer, space: GpuSpace, arrangement: Arrangement, rank: int) -> None:
        self.scorer, self.arrangement = scorer, arrangement
        entries = scorer.list_engine_entries(arrangement, space.list_engines(arrangement), rank)
        self.entries = sorted(entries, key=EngineEntry.order)
        by_mode = {
            (entry.choice.tp, entry.choice.attention_dp, entry.choice.quantization, mode): (entry.choice, mode)
            for entry in self.entries
            for mode in space.list_transports(arrangement, entry.choice)
        }
        self._transports = tuple(by_mode.values())
        self.known = scorer.memo.create_table()

    @cached_property
    def floor(self) -> BytesByMoment:
        """Minimum bytes of any engine, at every moment."""
        return find_engine_floor(self.scorer, self.arrangement, [entry.choice for entry in self.entries])

    def least_sync_s(self, trainer: TrainerChoice) -> float:
        """Seconds of the fastest weight sync to any of these engines."""
        return self._least_sync_s(3 if trainer.zero_stage == 3 else 0)  # only stage 3 shards weights

    @memoize
    def _least_sync_s(self, zero_stage: int) -> float:
        trainer = replace(NO_TRAINER, zero_stage=zero_stage)
        cost, arrangement = self.scorer.times.syncs.predict_cost, self.arrangement
        return min(cost(arrangement, trainer, engine, mode).seconds for engine, mode in self._transports)


class EnginesInOrder:
    """Engines ordered by a bound that is expensive to compute, and so computed only as far as it is read.

    bound: never below the seconds that an entry already has.
    """

    def __init__(self, entries: Sequence[EngineEntry], bound: Callable[[EngineEntry], float]) -> None:
        self._bound, self._known = bound, list[EngineEntry]()
        self._heap = sorted((entry.order(), place, False, entry) for place, entry in enumerate(entries))

    @property
    def entries(self) -> tuple[EngineEntry, ...]:
        """All entries with the bounds known so far."""
        return (*self._known, *(entry for *_, entry in self._heap))

    def get(self, index: int) -> EngineEntry | None:
        """Get the entry at an index; None past the end."""
        while len(self._known) <= index and self._heap:
            _, place, is_asked, entry = heappop(self._heap)
            if is_asked:
                self._known.append(entry)
            else:
                entry = replace(entry, seconds=self._bound(entry))
                heappush(self._heap, (entry.order(), place, True, entry))
        return self._known[index] if index < len(self._known) else None


def find_engine_floor(
    scorer: CandidateScorer, arrangement: Arrangement, choices: Sequence[EngineChoice]
) -> BytesByMoment:
    """Find the minimum bytes of several engines at every moment."""
    engine_bytes = [scorer.roles.sum_engine_bytes(arrangement, choice) for choice in choices]
    return BytesByMoment(
        tuple(map(min, *(sizes.expected for sizes in engine_bytes), engine_bytes[0].expected)),
        tuple(map(min, *(sizes.high for sizes in engine_bytes), engine_bytes[0].high)),
        tuple(map(min, *(sizes.hosts for sizes in engine_bytes), engine_bytes[0].hosts)),
    )


class Trainers:
    """Trainers of an arrangement that fit alone, by seconds.

    rank: 0 must fit in the worst case, 1 in expectation. bound: lower bound of all trainers, fitting or not; infinite
    if there are none.
    """

    def __init__(
        self, scorer: CandidateScorer, space: GpuSpace, arrangement: Arrangement, engines: Engines, rank: int
    ) -> None:
        self.scorer, self.arrangement, self.engines, self.rank = scorer, arrangement, engines, rank
        self._sweeps = _list_chains(space, arrangement)
        self._heap: list[tuple[float, int, int, object]] = []
        self._count = count()
        self._opened: set[int] = set()
        self.known = scorer.memo.create_table()
        self._read_already: list[TrainerEntry] = []
        self._stream = self._read()
        for base, sweeps in self._sweeps.items():
            # many chains failed before, so memory is checked before the heap is filled
            if scorer.is_tight and not self._may_fit(base):
                continue
            for savings, sweep in sweeps.items():
                # sweeps with more memory savings are opened later, from those without
                if not any(_is_step(other, savings) for other in sweeps):
                    self._push_sweep(sweep)
        self.bound = self._heap[0][0] if self._heap else float("inf")

    def get(self, index: int) -> TrainerEntry | None:
        """Get the entry at an index; None past the end."""
        while len(self._read_already) <= index:
            entry = next(self._stream, None)
            if entry is None:
                return None
            self._read_already.append(entry)
        return self._read_already[index]

    def _read(self) -> Iterator[TrainerEntry]:
        while self._heap:
            seconds, _, _, item = heappop(self._heap)
            if isinstance(item, TrainerChoice):
                yield TrainerEntry(seconds, item)
                continue
            assert isinstance(item, MicroBatchSweep), "choices and sweeps"
            fitting = self.keep_fitting(item)
            if not fitting and not self._may_fit(_build_chain_key(item)):
                self.scorer.num_misfits += 1
                continue
            for choice in fitting:
                heappush(self._heap, (self._bound_seconds(choice), 1, next(self._count), choice))
            for savings, sweep in self._sweeps[_build_chain_key(item)].items():
                if _is_step(item.savings, savings):
                    self._push_sweep(sweep)

    def _push_sweep(self, sweep: MicroBatchSweep) -> None:
        """Push a sweep with the seconds of its fastest passes; sweeps with more memory savings follow when it is
        popped.
        """
        if id(sweep) not in self._opened:
            self._opened.add(id(sweep))
            bound = min(self._bound_seconds(choice, with_moves=False) for choice in sweep.choices)
            heappush(self._heap, (bound, 0, next(self._count), sweep))

    def _bound_seconds(self, choice: TrainerChoice, *, with_moves: bool = True) -> float:
        times, arrangement = self.scorer.times, self.arrangement
        own = (
            times.predict_trainer_seconds(arrangement, choice)
            if with_moves
            else times.predict_pass_seconds(arrangement, choice)
        )
        return own + self.engines.least_sync_s(choice)

    @memoize
    def _may_fit(self, base: tuple[object, ...]) -> bool:
        """Whether the leanest choice of a chain fits on the devices: all memory savings, smallest micro-batch."""
        roles, choice = self.scorer.roles, _find_leanest(self._sweeps[base])
        return not self.scorer.is_hopeless(self.arrangement, choice, self.rank) and all(
            self._fits(sum_bytes(self.arrangement, choice), on_host=False)
            for sum_bytes in (roles.sum_state_bytes, roles.sum_trainer_bytes)
        )

    def keep_fitting(self, sweep: MicroBatchSweep) -> tuple[TrainerChoice, ...]:
        """Keep the choices of a sweep that fit beside the smallest engine.

        The largest micro-batch comes first and smaller ones need no more memory, so a bisection finds the first.
        """
        roles, choices = self.scorer.roles, sweep.choices
        if not self._fits(roles.sum_state_bytes(self.arrangement, choices[0])):
            return ()

        def fits(choice: TrainerChoice) -> bool:
            return self._fits(roles.sum_trainer_bytes(self.arrangement, choice))

        return choices[bisect_left(choices, True, key=fits) :]

    def _fits(self, own_bytes: BytesByMoment, *, on_host: bool = True) -> bool:
        return _fits(self.scorer, self.arrangement, self.rank, (own_bytes, self.engines.floor), on_host=on_host)


def may_fit_without_engine(scorer: CandidateScorer, space: GpuSpace, arrangement: Arrangement, rank: int) -> bool:
    """Whether any trainer of an arrangement fits without an engine."""
    roles, nothing = scorer.roles, scorer.roles.nothing(arrangement)
    for choice in map(_find_leanest, _list_chains(space, arrangement).values()):
        if scorer.is_hopeless(arrangement, choice, rank):
            continue
        for sum_bytes in (roles.sum_state_bytes, roles.sum_trainer_bytes):
            if (slack := scorer.compute_slack(arrangement, (sum_bytes(arrangement, choice), nothing), rank)) < 0:
                scorer.record_shortage(arrangement, choice, rank, -slack)
                break
        else:
            return True
    return False


def _fits(
    scorer: CandidateScorer,
    arrangement: Arrangement,
    rank: int,
    parts: TwoParts,
    *,
    on_host: bool,
) -> bool:
    """Whether two parts of an arrangement fit together. on_host: check host memory too."""
    device, host = scorer.compute_slacks(arrangement, parts, rank)
    return device >= 0 and (host >= 0 or not on_host)


def _list_chains(space: GpuSpace, arrangement: Arrangement) -> dict[tuple[object, ...], Chain]:
    """List the sweeps of each layout by memory savings."""
    chains: dict[tuple[object, ...], Chain] = {}
    for sweep in space.list_sweeps(arrangement):
        chains.setdefault(_build_chain_key(sweep), {})[sweep.savings] = sweep
    return chains


def _find_leanest(chain: Chain) -> TrainerChoice:
    """Find the choice with all memory savings and the smallest micro-batch."""
    return max(chain.values(), key=lambda sweep: sum(sweep.savings)).choices[-1]


def _build_chain_key(sweep: MicroBatchSweep) -> tuple[object, ...]:
    """Key shared by sweeps that differ only in memory savings."""
    choice = sweep.choices[0]
    return choice.zero_stage, choice.ulysses, choice.tp, choice.pp, choice.cp, choice.ep, choice.max_tokens > 0


def _is_step(savings: MemorySavings, other: MemorySavings) -> bool:
    """Whether `other` has exactly one more memory saving than `savings`."""
    return sum(other) == sum(savings) + 1 and all(not a or b for a, b in zip(savings, other, strict=True))
