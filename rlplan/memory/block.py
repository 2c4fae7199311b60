"""Block: the widths of one decoder layer and the kernels it runs on, which is all that its activations depend on.

In: a ModelSpec, or widths by hand. Out: a frozen value that the formulas of activations.py read.
Left out: bytes (activations.py), parameters (spec/model.py).

Symbols: h hidden, q = a*d width of the queries, k width of the keys (and of the values), I width of the MLP.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from rlplan.spec.model import ModelSpec


class Norm(StrEnum):
    """How a norm is computed, which decides what it saves.

    RMS: in fp32, scaled in the model's type (Llama, Qwen, Mistral). RMS_FP32: scaled in fp32 too (Gemma, OLMo 2,
    gpt-oss). LAYER: torch's kernel. FUSED: an RMS kernel that saves its input only (torch.nn.RMSNorm, Liger, compiled).
    """

    RMS = "rms"
    RMS_FP32 = "rms_fp32"
    LAYER = "layer"
    FUSED = "fused"


@dataclass(frozen=True)
class Experts:
    """A mixture of experts. top_k: experts of a token. width: of one expert. shared_width: of those every token visits.

    saved_widths: tensors of an expert's width that are saved for a token and expert: gate, up, activation, product 4;
    gpt-oss clamps and gates by hand: 7. has_fp32_router: the router reads an fp32 copy (DeepSeek).
    """

    num: int
    top_k: int
    width: int
    shared_width: int = 0
    saved_widths: int = 4
    has_fp32_router: bool = False


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: ranks of the compressed queries and keys, widths of a head."""

    q_rank: int
    kv_rank: int
    qk_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class Block:
    """One decoder layer. Widths are elements.

    mlp_saved_widths: tensors of width I that the MLP saves: 4 gated (gate, its activation, up, product), 2 plain, 5
    with GPT-2's tanh written out, 3 where a fused kernel recomputes the activation (the product is a linear input).
    norm_widths_saved, num_norms: 2, or 4 where norms stand after attention and MLP too (Gemma), of which two feed no
    linear layer. qk_norm: over each head (Qwen3, Gemma 3) or over the whole width (OLMo 2).
    """

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    norm: Norm = Norm.RMS
    num_norms: int = 2
    norms_feed_linears: int = 2
    qk_norm: str = "none"
    mlp_saved_widths: int = 4
    has_rotary: bool = True
    experts: Experts | None = None
    latent: Latent | None = None

    @property
    def q(self) -> int:
        """Width of the queries."""
        return self.num_heads * self.head_dim

    @property
    def k(self) -> int:
        """Width of the keys, and of the values."""
        return self.num_kv_heads * self.head_dim

    def fused(self) -> "Block":
        """The same layer under fused kernels (Liger, Transformer Engine, torch.compile): norms save their input only,
        the MLP gate, up and the product that the last linear layer reads."""
        experts = replace(self.experts, saved_widths=3) if self.experts else None
        norm = self.norm if self.norm is Norm.LAYER else Norm.FUSED
        gated = self.mlp_saved_widths == 4
        return replace(self, norm=norm, mlp_saved_widths=3 if gated else self.mlp_saved_widths, experts=experts)

    def sharded(self, ways: int) -> "Block":
        """The part that tensor parallelism splits: heads, MLP and experts over `ways` ranks; norms are whole."""
        experts = self.experts
        if experts is not None:
            experts = replace(experts, width=experts.width // ways, shared_width=experts.shared_width // ways)
        return replace(
            self,
            num_heads=max(1, self.num_heads // ways),
            num_kv_heads=max(1, self.num_kv_heads // ways),
            intermediate=self.intermediate // ways,
            experts=experts,
        )


def block_of(model: ModelSpec) -> Block:
    """The block of a model: its widths and what its Hugging Face module is made of.

    >>> from rlplan.spec.model import ModelSpec
    >>> tiny = ModelSpec(architecture="Qwen3ForCausalLM", hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=1,
    ...     head_dim=4, intermediate_size=16, vocab_size=32, max_position_embeddings=64, has_tied_embeddings=True,
    ...     has_qkv_bias=False, has_qk_norm=True)
    >>> block = block_of(tiny)
    >>> block.qk_norm, block.q, block.k
    ('heads', 8, 4)
    """
    return Block(
        hidden=model.hidden_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        intermediate=model.intermediate_size,
        qk_norm="heads" if model.has_qk_norm else "none",
    )
