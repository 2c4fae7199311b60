"""Ulysses: ranks share a pack, each with a part of its tokens; around attention they exchange tokens for heads.

In: a process group, a pack that all its ranks have whole. Out: a rank's part of the pack; numbers of all its tokens.
Source: Jacobs et al. 2023, arXiv:2309.14509, section 3. DeepSpeed's own (`UlyssesSPAttentionHF`) knows rows of one
sequence; packed ones need each sequence's end on every rank, so the exchange is ours. DeepSpeed shares states over all
ranks as ever: a rank's gradient is that of its own tokens, and their sum over all ranks is the whole one.

A pack that the ranks do not divide is filled up with tokens of a sequence that is not read.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rlplan.runtime.models.logprob_model import TokenBatch


@dataclass(frozen=True)
class Sharing:
    """This rank's place among those that compute a pass together. group: torch's process group."""

    group: Any
    size: int
    index: int

    def own_part(self, pack: "TokenBatch") -> "TokenBatch":
        """The pack with this rank's tokens, and those of its positions that lie among them; lengths stay whole."""
        padding = -pack.input_ids.shape[1] % self.size
        rows, places = (torch.nn.functional.pad(t, (0, padding)) for t in (pack.input_ids, pack.position_ids))
        share = rows.shape[1] // self.size
        first, last = self.index * share, (self.index + 1) * share
        mine = (pack.positions >= first) & (pack.positions < last)
        return replace(
            pack,
            input_ids=rows[:, first:last],
            position_ids=places[:, first:last],
            sequence_lens=(*pack.sequence_lens, padding) if padding else pack.sequence_lens,
            positions=pack.positions[mine] - first,
            targets=pack.targets[mine],
        )

    def gather(self, numbers: torch.Tensor, pack: "TokenBatch") -> torch.Tensor:
        """One number for each position of the whole pack, from every rank's own. Gradients stay where they belong."""
        length = pack.input_ids.shape[1] + -pack.input_ids.shape[1] % self.size
        owners = pack.positions // (length // self.size)
        counts = torch.bincount(owners, minlength=self.size).tolist()
        whole: torch.Tensor = _Gather.apply(numbers, self, counts)
        return whole

    def to_heads(self, rows: torch.Tensor) -> torch.Tensor:
        """[1, heads, own tokens, d] to [1, own heads, all tokens, d]; fewer heads than ranks are repeated."""
        heads = rows[0].transpose(0, 1)
        if heads.shape[1] % self.size:
            heads = heads.repeat_interleave(self.size // heads.shape[1], 1)
        exchanged: torch.Tensor = _Exchange.apply(heads, self, True)
        return exchanged.transpose(0, 1).unsqueeze(0)

    def to_tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """[1, all tokens, own heads, d] to [1, own tokens, heads, d]."""
        exchanged: torch.Tensor = _Exchange.apply(rows[0], self, False)
        return exchanged.unsqueeze(0)


def meet(size: int) -> Sharing | None:
    """The group of this rank: `size` neighbours. Collective: every rank calls it. None where each computes alone."""
    import torch.distributed as dist

    if size == 1:
        return None
    mine, rank = None, dist.get_rank()
    for first in range(0, dist.get_world_size(), size):
        group = dist.new_group(list(range(first, first + size)))
        if first <= rank < first + size:
            mine = group
    return Sharing(mine, size, rank % size)


class _Exchange(torch.autograd.Function):
    """See `_exchanged`, of which each way is the other's gradient."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sharing: Sharing, to_heads: bool) -> torch.Tensor:
        ctx.sharing, ctx.to_heads = sharing, to_heads
        return _exchanged(rows, sharing, to_heads=to_heads)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _exchanged(gradient, ctx.sharing, to_heads=not ctx.to_heads), None, None


class _Gather(torch.autograd.Function):
    """Numbers of every rank, one after the other. counts: how many each has."""

    @staticmethod
    def forward(ctx: Any, numbers: torch.Tensor, sharing: Sharing, counts: list[int]) -> torch.Tensor:
        import torch.distributed as dist

        most = max(counts)
        padded = torch.nn.functional.pad(numbers, (0, most - len(numbers)))
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=sharing.group)
        first = sum(counts[: sharing.index])
        ctx.own = slice(first, first + counts[sharing.index])
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient[ctx.own], None, None


def _exchanged(rows: torch.Tensor, sharing: Sharing, *, to_heads: bool) -> torch.Tensor:
    """[own tokens, heads, d] to [all tokens, own heads, d], or the other way."""
    import torch.distributed as dist

    parts = rows.unflatten(1, (sharing.size, -1)).transpose(0, 1) if to_heads else rows.unflatten(0, (sharing.size, -1))
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    # Part i goes to rank i, and comes from it. As bytes, for gloo does not know every type.
    dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), group=sharing.group)
    return received.flatten(0, 1) if to_heads else received.transpose(0, 1).flatten(1, 2)
