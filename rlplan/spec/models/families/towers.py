"""Vision towers: tables of tensors and how their configs are read. Counted, not modelled further.

In: the `vision_config` of a multimodal config. Out: a VisionSpec, and its tensors. Left out: images'
tokens. A tower is held whole by every rank here; vLLM shards its linear layers unless told otherwise.

Symbols: v width, w width of its MLP, p numbers in a patch, n positions, u width after merging patches, o width of the
language model, m width of the merger. Source: transformers 5.19, vision classes of the modeling files.
"""

from collections.abc import Callable, Iterator

from rlplan.records import dataclass
from rlplan.spec.models.config import Config
from rlplan.spec.models.parts import VisionSpec
from rlplan.spec.models.tensors import Parameter, Sizes, list_tensors, with_prefix

VisionReader = Callable[[Config, int], VisionSpec]


@dataclass(frozen=True)
class Tower:
    """Tables of tensors."""

    before: str
    """Before the stack."""
    layer: str
    """One layer of the stack, below `prefix`."""
    prefix: str
    after: str
    """After the stack."""
    merger: str = ""
    """One further merger, below `merger_prefix`."""
    merger_prefix: str = ""


_BIASED_QKV = """attn.qkv.weight    3*v v
attn.qkv.bias      3*v
attn.proj.weight   v v
attn.proj.bias     v
"""
_MERGER = """{name}.norm.weight         {norm}
{name}.norm.bias           {norm}
{name}.linear_fc1.weight   u u
{name}.linear_fc1.bias     u
{name}.linear_fc2.weight   o u
{name}.linear_fc2.bias     o
"""
_SEPARATE = "".join(f"{{0}}.{name}_proj.weight v v\n{{0}}.{name}_proj.bias v ? bias\n" for name in "kvq")
_BIASED_SEPARATE = _SEPARATE.replace("? bias", "")
_NORMED = "{0}.weight v\n{0}.bias v\n"
_PLAIN_MLP = "mlp.fc1.weight w v\nmlp.fc1.bias w\nmlp.fc2.weight v w\nmlp.fc2.bias v\n"

QWEN2_5 = Tower(
    before="[vision]\nmodel.visual.patch_embed.proj.weight v c t s s\n",
    layer="[vision]\nnorm1.weight v\nnorm2.weight v\n"
    + _BIASED_QKV
    + "".join(f"mlp.{name}_proj.weight w v\nmlp.{name}_proj.bias w\n" for name in ("gate", "up"))
    + "mlp.down_proj.weight v w\nmlp.down_proj.bias v\n",
    prefix="model.visual.blocks.",
    after="""[vision]
model.visual.merger.ln_q.weight    v
model.visual.merger.mlp.0.weight   u u
model.visual.merger.mlp.0.bias     u
model.visual.merger.mlp.2.weight   o u
model.visual.merger.mlp.2.bias     o
""",
)
QWEN3 = Tower(
    before="""[vision]
model.visual.patch_embed.proj.weight   v c t s s
model.visual.patch_embed.proj.bias     v
[vision plain]
model.visual.pos_embed.weight          n v
""",
    layer="[vision]\n"
    + _NORMED.format("norm1")
    + _NORMED.format("norm2")
    + _BIASED_QKV
    + _PLAIN_MLP.replace("fc", "linear_fc"),
    prefix="model.visual.blocks.",
    after="[vision]\n" + _MERGER.format(name="model.visual.merger", norm="v"),
    merger="[vision]\n" + _MERGER.format(name="", norm="u").replace("\n.", "\n").removeprefix("."),
    merger_prefix="model.visual.deepstack_merger_list.",
)
SIGLIP = Tower(
    before="""[vision]
model.vision_tower.embeddings.patch_embedding.weight      v c s s
model.vision_tower.embeddings.patch_embedding.bias        v
[vision plain]
model.vision_tower.embeddings.position_embedding.weight   n v
""",
    layer="[vision]\n"
    + _NORMED.format("layer_norm1")
    + _BIASED_SEPARATE.format("self_attn")
    + "self_attn.out_proj.weight v v\nself_attn.out_proj.bias v\n"
    + _NORMED.format("layer_norm2")
    + _PLAIN_MLP,
    prefix="model.vision_tower.encoder.layers.",
    after="[vision]\n"
    + _NORMED.format("model.vision_tower.post_layernorm")
    + """model.multi_modal_projector.mm_input_projection_weight   v o
model.multi_modal_projector.mm_soft_emb_norm.weight      v
""",
)
PIXTRAL = Tower(
    before="[vision]\nmodel.vision_tower.patch_conv.weight v c s s\nmodel.vision_tower.ln_pre.weight v\n",
    layer="[vision]\nattention_norm.weight v\n"
    "feed_forward.gate_proj.weight w v\nfeed_forward.up_proj.weight w v\nfeed_forward.down_proj.weight v w\n"
    + _SEPARATE.format("attention")
    + "attention.o_proj.weight v v\nffn_norm.weight v\n",
    prefix="model.vision_tower.transformer.layers.",
    after="""[vision]
model.multi_modal_projector.norm.weight                         v
model.multi_modal_projector.patch_merger.merging_layer.weight   v u
model.multi_modal_projector.linear_1.weight                     o v
model.multi_modal_projector.linear_2.weight                     o o
""",
)
LLAMA4 = Tower(
    before="""[vision]
vision_model.class_embedding                v
vision_model.positional_embedding_vlm       n v
vision_model.patch_embedding.linear.weight  v p
"""
    + _NORMED.format("vision_model.layernorm_pre")
    + _NORMED.format("vision_model.layernorm_post"),
    layer="[vision]\n"
    + "".join(f"self_attn.{name}_proj.weight v v\nself_attn.{name}_proj.bias v\n" for name in "qkv")
    + "self_attn.o_proj.weight v v\nself_attn.o_proj.bias v\n"
    + _PLAIN_MLP
    + _NORMED.format("input_layernorm")
    + _NORMED.format("post_attention_layernorm"),
    prefix="vision_model.model.layers.",
    after="""[vision]
vision_model.vision_adapter.mlp.fc1.weight   m w
vision_model.vision_adapter.mlp.fc2.weight   m2 m
multi_modal_projector.linear_1.weight        o m3
""",
)
GEMMA4 = Tower(
    before="""[vision]
model.vision_tower.patch_embedder.position_embedding_table   2 n v
model.vision_tower.patch_embedder.input_proj.weight          v p
[vision buffer ? standardized]
model.vision_tower.std_bias                                  v
model.vision_tower.std_scale                                 v
""",
    layer="[vision]\n"
    + "".join(f"self_attn.{name}_proj.linear.weight v v\n" for name in "qkvo")
    + "self_attn.q_norm.weight d\nself_attn.k_norm.weight d\n"
    + "mlp.gate_proj.linear.weight w v\nmlp.up_proj.linear.weight w v\nmlp.down_proj.linear.weight v w\n"
    + "".join(
        f"{name}_layernorm.weight v\n" for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
    ),
    prefix="model.vision_tower.encoder.layers.",
    after="[vision]\nmodel.embed_vision.embedding_projection.weight o v\n",
)
_CLIPS = "".join(f"{{0}}.{end}_{side} 1\n" for end in ("input", "output") for side in ("min", "max"))
_LINEARS = {
    "feed_forward1.ffw_layer_1": "4*v v",
    "feed_forward1.ffw_layer_2": "v 4*v",
    "feed_forward2.ffw_layer_1": "4*v v",
    "feed_forward2.ffw_layer_2": "v 4*v",
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.post"), "v v"),
    "lconv1d.linear_start": "2*v v",
    "lconv1d.linear_end": "v v",
}
_AUDIO_NORMS = (
    *(f"feed_forward{half}.{side}_layer_norm" for half in (1, 2) for side in ("pre", "post")),
    *("lconv1d.pre_layer_norm", "lconv1d.conv_norm", "norm_pre_attn", "norm_post_attn", "norm_out"),
)
GEMMA4_AUDIO = Tower(
    before="""[vision]
model.audio_tower.subsample_conv_projection.layer0.conv.weight         128 1 3 3
model.audio_tower.subsample_conv_projection.layer0.norm.weight         128
model.audio_tower.subsample_conv_projection.layer1.conv.weight         32 128 3 3
model.audio_tower.subsample_conv_projection.layer1.norm.weight         32
model.audio_tower.subsample_conv_projection.input_proj_linear.weight   v 1024
""",
    layer="[vision]\n"
    + "".join(f"{name}.linear.weight {shape}\n" for name, shape in _LINEARS.items())
    + "self_attn.per_dim_scale d\nself_attn.relative_k_proj.weight v v\nlconv1d.depthwise_conv1d.weight v 1 k\n"
    + "".join(f"{name}.weight v\n" for name in _AUDIO_NORMS)
    + "[vision buffer ? clipped]\n"
    + "".join(_CLIPS.format(name) for name in _LINEARS),
    prefix="model.audio_tower.layers.",
    after="""[vision]
model.audio_tower.output_proj.weight         m v
model.audio_tower.output_proj.bias           m
model.embed_audio.embedding_projection.weight   o m
""",
)
KIMI_K25 = Tower(
    before="""[vision]
model.vision_tower.patch_embed.proj.weight                   v c s s
model.vision_tower.patch_embed.proj.bias                     v
model.vision_tower.patch_embed.pos_emb.position_embeddings   n nw v
""",
    layer="[vision]\n"
    + _NORMED.format("norm1")
    + _NORMED.format("norm2")
    + "attn.proj.weight v v\nattn.proj.bias v\n"
    + "".join(f"attn.{name}_proj.weight v v\nattn.{name}_proj.bias v\n" for name in "qkv")
    + _PLAIN_MLP,
    prefix="model.vision_tower.layers.",
    after="[vision]\n"
    + _NORMED.format("model.vision_tower.final_layernorm")
    + """model.mm_projector.pre_norm.weight   m
model.mm_projector.pre_norm.bias     m
model.mm_projector.in_proj.weight    u u
model.mm_projector.in_proj.bias      u
model.mm_projector.out_proj.weight   o u
model.mm_projector.out_proj.bias     o
""",
)
TOWERS = {
    "qwen2_5": QWEN2_5,
    "qwen3": QWEN3,
    "siglip": SIGLIP,
    "pixtral": PIXTRAL,
    "llama4": LLAMA4,
    "gemma4": GEMMA4,
    "gemma4_audio": GEMMA4_AUDIO,
    "kimi_k25": KIMI_K25,
}


def tower_tensors(vision: VisionSpec) -> Iterator[Parameter]:
    """Every tensor of a vision tower and of what joins it to the language model."""
    tower, sizes = TOWERS[vision.tower], Sizes(vision.sizes, vision.sizes)
    conditions = frozenset(vision.conditions)
    yield from list_tensors(tower.before, sizes, conditions)
    layer = list_tensors(tower.layer, sizes, conditions)
    for index in range(vision.num_layers):
        yield from with_prefix(f"{tower.prefix}{index}.", layer)
    yield from list_tensors(tower.after, sizes, conditions)
    for index in range(vision.num_mergers):
        yield from with_prefix(f"{tower.merger_prefix}{index}.", list_tensors(tower.merger, sizes, conditions))
