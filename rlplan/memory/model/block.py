"""Block: the widths of one decoder layer and the kernels it runs on, which is all that its activations depend on.

In: widths by hand, or from a ModelSpec (block_families.py). Out: a frozen value that the formulas of activations.py
read. Left out: bytes (activations.py), parameters (spec/model.py).

Symbols: h hidden, q = a*d width of the queries, k width of the keys (and of the values), I width of the MLP.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

FLOAT_BYTES = 4


class Norm(StrEnum):
    """How a norm is computed, which decides what it saves.

    RMS: in fp32, scaled in the model's type (Llama, Qwen, Mistral). RMS_FP32: scaled in fp32 too (Gemma, OLMo 2,
    gpt-oss). LAYER: torch's kernel. LAYER_FP32: the same on an fp32 copy, without weights (OLMo). LAYER_BY_HAND:
    written out in fp32 (Cohere). FUSED: an RMS kernel that saves its input only (torch.nn.RMSNorm, Liger, compiled).
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
    """Experts of a token."""

    width: int
    """Of one expert."""

    shared_width: int = 0
    """Of those that every token visits."""

    saved_widths: int = 4
    """Tensors of an expert's width that are saved for a token and expert: gate, up, activation, product 4; gpt-oss
    clamps and gates by hand: 7."""

    has_fp32_router: bool = False
    """The router reads an fp32 copy (DeepSeek)."""

    row_width: int = 0
    """Of the rows that go to experts and back; 0 for the model's."""

    row_shards: int = 1
    """Shares into which tensor parallel ranks cut the rows that go to experts: each sends its own tokens' to experts
    that are whole, or to those that fewer of them share."""

    gates_shared: bool = False
    """The shared experts' output is scaled by a gate of its own (Qwen)."""


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention."""

    q_rank: int
    """Of the compressed queries."""

    kv_rank: int
    """Of the compressed keys and values."""

    qk_head_dim: int
    v_head_dim: int
    nope_head_dim: int = 0
    """The part of a key that stands beside the value in one projection."""


@dataclass(frozen=True)
class DeltaRule:
    """Linear attention by the gated delta rule instead of attention."""

    num_heads: int
    """Of the values, to which keys and queries are repeated."""

    key_head_dim: int
    """Of one head."""

    keys: int
    """Width of all heads together."""

    values: int
    """Width of all heads together."""


@dataclass(frozen=True)
class StateSpace:
    """Mamba-2 instead of attention."""

    num_heads: int
    keys: int
    """Width of B, and of C."""

    values: int
    """Width of the inputs, and of their gates."""


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
    """2, or 4 where norms stand after attention and MLP too (Gemma)."""

    norms_feed_linears: int = 2
    """Norms whose output a linear layer reads: of Gemma's four two do not."""

    qk_norm: str = "none"
    """Over each head (Qwen3, Gemma 3), over the whole width (OLMo 2), or none."""

    mlp_saved_widths: int = 4
    """Tensors of width I that the MLP saves: 4 gated (gate, its activation, up, product), 2 plain, 5 with GPT-2's
    tanh written out, 3 where a fused kernel recomputes the activation (the product is a linear input)."""

    has_rotary: bool = True
    has_fp32_rotary: bool = False
    """Its table of rotary rows is never cast to the model's type (OLMo)."""

    experts: Experts | None = None
    latent: Latent | None = None
    delta_rule: DeltaRule | None = None
    state_space: StateSpace | None = None
    has_attention: bool = True
    has_mlp: bool = True
    """Of layers that are attention or an MLP each has one (Nemotron-H)."""

    num_branches: int = 2
    """1 where attention and MLP read the same normed rows (Phi, Cohere)."""

    norms_share_input: bool = False
    """Both norms read the layer's input (GPT-NeoX)."""

    packs_qkv: bool = False
    """Queries, keys and values are one projection, which the values keep alive beside rotated queries and keys."""

    gates_attention: bool = False
    """Its output is scaled by a sigmoid (Qwen3-Next)."""

    norms_values: bool = False
    """Values are normed too (Gemma 4)."""

    has_keys: bool = True
    """False where keys and values are those of an earlier layer."""

    per_layer_width: int = 0
    """Of an input that every layer has beside the one before it (Gemma 4 E2B)."""

    rotary_bytes: int = 0
    """Of a token's rotary rows that every layer makes for itself (Ernie, in fp32)."""

    @property
    def q(self) -> int:
        """Width of the queries."""
        return self.num_heads * self.head_dim

    @property
    def k(self) -> int:
        """Width of the keys, and of the values."""
        return self.num_kv_heads * self.head_dim

    def rotary_table_bytes(self, element_bytes: int) -> int:
        """Of a token's cosines and sines, which all layers share: of a head, or of MLA's rotary part.

        >>> block = Block(hidden=64, num_heads=4, num_kv_heads=4, head_dim=16, intermediate=256)
        >>> block.rotary_table_bytes(2), replace(block, has_rotary=False).rotary_table_bytes(2)
        (64, 0)
        """
        if not self.has_rotary:
            return 0
        latent = self.latent
        width = latent.qk_head_dim - latent.nope_head_dim if latent else self.head_dim
        return 2 * width * (FLOAT_BYTES if self.has_fp32_rotary else element_bytes)

    def fused(self) -> "Block":
        """The same layer under fused kernels (Liger, Transformer Engine, torch.compile): norms save their input only,
        the MLP gate, up and the product that the last linear layer reads."""
        experts = replace(self.experts, saved_widths=min(3, self.experts.saved_widths)) if self.experts else None
        norm = Norm.FUSED if self.norm in (Norm.RMS, Norm.RMS_FP32) else self.norm
        gated = self.mlp_saved_widths == 4
        return replace(self, norm=norm, mlp_saved_widths=3 if gated else self.mlp_saved_widths, experts=experts)

    def sharded(self, tp_size: int, expert_tp: int | None = None) -> "Block":
        """The part that tensor parallelism splits: heads, MLP and experts over `tp_size` ranks; norms are whole.

        expert_tp: ranks that share an expert's matrices, None for all. A rank sends its share of the rows to experts
        that are whole (1), and has all rows where it has a share of each expert: for each of the pass's tokens the
        same widths, and of the rows themselves expert_tp / tp_size.
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
            num_heads=max(1, self.num_heads // tp_size),
            num_kv_heads=max(1, self.num_kv_heads // tp_size),
            intermediate=self.intermediate // tp_size,
            experts=experts,
        )


@dataclass(frozen=True)
class Layers:
    """So many layers of one kind."""

    num: int
    block: Block
