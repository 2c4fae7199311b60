"""How many rollouts an engine runs, from the first token of a step to the last of its longest rollout.

In: response lengths, rollouts for each that runs at once. Out: an Occupancy, in token steps: apart from any engine, so
that a search computes it once. Left out: seconds (generation.py), preemption.

All rollouts wait at time 0; one starts wherever another ends. Once none is left to start, the running ones finish: the
long tail. The lengths are quantiles of the distribution, in several evenly mixed orders, whose times are averaged: it
matters whether the longest comes first or last.

Symbols: N rollouts, S running at once, r = N/S.
"""

import heapq
from dataclasses import dataclass
from functools import lru_cache

from rlplan.spec.parts.lengths import Lengths, LengthSpec

SAMPLE = 128
"""Rollouts that stand for all of a step: more change the time of the examples by less than 1 %."""
DEEPEST = 8.0
"""Rollouts for each that runs at once, beyond which the rest is steady: as many running, at all ages."""
GOLDEN = 0.6180339887498949
"""Fractional parts of its multiples are spread evenly, whatever their number: van der Corput order."""
ORDERS = tuple(index / 8 for index in range(8))
"""Offsets of the orders that are averaged: the longest rollouts start early, late and between. Four are up to 5 % too
fast for a long tail, eight 2 %."""
_LEVELS = (0.85, 0.65, 0.45, 0.25, 0.12, 0.05, 0.0)
"""Shares of S at which the tail is cut into pieces."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some token steps."""

    steps: float
    busy: float
    """Running rollouts for each of S, on average."""
    age: float
    """Tokens that these have generated."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """A step's generation, piece by piece."""

    pieces: tuple[Piece, ...]
    """Their steps add up to its length."""
    longest: float
    """Response of the sample, in tokens."""


def occupancy(spec: LengthSpec, max_len: int, num_rollouts: int, ratio: float) -> Occupancy:
    """The pieces of one engine's step, for at most about `DEEPEST` rollouts a place.

    num_rollouts: N; ratio: N/S. Up to `SAMPLE` rollouts are taken one by one, more by a sample of the same ratio.
    Counts: list scheduling, the mean of ORDERS where rollouts differ and some must wait.
    Assumes: rollouts start in an order that has nothing to do with their length.

    >>> from rlplan.spec.parts.lengths import ConstantLengths
    >>> occupancy(ConstantLengths(value=100), 1000, 8, 2.0).pieces  # two waves of 100 tokens
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
    """The pieces of so many rollouts of a sample in so many places: one for many numbers of all rollouts."""
    lengths = _quantiles(spec, max_len, number)
    orders = ORDERS if number > places and lengths[0] < lengths[-1] else ORDERS[:1]
    sums = [[0.0, 0.0, 0.0] for _ in range(len(_LEVELS) + 1)]
    for offset in orders:
        _schedule([lengths[index] for index in _mixed(number, offset)], places, sums)
    pieces = (
        Piece(steps / len(orders), busy / steps / places, ages / busy) for steps, busy, ages in sums if steps and busy
    )
    return Occupancy(tuple(pieces), lengths[-1])


@lru_cache(maxsize=256)
def _quantiles(spec: LengthSpec, max_len: int, number: int) -> tuple[float, ...]:
    """Lengths that stand for all, in order."""
    shares = ((index + 0.5) / number for index in range(number))
    return tuple(max(1.0, min(float(max_len), spec.quantile(share))) for share in shares)


@lru_cache(maxsize=1024)
def _mixed(number: int, offset: float) -> tuple[int, ...]:
    """Rollouts in an evenly mixed order."""
    return tuple(sorted(range(number), key=lambda index: ((index + 1) * GOLDEN + offset) % 1.0))


def _schedule(lengths: list[float], places: int, sums: list[list[float]]) -> None:
    """Adds one order to the sums: steps, places x steps and ages x steps, while all are busy, then level by level."""
    running = [(length, 0.0) for length in lengths[:places]]
    heapq.heapify(running)
    last_start = 0.0
    for length in lengths[places:]:
        last_start = running[0][0]
        heapq.heapreplace(running, (last_start + length, last_start))
    # an age grows from 0 to the length: its sum over a rollout's steps is length^2 / 2, less what falls into the tail
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
    """Response tokens that a running rollout holds in the cache, as far as they limit how many can be.

    Counts: the mean age of what runs in a steady engine, E[R^2] / (2*E[R]), or, where all have begun together, the most
    that the survivors hold, max over t of t * P(R > t), if that is more.
    Source: renewal theory (inspection paradox). Assumes: vLLM preempts and recomputes rarely.

    >>> from rlplan.spec.parts.lengths import ConstantLengths
    >>> mean_footprint(Lengths(ConstantLengths(value=100), 1000))  # all have 100 at the end
    98.4375
    """
    age = mean_age(lengths)
    shares = [(index + 0.5) / 32 for index in range(32)]
    return max(age, max((1 - share) * lengths.quantile(share) for share in shares))


def mean_age(lengths: Lengths) -> float:
    """Tokens that a running rollout of a steady engine has, on average: E[R^2] / (2*E[R]).

    Source: renewal theory (inspection paradox).
    """
    return (lengths.variance + lengths.mean**2) / (2 * lengths.mean)
