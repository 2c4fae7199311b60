"""What one rank of a rollout engine reads, multiplies and sends for a step: counts, no seconds.

In: a ModelSpec, how the engine cuts and quantises it. Out: EngineCounts. Left out: seconds (step.py), vision
towers, speculative drafts, pipelines (an engine is tensor- or expert-parallel).
Symbols: h hidden, L layers, t tp, a heads, d head_dim, I MLP width, E experts, k of them chosen, Ie their width,
T tokens of a step, s tokens that a sequence has cached.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from rlplan.memory.model.quantization import Quantization, weight_bytes
from rlplan.memory.serving.tensors import stored_bytes
from rlplan.memory.serving.weights import engine_layout
from rlplan.spec.model import Component, ModelSpec, Parameter
from rlplan.spec.models.dimensions import Layout
from rlplan.spec.models.kv import LayerCache, layer_caches
from rlplan.spec.models.parts import LINEAR, NONE
from rlplan.timing.training.mini_batch import largest_normal

BUFFERED = (Component.EMBEDDINGS, Component.VISION, Component.NORMS)
"""Read by the row, or not at all in a text step, or counted among the elementwise passes."""

EVENNESS = 1.0
"""How even routing is: infinite where every expert is as popular as any other. Source: gpt-oss-120b on B200 wants 0.5
to 1, MiniMax-M2.5 on H200, whose router is balanced by a bias, 2 or more (reports/runtime/seconds.md)."""


@dataclass(frozen=True, slots=True)
class Matmuls:
    """Matmuls of one format."""

    num_bytes: int
    """Of their weights."""
    num_weights: int
    """Multiplied with each token."""
    form: str
    """Name of the weights' format, empty for plain ones; it decides in which type the GPU multiplies."""


@dataclass(frozen=True, slots=True)
class ExpertMatmuls:
    """The routed experts of a rank."""

    num_bytes: float
    """Of one expert of one layer, as far as the rank holds it."""
    num_weights: float
    """Of one expert of one layer, as far as the rank holds it."""
    form: str
    num_experts: int
    num_active: int
    """Experts chosen for each token."""
    num_held: int
    """Experts of which the rank holds something."""
    num_layers: int
    """Layers with experts."""
    num_groups: int = 1
    """Ranks that hold different experts; all wait for the one with the most work."""

    def num_hit(self, num_tokens: float) -> float:
        """Experts of a layer that a rank reads for `num_tokens` tokens, on average.

        Counts: held * (1 - (1 - k/E) * (1 + (T-1)*k / (E*c))^-c) with c = EVENNESS: the first token reads its k, the
        others draw experts whose popularity is gamma distributed with shape c.
        Differs: even routing, (1 - k/E)^T, reads 17 % more experts at 16 tokens below.
        Source: the negative binomial's probability of no draw; EVENNESS. Assumes: tokens are independent.

        >>> experts = ExpertMatmuls(1.0, 1.0, "", 128, 4, 128, 1)
        >>> experts.num_hit(1), round(experts.num_hit(16), 2)  # 4, and 128 * (1 - 31/32 * (1 + 15/32)^-1)
        (4.0, 43.57)
        """
        chosen = self.num_active / self.num_experts
        missed = (1.0 - chosen) * (1.0 + max(0.0, num_tokens - 1) * chosen / EVENNESS) ** -EVENNESS
        return self.num_held * min(1.0, num_tokens) * (1.0 - float(missed))

    def slowest(self, num_tokens: float) -> float:
        """Experts that the slowest of the ranks reads: all wait for it in every layer.

        Counts: n hits of `num_held`, each with chance p = n / held, have the deviation sqrt(n (1 - p)); the largest of
        `num_groups` such ranks. Source: binomial; Blom 1958. Assumes: experts are dealt out without regard to load.

        >>> round(ExpertMatmuls(1.0, 1.0, "", 128, 4, 16, 1, 8).slowest(16), 2)  # 5.45 + 1.43 * sqrt(5.45 * 0.66)
        8.17
        """
        hit = self.num_hit(num_tokens)
        spread = largest_normal(self.num_groups) * math.sqrt(hit * max(0.0, 1.0 - hit / self.num_held))
        return min(float(self.num_held), hit + spread)

    def pairs(self, num_tokens: float) -> float:
        """Pairs of a token and an expert on a rank, in one layer: T * k * held / E."""
        return num_tokens * self.num_active * self.num_held / self.num_experts


@dataclass(frozen=True, slots=True)
class CacheReads:
    """Attention layers that read alike; figures are of all of these layers."""

    num_bytes: int
    """Of a cached token."""
    flops: int
    """Of a query with one cached token, on a rank."""
    prefill_flops: int
    """The same in a prefill."""
    window: int | None = None
    """In tokens, None for all."""


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """One rank of an engine."""

    matmuls: tuple[Matmuls, ...]
    """Of every layer, for every token."""
    head: Matmuls
    """For each token that is sampled."""
    experts: ExpertMatmuls | None
    caches: tuple[CacheReads, ...]
    num_layers: int
    elementwise_bytes: int
    """A token's activations, read and written, over all layers."""
    state_bytes: int
    """Read and written for a sequence by linear-attention layers."""
    message_bytes: int
    """Of a token in one all-reduce."""
    num_collectives: int
    """All-reduces of a replica's ranks in a step."""
    ranks: int
    """Of a replica of the attention."""
    replicas: int = 1
    """Each attends to sequences of its own; all of them share the experts."""


@dataclass(frozen=True, slots=True)
class EngineCut:
    """How an engine holds a model."""

    tp: int = 1
    ep: int = 1
    """Above 1 where ranks hold whole experts."""
    replicas: int = 1
    """Of the attention, in data parallel; experts are cut over the ranks of all of them."""
    element_bytes: int = 2
    kv_element_bytes: int = 2
    scheme: Quantization | None = None
    """Of a quantised checkpoint."""

    @property
    def layout(self) -> Layout:
        """What lies on a rank."""
        return engine_layout(self.tp, ep=self.ep, attention_dp=self.replicas if self.ep > 1 else 1)


@lru_cache(maxsize=256)
def engine_counts(model: ModelSpec, cut: EngineCut) -> EngineCounts:
    """Counts of one rank. Raises: SpecError for sizes that do not divide.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> counts = engine_counts(find_model("meta-llama/Llama-3.1-8B"), EngineCut())
    >>> counts.matmuls[0].num_weights  # 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    6979321856
    >>> counts.caches[0].num_bytes, counts.num_collectives  # 32 * 2 * 8 * 128 * 2, and none on one rank
    (131072, 0)
    """
    layout = cut.layout
    tensors = model.held_tensors(layout, has_first=False)
    dense = [tensor for tensor in tensors if tensor.component not in (*BUFFERED, Component.EXPERTS, Component.HEAD)]
    head = [tensor for tensor in tensors if tensor.component is Component.HEAD]
    if not head:  # a tied table
        whole = model.held_tensors(layout, range(0))
        head = [tensor for tensor in whole if tensor.component is Component.EMBEDDINGS][:1]
    caches = layer_caches(model, cut.tp)
    return EngineCounts(
        matmuls=tuple(_by_format(dense, cut)),
        head=next(iter(_by_format(head, cut))),
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


def _by_format(tensors: list[Parameter], cut: EngineCut) -> Iterable[Matmuls]:
    matrices = [tensor for tensor in tensors if len(tensor.shape) > 1]
    plain = [tensor for tensor in matrices if cut.scheme is None or not cut.scheme.covers(tensor)]
    quantized = [tensor for tensor in matrices if cut.scheme is not None and cut.scheme.covers(tensor)]
    if plain:
        yield Matmuls(stored_bytes(plain, cut.element_bytes), _num_multiplied(plain, cut), "")
    if quantized and cut.scheme is not None:
        num_bytes = weight_bytes(quantized, cut.element_bytes, cut.scheme)
        yield Matmuls(num_bytes, _num_multiplied(quantized, cut), cut.scheme.form.name)


def _num_multiplied(tensors: list[Parameter], cut: EngineCut) -> int:
    """Weights with which a rank multiplies each token of its replica: where it has the shared experts whole, these
    see one of tp parts of the tokens.
    """
    times = cut.tp if cut.layout.attention_dp > 1 else 1
    shared = sum(tensor.numel for tensor in tensors if tensor.component is Component.SHARED_EXPERTS)
    return sum(tensor.numel for tensor in tensors) - shared + shared // times


def _num_all_reduces(model: ModelSpec, cut: EngineCut) -> int:
    """Two a layer and one of the table; beside replicas, experts are exchanged among all ranks instead."""
    exchanged = len(model.experts.layers) if model.experts and cut.replicas > 1 else 0
    return 2 * model.num_layers + 1 - exchanged if cut.tp > 1 else 0


def _experts(model: ModelSpec, cut: EngineCut) -> ExpertMatmuls | None:
    """What a rank holds of one expert: the bytes of all experts over their number and layers."""
    spec = model.experts
    if spec is None:
        return None
    layout = cut.layout if cut.ep > 1 else engine_layout(cut.tp * cut.replicas)
    tensors = model.held_tensors(layout, has_first=False)
    held = [tensor for tensor in tensors if tensor.component is Component.EXPERTS and len(tensor.shape) > 1]
    num_held, num_layers = spec.num_experts // cut.ep, len(spec.layers)
    number = num_held * num_layers
    covered = cut.scheme is not None and any(cut.scheme.covers(tensor) for tensor in held)
    num_bytes = weight_bytes(held, cut.element_bytes, cut.scheme)
    weights = sum(tensor.numel for tensor in held)
    form = cut.scheme.form.name if covered and cut.scheme else ""
    return ExpertMatmuls(
        num_bytes / number, weights / number, form, spec.num_experts, spec.num_active, num_held, num_layers, cut.ep
    )


def _cache_reads(model: ModelSpec, caches: tuple[LayerCache, ...], cut: EngineCut) -> tuple[CacheReads, ...]:
    """Attention layers grouped by what they keep.

    Counts: FLOPs of a query and a cached token are 4*a/t*d (scores and values, 2 each); of MLA in a decode, where
    queries are absorbed into the latent, 2*a/t*(2*rkv + dr), in a prefill 2*a/t*(dn + dr + dv).
    Source: FlashAttention-2 (Dao 2023), section 2.1; DeepSeek-V2, arXiv 2405.04434, section 2.1.3.
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
    """Bytes that a token's activations are read and written by all layers, in 16 bits.

    Counts: two norms with their residuals 8*h, rotary 2*a*d/t, gate, up and activation 3*I/t; of experts 3*k*Ie/t, and
    4*k*h to spread tokens over experts and gather them. What matmuls and attention read and write of activations is
    in their own shares of the peak.
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
