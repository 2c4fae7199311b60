"""The cache of each layer per sequence, in elements; bytes follow elsewhere.

In: a ModelSpec, and the tensor-parallel size. Out: a LayerCache per layer. Left out: bytes, blocks, prefix sharing,
dtypes (a recurrent state is usually kept in fp32).

Symbols: k key heads, d head_dim, rkv and dr MLA's latent and rotary parts, t tensor-parallel ranks.
"""

from dataclasses import dataclass

from rlplan.spec.model import ModelSpec
from rlplan.spec.models.dimensions import Layout, compute_sizes, count_kv_heads
from rlplan.spec.models.parts import CHUNKED, FULL, LINEAR, NONE, SLIDING


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


def list_layer_caches(model: ModelSpec, tp: int = 1) -> tuple[LayerCache, ...]:
    """The cache of every layer on one of `tp` ranks.

    Counts: 2*k*d a token (keys and values, also where Gemma 4 uses keys as values: both are cached), with
    max(1, k/t) heads; MLA rkv+dr, replicated over t; linear layers a constant.
    Source: vLLM 0.25 kv_cache_interface.py and mamba_utils.py (`gated_delta_net_state_shape`), HF DynamicCache.
    Differs: Hugging Face keeps conv_kernel inputs of the convolution, vLLM conv_kernel - 1. HF's MLA caches the
    decompressed heads, vLLM the latent.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> list_layer_caches(find_model("meta-llama/Llama-3.1-8B"), tp=16)[0].elements_per_token  # 8 heads
    256
    """
    compute_sizes(model, Layout(tp=tp))
    return tuple(_cache(model, layer, tp) for layer in range(model.num_layers))


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


def _cache(model: ModelSpec, layer: int, tp: int) -> LayerCache:
    kind = model.attention_kind(layer)
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
    keys, values = spec.num_key_heads * spec.key_head_dim, spec.num_value_heads * spec.value_head_dim
    return LayerCache(
        LINEAR,
        recurrent_elements=spec.num_value_heads * spec.key_head_dim * spec.value_head_dim // tp,
        conv_elements=(spec.conv_kernel - 1) * (2 * keys + values) // tp,
    )
