"""Block: the widths and kernels of one decoder layer, which decide the bytes of its activations.

In: widths, given directly or from a ModelSpec (block_families.py). Out: a frozen value for the formulas of
activations.py. Left out: bytes (activations.py), parameters (spec/model.py).

Symbols: h hidden, q = a*d width of the queries, k width of the keys (and of the values), I width of the MLP.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

FLOAT_BYTES = 4


class Norm(StrEnum):
    """Implementation of a norm, which decides the tensors that it saves.

    RMS: computed in fp32, scaled in the model's type (Llama, Qwen, Mistral). RMS_FP32: scaled in fp32 too (Gemma,
    OLMo 2, gpt-oss). LAYER: torch's layer norm kernel. LAYER_FP32: the same kernel on an fp32 copy, without weights
    (OLMo). LAYER_BY_HAND: a layer norm in elementary operations in fp32 (Cohere). FUSED: an RMS kernel that saves only
    its input (torch.nn.RMSNorm, Liger, torch.compile).
    """

    RMS = "rms"
    RMS_FP32 = "rms_fp32"
    LAYER = "layer"
    LAYER_FP32 = "layer_fp32"
    LAYER_BY_HAND = "layer_by_hand"
    FUSED = "fused"


@dataclass(frozen=True)
class Experts:
    """A mixture of experts."""

    num: int
    top_k: int
    """Experts per token."""

    width: int
    """Intermediate width of one expert."""

    shared_width: int = 0
    """Intermediate width of the shared experts."""

    saved_widths: int = 4
    """Tensors of an expert's width that are saved for each token and expert: 4 (gate, up, activation, product), or 7
    for gpt-oss, which clamps and gates in elementary operations."""

    has_fp32_router: bool = False
    """Whether the router reads an fp32 copy of its input (DeepSeek)."""

    row_width: int = 0
    """Width of the rows that experts read and write; 0: the model's hidden size."""

    row_shards: int = 1
    """Parts into which tensor parallel ranks cut the rows for experts. With whole experts each rank sends only its own
    tokens; the same holds where fewer ranks share an expert than a layer."""

    gates_shared: bool = False
    """Whether a gate scales the shared experts' output (Qwen)."""


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention."""

    q_rank: int
    """Width of the compressed queries."""

    kv_rank: int
    """Width of the compressed keys and values."""

    qk_head_dim: int
    v_head_dim: int
    nope_head_dim: int = 0
    """Width of a key without its rotary part. One projection computes it together with the value."""


@dataclass(frozen=True)
class DeltaRule:
    """Linear attention by the gated delta rule instead of attention."""

    num_heads: int
    """Value heads. Queries and keys are repeated to as many."""

    key_head_dim: int
    """Width of one key head."""

    keys: int
    """Width of all key heads together."""

    values: int
    """Width of all value heads together."""


@dataclass(frozen=True)
class StateSpace:
    """Mamba-2 instead of attention."""

    num_heads: int
    keys: int
    """Width of B; C has the same."""

    values: int
    """Width of the inputs; their gates have the same."""


@dataclass(frozen=True)
class Block:
    """One decoder layer. Widths are elements."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    """Width I of the MLP."""

    norm: Norm = Norm.RMS
    num_norms: int = 2
    """2, or 4 with norms after attention and MLP too (Gemma)."""

    norms_feed_linears: int = 2
    """Norms whose output a linear layer reads; two of Gemma's four."""

    qk_norm: str = "none"
    """`heads`: norms over each head (Qwen3, Gemma 3); `full`: over the whole width (OLMo 2); or `none`."""

    mlp_saved_widths: int = 4
    """Tensors of width I that the MLP saves: 4 gated (gate, its activation, up, product), 2 plain, 5 with GPT-2's
    tanh in elementary operations, 3 where a fused kernel recomputes the activation."""

    has_rotary: bool = True
    has_fp32_rotary: bool = False
    """Whether the rotary table stays in fp32 instead of the model's type (OLMo)."""

    experts: Experts | None = None
    latent: Latent | None = None
    delta_rule: DeltaRule | None = None
    state_space: StateSpace | None = None
    short_conv: int = 0
    """Width of a gated short convolution instead of attention (LFM2); 0 for none."""

    has_attention: bool = True
    has_mlp: bool = True
    """Layers of Nemotron-H have either attention or an MLP; all others have both."""

    num_branches: int = 2
    """2, or 1 where attention and MLP read the same normed rows (Phi, Cohere)."""

    norms_share_input: bool = False
    """Both norms read the layer's input (GPT-NeoX)."""

    packs_qkv: bool = False
    """One projection computes queries, keys and values. The values, a view, keep all of it in memory."""

    gates_attention: bool = False
    """A sigmoid gate scales attention's output (Qwen3-Next)."""

    norms_values: bool = False
    """Values are normed too (Gemma 4)."""

    has_keys: bool = True
    """False where the layer reads keys and values of an earlier layer."""

    per_layer_width: int = 0
    """Width of an additional input that each layer has of its own (Gemma 4 E2B); 0 for none."""

    rotary_bytes: int = 0
    """Bytes of rotary rows that every layer computes anew for a token (Ernie, in fp32)."""

    @property
    def q(self) -> int:
        """Width of the queries."""
        return self.num_heads * self.head_dim

    @property
    def k(self) -> int:
        """Width of the keys, and of the values."""
        return self.num_kv_heads * self.head_dim

    def rotary_table_bytes(self, element_bytes: int) -> int:
        """Bytes of a token's cosines and sines, which all layers share: for a head, or for MLA's rotary part.

        >>> block = Block(hidden=64, num_heads=4, num_kv_heads=4, head_dim=16, intermediate=256)
        >>> block.rotary_table_bytes(2), replace(block, has_rotary=False).rotary_table_bytes(2)
        (64, 0)
        """
        if not self.has_rotary:
            return 0
        latent = self.latent
        width = latent.qk_head_dim - latent.nope_head_dim if latent else self.head_dim
        return 2 * width * (FLOAT_BYTES if self.has_fp32_rotary else element_bytes)

    def fuse(self) -> "Block":
        """The layer under fused kernels (Liger, Transformer Engine, torch.compile).

        Norms then save only their input, and the MLP saves gate, up and the product that its last linear layer reads.
        """
        experts = replace(self.experts, saved_widths=min(3, self.experts.saved_widths)) if self.experts else None
        norm = Norm.FUSED if self.norm in (Norm.RMS, Norm.RMS_FP32) else self.norm
        gated = self.mlp_saved_widths == 4
        return replace(self, norm=norm, mlp_saved_widths=3 if gated else self.mlp_saved_widths, experts=experts)

    def shard(self, tp_size: int, expert_tp: int | None = None) -> "Block":
        """The layer on one tensor parallel rank: heads, MLP and experts are cut over `tp_size` ranks; norms are whole.

        expert_tp: ranks that share an expert's matrices; None: all of them. With whole experts (1) a rank handles its
        own share of the rows. With a part of each expert it handles all rows. In general the widths per token are the
        same, and a rank has expert_tp / tp_size of the rows.
        """
        if tp_size == 1:
            return self
        experts = self.experts
        if experts is not None:
            widths = experts.width // tp_size, experts.shared_width // tp_size
            shares = max(1, tp_size // (expert_tp or tp_size))
            experts = replace(experts, width=widths[0], shared_width=widths[1], row_shards=shares)
        rule = self.delta_rule
        if rule is not None:
            heads, keys, values = rule.num_heads // tp_size, rule.keys // tp_size, rule.values // tp_size
            rule = replace(rule, num_heads=heads, keys=keys, values=values)
        mamba = self.state_space
        if mamba is not None:
            sizes = (mamba.num_heads // tp_size, mamba.keys // tp_size, mamba.values // tp_size)
            mamba = StateSpace(*sizes)
        return replace(
            self,
            delta_rule=rule,
            state_space=mamba,
            short_conv=self.short_conv // tp_size,
            num_heads=max(1, self.num_heads // tp_size),
            num_kv_heads=max(1, self.num_kv_heads // tp_size),
            intermediate=self.intermediate // tp_size,
            experts=experts,
        )


@dataclass(frozen=True)
class Layers:
    """Equal layers of a model."""

    num: int
    block: Block
