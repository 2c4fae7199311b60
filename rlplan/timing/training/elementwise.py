"""Bytes of the operators between matmuls: norms, rotary positions, activations, residuals, the cross-entropy; and
the cost of Megatron's selective recomputation, which recomputes chosen modules of a layer.

In: a ModelSpec, whether kernels are fused. Out: bytes read and written per token in a forward pass. These operators are
limited by memory bandwidth, which has grown less than matmul rates, so newer GPUs reach a smaller share of peak FLOP/s.
Left out: operands of matmuls (part of their efficiency), dropout, biases (epilogues), vision towers.

Symbols: h hidden, q, k widths of queries and keys, I MLP width, t experts per token, e = 2 bytes per element.
"""

from functools import lru_cache
from typing import NamedTuple

from rlplan.memory.model.block import Norm
from rlplan.memory.model.block_families import find_traits
from rlplan.spec.model import Component, ModelSpec
from rlplan.spec.models.parts import LINEAR, NONE
from rlplan.timing.training.flops import kinds_of_layers, layer_parameters, matmul_parameters
from rlplan.vocabulary import Loss

ELEMENT_BYTES = 2
FUSED_NORM = 4
"""Bytes per element of a norm in one kernel: one read, one write."""
NORM_BYTES = {Norm.RMS: 36, Norm.RMS_FP32: 38, Norm.LAYER: 4, Norm.LAYER_FP32: 16, Norm.LAYER_BY_HAND: 44}
"""Bytes per element of a norm. RMS: to fp32 6, square 8, mean 4, scale 8, to bf16 6, weight 4 (transformers 5.19,
LlamaRMSNorm, one kernel per operator). RMS_FP32 applies its weight in fp32. LAYER is torch's kernel."""
RESIDUAL = 6
"""Bytes per element of a sum: two reads, one write."""
ROTARY, FUSED_ROTARY = 20, 4
"""Bytes per element of q and k: times cosine 4, rotated halves 6, times sine 4, sum 6 (apply_rotary_pos_emb)."""
GATED, FUSED_GATED = 10, 6
"""Bytes per element of I: activation 4, product 6; in one kernel two reads and one write."""
CLAMPED = 44
"""Bytes per element of gpt-oss's experts, one kernel per operator: biases of gate and up 8, both clamped 8, gate times
1.702 4, sigmoid 4, product 6, up plus 1 4, product 6, routing weight 4 (Megatron-Core 0.14 moe/experts.py,
transformers 5.19)."""
PLAIN_MLP, TANH_MLP = 4, 36
"""Bytes per element of an activation: in one kernel, and in the nine kernels of GPT-2's explicit tanh."""
PERMUTED = 4
"""Bytes per element of a row that is copied to its expert or back."""
STATES = 16
"""Bytes per element of a chunk's state in Mamba-2: fp32, written by its chunk, read and written by the pass over
chunks, read by the scan (mamba_ssm 2.2, ssd_combined)."""
SCAN = 3.5
"""Time of Mamba-2's scan relative to its memory traffic; none of its five Triton kernels reaches the memory's rate.
Derived from Dao and Gu 2024, section 9.3: with states of 64 it is as fast as FlashAttention 2 at 2,048 tokens (A100).
There, 4,096 FLOPs per element at 0.78 of matmul rates take 21 ps; its own FLOPs take 3 ps, and its bytes are 8 per
element. It is not fitted to throughput: eleven points of Nemotron 3 (Megatron-Bridge, H100 and Blackwell) err by 8.1 %
with it, by 14.5 % without."""
SHORT_CONV = 20
"""Bytes per element of a gated short convolution: both gates 6 each, the convolution 4, its output transposed 4
(transformers 5.19, modeling_lfm2.py, with the kernel of causal-conv1d)."""
SCORES = 11
"""Bytes per pair and head of unfused attention: scores written 2, softmax 4, dropout 5."""
BACKWARD = 2.0
"""Bytes of the backward pass relative to the forward pass. Counts: a norm reads two and writes one, twice; a gated
product reads three and writes two; a sum reads two and writes one: 1.5 to 2.2 times."""


@lru_cache(maxsize=512)
def layers_bytes(model: ModelSpec, *, is_fused: bool) -> float:
    """Bytes per token of the elementwise operators of all layers, forward.

    Counts: two norms, two sums, rotary positions of q + k, attention's q, k, v and output, the MLP or its experts, with
    rows copied to experts and back. Source: transformers 5.19 modeling files, operator by operator; fused: Transformer
    Engine, Liger, torch.compile (`norm`, `rope`, `swiglu` in one kernel each).

    >>> from rlplan.spec.models.catalogue import find_model
    >>> qwen = find_model("Qwen/Qwen2.5-7B")  # h 3584, q 3584, k 512, I 18944
    >>> layers_bytes(qwen, is_fused=True) / 28  # 20*3584 + 4*4096 + 4*4096 + 6*18944
    218112.0
    >>> layers_bytes(qwen, is_fused=False) / 28  # 84*3584 + 20*4096 + 4*4096 + 10*18944
    588800.0
    """
    inner = dense_mlp_bytes(model, is_fused=is_fused) + experts_bytes(model, is_fused=is_fused)
    return inner + sum(count * _outer_bytes(model, kind, is_fused) for kind, count in kinds_of_layers(model).items())


def dense_mlp_bytes(model: ModelSpec, *, is_fused: bool = True) -> float:
    """Bytes per token of all dense MLPs, forward. Source: as `layers_bytes`."""
    return _mlp_bytes(model, is_fused) * model.num_dense_mlps


def experts_bytes(model: ModelSpec, *, is_fused: bool = True, has_rows: bool = True) -> float:
    """Bytes per token of all expert layers, forward. has_rows: includes copies of rows to experts and back.

    Counts: activations of the k active experts and of the shared ones; 8 h per active expert.
    Source: as `layers_bytes`.
    """
    experts = model.experts
    if experts is None:
        return 0.0
    per_width = (FUSED_GATED if is_fused else GATED) if experts.is_gated else PLAIN_MLP
    per_width = CLAMPED if model.architecture == "GptOssForCausalLM" else per_width
    rows = 2 * PERMUTED * (experts.latent_size or model.hidden_size) * has_rows
    routed = experts.num_active * (experts.intermediate_size * per_width + rows)
    return len(experts.layers) * (routed + per_width * experts.shared_intermediate_size)


@lru_cache(maxsize=512)
def between_bytes(model: ModelSpec, *, is_fused: bool) -> float:
    """The norms and sums within `layers_bytes`.

    Tensor-parallel ranks share them under sequence parallelism; without it, each rank computes all of them.
    Source: Korthikanti et al. 2022, section 4.2.2.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> between_bytes(find_model("Qwen/Qwen2.5-7B"), is_fused=True) / 28  # 2*(4 + 6)*3584
    71680.0
    """
    num_norms: int = find_traits(model).get("num_norms", 2)
    sums = 1 if NONE in model.attention_kinds else 2
    layer_bytes = model.hidden_size * (num_norms * _norm_bytes(model, is_fused) + sums * RESIDUAL)
    return float(layer_bytes * model.num_layers)


def _norm_bytes(model: ModelSpec, is_fused: bool) -> int:
    norm = find_traits(model).get("norm", Norm.RMS)
    return min(NORM_BYTES[norm], FUSED_NORM) if is_fused else NORM_BYTES[norm]


def _outer_bytes(model: ModelSpec, kind: str, is_fused: bool) -> float:
    """Bytes per token of the norms, sums and attention of one layer."""
    traits, norm = find_traits(model), _norm_bytes(model, is_fused)
    outer = between_bytes(model, is_fused=is_fused) / model.num_layers
    if kind == NONE:
        return outer
    if kind == LINEAR and (rule := model.linear_attention) is not None:
        if rule.is_short_conv:
            return outer + rule.num_value_heads * rule.value_head_dim * SHORT_CONV
        keys, values = rule.num_key_heads * rule.key_head_dim, rule.num_value_heads * rule.value_head_dim
        states = STATES * keys * values / (rule.num_key_heads * rule.chunk) if rule.is_mamba else 0.0
        scanned = (2 * keys + values) * 2 * ELEMENT_BYTES + states
        scanned *= SCAN if rule.is_mamba else 1.0
        return outer + (2 * keys + values) * FUSED_NORM + values * (norm + GATED) + scanned
    rotary = (FUSED_ROTARY if is_fused else ROTARY) if traits.get("has_rotary", True) else 0
    if (latent := model.latent_attention) is not None:
        keys = model.num_heads * (latent.nope_head_dim + latent.rope_head_dim)
        values = model.num_heads * latent.value_head_dim
        turned = (model.num_heads + 1) * latent.rope_head_dim * rotary
        copied = 2 * keys * PERMUTED + (latent.q_rank + latent.kv_rank) * norm
        return outer + turned + copied + ELEMENT_BYTES * (2 * keys + 2 * values)
    both = model.q_size + model.kv_size
    qk_norm = norm if model.has_qk_norm else 0
    return outer + both * (rotary + qk_norm) + 2 * ELEMENT_BYTES * both


def _mlp_bytes(model: ModelSpec, is_fused: bool) -> float:
    widths = find_traits(model).get("mlp_saved_widths", 4)
    if widths == 4:
        return model.intermediate_size * (FUSED_GATED if is_fused else GATED)
    return model.intermediate_size * (TANH_MLP if widths == 5 and not is_fused else PLAIN_MLP)


def cast_bytes(
    model: ModelSpec, *, is_backward: bool, tp: int = 1, scales_rows: bool = False, transposes_gradients: bool = False
) -> float:
    """Bytes per token of casts to 8-bit floats in all layers, in one pass, on all tp ranks.

    Counts, per element: forward, the inputs of matmuls (2 h + q + I) are read for their maximum, read again and written
    in 8 bits: 5 bytes. Backward, output gradients take 5 bytes, and inputs are transposed (3).
    scales_rows: backward casts both by rows and columns, 10 and 5 bytes. Each rank casts all of h, gathered in 16 bits.
    transposes_gradients: gradients are transposed too (3), and rows gathered in 8 bits are copied on each rank (2).
    Source: torchao 0.7 float8 with tensor scales, 0.11 with row scales (float8_linear.py), recomputed each time;
    float8_ops.py (`preprocess_addmm`: the second operand by columns), pytorch issue 133242 (read twice).
    Assumes: the head stays in 16 bits. Left out: maxima that recomputation keeps, applying a tensor scale.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> cast_bytes(find_model("Qwen/Qwen2.5-7B"), is_backward=False) / 28  # 5 * (3 * 3584 + 18944)
    148480.0
    >>> cast_bytes(find_model("Qwen/Qwen2.5-7B"), is_backward=False, tp=2, scales_rows=True) / 28  # 2 h once more
    184320.0
    """
    inputs, outputs = _cast_widths(model)
    kinds = kinds_of_layers(model)
    gathered = model.hidden_size * (model.num_layers - kinds.get(NONE, 0) + model.num_dense_mlps)
    if scales_rows:
        whole = gathered * (tp - 1.0)
        return (10.0 * (outputs + whole) + _rescaled_bytes(model, tp) if is_backward else 0.0) + 5.0 * (inputs + whole)
    if not is_backward:
        return 5.0 * inputs
    if not transposes_gradients:
        return 5.0 * outputs + 3.0 * inputs
    return 8.0 * outputs + 3.0 * inputs + (2.0 * gathered * (2 * tp - 3) if tp > 1 else 0.0)


def _rescaled_bytes(model: ModelSpec, tp: int) -> float:
    """Bytes per token of input gradients that a separate kernel scales, in all layers, on all tp ranks.

    Counts: 4 per element of each linear layer: three times h for queries, keys and values, and twice for gate and up,
    complete on every rank; q and I. Source: torchao 0.11 float8_ops.py (`addmm_float8_unwrapped`: backward without fast
    accumulation, cuBLAS's matmul and then a product), its issue 2184 (a separate kernel each time).
    Left out: weight gradients and experts.
    """
    kinds = kinds_of_layers(model)
    attention, mlps = model.num_layers - kinds.get(NONE, 0), model.num_dense_mlps
    whole = model.hidden_size * (3 * attention + 2 * mlps) * tp
    return 4.0 * (whole + model.q_size * attention + model.intermediate_size * mlps)


def _cast_widths(model: ModelSpec) -> tuple[float, float]:
    """Elements per token that the matmuls of all layers read, and those whose gradients the backward pass reads.

    Counts: each active expert reads its own copy of a row (Megatron-Core 0.14 casts after the dispatcher permutes).
    """
    h, kinds, experts, mamba = model.hidden_size, kinds_of_layers(model), model.experts, model.linear_attention
    num_none, num_mamba = kinds.get(NONE, 0), kinds.get(LINEAR, 0) if mamba and mamba.is_mamba else 0
    attention, dense = model.num_layers - num_none - num_mamba, model.num_dense_mlps
    ups = 1 if num_none else 2
    inputs = attention * (h + model.q_size) + dense * (h + model.intermediate_size)
    outputs = attention * (model.q_size + 2 * model.kv_size + h) + dense * (ups * model.intermediate_size + h)
    if mamba is not None and num_mamba:
        keys, values = mamba.num_key_heads * mamba.key_head_dim, mamba.num_value_heads * mamba.value_head_dim
        inputs += num_mamba * (h + values)
        outputs += num_mamba * (2 * keys + 2 * values + h)
    if experts is not None:
        rows, ups = experts.num_active * (experts.latent_size or h), experts.num_matrices - 1
        routed, shared = experts.num_active * experts.intermediate_size, experts.shared_intermediate_size
        shared_row = h if shared else 0
        inputs += len(experts.layers) * (rows + routed + shared_row + shared)
        outputs += len(experts.layers) * (rows + ups * routed + shared_row + ups * shared)
    return float(inputs), float(outputs)


LOSS_BYTES = {
    Loss.PLAIN: (18, 16),
    Loss.SHIFTED: (26, 24),
    Loss.FUSED: (8, 0),
    Loss.IN_PLACE: (10, 8),
    Loss.UNCAST: (6, 8),
    Loss.COPIED: (38, 22),
    Loss.KEPT: (10, 14),
    Loss.BY_ROWS: (46, 44),
    Loss.COMPILED_CHUNKED: (8, 6),
    Loss.NONE: (0, 0),
}
"""Bytes per logit, forward and backward. Losses without an entry cost as much as PLAIN.

PLAIN: to fp32 6, log-softmax read twice and written 12; backward fp32 read twice, written, cast 16 (torch 2.13). FUSED:
read twice, its gradient written. UNCAST: temperature 4, read 2; backward in place 4, temperature 4. KEPT: cast 6, read
4; backward read, written, cast 14. COPIED: cast 6, maximum 4, difference 8, exponent 8, sum 4, quotient 8; backward
transposed 8, scaled 8, cast 6. BY_ROWS: one torch operator after the other (`rlplan.runtime.models.logprob_model`):
cast 6, temperature 8, maximum 4, difference 8, exponent 8, sum 4, entropy 8; backward cast 6, temperature 8, minus the
normalizer 8, exponential 8, scale 8, cast 6."""


def loss_bytes(loss: Loss, vocab_size: int, *, is_backward: bool) -> float:
    """Bytes of one token's logits between the head and the loss.

    Counts: `LOSS_BYTES` times V. Source: torch 2.13 cross_entropy; Liger 0.5 fused_linear_cross_entropy.

    >>> loss_bytes(Loss.PLAIN, 1000, is_backward=False)
    18000.0
    """
    return float(LOSS_BYTES.get(loss, LOSS_BYTES[Loss.PLAIN])[is_backward]) * vocab_size


class Recomputed(NamedTuple):
    """Shares of a forward pass that are computed a second time."""

    matmuls: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    expert_exchanges: float = 0.0


@lru_cache(maxsize=256)
def count_recomputed(model: ModelSpec, names: frozenset[str]) -> Recomputed:
    """Share of a forward pass of all layers that the modules make up.

    Counts: parameters that a token is multiplied with, bytes of fused kernels; `moe` also exchanges its rows again.
    Source: Megatron-Core 0.14, transformer_layer.py, moe/moe_layer.py.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> qwen = find_model("Qwen/Qwen2.5-7B")
    >>> round(count_recomputed(qwen, frozenset(("mlp",))).matmuls, 3)  # 3*18944 of 3*18944 + 2*3584 + 2*512 columns
    0.874
    >>> count_recomputed(qwen, frozenset(("core_attn",)))
    Recomputed(matmuls=0.0, attention=1.0, elementwise=0.0, expert_exchanges=0.0)
    """
    counts, experts, latent = matmul_parameters(model), model.experts, model.latent_attention
    attention_layers = model.num_layers - kinds_of_layers(model).get(NONE, 0)
    matmuls = moved = 0.0
    if "mlp" in names:
        matmuls += counts.get(Component.MLP, 0)
        moved += dense_mlp_bytes(model)
    if "layernorm" in names:
        moved += 2 * FUSED_NORM * model.hidden_size * model.num_layers
    if "mla_up_proj" in names and latent is not None:
        keys = latent.nope_head_dim + latent.rope_head_dim
        ups = latent.q_rank * keys + latent.kv_rank * (latent.nope_head_dim + latent.value_head_dim)
        matmuls += model.num_heads * ups * attention_layers
    if experts is not None:
        if "moe" in names:
            matmuls += counts.get(Component.EXPERTS, 0) * experts.num_active / experts.num_experts
            matmuls += counts.get(Component.ROUTER, 0)
            moved += experts_bytes(model)
        elif "moe_act" in names:
            moved += experts_bytes(model, has_rows=False)
        if names & {"moe", "shared_experts"}:
            matmuls += counts.get(Component.SHARED_EXPERTS, 0)
    return Recomputed(
        matmuls / layer_parameters(model),
        float("core_attn" in names),
        moved / layers_bytes(model, is_fused=True),
        float("moe" in names and experts is not None),
    )
