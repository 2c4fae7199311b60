"""Mixing: which prompt is the n-th, of one data set or of several by their weights.

In: data sets' sizes and weights, a seed, a number. Out: a row. All follows from the number, so that a run that goes on
needs nothing else. Left out: rows (loading.py).

An epoch of the mixture has as many prompts as all data sets together have rows, and of each set the part that its
weight is; a data set goes through its own rows in epochs of its own.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Share:
    """A data set in a mixture."""

    name: str
    num_rows: int
    weight: float = 1.0


class Mixture:
    """See the module docstring. shuffles: epochs have orders of their own; else rows come as they stand.

    difficulties: one number a row, [rows of all data sets], by which each epoch of a data set goes up; else empty.
    """

    def __init__(
        self, shares: Sequence[Share], seed: int, *, shuffles: bool = True, difficulties: Sequence[float] = ()
    ) -> None:
        self.shares, self.seed, self.shuffles, self.difficulties = shares, seed, shuffles, difficulties
        self.num_rows = sum(share.num_rows for share in shares)
        self.quotas = quotas_of(shares)
        self._turns_of = lru_cache(maxsize=2)(self._turns)
        self._order_of = lru_cache(maxsize=2 * len(shares))(self._order)

    def row(self, number: int) -> int:
        """The place of the n-th prompt, from 0, among the rows of all data sets."""
        epoch, index = divmod(number, self.num_rows)
        source, place = self._turns_of(epoch)[index]
        own_epoch, own_index = divmod(epoch * self.quotas[source] + place, self.shares[source].num_rows)
        return sum(share.num_rows for share in self.shares[:source]) + self._order_of(source, own_epoch)[own_index]

    def _turns(self, epoch: int) -> list[tuple[int, int]]:
        """(data set, how many prompts of it come before) of an epoch: shuffled, or each set spread evenly over it."""
        turns = [(source, place) for source, quota in enumerate(self.quotas) for place in range(quota)]
        if not self.shuffles or self.difficulties:
            return sorted(turns, key=lambda turn: ((turn[1] + 0.5) / self.quotas[turn[0]], turn[0]))
        order = [source for source, _ in turns]
        random.Random(f"{self.seed}/mixture/{epoch}").shuffle(order)
        taken = [iter(range(quota)) for quota in self.quotas]
        return [(source, next(taken[source])) for source in order]

    def _order(self, source: int, epoch: int) -> list[int]:
        """The rows of a data set in one of its epochs; by difficulty rows that are alike stay as they were dealt."""
        share, first = self.shares[source], sum(share.num_rows for share in self.shares[:source])
        order = list(range(share.num_rows))
        if self.shuffles:
            random.Random(f"{self.seed}/epoch/{epoch}" + (f"/{share.name}" if share.name else "")).shuffle(order)
        if self.difficulties:
            order.sort(key=lambda row: self.difficulties[first + row])
        return order


def quotas_of(shares: Sequence[Share]) -> list[int]:
    """Prompts of each data set in an epoch of the mixture: by weight, those with the largest remainders rounded up.

    >>> quotas_of([Share("a", 6, 3.0), Share("b", 4, 1.0)])  # 7.5 and 2.5 of 10
    [8, 2]
    """
    total, weights = sum(share.num_rows for share in shares), sum(share.weight for share in shares)
    exact = [share.weight / weights * total for share in shares]
    quotas = [int(each) for each in exact]
    by_remainder = sorted(range(len(shares)), key=lambda index: (quotas[index] - exact[index], index))
    for index in by_remainder[: total - sum(quotas)]:
        quotas[index] += 1
    return quotas
