"""Families with routed experts, latent attention or linear attention.

In: nothing. Out: `MIXTURES`, architecture -> Family. Left out: multi-token-prediction heads, which Hugging Face modules
do not load (DeepSeek-V3's is 11.5 B more on disk). Source: transformers 5.19, modeling files of that name.
"""

from dataclasses import replace

from rlplan.spec.models.families import readers, tables
from rlplan.spec.models.families.dense import ATTENTION_BIAS
from rlplan.spec.models.families.family import Family, words

MIXTRAL = Family(
    layer=tables.ATTENTION + tables.ROUTER + tables.EXPERTS + tables.NORMS,
    required=("num_key_value_heads",),
    reads=(readers.window_everywhere, readers.experts(number="num_local_experts", width="intermediate_size")),
)
OLMOE = replace(
    MIXTRAL,
    conditions=words("wide_qk_norm"),
    switches=ATTENTION_BIAS,
    reads=(readers.full_only, readers.experts(number="num_experts", width="intermediate_size")),
)
MINIMAX_M2 = replace(
    MIXTRAL,
    layer=tables.ATTENTION
    + tables.ROUTER
    + "[router buffer ? experts]\nmlp.e_score_correction_bias =E\n"
    + tables.EXPERTS
    + tables.NORMS,
    conditions=words("wide_qk_norm"),
    required=("num_key_value_heads", "head_dim"),
    fixed={"use_qk_norm": True, "shared_intermediate_size": 0},
    reads=(readers.full_only, readers.experts(number="num_local_experts", width="intermediate_size")),
)
PHIMOE = replace(
    MIXTRAL,
    layer=tables.ATTENTION + "[router linear]\nmlp.router.weight =E h\n" + tables.EXPERTS + tables.NORMS,
    conditions=words("layer_norm"),
    switches=ATTENTION_BIAS | {"lm_head_bias": (False, "head_bias")},
)
GRANITE_MOE = replace(
    MIXTRAL,
    layer=tables.ATTENTION
    + tables.NORMS
    + "[router]\nblock_sparse_moe.router.weight =E h\n"
    + tables.EXPERTS.replace("mlp.", "block_sparse_moe."),
    switches=ATTENTION_BIAS,
    reads=(readers.full_only, readers.experts(number="num_local_experts", width="intermediate_size")),
)
GPT_OSS = Family(
    layer=tables.SINKS
    + tables.ATTENTION
    + """[router]
mlp.router.weight               =E h
mlp.router.bias                 =E
[experts]
mlp.experts.gate_up_proj        E h 2*Ie
mlp.experts.gate_up_proj_bias   E 2*Ie
mlp.experts.down_proj           E Ie h
mlp.experts.down_proj_bias      E h
"""
    + tables.NORMS,
    switches={"attention_bias": (True, "qkv_bias output_bias")},
    required=("num_key_value_heads", "head_dim"),
    defaults={"sliding_window": 128},
    reads=(
        readers.window_every_layer_but(2),
        readers.experts(number="num_local_experts", width="intermediate_size"),
    ),
)
_QWEN_DEFAULTS = {"decoder_sparse_step": 1, "max_window_layers": 28, "sliding_window": 4096}

QWEN2_MOE = Family(
    layer=tables.ATTENTION
    + tables.GATED_MLP
    + tables.ROUTER
    + tables.EXPERTS
    + tables.GATED_SHARED_EXPERT
    + tables.NORMS,
    switches={"qkv_bias": (True, "qkv_bias")},
    required=("num_key_value_heads",),
    defaults=_QWEN_DEFAULTS,
    reads=(
        readers.window_if_used,
        readers.experts(
            number="num_experts",
            width="moe_intermediate_size",
            shared="shared_expert_intermediate_size",
            layers=readers.by_sparse_step,
        ),
    ),
)
QWEN3_MOE = Family(
    layer=tables.ATTENTION + tables.GATED_MLP + tables.EXPERTS + tables.ROUTER + tables.NORMS,
    conditions=words("qk_norm"),
    switches=ATTENTION_BIAS,
    required=("num_key_value_heads",),
    defaults=_QWEN_DEFAULTS,
    reads=(
        readers.window_if_used,
        readers.experts(
            number="num_experts|num_local_experts", width="moe_intermediate_size", layers=readers.by_sparse_step
        ),
    ),
)
QWEN3_NEXT = replace(
    QWEN2_MOE,
    layer=tables.PACKED_LINEAR_ATTENTION
    + tables.GATED_ATTENTION
    + tables.GATED_MLP
    + tables.ROUTER
    + tables.EXPERTS
    + tables.GATED_SHARED_EXPERT
    + tables.NORMS,
    switches=ATTENTION_BIAS,
    required=("num_key_value_heads", "head_dim"),
    defaults=_QWEN_DEFAULTS | {"full_attention_interval": 4},
    reads=(readers.linear_attention, *QWEN2_MOE.reads[1:]),
)
QWEN3_5_MOE = replace(
    QWEN3_NEXT, layer=QWEN3_NEXT.layer.replace(tables.PACKED_LINEAR_ATTENTION, tables.SPLIT_LINEAR_ATTENTION)
)
QWEN3_5 = replace(
    QWEN3_5_MOE,
    layer=tables.SPLIT_LINEAR_ATTENTION + tables.GATED_ATTENTION + tables.GATED_MLP + tables.NORMS,
    reads=(readers.linear_attention,),
)
_SHARED_AFTER_DENSE = readers.experts(
    number="n_routed_experts",
    width="moe_intermediate_size",
    shared="n_shared_experts*width",
    layers=readers.after_dense_layers,
)
_SPARSE_MLP = tables.GATED_MLP + tables.EXPERTS + tables.ROUTER + tables.ROUTING_BIAS + tables.SHARED_EXPERTS

GLM4_MOE = Family(
    layer=tables.ATTENTION + _SPARSE_MLP + tables.NORMS,
    switches={"attention_bias": (False, "qkv_bias"), "use_qk_norm": (False, "qk_norm")},
    required=("num_key_value_heads",),
    reads=(readers.full_only, _SHARED_AFTER_DENSE),
)
DEEPSEEK_V3 = Family(
    layer=tables.LATENT_ATTENTION + _SPARSE_MLP + tables.NORMS,
    switches={"attention_bias": (False, "latent_bias")},
    reads=(readers.full_only, readers.latent_attention, _SHARED_AFTER_DENSE),
)
DEEPSEEK_V2 = replace(DEEPSEEK_V3, layer=DEEPSEEK_V3.layer.replace(tables.ROUTING_BIAS, ""), fixed={"mlp_bias": False})
DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    layer=tables.LATENT_ATTENTION + tables.INDEXER + _SPARSE_MLP + tables.NORMS,
    reads=(*DEEPSEEK_V3.reads, readers.indexer),
    fixed={"mlp_bias": False},
)
GLM4_MOE_LITE = replace(DEEPSEEK_V3, defaults={"first_k_dense_replace": 1})
ERNIE_MOE = Family(
    layer=tables.ATTENTION
    + tables.GATED_MLP
    + tables.ROUTER
    + "[router ? experts]\nmlp.gate.moe_statics.e_score_correction_bias 1 =E\n"
    + tables.EXPERTS
    + tables.SHARED_EXPERTS
    + tables.NORMS,
    required=("num_key_value_heads",),
    fixed={"use_bias": False},
    defaults={"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1},
    is_tied=True,
    reads=(
        readers.full_only,
        readers.experts(
            number="moe_num_experts",
            active="moe_k",
            width="moe_intermediate_size",
            shared="moe_num_shared_experts*width",
            layers=readers.between_indices,
        ),
    ),
)
LLAMA4 = Family(
    layer=tables.ATTENTION
    + tables.GATED_MLP.replace("mlp.", "feed_forward.")
    + """[experts ? experts]
feed_forward.experts.gate_up_proj            E h 2*Ie
feed_forward.experts.down_proj               E Ie h
[router linear ? experts]
feed_forward.router.weight                   =E h
[shared_experts ? experts]
feed_forward.shared_expert.gate_proj.weight   Is h
feed_forward.shared_expert.up_proj.weight     Is h
feed_forward.shared_expert.down_proj.weight   h Is
"""
    + tables.NORMS,
    switches=ATTENTION_BIAS,
    keys={"intermediate_size": "intermediate_size_mlp"},
    required=("num_key_value_heads", "head_dim"),
    defaults={"interleave_moe_layer_step": 1, "no_rope_layer_interval": 4, "attention_chunk_size": 8192},
    reads=(
        readers.chunked_attention,
        readers.experts(
            number="num_local_experts",
            width="intermediate_size",
            shared="intermediate_size",
            layers=readers.interleaved,
        ),
    ),
)
NEMOTRON_H = Family(
    before="[embeddings]\nmodel.embeddings.weight   V h\n",
    layer="""[norms]
norm.weight   h
"""
    + tables.MAMBA
    + tables.ATTENTION.replace("self_attn.", "mixer.").replace("[attention]", "[attention ? full]")
    + """[mlp ? none !experts]
mixer.up_proj.weight     I h
mixer.down_proj.weight   h I
[experts ? experts]
mixer.experts.up_proj     E Ie El
mixer.experts.down_proj   E El Ie
[router ? experts]
mixer.gate.weight   =E h
[router buffer ? experts]
mixer.gate.e_score_correction_bias   =E
[shared_experts ? experts]
mixer.shared_experts.up_proj.weight     Is h
mixer.shared_experts.down_proj.weight   h Is
mixer.fc1_latent_proj.weight            El h   ? latent_experts
mixer.fc2_latent_proj.weight            h El   ? latent_experts
""",
    after=tables.HEAD.replace("model.norm.", "model.norm_f."),
    defaults={"head_dim": 128, "n_groups": 8, "conv_kernel": 4, "ssm_state_size": 128, "chunk_size": 128},
    switches={"use_conv_bias": (True, "conv_bias")},
    fixed={"use_bias": False, "mlp_bias": False, "attention_bias": False},
    required=("num_key_value_heads",),
    reads=(readers.hybrid_layers,),
)
"""Source: modeling_nemotron_h.py; multi-token prediction is left out as there."""

MIXTURES = {
    "MixtralForCausalLM": MIXTRAL,
    "OlmoeForCausalLM": OLMOE,
    "MiniMaxM2ForCausalLM": MINIMAX_M2,
    "PhimoeForCausalLM": PHIMOE,
    "PhiMoEForCausalLM": PHIMOE,
    "GraniteMoeForCausalLM": GRANITE_MOE,
    "GptOssForCausalLM": GPT_OSS,
    "Qwen2MoeForCausalLM": QWEN2_MOE,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "Qwen3NextForCausalLM": QWEN3_NEXT,
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5MoeForCausalLM": QWEN3_5_MOE,
    "Glm4MoeForCausalLM": GLM4_MOE,
    "Glm4MoeLiteForCausalLM": GLM4_MOE_LITE,
    "DeepseekV2ForCausalLM": DEEPSEEK_V2,
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
    "DeepseekV32ForCausalLM": DEEPSEEK_V32,
    "GlmMoeDsaForCausalLM": DEEPSEEK_V32,
    "Ernie4_5_MoeForCausalLM": ERNIE_MOE,
    "Llama4ForCausalLM": LLAMA4,
    "NemotronHForCausalLM": NEMOTRON_H,
}
