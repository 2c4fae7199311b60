"""vLLM's KV cache: groups of layers, bytes of a block, tokens that the pool holds, and the demand of a step's rollouts.

Layers of the same kind form groups, each with its own block table. All groups have the same number of layers, so a
block of any group has the same bytes, and one pool serves all. A block of the pool holds B tokens of one group.
The demand of rollouts, whose lengths are random, is that of all concurrent sequences at their full length. It is
reached when the last sequences of a batch have just been admitted.

In: a ModelSpec, ranks, bytes of an element and a block size; concurrent sequences, lengths. Out: a CachePool; bytes at
the expected demand and at its 99th percentile. Left out: speculative drafts, layouts that pack pages of different sizes
into one block, HiSparse and other caches on the host, the order in which rollouts end.

Symbols: B block_size, t tensor-parallel ranks, c concurrent sequences on one engine, P prompt, n responses of a prompt.
Source: vLLM 0.32.0, v1/core/kv_cache_utils.py and v1/kv_cache_interface.py, unless another is named.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlplan.spec.model import ModelSpec
from rlplan.spec.models.dimensions import Layout, compute_sizes, count_key_heads, count_kv_heads
from rlplan.spec.models.parts import CHUNKED, FULL, LINEAR, NONE, PARALLEL, SLIDING
from rlplan.spec.parts.lengths import Lengths
from rlplan.units import ceil_div, round_up


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The cache of one layer on one rank, in elements."""

    kind: str
    """Attention of the layer: `full`, `sliding`, `chunked`, `linear`, or `none` if nothing is cached."""
    elements_per_token: int = 0
    """Elements per cached token."""
    window: int | None = None
    """Tokens that must stay cached; None: all."""
    index_elements_per_token: int = 0
    """Elements per token for the keys of a sparse-attention indexer, replicated on every rank."""
    recurrent_elements: int = 0
    """Elements of a linear layer's state per sequence of any length: num_value_heads * key_head_dim *
    value_head_dim."""
    conv_elements: int = 0
    """Elements of a linear layer's last conv_kernel - 1 inputs per sequence."""


def list_layer_caches(model: ModelSpec, tp: int = 1, layers: range | None = None) -> tuple[LayerCache, ...]:
    """The caches of every layer, or of some layers, on one of `tp` ranks.

    A layer with attention and a state side by side has two.
    Counts: 2*k*d a token (keys and values, also where Gemma 4 uses keys as values: both are cached), with
    max(1, k/t) heads; MLA rkv+dr, replicated over t; linear layers a constant.
    Source: vLLM 0.32.0 kv_cache_interface.py and mamba_utils.py (`gated_delta_net_state_shape`, `kda_state_shape`,
    `mamba2_state_shape`, `short_conv_state_shape`), HF DynamicCache.
    Differs: Hugging Face keeps conv_kernel inputs of the convolution, vLLM conv_kernel - 1. HF's MLA caches the
    decompressed heads, vLLM the latent.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> list_layer_caches(find_model("meta-llama/Llama-3.1-8B"), tp=16)[0].elements_per_token  # 8 heads
    256
    """
    compute_sizes(model, Layout(tp=tp))
    chosen = layers if layers is not None else range(model.num_layers)
    return tuple(cache for layer in chosen for cache in _list_caches(model, layer, tp))


def kv_elements_per_token(model: ModelSpec, tp: int = 1) -> dict[str, int]:
    """Elements per token, summed over the layers of each kind.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> kv_elements_per_token(find_model("deepseek-ai/DeepSeek-V3"), tp=8)  # 61 * (512 + 64), whatever tp
    {'full': 35136}
    """
    totals: dict[str, int] = {}
    for cache in list_layer_caches(model, tp):
        if cache.kind == NONE:
            continue
        totals[cache.kind] = totals.get(cache.kind, 0) + cache.elements_per_token + cache.index_elements_per_token
    return totals


def _list_caches(model: ModelSpec, layer: int, tp: int) -> tuple[LayerCache, ...]:
    kind = model.attention_kind(layer)
    if kind == PARALLEL:
        return _cache(model, layer, FULL, tp), _linear_cache(model, tp)
    return (_cache(model, layer, kind, tp),)


def _cache(model: ModelSpec, layer: int, kind: str, tp: int) -> LayerCache:
    if kind == LINEAR:
        return _linear_cache(model, tp)
    if kind == NONE or model.reuses_keys(layer):
        return LayerCache(NONE)
    window = model.window if kind in (SLIDING, CHUNKED) else None
    if latent := model.latent_attention:
        index = model.indexer.head_dim if model.indexer and layer in model.indexer.layers else 0
        return LayerCache(kind, latent.kv_rank + latent.rope_head_dim, window, index)
    if kind == FULL and model.global_attention:
        sizes = model.global_attention
        return LayerCache(kind, 2 * count_kv_heads(sizes.num_kv_heads, tp) * sizes.head_dim)
    return LayerCache(kind, 2 * count_kv_heads(model.num_kv_heads, tp) * model.head_dim, window)


def _linear_cache(model: ModelSpec, tp: int) -> LayerCache:
    spec = model.linear_attention
    assert spec is not None, "a linear layer has its sizes"
    keys = count_key_heads(spec, tp) * spec.key_head_dim
    values = spec.num_value_heads * spec.value_head_dim // tp
    return LayerCache(
        LINEAR,
        recurrent_elements=values * spec.key_head_dim,
        conv_elements=(spec.conv_kernel - 1) * (2 * keys + values),
    )


DEFAULT_BLOCK = 16
"""Tokens in a block. Source: config/cache.py `DEFAULT_BLOCK_SIZE`."""
MLA_BLOCK = 64
"""Tokens in a block of latent attention, fixed by FlashMLA. Source: v1/attention/backends/mla/flashmla.py."""
INDEX_SCALE_BYTES = 4
"""Bytes of the scale of each fp8 key of an indexer. Source: models/deepseek_v2.py `DeepseekV32IndexerCache`."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share one block table."""

    kind: str
    num_layers: int
    block_size: int
    """Tokens per block; 0 for a recurrent state of constant size."""
    window: int | None = None
    """Tokens of a sliding window; None for all tokens."""

    def num_blocks(self, num_tokens: int, in_flight: int = 0, context_ranks: int = 1) -> int:
        """Blocks of a sequence of `num_tokens`. in_flight: tokens of scheduled batches.

        Counts: ceil(tokens / B). A sliding window holds at most window - 1 tokens and those in flight, and one block
        more because it may begin inside a block. A recurrent state is one block.

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
    """The KV cache blocks of one rank."""

    bytes_per_block: int
    """Bytes of one block of any group, over all layers of the group."""
    groups: tuple[CacheGroup, ...]
    context_ranks: int = 1
    """Decode context parallel size."""

    @property
    def block_size(self) -> int:
        """Tokens of the smallest block, without recurrent states."""
        return min(group.block_size for group in self.groups if group.block_size)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token in all groups."""
        return self.bytes_per_block * len(self.groups) / self.block_size

    def num_blocks(self, budget: int) -> int:
        """Whole blocks in a budget of bytes, rounded down."""
        return max(budget, 0) // self.bytes_per_block

    def blocks_of_sequence(self, num_tokens: int, in_flight: int = 0) -> int:
        """Blocks of one sequence over all groups."""
        return sum(group.num_blocks(num_tokens, in_flight, self.context_ranks) for group in self.groups)

    def num_tokens(self, num_blocks: int, max_model_len: int, in_flight: int = 0) -> int:
        """Tokens that vLLM's log states as the size of the cache: concurrency at the largest length, times that length.

        Source: `get_kv_cache_capacity`. Differs: with one group and a length that B divides, it is blocks times B.

        >>> pool = CachePool(65536, (CacheGroup("full", 32, 16),))
        >>> pool.num_tokens(1000, 4096), pool.num_tokens(1000, 4000)
        (16000, 16000)
        """
        return num_blocks * max_model_len // self.blocks_of_sequence(max_model_len, in_flight)

    def num_table_tokens(self, num_blocks: int) -> int:
        """Tokens that logs before 0.21 state: blocks over groups, times B. Source: vLLM 0.11 kv_cache_utils.py."""
        return num_blocks // len(self.groups) * self.block_size * self.context_ranks


@dataclass(frozen=True, slots=True)
class _Page:
    """One layer's block. Layers whose pages are equal share a group."""

    kind: str
    window: int | None
    block_size: int
    num_bytes: int


def build_cache_pool(
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
    """Build the pool of one rank.

    layers: layers of its pipeline stage. state_bytes: bytes of an element of a linear layer's state. splits_groups:
    False for engines whose sliding-window layers keep all tokens (before 0.9.2, or by option).
    Counts: one group where all layers are of one kind. Otherwise groups of as many layers as the rarest kind has, or
    the most common one if that is less than 1.5 times as many; the last group of each kind is padded.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> build_cache_pool(find_model("meta-llama/Llama-3.1-8B")).bytes_per_block  # 32 * 16 * 2 * 8 * 128 * 2
    2097152
    >>> pool = build_cache_pool(find_model("openai/gpt-oss-20b"))  # 12 sliding, 12 full: 12 * 16 * 2 * 8 * 64 * 2
    >>> pool.bytes_per_block, [group.num_layers for group in pool.groups]
    (393216, [12, 12])
    """
    chosen = [cache for cache in list_layer_caches(model, tp, layers) if cache.kind != NONE]
    size = block_size or (MLA_BLOCK if model.latent_attention else DEFAULT_BLOCK)
    if any(cache.kind == LINEAR for cache in chosen):
        size = _hybrid_block(chosen, size, element_bytes, state_bytes)
    pages = [_build_page(cache, size, element_bytes, state_bytes, splits_groups) for cache in chosen]
    if len({(page.kind, page.window) for page in pages}) == 1:
        first = pages[0]
        group = CacheGroup(first.kind, len(pages), first.block_size, first.window)
        return CachePool(sum(page.num_bytes for page in pages), (group,), context_ranks)
    groups = _split_groups(_unify_pages(pages))
    largest = max(page.num_bytes for page in pages)
    return CachePool(largest * max(group.num_layers for group in groups), groups, context_ranks)


def _build_page(cache: LayerCache, block_size: int, element_bytes: int, state_bytes: int, splits_groups: bool) -> _Page:
    if cache.kind == LINEAR:
        return _Page(LINEAR, None, 0, _state_bytes(cache, state_bytes))
    window = cache.window if splits_groups else None
    index = cache.index_elements_per_token + (INDEX_SCALE_BYTES if cache.index_elements_per_token else 0)
    kind = FULL if window is None else cache.kind
    return _Page(kind, window, block_size, block_size * (cache.elements_per_token * element_bytes + index))


def _state_bytes(cache: LayerCache, state_bytes: int) -> int:
    return (cache.recurrent_elements + cache.conv_elements) * state_bytes


def _hybrid_block(caches: Sequence[LayerCache], block_size: int, element_bytes: int, state_bytes: int) -> int:
    """Tokens in an attention block of a hybrid model: so many that the block is as large as a recurrent state.

    Source: platforms/interface.py, `Setting attention block size to ... to ensure that attention page size is >= mamba
    page size`.
    """
    tokens = [cache.elements_per_token * element_bytes for cache in caches if cache.kind != LINEAR]
    if not tokens:
        return block_size
    state = max(_state_bytes(cache, state_bytes) for cache in caches if cache.kind == LINEAR)
    return block_size * max(1, ceil_div(state, block_size * max(tokens)))


def _unify_pages(pages: list[_Page]) -> list[_Page]:
    """Bring pages to one size. A smaller page gets more tokens where the sizes divide; otherwise it is padded."""
    largest = max(page.num_bytes for page in pages)
    return [
        replace(page, num_bytes=largest, block_size=page.block_size * (largest // page.num_bytes))
        if largest % page.num_bytes == 0
        else replace(page, num_bytes=largest)
        for page in pages
    ]


def _split_groups(pages: list[_Page]) -> tuple[CacheGroup, ...]:
    """Split layers into groups of the same number of layers. Source: `_get_kv_cache_groups_uniform_page_size`."""
    counts: dict[_Page, int] = {}
    for page in pages:
        counts[page] = counts.get(page, 0) + 1
    fewest, most = min(counts.values()), max(counts.values())
    # vLLM's threshold: up to 1.5 times as many layers, padding the rare kinds costs less than splitting the others.
    width = most if most < 1.5 * fewest else fewest
    return tuple(
        CacheGroup(page.kind, width, page.block_size, page.window)
        for page, count in counts.items()
        for _ in range(round_up(count, width) // width)
    )


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
