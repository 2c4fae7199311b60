"""FLOPs of a forward pass: matmuls of the layers and of the head, and attention.

In: a ModelSpec, lengths in tokens. Out: floating-point operations; a multiply-add is two. Left out: norms and other
operators that are limited by memory (elementwise.py), the number of passes (passes.py), vision towers, the indexer of
sparse attention (its layers count as full attention), multi-token-prediction heads.

Symbols: P matmul parameters per token, h hidden, V vocabulary, s tokens of a sequence, a heads, dq, dv widths of a
head's queries and values, w window, C tokens of a chunk.
"""

from dataclasses import dataclass
from functools import lru_cache

from rlplan.memory.model.activations import DELTA_RULE_CHUNK
from rlplan.spec.model import Component, ModelSpec, Parameter
from rlplan.spec.models.parts import LINEAR, NONE, PARALLEL, LinearAttentionSpec
from rlplan.vocabulary import Role

SLIDING = ("sliding", "chunked")
"""Layer kinds whose attention sees `ModelSpec.window` tokens."""
LAYER_COMPONENTS = (
    Component.ATTENTION,
    Component.MLP,
    Component.SHARED_EXPERTS,
    Component.ROUTER,
    Component.EXPERTS,
)


@dataclass(frozen=True)
class Lengths:
    """Mean and mean square of sequence lengths, in tokens; attention grows with the square."""

    mean: float
    mean_square: float


def _is_matmul(parameter: Parameter) -> bool:
    return len(parameter.shape) > 1 and not parameter.is_buffer and not parameter.name.endswith("bias")


@lru_cache(maxsize=256)
def matmul_parameters(model: ModelSpec) -> dict[Component, int]:
    """Matmul parameters of the layers, by component; experts count in full, whether active or not."""
    counts: dict[Component, int] = {}
    for parameter in model.parameters:
        if parameter.component in LAYER_COMPONENTS and _is_matmul(parameter):
            counts[parameter.component] = counts.get(parameter.component, 0) + parameter.numel
    return counts


@lru_cache(maxsize=256)
def layer_parameters(model: ModelSpec) -> float:
    """Parameters of the layers that one token is multiplied with; only active experts count.

    Counts: every matrix of the layers, experts times active/all; no embeddings (a lookup), norms, biases.
    Source: Kaplan et al. 2020, section 2.1 (non-embedding parameters).

    >>> from rlplan.spec.models.catalogue import find_model
    >>> int(layer_parameters(find_model("Qwen/Qwen2.5-7B")))  # 28 * (2 * 3584^2 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    6525288448
    """
    active = 1.0 if model.experts is None else model.experts.num_active / model.experts.num_experts
    return sum(
        numel * (active if component is Component.EXPERTS else 1.0)
        for component, numel in matmul_parameters(model).items()
    )


def linear_flops(model: ModelSpec) -> float:
    """FLOPs per token of the matmuls in the layers, forward.

    Counts: 2 P. Source: Kaplan et al. 2020, section 2.1; Narayanan et al. 2021, appendix.
    Differs: 2 N of all parameters counts the embedding too.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> linear_flops(find_model("Qwen/Qwen2.5-7B")) / 1e9
    13.050576896
    """
    return 2.0 * layer_parameters(model)


def head_flops(model: ModelSpec, role: Role = Role.POLICY) -> float:
    """FLOPs of one token's logits, or of its single value, forward.

    Counts: 2 h V; 2 h for a value or a reward. Source: Narayanan et al. 2021, appendix.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> head_flops(find_model("Qwen/Qwen2.5-7B")), head_flops(find_model("Qwen/Qwen2.5-7B"), Role.VALUE)
    (1089994752.0, 7168.0)
    """
    words = 1 if role in (Role.VALUE, Role.REWARD) else model.head_width
    return 2.0 * model.hidden_size * words


def attended_pairs(lengths: Lengths, window: int | None = None) -> float:
    """Query-key pairs that one head computes for a sequence.

    Counts: (s^2 + s) / 2, causal; with a window w s - (w^2 - w) / 2 for longer sequences. Source: Dao 2023
    (FlashAttention 2), section 3.1.1: blocks above the diagonal are skipped. Assumes: with a window, all sequences have
    the mean length. Differs: model FLOPs of llm-foundry and PaLM count s^2, twice as many.

    >>> attended_pairs(Lengths(4, 16)), attended_pairs(Lengths(4, 16), window=2)
    (10.0, 7.0)
    """
    full = (lengths.mean_square + lengths.mean) / 2
    if window is None or lengths.mean <= window:
        return full
    return min(full, window * lengths.mean - (window * window - window) / 2)


def delta_rule_flops(spec: LinearAttentionSpec) -> float:
    """FLOPs per token of one linear-attention layer with the gated delta rule, forward.

    Counts: reading, correcting and writing a head's state, 6 dk dv; inside a chunk of C tokens half of three matmuls
    with keys and two with values, C (3 dk + 2 dv). Source: Yang et al. 2024 (gated delta networks), section 3.3;
    flash-linear-attention 0.4, ops/gated_delta_rule/chunk.py. Left out: the inverse of a chunk's triangle, C^2 / 3.

    >>> delta_rule_flops(LinearAttentionSpec(num_key_heads=1, num_value_heads=1, key_head_dim=2, value_head_dim=4,
    ...     conv_kernel=4))  # 6 * 2 * 4 + 64 * (6 + 8)
    944.0
    """
    keys, values = spec.key_head_dim, spec.value_head_dim
    return float(spec.num_value_heads * (6 * keys * values + DELTA_RULE_CHUNK * (3 * keys + 2 * values)))


def state_space_flops(spec: LinearAttentionSpec) -> float:
    """FLOPs per token of one Mamba-2 layer, forward.

    Counts: inside a chunk of C tokens half of the products of B and C, C g n, and of those with the inputs, C a p; a
    chunk's state written and read, 4 a n p. Source: Dao and Gu 2024 (Mamba-2), section 6; mamba_ssm 2.2, ssd_combined.

    >>> state_space_flops(LinearAttentionSpec(num_key_heads=1, num_value_heads=2, key_head_dim=8, value_head_dim=4,
    ...     conv_kernel=4, is_mamba=True, chunk=16))  # 16 * (8 + 2 * 4) + 4 * 2 * 8 * 4
    512.0
    """
    values = spec.num_value_heads * spec.value_head_dim
    inside = spec.chunk * (spec.num_key_heads * spec.key_head_dim + values)
    return float(inside + 4 * spec.key_head_dim * values)


def state_flops(spec: LinearAttentionSpec) -> float:
    """FLOPs per token of one linear layer, forward, without its projections.

    Counts: a short convolution's K products and sums and its two gates.

    >>> state_flops(LinearAttentionSpec(num_key_heads=0, num_value_heads=2, key_head_dim=0, value_head_dim=4,
    ...     conv_kernel=3))  # 8 * (2 * 3 + 2)
    64.0
    """
    if spec.is_short_conv:
        return float(spec.num_value_heads * spec.value_head_dim * (2 * spec.conv_kernel + 2))
    return state_space_flops(spec) if spec.is_mamba else delta_rule_flops(spec)


def attention_widths(model: ModelSpec, kind: str) -> int:
    """Sum of query and value widths over all heads, for a layer of this kind."""
    if (latent := model.latent_attention) is not None:
        return model.num_heads * (latent.nope_head_dim + latent.rope_head_dim + latent.value_head_dim)
    if kind == "full" and (wide := model.global_attention) is not None:
        return 2 * model.num_heads * wide.head_dim
    return 2 * model.q_size


def attention_flops(model: ModelSpec, lengths: Lengths) -> float:
    """FLOPs of one sequence's attention in all layers, forward: scores and weighted values.

    Counts: 2 a (dq + dv) per pair and layer; linear layers `state_flops` per token.
    Source: Narayanan et al. 2021, appendix (4 h s^2 per layer without a mask); latent attention: DeepSeek-V2, in its
    training form, which is not absorbed.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> attention_flops(find_model("Qwen/Qwen2.5-7B"), Lengths(1, 1))  # 28 layers * 4 * 3584, one pair
    401408.0
    """
    total = 0.0
    for kind, count in kinds_of_layers(model).items():
        if kind in (LINEAR, PARALLEL) and model.linear_attention is not None:
            total += count * lengths.mean * state_flops(model.linear_attention)
        if kind not in (LINEAR, NONE):
            window = model.window if kind in SLIDING else None
            total += count * 2.0 * attention_widths(model, kind) * attended_pairs(lengths, window)
    return total


@lru_cache(maxsize=256)
def kinds_of_layers(model: ModelSpec) -> dict[str, int]:
    """Count the layers by kind of attention.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> kinds_of_layers(find_model("google/gemma-2-2b"))
    {'sliding': 13, 'full': 13}
    """
    counts: dict[str, int] = {}
    for layer in range(model.num_layers):
        kind = model.attention_kind(layer)
        counts[kind] = counts.get(kind, 0) + 1
    return counts
