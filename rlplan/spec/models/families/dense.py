"""Dense families with rotary positions and a gated or plain MLP.

In: nothing. Out: `DENSE`, architecture -> Family. Left out: experts (`mixtures`), the first generation
(`older`), vision (`multimodal`). Source: transformers 5.19, modeling files of that name.
"""

from dataclasses import replace

from rlplan.spec.models.families import readers, tables
from rlplan.spec.models.families.family import Family, words

ATTENTION_BIAS = {"attention_bias": (False, "qkv_bias output_bias")}
PLAIN_LAYER = tables.ATTENTION + tables.GATED_MLP + tables.NORMS

LLAMA = Family(layer=PLAIN_LAYER, switches=ATTENTION_BIAS | {"mlp_bias": (False, "mlp_bias")})
MISTRAL = Family(
    layer=PLAIN_LAYER,
    required=("num_key_value_heads",),
    defaults={"sliding_window": 4096},
    reads=(readers.window_everywhere,),
)
QWEN2 = Family(
    layer=PLAIN_LAYER,
    conditions=words("qkv_bias"),
    required=("num_key_value_heads",),
    defaults={"max_window_layers": 28, "sliding_window": 4096},
    reads=(readers.window_if_used,),
)
QWEN3 = replace(
    QWEN2,
    conditions=words("qk_norm"),
    switches=ATTENTION_BIAS,
    required=("num_key_value_heads", "head_dim"),
)
GEMMA = Family(
    layer=PLAIN_LAYER,
    switches=ATTENTION_BIAS,
    required=("num_key_value_heads", "head_dim"),
    is_tied=True,
)
GEMMA2 = replace(
    GEMMA,
    layer=PLAIN_LAYER + tables.FEEDFORWARD_NORMS,
    defaults={"sliding_window": 4096},
    reads=(readers.window_every_layer_but(2),),
)
GEMMA3_DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
"""Published Gemma 3 configs leave these out where they are the library's (configuration_gemma3.py)."""

GEMMA3 = replace(
    GEMMA2,
    conditions=words("qk_norm"),
    required=(),
    defaults=GEMMA3_DEFAULTS,
    reads=(readers.window_every_layer_but(6),),
)
PHI3 = Family(layer=tables.PACKED_ATTENTION + tables.PACKED_MLP + tables.NORMS, reads=(readers.window_everywhere,))
OLMO2 = Family(
    layer=tables.ATTENTION + tables.GATED_MLP + tables.POST_NORMS,
    conditions=words("wide_qk_norm"),
    switches=ATTENTION_BIAS,
)
OLMO3 = replace(OLMO2, defaults={"sliding_window": 4096}, reads=(readers.window_every_layer_but(4),))
OLMO = Family(
    layer=tables.ATTENTION + tables.GATED_MLP,
    after="[head]\nlm_head.weight V h ? !tied",
    switches=ATTENTION_BIAS,
)
GLM = Family(
    layer=tables.ATTENTION + tables.PACKED_MLP + tables.NORMS,
    switches={"attention_bias": (True, "qkv_bias")},
    required=("num_key_value_heads", "head_dim"),
)
GLM4 = replace(GLM, layer=GLM.layer + "[norms]\npost_self_attn_layernorm.weight h\npost_mlp_layernorm.weight h\n")
COHERE = Family(
    layer=tables.ATTENTION
    + "[norms]\nself_attn.q_norm.weight a d ? headed_qk_norm\nself_attn.k_norm.weight k d ? headed_qk_norm\n"
    + tables.GATED_MLP
    + "[norms]\ninput_layernorm.weight h\n",
    switches=ATTENTION_BIAS | {"use_qk_norm": (False, "headed_qk_norm")},
    is_tied=True,
)
COHERE2 = replace(
    COHERE,
    switches=ATTENTION_BIAS,
    defaults={"sliding_window": 4096},
    reads=(readers.window_every_layer_but(4),),
)
STARCODER2 = Family(
    layer=tables.ATTENTION
    + """[mlp]
mlp.c_fc.weight     I h
mlp.c_fc.bias       I   ? mlp_bias
mlp.c_proj.weight   h I
mlp.c_proj.bias     h   ? mlp_bias
"""
    + tables.NORMS,
    conditions=words("layer_norm"),
    switches={"use_bias": (True, "qkv_bias output_bias mlp_bias")},
    required=("num_key_value_heads",),
    is_tied=True,
    reads=(readers.window_everywhere,),
)
STABLELM = Family(
    layer=tables.ATTENTION + tables.GATED_MLP + tables.NORMS,
    conditions=words("layer_norm"),
    switches={"use_qkv_bias": (False, "qkv_bias")},
    fixed={"qk_layernorm": False, "use_parallel_residual": False},
)
SMOLLM3 = replace(LLAMA, is_tied=True, required=("num_key_value_heads",))
SEED_OSS = Family(
    layer=PLAIN_LAYER,
    switches={
        "attention_bias": (True, "qkv_bias"),
        "attention_out_bias": (False, "output_bias"),
        "mlp_bias": (False, "mlp_bias"),
    },
    required=("num_key_value_heads", "head_dim"),
)
ERNIE = Family(
    layer=PLAIN_LAYER,
    switches={"use_bias": (False, "qkv_bias output_bias mlp_bias")},
    required=("num_key_value_heads", "head_dim"),
    is_tied=True,
)
ARCEE = Family(
    layer=tables.ATTENTION
    + """[mlp]
mlp.up_proj.weight     I h
mlp.up_proj.bias       I   ? mlp_bias
mlp.down_proj.weight   h I
mlp.down_proj.bias     h   ? mlp_bias
"""
    + tables.NORMS,
    switches=LLAMA.switches,
    required=("num_key_value_heads",),
)

DENSE = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "GemmaForCausalLM": GEMMA,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "Ministral3ForCausalLM": replace(MISTRAL, required=("num_key_value_heads", "head_dim"), defaults={}),
    "Phi3ForCausalLM": PHI3,
    "OlmoForCausalLM": OLMO,
    "Olmo2ForCausalLM": OLMO2,
    "Olmo3ForCausalLM": OLMO3,
    "GlmForCausalLM": GLM,
    "Glm4ForCausalLM": GLM4,
    "CohereForCausalLM": COHERE,
    "Cohere2ForCausalLM": COHERE2,
    "Starcoder2ForCausalLM": STARCODER2,
    "StableLmForCausalLM": STABLELM,
    "SmolLM3ForCausalLM": SMOLLM3,
    "GraniteForCausalLM": LLAMA,
    "SeedOssForCausalLM": SEED_OSS,
    "Ernie4_5ForCausalLM": ERNIE,
    "ArceeForCausalLM": ARCEE,
}
