"""Activations: bytes that a decoder layer saves for its backward pass, and bytes in flight inside a pass.

In: a Block (or a ModelSpec), a token count, bytes of an element. Out: bytes of one rank.
Left out: recomputation of whole layers (trainers/micro_batch.py); tensors of T squared, which flash attention never
allocates.

Symbols: T tokens on the rank, e bytes of an element, h hidden, a heads, q = a*d, k = kv heads * d, I MLP width.
Source: tensors saved by the decoder layers of transformers 5.19 with flash attention, listed one by one with
`torch.autograd.graph.saved_tensors_hooks`; judged by traces of 12 families
(tests/memory/model/test_activations_traced.py).
"""

from dataclasses import replace

from rlplan.memory.model.block import FLOAT_BYTES, Block, DeltaRule, Norm, StateSpace
from rlplan.spec.model import ModelSpec

DELTA_RULE_CHUNK = 64
"""Tokens of a chunk. Source: flash-linear-attention 0.4, ops/gated_delta_rule/chunk.py, `chunk_size`."""

SHORT_CONV_WIDTHS = 6
"""Tensors of its width that a gated short convolution saves: the projection of two gates and the input, the gated
input, the convolution's output, the gated output. Source: transformers 5.19, modeling_lfm2.py, `Lfm2ShortConv`."""


def norm_saved_bytes(kind: Norm, width: int, element_bytes: int, *, keeps_output: bool = True) -> int:
    """Bytes that a norm saves for one token.

    Counts: RMS an fp32 copy of the input (in fp32: the input), the normed value e*w, the output e*w that a linear layer
    reads, and a scale; RMS_FP32 the normed value in fp32; LAYER and FUSED input and output; LAYER_FP32 the input in
    fp32; LAYER_BY_HAND three fp32 copies (input, centred, normed).

    >>> [norm_saved_bytes(kind, 1000, 2) for kind in (Norm.RMS, Norm.RMS_FP32, Norm.FUSED)]
    [8004, 10004, 4004]
    """
    output = element_bytes * width if keeps_output else 0
    if kind is Norm.RMS:
        return (FLOAT_BYTES + element_bytes) * width + output + FLOAT_BYTES
    if kind is Norm.RMS_FP32:
        return 2 * FLOAT_BYTES * width + output + FLOAT_BYTES
    if kind is Norm.LAYER_BY_HAND:
        return 3 * FLOAT_BYTES * width + output + FLOAT_BYTES
    if kind is Norm.LAYER_FP32:
        return FLOAT_BYTES * width + output + 2 * FLOAT_BYTES
    scales = 2 * element_bytes if kind is Norm.LAYER else FLOAT_BYTES
    return element_bytes * width + output + scales


def attention_saved_bytes(block: Block, element_bytes: int) -> int:
    """Bytes that attention saves for one token, without its norm's output.

    Counts: queries, keys (rotated), values and the output e*(2q + 2k), log-sum 4a. A packed projection is saved instead
    of the values, e*(q + k) more; qk-norm adds normed queries and keys; a gated output adds e*2q.
    Assumes: flash attention; grouped keys are not repeated (`enable_gqa`), which transformers does without a mask.

    >>> attention_saved_bytes(Block(hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate=128), 2)
    400
    """
    e, a = element_bytes, block.num_heads
    if not block.has_attention:
        return 0
    if block.state_space is not None:
        return state_space_saved_bytes(block.state_space, e)
    if block.delta_rule is not None:
        return delta_rule_saved_bytes(block.delta_rule, e)
    if block.short_conv:
        return SHORT_CONV_WIDTHS * e * block.short_conv
    if block.latent is not None:
        return latent_saved_bytes(block, e)
    if not block.has_keys:
        block = replace(block, num_kv_heads=0)
    saved = e * (2 * block.q + 2 * block.k) + FLOAT_BYTES * a + block.rotary_bytes
    saved += e * (block.q + block.k) * block.packs_qkv + 2 * e * block.q * block.gates_attention
    saved += FLOAT_BYTES * (block.k + 2 * block.num_kv_heads) * block.norms_values
    if block.qk_norm == "none":
        return saved
    normed = norm_saved_bytes(block.norm, block.q + block.k, e, keeps_output=False) - FLOAT_BYTES
    scales = 2 if block.qk_norm == "full" else block.num_heads + block.num_kv_heads
    return saved + normed + FLOAT_BYTES * scales


def latent_saved_bytes(block: Block, element_bytes: int) -> int:
    """Bytes that latent attention saves for one token.

    Counts: the two compressed norms, queries and keys e*2*a*qk, log-sum 4a. Values narrower than keys are padded to the
    keys' width, as is the output, whose own part is saved too; otherwise the projection of keys and values, and the
    output. Source: transformers 5.19, modeling_deepseek_v3.py, with the padding of its flash attention.
    """
    latent, e, a = block.latent, element_bytes, block.num_heads
    assert latent is not None
    values = 2 * latent.qk_head_dim if latent.v_head_dim < latent.qk_head_dim else latent.nope_head_dim
    if latent.v_head_dim >= latent.qk_head_dim:
        values += latent.v_head_dim
    heads = e * a * (2 * latent.qk_head_dim + values + latent.v_head_dim) + FLOAT_BYTES * a
    return compressed_saved_bytes(block, e) + heads


def compressed_saved_bytes(block: Block, element_bytes: int) -> int:
    """Bytes of the two compressed norms of latent attention, for one token."""
    latent = block.latent
    assert latent is not None
    widths = (latent.q_rank, latent.kv_rank)
    return sum(norm_saved_bytes(block.norm, width, element_bytes) for width in widths if width)


def delta_rule_saved_bytes(rule: DeltaRule, element_bytes: int) -> int:
    """Bytes that linear attention by the gated delta rule saves for one token.

    Counts: the convolution's input e*(2k + v), normed queries and keys repeated to every head, values e*v, 64e per head
    for a row of a chunk's matrix; the gated norm (12 + 2e)*v and its output e*v; decays, betas and scales.
    Source: flash-linear-attention 0.4, ops/gated_delta_rule/chunk.py; transformers 5.19, modeling_qwen3_next.py.
    Assumes: the kernels of flash-linear-attention and causal-conv1d. Differs: transformers' fallback in torch keeps
    three times as much.

    >>> delta_rule_saved_bytes(DeltaRule(num_heads=32, key_head_dim=128, keys=2048, values=4096), 2)
    119616
    """
    e, heads = element_bytes, rule.num_heads
    projected = e * (2 * rule.keys + rule.values)
    kernel = e * (2 * heads * rule.key_head_dim + rule.values + DELTA_RULE_CHUNK * heads)
    gated_norm = (3 * FLOAT_BYTES + 2 * e) * rule.values + e * rule.values
    return projected + kernel + gated_norm + (6 * FLOAT_BYTES + e) * heads


def state_space_saved_bytes(space: StateSpace, element_bytes: int) -> int:
    """Bytes that Mamba-2 saves for one token.

    Counts: the projection of gates, inputs, B, C and steps e*(2v + 2k + a), the scan's output and the normed one 2*e*v.
    The backward pass recomputes states and the convolution. Source: mamba_ssm 2.2, ssd_combined,
    `MambaSplitConv1dScanCombinedFn`. Not validated by any measurement.

    >>> state_space_saved_bytes(StateSpace(num_heads=64, keys=1024, values=4096), 2)
    36996
    """
    return element_bytes * (4 * space.values + 2 * space.keys + space.num_heads) + 4


def mlp_saved_bytes(block: Block, element_bytes: int) -> int:
    """Bytes that the MLP or the experts save for one token, without the norm's output.

    Counts: 4*e*I gated, 2*e*I plain. Experts: top_k times their width, input and output rows, routing indices and
    scores. Shared experts: the same as a gated MLP, with their gate and the output that it scales.
    """
    experts, e = block.experts, element_bytes
    if not block.has_mlp:
        return 0
    if experts is None:
        return block.mlp_saved_widths * e * block.intermediate
    width = experts.row_width or block.hidden
    rows = experts.top_k * (experts.saved_widths * e * experts.width + (2 * e * width + 40) // experts.row_shards)
    return rows + router_saved_bytes(block, e) + min(4, experts.saved_widths) * e * experts.shared_width


def router_saved_bytes(block: Block, element_bytes: int) -> int:
    """Bytes of the router in `mlp_saved_bytes`, for one token.

    Counts: the scores of all experts, an fp32 copy of the router's input; the shared experts' gate and the output that
    it scales.
    """
    experts = block.experts
    if experts is None:
        return 0
    scores = FLOAT_BYTES * experts.num + (FLOAT_BYTES * block.hidden if experts.has_fp32_router else 0)
    return scores + (element_bytes * (block.hidden + 1) if experts.gates_shared else 0)


def between_saved_bytes(block: Block, element_bytes: int, *, has_outputs: bool) -> int:
    """Bytes that a layer saves for one token between the matmuls that tensor parallelism cuts.

    Sequence parallelism shards exactly this part.
    Counts: inputs of the norms. has_outputs (Megatron): also the inputs of linear layers, the router's tensors, and the
    two compressed norms of latent attention.
    Source: Megatron-Core main of 2026-08, transformer/multi_latent_attention.py (`kv_compressed: [s / TP, b, ...]`),
    moe/router.py; Transformer Engine 2026-08, module/layernorm_linear.py.

    >>> block = Block(hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate=128, norm=Norm.FUSED)
    >>> [between_saved_bytes(block, 2, has_outputs=has_outputs) for has_outputs in (False, True)]  # 2*(2*64+4); 4*128
    [264, 520]
    """
    e = element_bytes
    inputs = block.num_norms * norm_saved_bytes(block.norm, block.hidden, e, keeps_output=False)
    if not has_outputs:
        return inputs
    outputs = block.norms_feed_linears * e * block.hidden
    latent = compressed_saved_bytes(block, e) if block.latent and block.has_attention else 0
    return inputs + outputs + latent + router_saved_bytes(block, e)


def block_saved_bytes(block: Block, num_tokens: int, element_bytes: int) -> int:
    """Bytes that one decoder layer saves for its backward pass.

    Counts: the norms with their outputs, attention, MLP. Norms after a linear layer (Gemma, OLMo 2) save no output;
    where no norm comes before the linear layers, the residual that they read is saved instead. Once a layer: an fp32
    router's weight.
    Differs: Korthikanti et al. 2022 count 34h in bf16 for GPT with dropout. 24h remain without dropout's masks and
    copies where I = 4h, with fp16 norms and a fused activation.

    >>> gpt = Block(hidden=1000, num_heads=10, num_kv_heads=10, head_dim=100, intermediate=4000, norm=Norm.LAYER,
    ...             mlp_saved_widths=2)
    >>> block_saved_bytes(gpt, 1, 2)  # norms 2*(2+2)*1000 + 8, attention 8*1000 + 40, MLP 16*1000
    32048
    """
    e = element_bytes
    fed = block.norms_feed_linears
    norms = fed * norm_saved_bytes(block.norm, block.hidden, e)
    norms += (block.num_norms - fed) * norm_saved_bytes(block.norm, block.hidden, e, keeps_output=False)
    norms += (block.num_branches - min(fed, block.num_branches)) * e * block.hidden
    norms -= e * block.hidden * block.norms_share_input
    if block.per_layer_width:
        norms += e * (block.hidden + 4 * block.per_layer_width)
        norms += norm_saved_bytes(block.norm, block.hidden, e, keeps_output=False)
    router = FLOAT_BYTES * block.hidden * block.experts.num if block.experts and block.experts.has_fp32_router else 0
    return num_tokens * (norms + attention_saved_bytes(block, e) + mlp_saved_bytes(block, e)) + router


def checkpoint_bytes(block: Block, num_tokens: int, element_bytes: int) -> int:
    """Bytes saved of a recomputed layer: its input e*h*T, and its per-layer input where it has one."""
    return num_tokens * element_bytes * (block.hidden + block.per_layer_width)


def exchanged_bytes(block: Block, ulysses: int, num_tokens: int, element_bytes: int) -> int:
    """Bytes that a layer saves in addition to `block_saved_bytes` under Ulysses sequence parallelism.

    Counts, for each of a rank's own tokens: attention's output once more, e*q, because the output projection reads it
    after the all-to-all; with fewer key heads than ranks, keys and values repeated to one head a rank, 2*e*(N d - k).
    Source: `rlplan.runtime.models.sequence_parallel`; Jacobs et al. 2023, arXiv:2309.14509.
    Assumes: tensors are freed once they have been sent.

    >>> block = Block(hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate=128)
    >>> [exchanged_bytes(block, ulysses, 1, 2) for ulysses in (1, 2, 4)]  # 2*64; 2*64 + 4*(64 - 32)
    [0, 128, 256]
    """
    if ulysses == 1:
        return 0
    repeated = max(0, ulysses * block.head_dim - block.k)
    return num_tokens * element_bytes * (block.q + 2 * repeated)


def final_saved_bytes(block: Block, num_tokens: int, num_head_tokens: int, element_bytes: int) -> int:
    """Bytes saved outside the layers: the last norm with the rows that the head reads, and the rotary table.

    num_head_tokens: tokens whose logits are computed. If they are not all tokens, the head's rows are a second copy of
    the norm's output.
    """
    e, h = element_bytes, block.hidden
    rows = 0 if num_head_tokens == num_tokens else num_head_tokens * e * h
    return num_tokens * (norm_saved_bytes(block.norm, h, e) + block.rotary_table_bytes(e)) + rows


def working_bytes(block: Block, num_tokens: int, element_bytes: int) -> int:
    """Peak bytes of gradients in flight inside one layer's backward pass.

    Counts, for a token: gradients of two MLP tensors 2eI, of the residual 2eh; for experts 3e*top_k of their width and
    of the rank's share of the rows, instead of the MLP's.
    Assumes: autograd frees each gradient after its last reader.
    """
    experts, e = block.experts, element_bytes
    if experts is not None:
        rows = (experts.row_width or block.hidden) // experts.row_shards
        inner = 3 * e * experts.top_k * (experts.width + rows)
        return num_tokens * (inner + 2 * e * block.hidden)
    return num_tokens * e * (2 * block.intermediate + 2 * block.hidden)


def forward_layer_bytes(block: Block, element_bytes: int) -> int:
    """Peak bytes in flight for one token inside a layer of a forward-only pass, which saves nothing.

    Counts: embeddings, the layer's input and its residual 3eh, to which callers still refer; the normed rows eh; the
    rotary table; and the larger of attention and MLP. Attention and experts take the bytes that they save in training
    (gpt-oss's experts two tensors of their width more). A gated MLP has activation, up and product 3eI; a plain one its
    saved tensors, at least 2eI.
    Source: traces without gradient (tests/memory/model/test_activations_traced.py).

    >>> forward_layer_bytes(Block(hidden=64, num_heads=4, num_kv_heads=4, head_dim=16, intermediate=256), 2)
    2112
    """
    e, experts = element_bytes, block.experts
    rows = (3 + (block.norms_feed_linears > 0)) * e * block.hidden + block.rotary_table_bytes(e)
    if experts is not None:
        inner = mlp_saved_bytes(block, e)
        inner += 2 * e * experts.top_k * experts.width * (experts.saved_widths > 4)
    else:
        widths = 3 if block.mlp_saved_widths == 4 else max(2, block.mlp_saved_widths)
        inner = widths * e * block.intermediate
    return rows + max(inner, attention_saved_bytes(block, e))


def mlp_freed_bytes(block: Block, num_tokens: int, element_bytes: int, *, row_shards: int = 1) -> int:
    """Bytes of `block_saved_bytes` that are freed when the backward pass leaves a layer's MLP.

    Counts: the MLP's saved tensors, and two of its norm's three tensors 2eh. row_shards: ranks that shard these two.
    """
    return num_tokens * (mlp_saved_bytes(block, element_bytes) + 2 * element_bytes * block.hidden // row_shards)


def forward_working_bytes(model: ModelSpec, num_tokens: int) -> int:
    """Peak bytes in flight inside one layer's forward-only pass in fp32.

    Counts, for a token: residual, normed input and output 3h; gate, its activation, up and their product 4I.
    """
    return num_tokens * FLOAT_BYTES * (4 * model.intermediate_size + 3 * model.hidden_size)


def module_bytes(block: Block, name: str, element_bytes: int) -> int:
    """Bytes that a module saves for one token, and does not save when it is recomputed.

    Counts: layernorm the outputs that linear layers read; mlp a dense layer's tensors; moe the tensors of experts and
    router; moe_act the input of each chosen expert's last matrix; shared_experts their tensors; mla_up_proj keys,
    queries and values of all heads.

    >>> block = Block(hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate=128)
    >>> [module_bytes(block, name, 2) for name in ("layernorm", "mlp", "moe", "core_attn")]  # 2 * 2*64; 4 * 2*128
    [256, 1024, 0, 0]
    """
    e, experts, latent = element_bytes, block.experts, block.latent
    if name == "layernorm":
        with_output = norm_saved_bytes(block.norm, block.hidden, e)
        without_output = norm_saved_bytes(block.norm, block.hidden, e, keeps_output=False)
        return block.norms_feed_linears * (with_output - without_output)
    if name == "mlp":
        return mlp_saved_bytes(block, e) if experts is None else 0
    if name == "mla_up_proj" and latent is not None:
        return e * block.num_heads * (2 * latent.qk_head_dim + latent.v_head_dim)
    if experts is None:
        return 0
    shared = min(4, experts.saved_widths) * e * experts.shared_width
    routed = {"moe": mlp_saved_bytes(block, e), "moe_act": experts.top_k * e * experts.width, "shared_experts": shared}
    return routed.get(name, 0)


def recomputed_bytes(block: Block, names: frozenset[str], element_bytes: int) -> int:
    """Bytes of a token that a layer need not save. `moe` includes the modules inside the experts.

    Source: Megatron-Core 0.14, transformer_config.py (`recompute_modules`), tensor_parallel/random.py
    (`CheckpointWithoutOutput`, which also frees the output of norms, activations and up-projections). Left out: the
    attention core, whose flash kernel saves only its inputs anyway.
    """
    inside = {"moe_act", "shared_experts"} if "moe" in names else set()
    return sum(module_bytes(block, name, element_bytes) for name in names - inside)
