"""Streams: choices of a trainer or an engine from the fastest on, worked out as far as somebody reads.

In: a frame's chains of choices, bytes and seconds of each. Out: choices in the order of a lower bound of their seconds,
without those that cannot fit whatever they are combined with. Left out: combining them (search.py).

Why no choice comes too late or is missing:
- bytes add up over processes, so a trainer that does not fit beside the least that any engine holds fits beside none;
- with fewer tokens a pass no moment takes more bytes (a property test), so along a chain all after the first that fits
  do, and the others need not be counted;
- recomputation and offload add work to the same passes (a property test), so that a chain with one more of them has no
  choice whose passes are faster than the fastest of the chain without; it is looked at when the stream has come to
  those. (With roles that move to the host it may be faster as a whole: what lies there already need not move.)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from rlplan.dataflow.choice import Arrangement, EngineChoice, TrainerChoice
from rlplan.dataflow.placements import GENERATION
from rlplan.planner.gpu.candidates import Chain, GpuSpace, Lean
from rlplan.planner.gpu.rated import Rater
from rlplan.planner.gpu.tables import Vector, fit


@dataclass(frozen=True, slots=True)
class TrainerEntry:
    """seconds: of everything but rollouts, and of the fastest hand-over to any engine."""

    seconds: float
    choice: TrainerChoice


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """seconds: of rollouts and switches with all the KV cache that is ever useful."""

    seconds: float
    choice: EngineChoice


class Engines:
    """The engines of a frame by seconds, and the least that any of them holds."""

    def __init__(self, rater: Rater, space: GpuSpace, frame: Arrangement) -> None:
        self.rater, self.frame, self.choices = rater, frame, space.engines(frame)
        times, limit = rater.times, rater.setting.pool(GENERATION).capacity
        entries = []
        for choice in self.choices:
            most, _ = rater.kv_cache(frame, choice, limit, limit)
            entries.append(EngineEntry(times.engine_seconds(frame, choice, most), choice))
        self.entries = sorted(entries, key=lambda entry: (entry.seconds, -entry.choice.max_num_seqs))
        self._floor: Vector | None = None
        ways = {
            (engine.tp, engine.quantization, way): (engine, way)
            for engine in self.choices
            for way in space.transports(frame, engine)
        }
        self.transports = tuple(ways.values())
        """Ways of handing over to them that differ in seconds."""

    @property
    def floor(self) -> Vector:
        """At every moment the least that any engine of the frame holds."""
        if self._floor is None:
            vectors = [self.rater.roles.engine_vector(self.frame, choice) for choice in self.choices]
            self._floor = Vector(
                tuple(map(min, *(vector.expected for vector in vectors), vectors[0].expected)),
                tuple(map(min, *(vector.high for vector in vectors), vectors[0].high)),
                tuple(map(min, *(vector.hosts for vector in vectors), vectors[0].hosts)),
            )
        return self._floor


class Trainers:
    """The trainers of a frame that fit by themselves, by seconds. rank: how surely they must fit.

    bound: no trainer takes fewer seconds, whether it fits or not; infinite where there is none.
    """

    def __init__(self, rater: Rater, space: GpuSpace, frame: Arrangement, engines: Engines, rank: int) -> None:
        self.rater, self.frame, self.engines, self.rank = rater, frame, engines, rank
        self._chains: dict[tuple[object, ...], dict[Lean, Chain]] = {}
        for chain in space.chains(frame):
            self._chains.setdefault(_base(chain), {})[chain.lean] = chain
        self._heap: list[tuple[float, int, int, object]] = []
        self._count = count()
        self._opened: set[int] = set()
        self._known: list[TrainerEntry] = []
        self._stream = self._read()
        for chains in self._chains.values():
            for lean, chain in chains.items():
                if not any(_is_step(other, lean) for other in chains):
                    self._open(chain)
        self.bound = self._heap[0][0] if self._heap else float("inf")

    def get(self, index: int) -> TrainerEntry | None:
        """The entry at an index, None beyond the last."""
        while len(self._known) <= index:
            entry = next(self._stream, None)
            if entry is None:
                return None
            self._known.append(entry)
        return self._known[index]

    def _read(self) -> Iterator[TrainerEntry]:
        while self._heap:
            seconds, _, _, item = heappop(self._heap)
            if isinstance(item, TrainerChoice):
                yield TrainerEntry(seconds, item)
                continue
            assert isinstance(item, Chain), "choices and chains"
            for choice in self._that_fit(item):
                heappush(self._heap, (self._seconds(choice), 1, next(self._count), choice))
            for lean, chain in self._chains[_base(item)].items():
                if _is_step(item.lean, lean):
                    self._open(chain)

    def _open(self, chain: Chain) -> None:
        """Put a chain on the heap at the seconds of its fastest passes; leaner ones follow when it comes up."""
        if id(chain) not in self._opened:
            self._opened.add(id(chain))
            bound = min(self._seconds(choice, with_moves=False) for choice in chain.choices)
            heappush(self._heap, (bound, 0, next(self._count), chain))

    def _seconds(self, choice: TrainerChoice, *, with_moves: bool = True) -> float:
        times, frame = self.rater.times, self.frame
        own = times.trainer_seconds(frame, choice) if with_moves else times.pass_seconds(frame, choice)
        return own + times.least_sync_seconds(frame, choice, self.engines.transports)

    def _that_fit(self, chain: Chain) -> tuple[TrainerChoice, ...]:
        """The choices of a chain that fit beside the least of any engine: all from the first that does."""
        roles, choices = self.rater.roles, chain.choices
        if not self._fits(roles.holding_vector(self.frame, choices[0])):
            return ()
        if self._fits(roles.trainer_vector(self.frame, choices[0])):
            return choices
        low, high = 0, len(choices) - 1
        if low == high or not self._fits(roles.trainer_vector(self.frame, choices[high])):
            return ()
        while high - low > 1:
            middle = (low + high) // 2
            fits = self._fits(roles.trainer_vector(self.frame, choices[middle]))
            low, high = (low, middle) if fits else (middle, high)
        return choices[high:]

    def _fits(self, vector: Vector) -> bool:
        rater, parts = self.rater, self.rater.roles.parts(self.frame)
        need = rater.roles.without_host_memory(fit(vector, self.engines.floor, parts.room))
        slack = need.slack_high if self.rank == 0 else need.slack_expected
        return slack >= 0 and need.slack_host >= 0


def _base(chain: Chain) -> tuple[object, ...]:
    """What a chain has in common with those that save more or less memory for time."""
    one = chain.choices[0]
    return one.zero_stage, one.ulysses, one.tp, one.pp, one.cp, one.ep, one.max_tokens > 0


def _is_step(one: Lean, other: Lean) -> bool:
    """Whether the other has exactly one more means to save memory."""
    return sum(other) == sum(one) + 1 and all(not a or b for a, b in zip(one, other, strict=True))
