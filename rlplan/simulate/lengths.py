"""Lengths, drawn: how many tokens each response of a simulated run has.

In: a distribution (spec/lengths.py), a seed. Out: whole tokens, at least 1, one after the other.
Left out: rollouts of one prompt that are alike; all are independent, as in the closed forms.
"""

import random

from rlplan.spec.lengths import Lengths

TABLE = 1 << 14
"""Quantiles that are worked out beforehand; between two of them a length is interpolated."""

TAIL = 64
"""Intervals at either end of the table where quantiles bend too much for that: there the exact one is taken."""


class LengthSampler:
    """Draws lengths by inverting the distribution; the same seed draws the same lengths.

    >>> from rlplan.spec.lengths import ConstantLengths, UniformLengths
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
        """The next `count` lengths in tokens."""
        if not self._table:
            self._table = [self._lengths.quantile(index / TABLE) for index in range(TABLE + 1)]
        return [self._one(self._random.random()) for _ in range(count)]

    def _one(self, share: float) -> int:
        place = share * TABLE
        index = int(place)
        if index < TAIL or index >= TABLE - TAIL:
            length = self._lengths.quantile(share)
        else:
            low = self._table[index]
            length = low + (place - index) * (self._table[index + 1] - low)
        return max(1, round(length))
