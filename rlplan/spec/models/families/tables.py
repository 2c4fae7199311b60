"""The tables of tensors that families are put together from. The language is explained in `tensors`.

In: nothing. Out: text. Left out: vision towers (`towers`) and the families themselves.

Symbols: h hidden_size, V vocab_size, I intermediate_size, P positions, a heads, d head_dim, q = a*d, kv = k*d,
E experts, Ie width of an expert, El width of its rows, Is width of the shared experts, rq and rkv ranks of MLA's
latents, dr its rotary part, qm, kvm, om widths of MLA's up and output projections, lk, lv, lh keys, values and heads
of linear attention, dl and K its head_dim and convolution kernel, ix, ia, id the sparse-attention indexer's width,
heads and head_dim.
Source: module names and shapes of transformers 5.19, compared with live modules on the meta device by the tests.
"""

EMBEDDINGS = """[embeddings]
model.embed_tokens.weight   V h
"""

HEAD = """[norms]
model.norm.weight   h
model.norm.bias     h     ? layer_norm
[head]
lm_head.weight      V h   ? !tied
lm_head.bias        V     ? head_bias
"""

QKV = """[attention]
self_attn.q_proj.weight   q h
self_attn.q_proj.bias     q     ? qkv_bias
self_attn.k_proj.weight   kv h
self_attn.k_proj.bias     kv    ? qkv_bias
self_attn.v_proj.weight   kv h
self_attn.v_proj.bias     kv    ? qkv_bias
"""

OUTPUT = """[attention]
self_attn.o_proj.weight   h q
self_attn.o_proj.bias     h     ? output_bias
"""

QK_NORM = """[norms]
self_attn.q_norm.weight   d     ? qk_norm
self_attn.k_norm.weight   d     ? qk_norm
self_attn.q_norm.weight   =q    ? wide_qk_norm
self_attn.k_norm.weight   =kv   ? wide_qk_norm
"""

ATTENTION = QKV + OUTPUT + QK_NORM

SINKS = """[attention]
self_attn.sinks   a
"""

PACKED_ATTENTION = """[attention]
self_attn.o_proj.weight     h q
self_attn.qkv_proj.weight   q+2*kv h
"""

LATENT_ATTENTION = """[attention]
self_attn.q_proj.weight               qm h     ? !compressed_q
self_attn.q_a_proj.weight             rq h     ? compressed_q
self_attn.q_a_proj.bias               rq       ? compressed_q latent_bias
[norms]
self_attn.q_a_layernorm.weight        rq       ? compressed_q
[attention]
self_attn.q_b_proj.weight             qm rq    ? compressed_q
self_attn.kv_a_proj_with_mqa.weight   rkv+dr h
self_attn.kv_a_proj_with_mqa.bias     rkv+dr   ? latent_bias
[norms]
self_attn.kv_a_layernorm.weight       rkv
[attention]
self_attn.kv_b_proj.weight            kvm rkv
self_attn.o_proj.weight               h om
self_attn.o_proj.bias                 h        ? latent_bias
"""

INDEXER = """[attention ? indexer]
self_attn.indexer.wq_b.weight           =ix rq
self_attn.indexer.wk.weight             id h
[norms ? indexer]
self_attn.indexer.k_norm.weight         id
self_attn.indexer.k_norm.bias           id
[attention ? indexer]
self_attn.indexer.weights_proj.weight   =ia h
"""

LINEAR_ATTENTION_START = """[attention ? linear]
linear_attn.dt_bias         lh
linear_attn.A_log           lh
linear_attn.conv1d.weight   2*lk+lv 1 K
"""

LINEAR_ATTENTION_OUTPUT = """[norms ? linear]
linear_attn.norm.weight      dl
[attention ? linear]
linear_attn.out_proj.weight  h lv
"""

PACKED_LINEAR_ATTENTION = (
    LINEAR_ATTENTION_START
    + """linear_attn.in_proj_qkvz.weight   2*lk+2*lv h
linear_attn.in_proj_ba.weight     2*lh h
"""
    + LINEAR_ATTENTION_OUTPUT
)

SPLIT_LINEAR_ATTENTION = (
    LINEAR_ATTENTION_START
    + LINEAR_ATTENTION_OUTPUT
    + """linear_attn.in_proj_qkv.weight   2*lk+lv h
linear_attn.in_proj_z.weight     lv h
linear_attn.in_proj_b.weight     lh h
linear_attn.in_proj_a.weight     lh h
"""
)

MAMBA = """[attention ? linear]
mixer.dt_bias           lh
mixer.A_log             lh
mixer.D                 lh
mixer.conv1d.weight     2*lk+lv 1 K
mixer.conv1d.bias       2*lk+lv        ? conv_bias
mixer.in_proj.weight    2*lk+2*lv+lh h
[norms ? linear]
mixer.norm.weight       lv
[attention ? linear]
mixer.out_proj.weight   h lv
"""

GATED_ATTENTION = """[attention ? !linear]
self_attn.q_proj.weight   2*q h
self_attn.q_proj.bias     2*q   ? qkv_bias
self_attn.k_proj.weight   kv h
self_attn.k_proj.bias     kv    ? qkv_bias
self_attn.v_proj.weight   kv h
self_attn.v_proj.bias     kv    ? qkv_bias
self_attn.o_proj.weight   h q
self_attn.o_proj.bias     h     ? output_bias
[norms ? !linear]
self_attn.q_norm.weight   d
self_attn.k_norm.weight   d
"""

GATED_MLP = """[mlp ? !experts]
mlp.gate_proj.weight   I h
mlp.gate_proj.bias     I    ? mlp_bias
mlp.up_proj.weight     I h
mlp.up_proj.bias       I    ? mlp_bias
mlp.down_proj.weight   h I
mlp.down_proj.bias     h    ? mlp_bias
"""

PACKED_MLP = """[mlp]
mlp.gate_up_proj.weight   2*I h
mlp.down_proj.weight      h I
"""

ROUTER = """[router ? experts]
mlp.gate.weight   =E h
"""

ROUTING_BIAS = """[router buffer ? experts]
mlp.gate.e_score_correction_bias   =E
"""

EXPERTS = """[experts ? experts]
mlp.experts.gate_up_proj   E 2*Ie h
mlp.experts.down_proj      E h Ie
"""

SHARED_EXPERTS = """[shared_experts ? experts shared]
mlp.shared_experts.gate_proj.weight   Is h
mlp.shared_experts.up_proj.weight     Is h
mlp.shared_experts.down_proj.weight   h Is
"""

GATED_SHARED_EXPERT = """[shared_experts ? experts]
mlp.shared_expert.gate_proj.weight   Is h
mlp.shared_expert.up_proj.weight     Is h
mlp.shared_expert.down_proj.weight   h Is
mlp.shared_expert_gate.weight        1 h
"""

NORMS = """[norms]
input_layernorm.weight            h
input_layernorm.bias              h   ? layer_norm
post_attention_layernorm.weight   h
post_attention_layernorm.bias     h   ? layer_norm
"""

FEEDFORWARD_NORMS = """[norms]
pre_feedforward_layernorm.weight    h
post_feedforward_layernorm.weight   h
"""

POST_NORMS = """[norms]
post_attention_layernorm.weight     h
post_feedforward_layernorm.weight   h
"""
