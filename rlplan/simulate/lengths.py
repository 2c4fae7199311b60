"""Sampled lengths: how many tokens each response of a simulated run has.

In: a distribution (spec/parts/lengths.py), a seed. Out: whole tokens, at least 1, one after the other.
Left out: correlation between rollouts of one prompt; all are independent, as in the closed forms.
"""

import random

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
