"""KV cache demand of a step's rollouts, whose lengths are random.

The demand is that of all concurrent sequences at their full length. It is reached when the last sequences of a batch
have just been admitted.

In: a pool's blocks, concurrent sequences, lengths. Out: bytes at the expected demand and at its 99th percentile, the
probability that a KV cache is too small. Left out: the order in which rollouts end.

Symbols: c concurrent sequences on one engine, P prompt, n responses of a prompt, B block size.
"""

from dataclasses import dataclass

from rlplan.memory.serving.kv import CachePool
from rlplan.spec.models.parts import FULL
from rlplan.spec.parts.lengths import Lengths
from rlplan.units import ceil_div

ENOUGH = 0.99
"""Probability that the demand does not exceed the cache that is sized for it."""


@dataclass(frozen=True)
class KvDemand:
    """KV cache demand of one engine."""

    pool: CachePool
    num_seqs: int
    """Concurrent sequences c."""
    prompt_len: int
    """Tokens P of every prompt."""
    max_prompt_len: int
    num_samples: int
    """Responses n that share a prompt."""
    lengths: Lengths
    """Distribution of response lengths."""

    @property
    def prompt_blocks(self) -> int:
        """Prompt blocks of c sequences in one group of full-attention layers. Responses share whole prompt blocks.

        Counts: ceil(c / n) * floor(P / B). Source: vLLM's prefix caching, v1/core/single_type_kv_cache_manager.py.
        """
        return ceil_div(self.num_seqs, self.num_samples) * (self.prompt_len // self._block)

    def fixed_blocks(self, share: float) -> int:
        """Blocks of sliding windows and recurrent states at the average length; they hardly grow with the length."""
        length = self.prompt_len + int(self.lengths.sum_quantile(share, self.num_seqs) / self.num_seqs)
        windows = (group.num_blocks(length) for group in self.pool.groups if group.kind != FULL)
        return self.num_seqs * sum(windows)

    def predict_bytes(self, share: float) -> int:
        """Bytes that the demand does not exceed in a share of steps; 0.5 gives the expected demand.

        Counts: for each group of full-attention layers the prompts' blocks, the responses' at the quantile of their
        sum, and half a block a sequence for its partly filled last block; `fixed_blocks`.
        Assumes: independent lengths (spec/parts/lengths.py).
        """
        tokens = int(self.lengths.sum_quantile(share, self.num_seqs))
        full = self.prompt_blocks + ceil_div(tokens, self._block) + self.num_seqs // 2
        return (self._num_full * full + self.fixed_blocks(share)) * self.pool.bytes_per_block

    @property
    def least_bytes(self) -> int:
        """Bytes of one longest sequence and vLLM's null block, the minimum with which the engine starts."""
        longest = self.max_prompt_len + self.lengths.longest
        return (self.pool.blocks_of_sequence(longest) + 1) * self.pool.bytes_per_block

    def preemption_risk(self, kv_cache: int) -> float:
        """Probability that c sequences at full length exceed the cache, so that some wait or are preempted."""
        left = self.pool.num_blocks(kv_cache) - self.fixed_blocks(0.5)
        if not self._num_full:  # windows and recurrent states take the same whatever the lengths
            return float(left < 0)
        blocks = left // self._num_full - self.prompt_blocks - self.num_seqs // 2
        return 1.0 - self.lengths.sum_at_most(max(0, blocks) * self._block, self.num_seqs)

    @property
    def _num_full(self) -> int:
        return sum(group.kind == FULL for group in self.pool.groups)

    @property
    def _block(self) -> int:
        return self.pool.block_size * self.pool.context_ranks
