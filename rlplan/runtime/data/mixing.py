"""Mixing: the order of prompts from one data set, or from several by weight.

An epoch of the mixture has as many prompts as all data sets have rows. Each data set fills a share equal to its weight,
and passes through its rows in its own epochs. The n-th prompt depends only on n, so a resumed run needs no other state.

In: sizes and weights of data sets, a seed, a number. Out: a row. Left out: reading rows (loading.py).
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
    """See the module docstring. shuffles: each epoch is shuffled; otherwise rows keep their order.

    difficulties: one number per row of all data sets; each epoch of a data set is sorted by it. Empty: no sorting.
    """

    def __init__(
        self, shares: Sequence[Share], seed: int, *, shuffles: bool = True, difficulties: Sequence[float] = ()
    ) -> None:
        self.shares, self.seed, self.shuffles, self.difficulties = shares, seed, shuffles, difficulties
        self.num_rows = sum(share.num_rows for share in shares)
        self.quotas = compute_quotas(shares)
        # a step at the end of an epoch takes prompts of two epochs
        self._turns_of = lru_cache(maxsize=2)(self._draw_turns)
        self._order_of = lru_cache(maxsize=2 * len(shares))(self._draw_order)

    def find_row(self, number: int) -> int:
        """Index of the n-th prompt, from 0, in the concatenated rows of all data sets."""
        epoch, index = divmod(number, self.num_rows)
        source, place = self._turns_of(epoch)[index]
        # Each epoch of the mixture takes the same number of prompts from a data set, so the set's own position follows.
        own_epoch, own_index = divmod(epoch * self.quotas[source] + place, self.shares[source].num_rows)
        return sum(share.num_rows for share in self.shares[:source]) + self._order_of(source, own_epoch)[own_index]

    def _draw_turns(self, epoch: int) -> list[tuple[int, int]]:
        """(data set, its prompts so far) for each position of an epoch: shuffled, or each set spread evenly."""
        pairs = [(source, place) for source, quota in enumerate(self.quotas) for place in range(quota)]
        if not self.shuffles or self.difficulties:  # spread evenly, so that a curriculum rises alike in all data sets
            return sorted(pairs, key=lambda turn: ((turn[1] + 0.5) / self.quotas[turn[0]], turn[0]))
        order = [source for source, _ in pairs]
        random.Random(f"{self.seed}/mixture/{epoch}").shuffle(order)
        taken = [iter(range(quota)) for quota in self.quotas]
        return [(source, next(taken[source])) for source in order]

    def _draw_order(self, source: int, epoch: int) -> list[int]:
        """The order of a data set's rows in one epoch; rows of equal difficulty keep their shuffled order."""
        share, first = self.shares[source], sum(share.num_rows for share in self.shares[:source])
        order = list(range(share.num_rows))
        if self.shuffles:
            random.Random(f"{self.seed}/epoch/{epoch}" + (f"/{share.name}" if share.name else "")).shuffle(order)
        if self.difficulties:
            order.sort(key=lambda row: self.difficulties[first + row])
        return order


def compute_quotas(shares: Sequence[Share]) -> list[int]:
    """Prompts of each data set in an epoch of the mixture, by weight; the largest remainders are rounded up.

    >>> compute_quotas([Share("a", 6, 3.0), Share("b", 4, 1.0)])  # 7.5 and 2.5 of 10
    [8, 2]
    """
    total, weights = sum(share.num_rows for share in shares), sum(share.weight for share in shares)
    exact = [share.weight / weights * total for share in shares]
    quotas = [int(share_rows) for share_rows in exact]
    by_remainder = sorted(range(len(shares)), key=lambda index: (quotas[index] - exact[index], index))
    for index in by_remainder[: total - sum(quotas)]:
        quotas[index] += 1
    return quotas
