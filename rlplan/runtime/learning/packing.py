"""Packing: assignment of sequences to ranks and to micro-batches.

In: lengths in tokens. Out: indices, by rank and by micro-batch. Pure and deterministic.
Left out: splitting sequences; a sequence longer than the limit gets its own micro-batch.
"""

from collections.abc import Sequence


def balance_by_length(lengths: Sequence[float], num_shares: int) -> list[list[int]]:
    """Assign sequences to shares greedily, so that the shares have similar numbers of tokens.

    The longest remaining sequence goes to the share with the fewest tokens. Source: Graham 1969 (LPT): the largest
    share has at most 4/3 - 1/(3n) times the optimum.

    >>> balance_by_length([7, 1, 5, 3], 2)
    [[0, 1], [2, 3]]
    """
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    totals = [0.0] * num_shares
    for index in _longest_first(lengths):
        share = min(range(num_shares), key=lambda rank: (totals[rank], len(shares[rank]), rank))
        shares[share].append(index)
        totals[share] += lengths[index]
    return [sorted(share) for share in shares]


def pack_best_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Pack sequences into micro-batches of at most `max_tokens`, by best-fit decreasing.

    Each sequence, the longest first, goes into the micro-batch where it leaves the least room.
    Source: Johnson 1973: at most 11/9 of the optimal number of micro-batches, plus one.

    Sequences are sorted by length within a pack, because attention batches neighbours of equal length.

    >>> pack_best_fit([5, 4, 3, 2, 2], 8)
    [[2, 0], [3, 4, 1]]
    """
    packs: list[list[int]] = []
    rooms: list[int] = []
    for index in _longest_first(lengths):
        fitting = [pack for pack, room in enumerate(rooms) if room >= lengths[index]]
        if fitting:
            best = min(fitting, key=lambda pack: (rooms[pack], pack))
        else:
            best = len(packs)
            packs.append([])
            rooms.append(max_tokens)
        packs[best].append(index)
        rooms[best] -= lengths[index]
    return [sorted(pack, key=lambda index: (lengths[index], index)) for pack in packs]


def pack_shares(lengths: Sequence[int], num_shares: int, max_tokens: int) -> list[list[list[int]]]:
    """Micro-batches of every rank, balanced by length and packed, the same number on each rank.

    A rank with fewer gets empty ones, because all ranks of a data-parallel group must run the same number of passes.

    >>> pack_shares([8, 2, 2, 2, 2], 2, 6)
    [[[0], []], [[1, 2, 3], [4]]]
    """
    shares = []
    for share in balance_by_length(lengths, num_shares):
        packs = pack_best_fit([lengths[index] for index in share], max_tokens)
        shares.append([[share[index] for index in pack] for pack in packs])
    most = max(len(packs) for packs in shares)
    return [packs + [[] for _ in range(most - len(packs))] for packs in shares]


def _longest_first(lengths: Sequence[float]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
