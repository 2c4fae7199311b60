"""Work of one rank of a rollout engine in a step: bytes read, weights multiplied, messages sent. No seconds.

In: a ModelSpec, and how the engine shards and quantizes it. Out: EngineCounts. Left out: seconds (step.py), vision
towers, speculative drafts, pipeline parallelism (engines have tensor and expert parallelism).
Symbols: h hidden, L layers, t tp, a heads, d head_dim, I MLP width, E experts, k active experts, Ie their width,
T tokens of a step, s cached tokens of a sequence.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from rlplan.memory.model.quantization import Quantization, weight_bytes
from rlplan.memory.serving.kv import LayerCache, list_layer_caches
from rlplan.memory.serving.weights import build_engine_layout, fuse_tensors, stored_bytes
from rlplan.spec.model import Component, ModelSpec, Parameter
from rlplan.spec.models.dimensions import Layout
from rlplan.spec.models.parts import LINEAR, NONE
from rlplan.timing.training.mini_batch import largest_normal

BUFFERED = (Component.EMBEDDINGS, Component.VISION, Component.NORMS)
"""Components without a matmul: tables are read row by row, vision is unused in a text step, norms are elementwise."""

EVENNESS = 1.0
"""Evenness of routing; infinite where all experts are equally popular. Source: measurements of gpt-oss-120b on B200
fit 0.5 to 1; MiniMax-M2.5 on H200, whose router is balanced by a bias, fits 2 or more (reports/runtime/seconds.md)."""


@dataclass(frozen=True, slots=True)
class Matmuls:
    """Matmuls whose weights have one format."""

    num_bytes: int
    """Bytes of the weights."""
    num_weights: int
    """Weights that each token is multiplied with."""
    form: str
    """Name of the weight format, empty for unquantized ones. It decides the compute type of the GPU."""
    num_kernels: int
    """Matmuls that a step starts; vLLM fuses those of the same input."""
    num_inputs: int
    """Input elements per token, over all of these matmuls."""


@dataclass(frozen=True, slots=True)
class ExpertMatmuls:
    """The routed experts of a rank."""

    num_bytes: float
    """Bytes of one expert of one layer on the rank."""
    num_weights: float
    """Weights of one expert of one layer on the rank."""
    form: str
    num_experts: int
    num_active: int
    """Experts chosen per token."""
    num_held: int
    """Experts of which the rank holds at least a shard."""
    num_layers: int
    """Layers with experts."""
    num_groups: int = 1
    """Ranks with different experts; all wait for the one with the most work."""

    def num_hit(self, num_tokens: float) -> float:
        """Experts of a layer that a rank reads for `num_tokens` tokens, on average.

        Counts: held * (1 - (1 - k/E) * (1 + (T-1)*k / (E*c))^-c) with c = EVENNESS. The first token reads its k; the
        others draw experts whose popularity is gamma distributed with shape c.
        Differs: even routing, (1 - k/E)^T, reads 17 % more experts at the 16 tokens of the example.
        Source: negative binomial distribution, zero class; EVENNESS. Assumes: tokens are independent.

        >>> experts = ExpertMatmuls(1.0, 1.0, "", 128, 4, 128, 1)
        >>> experts.num_hit(1), round(experts.num_hit(16), 2)  # 4, and 128 * (1 - 31/32 * (1 + 15/32)^-1)
        (4.0, 43.57)
        """
        chosen = self.num_active / self.num_experts
        missed = (1.0 - chosen) * (1.0 + max(0.0, num_tokens - 1) * chosen / EVENNESS) ** -EVENNESS
        return self.num_held * min(1.0, num_tokens) * (1.0 - float(missed))

    def slowest(self, num_tokens: float) -> float:
        """Experts read by the slowest rank; all ranks wait for it in every layer.

        Counts: n hits of `num_held`, each with probability p = n / held, have the deviation sqrt(n (1 - p)); the
        maximum over `num_groups` ranks. Source: binomial; Blom 1958. Assumes: placement ignores the load of experts.

        >>> round(ExpertMatmuls(1.0, 1.0, "", 128, 4, 16, 1, 8).slowest(16), 2)  # 5.45 + 1.43 * sqrt(5.45 * 0.66)
        8.17
        """
        hit = self.num_hit(num_tokens)
        spread = largest_normal(self.num_groups) * math.sqrt(hit * max(0.0, 1.0 - hit / self.num_held))
        return min(float(self.num_held), hit + spread)

    def pairs(self, num_tokens: float) -> float:
        """Token-expert pairs on a rank in one layer: T * k * held / E."""
        return num_tokens * self.num_active * self.num_held / self.num_experts


@dataclass(frozen=True, slots=True)
class CacheReads:
    """Attention layers that read the KV cache alike; all figures are sums over these layers."""

    num_bytes: int
    """Bytes per cached token."""
    flops: int
    """FLOPs of a query with one cached token on a rank, in a decode."""
    prefill_flops: int
    """FLOPs of a query with one cached token on a rank, in a prefill."""
    window: int | None = None
    """Sliding window in tokens; None for full attention."""


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """Work of one rank of an engine."""

    matmuls: tuple[Matmuls, ...]
    """Matmuls of all layers, for every token."""
    head: Matmuls
    """The head's matmul, for each sampled token."""
    experts: ExpertMatmuls | None
    caches: tuple[CacheReads, ...]
    num_layers: int
    elementwise_bytes: int
    """Bytes of a token's activations, read and written, over all layers."""
    state_bytes: int
    """Bytes of a sequence's states that linear-attention layers read and write."""
    message_bytes: int
    """Bytes of a token in one all-reduce."""
    num_collectives: int
    """All-reduces among the ranks of a replica in a step."""
    ranks: int
    """Ranks of one attention replica."""
    replicas: int = 1
    """Attention replicas with separate sequences; all of them share the experts."""


@dataclass(frozen=True, slots=True)
class EngineCut:
    """How an engine shards and quantizes a model."""

    tp: int = 1
    ep: int = 1
    """Expert-parallel ranks; above 1, each rank holds whole experts."""
    replicas: int = 1
    """Data-parallel replicas of the attention; experts are sharded over the ranks of all of them."""
    element_bytes: int = 2
    kv_element_bytes: int = 2
    scheme: Quantization | None = None
    """Quantization of the checkpoint."""

    @property
    def layout(self) -> Layout:
        """Layout of the model on a rank."""
        return build_engine_layout(self.tp, ep=self.ep, attention_dp=self.replicas if self.ep > 1 else 1)


@lru_cache(maxsize=256)
def engine_counts(model: ModelSpec, cut: EngineCut) -> EngineCounts:
    """Count the work of one rank. Raises: SpecError for sizes that do not divide.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> counts = engine_counts(find_model("meta-llama/Llama-3.1-8B"), EngineCut())
    >>> counts.matmuls[0].num_weights  # 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    6979321856
    >>> counts.caches[0].num_bytes, counts.num_collectives  # 32 * 2 * 8 * 128 * 2, and none on one rank
    (131072, 0)
    """
    layout = cut.layout
    tensors = model.list_rank_tensors(layout, has_first=False)
    dense = [tensor for tensor in tensors if tensor.component not in (*BUFFERED, Component.EXPERTS, Component.HEAD)]
    head = [tensor for tensor in tensors if tensor.component is Component.HEAD]
    if not head:  # the head is tied to the embedding table
        whole = model.list_rank_tensors(layout, range(0))
        head = [tensor for tensor in whole if tensor.component is Component.EMBEDDINGS][:1]
    caches = list_layer_caches(model, cut.tp)
    return EngineCounts(
        matmuls=tuple(_group_by_format(dense, cut)),
        head=next(iter(_group_by_format(head, cut))),
        experts=_experts(model, cut),
        caches=_cache_reads(model, caches, cut),
        num_layers=model.num_layers,
        elementwise_bytes=_elementwise_bytes(model, layout),
        state_bytes=sum(2 * 4 * (cache.recurrent_elements + cache.conv_elements) for cache in caches),
        message_bytes=2 * model.hidden_size,
        num_collectives=_num_all_reduces(model, cut),
        ranks=cut.tp,
        replicas=cut.replicas,
    )


def _group_by_format(tensors: list[Parameter], cut: EngineCut) -> Iterable[Matmuls]:
    matrices = [tensor for tensor in tensors if len(tensor.shape) > 1]
    covered = [cut.scheme is not None and cut.scheme.covers(tensor) for tensor in matrices]
    for scheme in (None, cut.scheme) if cut.scheme else (None,):
        group = [tensor for tensor, is_quantized in zip(matrices, covered, strict=True) if is_quantized == bool(scheme)]
        if group:
            num_bytes = (
                weight_bytes(group, cut.element_bytes, scheme) if scheme else stored_bytes(group, cut.element_bytes)
            )
            fused = fuse_tensors(group)
            num_inputs = sum(tensor.shape[-1] for tensor in fused)
            form = scheme.form.name if scheme else ""
            yield Matmuls(num_bytes, _num_multiplied(group, cut), form, len(fused), num_inputs)


def _num_multiplied(tensors: list[Parameter], cut: EngineCut) -> int:
    """Weights that a rank multiplies each token of its replica with.

    Replicas hold the shared experts whole and split their tokens over tp ranks, so shared experts count 1/tp.
    """
    times = cut.tp if cut.layout.attention_dp > 1 else 1
    shared = sum(tensor.numel for tensor in tensors if tensor.component is Component.SHARED_EXPERTS)
    return sum(tensor.numel for tensor in tensors) - shared + shared // times


def _num_all_reduces(model: ModelSpec, cut: EngineCut) -> int:
    """Two all-reduces per layer and one for the table; with replicas, experts use an exchange among all ranks.

    Counts: two more where queries and keys are normalized over all heads (MiniMax-M2), whose variances ranks share.
    """
    if cut.tp == 1:
        return 0
    exchanged = len(model.experts.layers) if model.experts and cut.replicas > 1 else 0
    wide = sum(
        tensor.name.endswith(("q_norm.weight", "k_norm.weight")) and tensor.shape[0] > model.head_dim
        for tensor in model.list_rank_tensors(build_engine_layout(1), has_first=False)
    )
    return 2 * model.num_layers + 1 - exchanged + wide


def _experts(model: ModelSpec, cut: EngineCut) -> ExpertMatmuls | None:
    """Routed experts of a rank; the size of one expert is the total over the number of experts and layers."""
    spec = model.experts
    if spec is None:
        return None
    # without expert parallelism, each expert is sharded over the ranks of all replicas
    layout = cut.layout if cut.ep > 1 else build_engine_layout(cut.tp * cut.replicas)
    tensors = model.list_rank_tensors(layout, has_first=False)
    parts = [tensor for tensor in tensors if tensor.component is Component.EXPERTS and len(tensor.shape) > 1]
    num_held, num_layers = spec.num_experts // cut.ep, len(spec.layers)
    number = num_held * num_layers
    covered = cut.scheme is not None and any(cut.scheme.covers(tensor) for tensor in parts)
    num_bytes = weight_bytes(parts, cut.element_bytes, cut.scheme)
    weights = sum(tensor.numel for tensor in parts)
    form = cut.scheme.form.name if covered and cut.scheme else ""
    return ExpertMatmuls(
        num_bytes / number, weights / number, form, spec.num_experts, spec.num_active, num_held, num_layers, cut.ep
    )


def _cache_reads(model: ModelSpec, caches: tuple[LayerCache, ...], cut: EngineCut) -> tuple[CacheReads, ...]:
    """Group attention layers by their window.

    Counts: FLOPs of a query and a cached token are 4*a/t*d (scores and values, 2 each). MLA absorbs queries into the
    latent in a decode, 2*a/t*(2*rkv + dr); in a prefill it needs 2*a/t*(dn + dr + dv).
    """
    grouped: dict[int | None, list[int]] = {}
    for cache in caches:
        if cache.kind in (LINEAR, NONE):
            continue
        sums = grouped.setdefault(cache.window, [0, 0, 0])
        elements = cache.elements_per_token + cache.index_elements_per_token
        decode, prefill = _attention_flops(model, cut.tp, cache.window)
        for index, value in enumerate((elements * cut.kv_element_bytes, decode, prefill)):
            sums[index] += value
    return tuple(CacheReads(sums[0], sums[1], sums[2], window) for window, sums in grouped.items())


def _attention_flops(model: ModelSpec, tp: int, window: int | None) -> tuple[int, int]:
    heads = model.num_heads // tp
    if latent := model.latent_attention:
        prefill = latent.nope_head_dim + latent.rope_head_dim + latent.value_head_dim
        return 2 * heads * (2 * latent.kv_rank + latent.rope_head_dim), 2 * heads * prefill
    whole = model.global_attention
    flops = 4 * heads * (whole.head_dim if whole and window is None else model.head_dim)
    return flops, flops


def _elementwise_bytes(model: ModelSpec, layout: Layout) -> int:
    """Bytes of a token's activations that all layers read and write outside matmuls and attention, in 16 bits.

    Counts: two norms with their residuals 8*h, rotary 2*a*d/t, gate, up and activation 3*I/t. Experts add 3*k*Ie/t, and
    4*k*h to distribute tokens over experts and gather them. Matmuls and attention include their own activations in
    their shares of the peak.
    Source: own count over vLLM's Llama and fused MoE layers. Assumes: norms, activation and rotary fused, a pass each.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> _elementwise_bytes(find_model("meta-llama/Llama-3.1-8B"), Layout())  # 64 * (8*4096 + 2*4096 + 3*14336)
    5373952
    """
    h, tp = model.hidden_size, layout.tp
    total = model.num_layers * (8 * h + 2 * model.q_size // tp)
    spec = model.experts
    with_experts = len(spec.layers) if spec else 0
    total += model.num_dense_mlps * 3 * model.intermediate_size // tp
    if spec:
        width = spec.num_active * spec.intermediate_size + spec.shared_intermediate_size
        total += with_experts * (3 * width // tp + 4 * spec.num_active * h)
    return 2 * total
