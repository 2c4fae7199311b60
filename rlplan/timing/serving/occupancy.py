"""How many rollouts an engine runs over time, from the first token of a step to the last of its longest rollout.

In: response lengths, rollouts per concurrency slot. Out: an Occupancy in token steps, which does not depend on an
engine and is computed once per search. Left out: seconds (generation.py), preemption.

All rollouts wait at time 0, and one starts whenever another ends. Once none is left to start, the running ones finish;
this is the long tail. The lengths are quantiles of the distribution in several evenly mixed orders. Their times are
averaged, because it matters whether the longest rollout starts first or last.

Symbols: N rollouts, S concurrency slots, r = N/S.
"""

import heapq
from dataclasses import dataclass
from functools import lru_cache

from rlplan.spec.parts.lengths import Lengths, LengthSpec

SAMPLE = 128
"""Rollouts in the sample that represents a step; more change the time of the examples by less than 1 %."""
DEEPEST = 8.0
"""Rollouts per slot up to which a step is simulated. Further rounds are steady: all slots busy, all ages mixed."""
GOLDEN = 0.6180339887498949
"""Golden ratio: the fractional parts of its multiples are evenly spread, whatever their number."""
ORDERS = tuple(index / 8 for index in range(8))
"""Offsets of the averaged orders; the longest rollouts start early, late or in between. Four orders are up to 5 % too
fast for a long tail, eight 2 %."""
_LEVELS = (0.85, 0.65, 0.45, 0.25, 0.12, 0.05, 0.0)
"""Shares of busy slots at which the tail is cut into pieces."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive token steps with similar occupancy."""

    steps: float
    busy: float
    """Mean share of the S slots that are busy."""
    age: float
    """Mean number of tokens that the running rollouts have generated."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """A step's generation, piece by piece."""

    pieces: tuple[Piece, ...]
    """Pieces in order; their steps add up to the length of the generation."""
    longest: float
    """Longest response of the sample, in tokens."""


def compute_occupancy(spec: LengthSpec, max_len: int, num_rollouts: int, ratio: float) -> Occupancy:
    """Compute the pieces of one engine's step, for at most about `DEEPEST` rollouts per slot.

    num_rollouts: N; ratio: N/S. Up to `SAMPLE` rollouts are taken one by one, more by a sample with the same ratio.
    Counts: list scheduling, the mean of ORDERS where rollouts differ and some must wait.
    Assumes: the start order is independent of the length.

    >>> from rlplan.spec.parts.lengths import ConstantLengths
    >>> compute_occupancy(ConstantLengths(value=100), 1000, 8, 2.0).pieces  # two waves of 100 tokens
    (Piece(steps=100.0, busy=1.0, age=50.0), Piece(steps=100.0, busy=1.0, age=50.0))
    """
    if num_rollouts <= SAMPLE:
        number, places = num_rollouts, max(1, round(num_rollouts / ratio))
    else:
        places = max(1, round(SAMPLE / ratio))
        number = max(places, round(places * ratio))
    return _occupancy(spec, max_len, number, places)


@lru_cache(maxsize=512)
def _occupancy(spec: LengthSpec, max_len: int, number: int, places: int) -> Occupancy:
    """Pieces of `number` sampled rollouts in `places` slots. The cache serves many values of N and S."""
    lengths = _quantiles(spec, max_len, number)
    orders = ORDERS if number > places and lengths[0] < lengths[-1] else ORDERS[:1]
    sums = [[0.0, 0.0, 0.0] for _ in range(len(_LEVELS) + 1)]
    for offset in orders:
        _schedule([lengths[index] for index in _mix_order(number, offset)], places, sums)
    pieces = (
        Piece(steps / len(orders), busy / steps / places, ages / busy) for steps, busy, ages in sums if steps and busy
    )
    return Occupancy(tuple(pieces), lengths[-1])


@lru_cache(maxsize=256)
def _quantiles(spec: LengthSpec, max_len: int, number: int) -> tuple[float, ...]:
    """Quantiles of the length distribution, in ascending order."""
    shares = ((index + 0.5) / number for index in range(number))
    return tuple(max(1.0, min(float(max_len), spec.quantile(share))) for share in shares)


@lru_cache(maxsize=1024)
def _mix_order(number: int, offset: float) -> tuple[int, ...]:
    """Indices of the rollouts in an evenly mixed order."""
    return tuple(sorted(range(number), key=lambda index: ((index + 1) * GOLDEN + offset) % 1.0))


def _schedule(lengths: list[float], places: int, sums: list[list[float]]) -> None:
    """Add one order to the sums of steps, slots x steps and ages x steps: first with all slots busy, then by level."""
    running = [(length, 0.0) for length in lengths[:places]]
    heapq.heapify(running)
    last_start = 0.0
    for length in lengths[places:]:
        last_start = running[0][0]
        heapq.heapreplace(running, (last_start + length, last_start))
    # an age grows from 0 to the length: its sum over a rollout's steps is length^2 / 2, less the part within the tail
    tail_ages = sum([(end - start) ** 2 - (last_start - start) ** 2 for end, start in running]) / 2
    _add(sums[0], last_start, last_start * places, sum([length**2 for length in lengths]) / 2 - tail_ages)
    alive, starts, now, level = len(running), sum([start for _, start in running]), last_start, 0
    for end, start in sorted(running):
        span = end - now
        _add(sums[level + 1], span, alive * span, span * (alive * (now + end) / 2 - starts))
        now, alive, starts = end, alive - 1, starts - start
        while alive and alive <= _LEVELS[level] * places:
            level += 1


def _add(sums: list[float], steps: float, busy: float, ages: float) -> None:
    if steps > 0:
        sums[0] += steps
        sums[1] += busy
        sums[2] += ages


@lru_cache(maxsize=64)
def mean_footprint(lengths: Lengths) -> float:
    """Response tokens per running rollout in the KV cache, for the limit on concurrency.

    Counts: the mean age in a steady engine, E[R^2] / (2*E[R]). Where all rollouts start together, the survivors can
    hold more, max over t of t * P(R > t). The larger of the two counts.
    Source: renewal theory (inspection paradox). Assumes: vLLM preempts and recomputes rarely.

    >>> from rlplan.spec.parts.lengths import ConstantLengths
    >>> mean_footprint(Lengths(ConstantLengths(value=100), 1000))  # all have 100 at the end
    98.4375
    """
    age = mean_age(lengths)
    shares = [(index + 0.5) / 32 for index in range(32)]
    return max(age, max((1 - share) * lengths.quantile(share) for share in shares))


def mean_age(lengths: Lengths) -> float:
    """Mean number of tokens of a running rollout in a steady engine: E[R^2] / (2*E[R]).

    Source: renewal theory (inspection paradox).
    """
    return (lengths.variance + lengths.mean**2) / (2 * lengths.mean)
