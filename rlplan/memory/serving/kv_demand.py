"""How much KV cache the rollouts of a step ask for, when their lengths are random.

In: a pool's blocks, sequences at once, lengths. Out: bytes at the expected demand and at its 99th percentile, the
probability that a given cache is too small. Left out: the order in which rollouts end; the demand is that of all
sequences at once at their full length, which is reached when the last of a batch have just been admitted.

Symbols: c sequences at once on one engine, P prompt, R response, n responses of a prompt, B block size.
"""

from dataclasses import dataclass

from rlplan.memory.serving.kv import CachePool
from rlplan.spec.models.parts import FULL
from rlplan.spec.parts.lengths import Lengths
from rlplan.units import ceil_div

ENOUGH = 0.99
"""The demand that a cache is sized for is not exceeded with this probability."""


@dataclass(frozen=True)
class KvDemand:
    """The demand of one engine. num_seqs: c. prompt_len: P of every prompt, shared by `num_samples` responses."""

    pool: CachePool
    num_seqs: int
    prompt_len: int
    max_prompt_len: int
    num_samples: int
    lengths: Lengths

    @property
    def prompt_blocks(self) -> int:
        """Blocks of the prompts of c sequences in one group of full layers: a prompt's whole blocks once for its group.

        Counts: ceil(c / n) * floor(P / B). Source: vLLM's prefix caching, v1/core/single_type_kv_cache_manager.py.
        """
        return ceil_div(self.num_seqs, self.num_samples) * (self.prompt_len // self._block)

    def fixed_blocks(self, share: float) -> int:
        """Blocks of windows and recurrent states: each sequence's own, hardly more for longer ones."""
        length = self.prompt_len + int(self.lengths.sum_quantile(share, self.num_seqs) / self.num_seqs)
        windows = (group.num_blocks(length) for group in self.pool.groups if group.kind != FULL)
        return self.num_seqs * sum(windows)

    def bytes_at(self, share: float) -> int:
        """Bytes that the demand does not exceed in a share of steps; 0.5 is the expected demand.

        Counts: for each group of full layers the prompts' blocks, the responses' at the quantile of their sum, half a
        block a sequence for what its last block leaves empty; windows and states as they are.
        Assumes: independent lengths (spec/parts/lengths.py).
        """
        tokens = int(self.lengths.sum_quantile(share, self.num_seqs))
        full = self.prompt_blocks + ceil_div(tokens, self._block) + self.num_seqs // 2
        return (self._num_full * full + self.fixed_blocks(share)) * self.pool.bytes_per_block

    @property
    def least_bytes(self) -> int:
        """Bytes for one longest sequence and vLLM's null block: below this the engine refuses to start."""
        longest = self.max_prompt_len + self.lengths.longest
        return (self.pool.blocks_of_sequence(longest) + 1) * self.pool.bytes_per_block

    def preemption_risk(self, kv_cache: int) -> float:
        """Probability that c sequences at full length need more than the cache: some wait, or restart."""
        left = self.pool.num_blocks(kv_cache) - self.fixed_blocks(0.5)
        if not self._num_full:
            return float(left < 0)
        blocks = left // self._num_full - self.prompt_blocks - self.num_seqs // 2
        return 1.0 - self.lengths.sum_at_most(max(0, blocks) * self._block, self.num_seqs)

    @property
    def _num_full(self) -> int:
        return sum(group.kind == FULL for group in self.pool.groups)

    @property
    def _block(self) -> int:
        return self.pool.block_size * self.pool.context_ranks
