"""Ulysses sequence parallelism: ranks split the tokens of a pack, and exchange tokens for heads around attention.

DeepSpeed's `UlyssesSPAttentionHF` supports rows of one sequence only. Packed rows need the ends of all sequences on
every rank, so the exchange is implemented here. ZeRO still partitions states over all ranks: each rank has the gradient
of its own tokens, and the sum over ranks is the full gradient. A pack whose tokens do not divide by the number of ranks
is padded with one more sequence, which is never read.

In: a process group, and a pack that all its ranks hold. Out: a rank's part of the pack; values of all its tokens.
Source: Jacobs et al. 2023, arXiv:2309.14509, section 3.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rlplan.runtime.models.logprob_model import TokenBatch


@dataclass(frozen=True)
class Sharing:
    """This rank's position among the ranks that compute a pass together."""

    group: Any
    """Process group of torch."""

    size: int
    """Number of ranks in the group."""

    index: int
    """This rank's index in the group."""

    def take_own_part(self, pack: "TokenBatch") -> "TokenBatch":
        """The pack with this rank's tokens and their positions; `sequence_lens` stays that of the whole pack."""
        padding = -pack.input_ids.shape[1] % self.size
        rows, places = (torch.nn.functional.pad(t, (0, padding)) for t in (pack.input_ids, pack.position_ids))
        share = rows.shape[1] // self.size
        first, last = self.index * share, (self.index + 1) * share
        is_own = (pack.positions >= first) & (pack.positions < last)
        return replace(
            pack,
            input_ids=rows[:, first:last],
            position_ids=places[:, first:last],
            sequence_lens=(*pack.sequence_lens, padding) if padding else pack.sequence_lens,
            positions=pack.positions[is_own] - first,
            targets=pack.targets[is_own],
        )

    def gather(self, values: torch.Tensor, pack: "TokenBatch") -> torch.Tensor:
        """One value per position of the whole pack, gathered from all ranks; gradients flow to the own ones only."""
        length = pack.input_ids.shape[1] + -pack.input_ids.shape[1] % self.size  # padded as in `take_own_part`
        owners = pack.positions // (length // self.size)
        counts = torch.bincount(owners, minlength=self.size).tolist()
        whole: torch.Tensor = _Gather.apply(values, self, counts)
        return whole

    def to_heads(self, rows: torch.Tensor) -> torch.Tensor:
        """Exchange [1, heads, own tokens, d] for [1, own heads, all tokens, d]; fewer heads than ranks are repeated."""
        heads = rows[0].transpose(0, 1)
        if heads.shape[1] % self.size:
            heads = heads.repeat_interleave(self.size // heads.shape[1], 1)
        exchanged: torch.Tensor = _Exchange.apply(heads, self, True)
        return exchanged.transpose(0, 1).unsqueeze(0)

    def to_tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """Exchange [1, all tokens, own heads, d] for [1, own tokens, heads, d]."""
        exchanged: torch.Tensor = _Exchange.apply(rows[0], self, False)
        return exchanged.unsqueeze(0)


def create_sharing_groups(size: int) -> Sharing | None:
    """Create groups of `size` adjacent ranks; this rank's one, or None for size 1. Collective: every rank calls it."""
    import torch.distributed as dist

    if size == 1:
        return None
    own_group, rank = None, dist.get_rank()
    for first in range(0, dist.get_world_size(), size):  # torch requires every rank to create every group
        group = dist.new_group(list(range(first, first + size)))
        if first <= rank < first + size:
            own_group = group
    return Sharing(own_group, size, rank % size)


class _Exchange(torch.autograd.Function):
    """`_exchange` with a gradient, which is the exchange in the other direction."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sharing: Sharing, to_heads: bool) -> torch.Tensor:
        ctx.sharing, ctx.to_heads = sharing, to_heads
        return _exchange(rows, sharing, to_heads=to_heads)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _exchange(gradient, ctx.sharing, to_heads=not ctx.to_heads), None, None


class _Gather(torch.autograd.Function):
    """Concatenates the values of all ranks. counts: number of values per rank."""

    @staticmethod
    def forward(ctx: Any, numbers: torch.Tensor, sharing: Sharing, counts: list[int]) -> torch.Tensor:
        import torch.distributed as dist

        longest = max(counts)
        padded = torch.nn.functional.pad(numbers, (0, longest - len(numbers)))  # all_gather needs equal sizes
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=sharing.group)
        first = sum(counts[: sharing.index])
        ctx.own = slice(first, first + counts[sharing.index])
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient[ctx.own], None, None


def _exchange(rows: torch.Tensor, sharing: Sharing, *, to_heads: bool) -> torch.Tensor:
    """Exchange [own tokens, heads, d] for [all tokens, own heads, d], or the reverse."""
    import torch.distributed as dist

    parts = rows.unflatten(1, (sharing.size, -1)).transpose(0, 1) if to_heads else rows.unflatten(0, (sharing.size, -1))
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    # Part i goes to rank i and comes from it. Sent as bytes, because gloo does not support every type.
    dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), group=sharing.group)
    return received.flatten(0, 1) if to_heads else received.transpose(0, 1).flatten(1, 2)
