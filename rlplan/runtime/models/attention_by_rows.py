"""Attention features that fused kernels lack: sliding windows, score caps and sinks, computed a few rows at a time.

Per query i and key j: s_ij = scale q_i k_j, capped as c tanh(s_ij / c), over i - window < j <= i. A sink is one extra
score of every query, for a key whose value is zero. Both passes hold only a few megabytes of scores at once; nothing of
size T squared is kept.

In: queries, keys and values of one packed row, in any type. Out: the attention of each sequence on its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

SCORES_AT_ONCE = 1 << 20
"""Maximum number of scores at once, 4 MiB in fp32. A block has at least one query of each head and sequence."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Parameters of the score function."""

    scale: float
    window: int | None
    """Number of keys that a query attends to, including its own; None for all."""

    cap: float | None
    """Soft cap of scores; None without one."""

    def compute(self, query: torch.Tensor, key: torch.Tensor, first: int) -> torch.Tensor:
        """Scores, [n, heads, rows, keys]; -inf where a query does not attend.

        query: [n, heads, rows, d]; key: [n, heads, keys, d]; first: position of the first query minus the first key's.
        """
        scores = (query @ key.transpose(-1, -2)).mul_(self.scale)
        if self.cap is not None:
            scores.div_(self.cap).tanh_().mul_(self.cap)
        rows, keys = scores.shape[-2:]
        back = torch.arange(first, first + rows, device=scores.device)[:, None] - torch.arange(
            keys, device=scores.device
        )
        unseen = back < 0
        if self.window is not None:
            unseen |= back >= self.window
        return scores.masked_fill_(unseen, float("-inf"))  # after the cap, which would make it finite again


def attend_by_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    lens: tuple[int, ...],
    scores: Scores,
) -> torch.Tensor:
    """Causal attention. query: [1, heads, T, d]; sinks: [heads]. Returns: [1, T, heads, d]."""
    output: torch.Tensor = _ByRows.apply(query, key, value, sinks, lens, scores)
    return output


class _ByRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        lens: tuple[int, ...],
        scores: Scores,
    ) -> torch.Tensor:
        output = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
        logs = query.new_empty(query.shape[1], query.shape[2], dtype=torch.float32)
        for block in _split_blocks(lens, query.shape[1], scores.window):
            q, k, v = block.select_queries(query), block.select_keys(key, query), block.select_keys(value, query)
            weights = scores.compute(q, k, block.offset)
            log = weights.logsumexp(-1)  # log of the softmax's denominator, the only value per query that is kept
            if sinks is not None:
                log = torch.logaddexp(log, sinks.float()[:, None])  # one more term of the denominator
            block.put(output.transpose(1, 2), weights.sub_(log.unsqueeze(-1)).exp_() @ v)
            block.put(logs[None, :, :, None], log.unsqueeze(-1))
        ctx.save_for_backward(query, key, value, output, logs, sinks)
        ctx.lens, ctx.scores = lens, scores
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, logs, sinks = ctx.saved_tensors
        scores: Scores = ctx.scores
        grads = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in (query, key, value)]
        gradient, output = gradient.transpose(1, 2), output.transpose(1, 2)
        sink_grads = None if sinks is None else torch.zeros_like(sinks, dtype=torch.float32)
        for block in _split_blocks(ctx.lens, query.shape[1], scores.window):
            q, k, v = block.select_queries(query), block.select_keys(key, query), block.select_keys(value, query)
            g, log = block.select_queries(gradient), block.select_queries(logs[None, :, :, None])
            # D_i = g_i o_i, which equals sum_j P_ij (g_i v_j). Source: FlashAttention-2, arXiv:2307.08691, algorithm 2.
            row_dots = (g * block.select_queries(output)).sum(-1, keepdim=True)
            weights = scores.compute(q, k, block.offset)
            # The derivative of c tanh(s / c) is 1 - tanh^2, and the score holds c tanh.
            slope = None if scores.cap is None else (weights / scores.cap).square_().neg_().add_(1)
            weights.sub_(log).exp_()  # P
            block.add(grads[2], weights.transpose(-1, -2) @ g)
            score_grads = (g @ v.transpose(-1, -2)).sub_(row_dots).mul_(weights)  # P (g v - D)
            if slope is not None:
                # A masked score of -inf has an infinite slope, and 0 times infinity would be NaN.
                score_grads.mul_(slope.masked_fill_(weights == 0, 0))
            score_grads.mul_(scores.scale)
            block.put(grads[0], score_grads @ k)
            block.add(grads[1], score_grads.transpose(-1, -2) @ q)
            if sinks is not None and sink_grads is not None:
                # The sink's value is zero, so its score's gradient is P_sink (0 - D).
                sink_grads -= ((sinks.float()[:, None, None] - log).exp() * row_dots).sum((0, 2, 3))
        results = [part.to(whole.dtype) for part, whole in zip(grads, (query, key, value), strict=True)]
        return (*results, None if sink_grads is None else sink_grads.to(sinks.dtype), None, None)


@dataclass(frozen=True, slots=True)
class _Block:
    """Some queries of n adjacent sequences of equal length, with the keys they attend to: tensors [n, heads, ., d]."""

    part: slice
    """Tokens of the n sequences in the packed row."""

    count: int
    """Number of sequences, n."""

    first: int
    """First query in each sequence."""

    last: int
    """End of the queries, exclusive. Attention is causal, so it is also the end of the keys."""

    first_key: int
    """First key in each sequence."""

    @property
    def offset(self) -> int:
        """Position of the first query minus the first key's."""
        return self.first - self.first_key

    def select_queries(self, rows: torch.Tensor) -> torch.Tensor:
        return cut_sequences(rows, self.part, self.count)[:, :, self.first : self.last].float()

    def select_keys(self, rows: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """Keys or values, repeated to the number of query heads."""
        part = cut_sequences(rows, self.part, self.count)[:, :, self.first_key : self.last].float()
        groups = query.shape[1] // rows.shape[1]
        return part.repeat_interleave(groups, 1) if groups > 1 else part

    def put(self, rows: torch.Tensor, part: torch.Tensor) -> None:
        cut_sequences(rows, self.part, self.count)[:, :, self.first : self.last] = part

    def add(self, rows: torch.Tensor, part: torch.Tensor) -> None:
        """Add gradients of keys or values, summed over the query heads that share a key head."""
        summed = sum_groups(part, rows.shape[1])
        cut_sequences(rows, self.part, self.count)[:, :, self.first_key : self.last] += summed


def cut_sequences(rows: torch.Tensor, part: slice, count: int) -> torch.Tensor:
    """A part of [1, heads, T, d] with `count` equally long sequences, as a view [count, heads, length, d]."""
    cut: torch.Tensor = rows[0, :, part].unflatten(1, (count, -1))
    return cut.transpose(0, 1)


def sum_groups(part: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Gradients of key heads from those of query heads [n, heads, length, d], summed over the heads that share one."""
    return part if part.shape[1] == num_heads else part.unflatten(1, (num_heads, -1)).sum(2)


def _split_blocks(lens: tuple[int, ...], num_heads: int, window: int | None) -> Iterator[_Block]:
    start = 0
    for length, run in groupby(lens):
        count = len(list(run))
        part = slice(start, start + count * length)
        start = part.stop
        rows = max(1, SCORES_AT_ONCE // (count * num_heads * length))
        for first in range(0, length, rows):
            first_key = 0 if window is None else max(0, first - window + 1)
            yield _Block(part, count, first, min(first + rows, length), first_key)
