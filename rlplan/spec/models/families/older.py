"""The first generation: learned or ALiBi positions, layer norms with biases, packed attention projections.

In: nothing. Out: `OLDER`, architecture -> Family. Left out: OPT-350m's projections around the stack, and what `fixed`
names. Source: transformers 5.19, modeling files of that name.
"""

from rlplan.spec.models.config import Config
from rlplan.spec.models.families import tables
from rlplan.spec.models.families.family import Family, words
from rlplan.spec.models.families.readers import Fields


def _opt(config: Config, num_layers: int) -> Fields:
    """Embeddings as wide as the layers: OPT-350m's projections around the stack are not modelled (modeling_opt.py)."""
    config.refuse_unless("word_embed_proj_dim", config.count("hidden_size"))
    return {}


def _four_times_hidden(config: Config, num_layers: int) -> Fields:
    """`n_inner` or four times the width (modeling_gpt2.py)."""
    key = "n_embd" if config.get("n_embd") is not None else "hidden_size"
    return {"intermediate_size": config.optional_count("n_inner") or 4 * config.count(key)}


def _falcon(config: Config, num_layers: int) -> Fields:
    """One key head, one for each query head, or `num_kv_heads` of the new architecture (modeling_falcon.py)."""
    heads = config.count("num_attention_heads")
    is_new = config.flag("new_decoder_architecture", default=False)
    if is_new:
        kv_heads = config.optional_count("num_kv_heads") or heads
    else:
        kv_heads = 1 if config.flag("multi_query", default=True) else heads
    conditions = {"new"} if is_new and config.get("num_ln_in_parallel_attn") in (None, 2) else set()
    if not is_new and not config.flag("parallel_attn", default=True):
        conditions.add("sequential")
    width = config.optional_count("ffn_hidden_size") or 4 * config.count("hidden_size")
    return {"num_kv_heads": kv_heads, "intermediate_size": width, "options": tuple(sorted(conditions))}


def _mpt(config: Config, num_layers: int) -> Fields:
    """`expansion_ratio` times the width; `kv_n_heads` does not exist in the library's model (modeling_mpt.py)."""
    if config.get("attn_config") is not None and config.child("attn_config").get("attn_type") == "multiquery_attention":
        config.refuse("attn_config.attn_type", "multiquery_attention", "multihead_attention")
    return {"intermediate_size": config.count("expansion_ratio") * config.count("d_model")}


_PACKED = """[attention]
{name}.query_key_value.weight   q+2*kv h
{name}.query_key_value.bias     q+2*kv   ? bias
{name}.dense.weight             h q
{name}.dense.bias               h        ? bias
"""
_FOUR_H_MLP = """[mlp]
mlp.dense_h_to_4h.weight   I h
mlp.dense_h_to_4h.bias     I   ? bias
mlp.dense_4h_to_h.weight   h I
mlp.dense_4h_to_h.bias     h   ? bias
"""
_FINAL_NORM = "[norms]\ntransformer.ln_f.weight h\ntransformer.ln_f.bias h\n"
_HEAD = "[head]\nlm_head.weight V h ? !tied\n"

OPT = Family(
    before="""[embeddings]
model.decoder.embed_tokens.weight       V h
model.decoder.embed_positions.weight    P+2 h
[norms]
model.decoder.final_layer_norm.weight   h
model.decoder.final_layer_norm.bias     h
""",
    layer="""[attention]
self_attn.k_proj.weight       kv h
self_attn.k_proj.bias         kv
self_attn.v_proj.weight       kv h
self_attn.v_proj.bias         kv
self_attn.q_proj.weight       q h
self_attn.q_proj.bias         q
self_attn.out_proj.weight     h q
self_attn.out_proj.bias       h
[norms]
self_attn_layer_norm.weight   h
self_attn_layer_norm.bias     h
[mlp]
fc1.weight                    I h
fc1.bias                      I
fc2.weight                    h I
fc2.bias                      h
[norms]
final_layer_norm.weight       h
final_layer_norm.bias         h
""",
    after=_HEAD,
    prefix="model.decoder.layers.",
    keys={"intermediate_size": "ffn_dim", "num_key_value_heads": "num_attention_heads"},
    fixed={"do_layer_norm_before": True, "enable_bias": True, "_remove_final_layer_norm": False},
    is_tied=True,
    reads=(_opt,),
)
GPT2 = Family(
    before="[embeddings]\ntransformer.wte.weight V h\ntransformer.wpe.weight P h\n",
    layer="""[norms]
ln_1.weight          h
ln_1.bias            h
[attention]
attn.c_attn.weight   h q+2*kv
attn.c_attn.bias     q+2*kv
attn.c_proj.weight   q h
attn.c_proj.bias     h
[norms]
ln_2.weight          h
ln_2.bias            h
[mlp]
mlp.c_fc.weight      h I
mlp.c_fc.bias        I
mlp.c_proj.weight    I h
mlp.c_proj.bias      h
""",
    after=_FINAL_NORM + _HEAD,
    prefix="transformer.h.",
    keys={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "num_key_value_heads": "n_head",
        "max_position_embeddings": "n_positions",
    },
    fixed={"add_cross_attention": False},
    is_tied=True,
    reads=(_four_times_hidden,),
)
GPTJ = Family(
    before="[embeddings]\ntransformer.wte.weight V h\n",
    layer="""[norms]
ln_1.weight            h
ln_1.bias              h
[attention]
attn.k_proj.weight     kv h
attn.v_proj.weight     kv h
attn.q_proj.weight     q h
attn.out_proj.weight   h q
[mlp]
mlp.fc_in.weight       I h
mlp.fc_in.bias         I
mlp.fc_out.weight      h I
mlp.fc_out.bias        h
""",
    after=_FINAL_NORM + _HEAD + "lm_head.bias V\n",
    prefix="transformer.h.",
    keys=GPT2.keys,
    reads=(_four_times_hidden,),
)
GPT_NEOX = Family(
    before="[embeddings]\ngpt_neox.embed_in.weight V h\n",
    layer=tables.NORMS + _PACKED.format(name="attention").replace("? bias", "? qkv_bias") + _FOUR_H_MLP,
    after="[norms]\ngpt_neox.final_layer_norm.weight h\ngpt_neox.final_layer_norm.bias h\n" + _HEAD,
    prefix="gpt_neox.layers.",
    conditions=words("layer_norm bias"),
    switches={"attention_bias": (True, "qkv_bias")},
    keys={"num_key_value_heads": "num_attention_heads"},
)
FALCON = Family(
    before="[embeddings]\ntransformer.word_embeddings.weight V h\n",
    layer=_PACKED.format(name="self_attention")
    + _FOUR_H_MLP
    + """[norms]
ln_attn.weight                    h   ? new
ln_attn.bias                      h   ? new
ln_mlp.weight                     h   ? new
ln_mlp.bias                       h   ? new
post_attention_layernorm.weight   h   ? sequential
post_attention_layernorm.bias     h   ? sequential
input_layernorm.weight            h   ? !new
input_layernorm.bias              h   ? !new
""",
    after=_FINAL_NORM + _HEAD,
    prefix="transformer.h.",
    switches={"bias": (False, "bias")},
    keys={"num_key_value_heads": "num_attention_heads"},
    defaults={"max_position_embeddings": 2048},
    is_tied=True,
    reads=(_falcon,),
)
BLOOM = Family(
    before="""[embeddings]
transformer.word_embeddings.weight             V h
[norms]
transformer.word_embeddings_layernorm.weight   h
transformer.word_embeddings_layernorm.bias     h
""",
    layer="[norms]\ninput_layernorm.weight h\ninput_layernorm.bias h\n"
    + _PACKED.format(name="self_attention")
    + "[norms]\npost_attention_layernorm.weight h\npost_attention_layernorm.bias h\n"
    + _FOUR_H_MLP,
    after=_FINAL_NORM + _HEAD,
    prefix="transformer.h.",
    conditions=words("bias"),
    keys={
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "num_key_value_heads": "n_head",
        "max_position_embeddings": "seq_length",
    },
    defaults={"seq_length": 2048},
    is_tied=True,
    reads=(_four_times_hidden,),
)
MPT = Family(
    before="[embeddings]\ntransformer.wte.weight V h\n",
    layer="""[norms]
norm_1.weight          h
[attention]
attn.Wqkv.weight       q+2*kv h
attn.out_proj.weight   h q
[norms]
norm_2.weight          h
[mlp]
ffn.up_proj.weight     I h
ffn.down_proj.weight   h I
""",
    after="[norms]\ntransformer.norm_f.weight h\n" + _HEAD,
    prefix="transformer.blocks.",
    keys={
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
    },
    defaults={"expansion_ratio": 4},
    fixed={"no_bias": True},
    is_tied=True,
    reads=(_mpt,),
)
PHI = Family(
    layer=tables.QKV
    + """[attention]
self_attn.dense.weight   h q
self_attn.dense.bias     h
[mlp]
mlp.fc1.weight           I h
mlp.fc1.bias             I
mlp.fc2.weight           h I
mlp.fc2.bias             h
[norms]
input_layernorm.weight   h
input_layernorm.bias     h
""",
    after="[norms]\nmodel.final_layernorm.weight h\nmodel.final_layernorm.bias h\n" + _HEAD + "lm_head.bias V\n",
    conditions=words("qkv_bias"),
    fixed={"qk_layernorm": False},
)

OLDER = {
    "OPTForCausalLM": OPT,
    "GPT2LMHeadModel": GPT2,
    "GPTJForCausalLM": GPTJ,
    "GPTNeoXForCausalLM": GPT_NEOX,
    "FalconForCausalLM": FALCON,
    "BloomForCausalLM": BLOOM,
    "MptForCausalLM": MPT,
    "MPTForCausalLM": MPT,
    "PhiForCausalLM": PHI,
}
