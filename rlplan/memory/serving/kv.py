"""The KV cache of vLLM: which layers share blocks, what a block costs, and how many tokens the pool holds.

In: a ModelSpec, ranks, bytes of an element and a block size. Out: a CachePool. Left out: speculative drafts, layouts
that pack pages of different sizes into one block, HiSparse and other caches on the host.

Layers with the same needs form a group with a block table of its own; groups are cut to the same number of layers, so
that a block of any group has the same bytes and all draw from one pool. A block of the pool is B tokens of one group.

Symbols: B block_size, L layers, t tensor-parallel ranks, c decode-context-parallel ranks, P prompt, R response, n
responses of a prompt.
Source: vLLM 0.32.0, v1/core/kv_cache_utils.py and v1/kv_cache_interface.py, unless said otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlplan.spec.model import ModelSpec
from rlplan.spec.models.kv import LayerCache, layer_caches
from rlplan.spec.models.parts import FULL, LINEAR, NONE
from rlplan.units import ceil_div, round_up

DEFAULT_BLOCK = 16
"""Tokens in a block. Source: config/cache.py `DEFAULT_BLOCK_SIZE`."""
MLA_BLOCK = 64
"""Tokens in a block of latent attention: what FlashMLA takes. Source: v1/attention/backends/mla/flashmla.py."""
INDEX_SCALE_BYTES = 4
"""A scale beside each fp8 key of an indexer. Source: models/deepseek_v2.py `DeepseekV32IndexerCache`."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers with one block table. window: None for all tokens. block_size: tokens; 0 for a state of constant size."""

    kind: str
    num_layers: int
    block_size: int
    window: int | None = None

    def num_blocks(self, num_tokens: int, in_flight: int = 0, context_ranks: int = 1) -> int:
        """Blocks that a sequence of `num_tokens` holds. in_flight: tokens computed but not settled yet.

        Counts: ceil(tokens / B); at most the window - 1 and what is in flight, with one block more because a window may
        begin inside a block; one for a recurrent state.

        >>> CacheGroup("full", 8, 16).num_blocks(100), CacheGroup("sliding", 8, 16, window=64).num_blocks(1000)
        (7, 5)
        """
        if self.kind == LINEAR:
            return 1
        if self.window is None:
            return ceil_div(ceil_div(num_tokens, context_ranks), self.block_size)
        return ceil_div(min(self.window - 1 + in_flight, num_tokens), self.block_size) + 1


@dataclass(frozen=True, slots=True)
class CachePool:
    """The blocks of one rank. bytes_per_block: of one block of any group, over all layers of the group."""

    bytes_per_block: int
    groups: tuple[CacheGroup, ...]
    context_ranks: int = 1

    @property
    def block_size(self) -> int:
        """Tokens of the smallest block that holds tokens."""
        return min(group.block_size for group in self.groups if group.block_size)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token in all groups."""
        return self.bytes_per_block * len(self.groups) / self.block_size

    def num_blocks(self, budget: int) -> int:
        """Whole blocks in a budget of bytes: rounded down, for it is a capacity."""
        return max(budget, 0) // self.bytes_per_block

    def blocks_of_sequence(self, num_tokens: int, in_flight: int = 0) -> int:
        """Blocks of one sequence over all groups."""
        return sum(group.num_blocks(num_tokens, in_flight, self.context_ranks) for group in self.groups)

    def num_tokens(self, num_blocks: int, max_model_len: int, in_flight: int = 0) -> int:
        """Tokens that the log calls the size of the cache: sequences of the largest length, times that length.

        Source: `get_kv_cache_capacity`. Differs: with one group it is blocks times B, but for a length that B does not
        divide.

        >>> pool = CachePool(65536, (CacheGroup("full", 32, 16),))
        >>> pool.num_tokens(1000, 4096), pool.num_tokens(1000, 4000)
        (16000, 16000)
        """
        return num_blocks * max_model_len // self.blocks_of_sequence(max_model_len, in_flight)

    def num_table_tokens(self, num_blocks: int) -> int:
        """The same in logs before 0.21: blocks over groups, times B. Source: vLLM 0.11 kv_cache_utils.py."""
        return num_blocks // len(self.groups) * self.block_size * self.context_ranks


@dataclass(frozen=True, slots=True)
class _Page:
    """One layer's block. num_bytes: of the block. What must be equal for two layers to share a group."""

    kind: str
    window: int | None
    block_size: int
    num_bytes: int


def cache_pool(
    model: ModelSpec,
    *,
    tp: int = 1,
    element_bytes: int = 2,
    state_bytes: int = 2,
    block_size: int | None = None,
    context_ranks: int = 1,
    layers: range | None = None,
    splits_groups: bool = True,
) -> CachePool:
    """The pool of one rank. layers: of its pipeline stage. state_bytes: an element of a linear layer's state.

    splits_groups: False for engines that give sliding-window layers all tokens (before 0.9.2, or by option).
    Counts: one group of all layers where all need the same tokens; else groups of as many layers as the rarest kind
    has (or the commonest, where that is less than half more), the last of each kind padded.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> cache_pool(find_model("meta-llama/Llama-3.1-8B")).bytes_per_block  # 32 * 16 * 2 * 8 * 128 * 2
    2097152
    >>> pool = cache_pool(find_model("openai/gpt-oss-20b"))  # 12 sliding and 12 full layers: 12 * 16 * 2 * 8 * 64 * 2
    >>> pool.bytes_per_block, [group.num_layers for group in pool.groups]
    (393216, [12, 12])
    """
    caches = layer_caches(model, tp)
    chosen = [caches[layer] for layer in layers] if layers is not None else list(caches)
    chosen = [cache for cache in chosen if cache.kind != NONE]
    size = block_size or (MLA_BLOCK if model.latent_attention else DEFAULT_BLOCK)
    if any(cache.kind == LINEAR for cache in chosen):
        size = _hybrid_block(chosen, size, element_bytes, state_bytes)
    pages = [_page(cache, size, element_bytes, state_bytes, splits_groups) for cache in chosen]
    if len({(page.kind, page.window) for page in pages}) == 1:
        first = pages[0]
        group = CacheGroup(first.kind, len(pages), first.block_size, first.window)
        return CachePool(sum(page.num_bytes for page in pages), (group,), context_ranks)
    groups = _split(_unified(pages))
    largest = max(page.num_bytes for page in pages)
    return CachePool(largest * max(group.num_layers for group in groups), groups, context_ranks)


def _page(cache: LayerCache, block_size: int, element_bytes: int, state_bytes: int, splits_groups: bool) -> _Page:
    if cache.kind == LINEAR:
        return _Page(LINEAR, None, 0, _state_bytes(cache, state_bytes))
    window = cache.window if splits_groups else None
    index = cache.index_elements_per_token + (INDEX_SCALE_BYTES if cache.index_elements_per_token else 0)
    kind = FULL if window is None else cache.kind
    return _Page(kind, window, block_size, block_size * (cache.elements_per_token * element_bytes + index))


def _state_bytes(cache: LayerCache, state_bytes: int) -> int:
    return (cache.recurrent_elements + cache.conv_elements) * state_bytes


def _hybrid_block(caches: Sequence[LayerCache], block_size: int, element_bytes: int, state_bytes: int) -> int:
    """Tokens in an attention block beside recurrent layers: enough that its bytes hold a state.

    Source: platforms/interface.py, `Setting attention block size to ... to ensure that attention page size is >= mamba
    page size`.
    """
    tokens = [cache.elements_per_token * element_bytes for cache in caches if cache.kind != LINEAR]
    if not tokens:
        return block_size
    state = max(_state_bytes(cache, state_bytes) for cache in caches if cache.kind == LINEAR)
    return block_size * max(1, ceil_div(state, block_size * max(tokens)))


def _unified(pages: list[_Page]) -> list[_Page]:
    """Pages of one size: a smaller one takes more tokens where that divides, else it is padded."""
    largest = max(page.num_bytes for page in pages)
    return [
        replace(page, num_bytes=largest, block_size=page.block_size * (largest // page.num_bytes))
        if largest % page.num_bytes == 0
        else replace(page, num_bytes=largest)
        for page in pages
    ]


def _split(pages: list[_Page]) -> tuple[CacheGroup, ...]:
    """Groups of the same number of layers. Source: `_get_kv_cache_groups_uniform_page_size`."""
    counts: dict[_Page, int] = {}
    for page in pages:
        counts[page] = counts.get(page, 0) + 1
    fewest, most = min(counts.values()), max(counts.values())
    width = most if most < 1.5 * fewest else fewest
    return tuple(
        CacheGroup(page.kind, width, page.block_size, page.window)
        for page, count in counts.items()
        for _ in range(round_up(count, width) // width)
    )
