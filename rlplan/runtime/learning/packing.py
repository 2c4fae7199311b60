"""Packing: which rank trains which sequences, and which of them share a micro-batch.

In: lengths in tokens. Out: indices, by rank and by micro-batch. Pure and deterministic.
Left out: cutting a sequence; one that is longer than the limit gets a micro-batch of its own.
"""

from collections.abc import Sequence


def balance_by_length(lengths: Sequence[float], num_shares: int) -> list[list[int]]:
    """Deal sequences out so that the shares' tokens are as even as a greedy rule makes them.

    The longest sequence first, always to the share with the fewest tokens. Source: Graham 1969 (LPT): the largest
    share has at most 4/3 - 1/(3n) of the best one's tokens.

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
    """Fill micro-batches of at most `max_tokens`: each sequence, the longest first, goes where it leaves least room.

    Source: Johnson 1973 (best-fit decreasing): at most 11/9 of the fewest micro-batches, and one.

    A pack's sequences stand by length, for attention takes neighbours of one length together.

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
    """Micro-batches of every rank: dealt out by length, then packed; as many micro-batches on each rank.

    A rank with fewer gets empty ones, for every rank of a data-parallel group has to run the same number of passes.

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
