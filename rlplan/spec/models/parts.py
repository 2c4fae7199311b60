"""Parts of a model beyond the plain decoder: experts, latent and linear attention, an indexer, a vision tower.

In: checked numbers. Out: frozen values inside a ModelSpec. Left out: their spelling in configs (`readers`).
"""

from pydantic import Field

from rlplan.spec.base import Spec
from rlplan.spec.models.config import MAX_DIMENSION, MAX_LAYERS

FULL, SLIDING, CHUNKED, LINEAR, NONE = "full", "sliding", "chunked", "linear", "none"
"""Kinds of attention: to all earlier tokens, to a window, to a chunk, through a state of constant size, or none.
Nemotron-H has layers without attention, which are an MLP instead."""
PARALLEL = "parallel"
"""Attention to all earlier tokens beside a state of constant size, both in one layer (Falcon-H1)."""


class ExpertsSpec(Spec):
    """The routed experts of a layer."""

    num_experts: int = Field(ge=1, le=MAX_DIMENSION)
    num_active: int = Field(ge=1, le=MAX_DIMENSION)
    """Experts chosen per token."""
    intermediate_size: int = Field(ge=1, le=MAX_DIMENSION)
    """Width of one expert."""
    shared_intermediate_size: int = Field(default=0, ge=0, le=MAX_DIMENSION)
    """Total width of the shared experts, which process every token; 0 for none."""
    latent_size: int = Field(default=0, ge=0, le=MAX_DIMENSION)
    """Width of the rows sent to routed experts (Nemotron 3 Super); 0 for the model's own width."""
    num_groups: int = Field(default=1, ge=1, le=MAX_DIMENSION)
    """Groups of experts, in their order, of which a token chooses some first (DeepSeek-V3, section 2.1.2)."""
    active_groups: int = Field(default=1, ge=1, le=MAX_DIMENSION)
    """Groups that the experts of a token come from."""
    is_gated: bool = True
    """Whether an expert has three matrices instead of two."""
    layers: tuple[int, ...]
    """Layers that have experts instead of a dense MLP (in Gemma 4: in addition to it)."""

    @property
    def num_matrices(self) -> int:
        """Matrices per expert."""
        return 3 if self.is_gated else 2


class LatentAttentionSpec(Spec):
    """Multi-head latent attention: keys and values are projections of one cached latent.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """

    q_rank: int = Field(ge=0, le=MAX_DIMENSION)
    """Width of the queries' latent; 0 if queries are projected directly."""
    kv_rank: int = Field(ge=1, le=MAX_DIMENSION)
    """Width of the cached latent."""
    nope_head_dim: int = Field(ge=1, le=MAX_DIMENSION)
    rope_head_dim: int = Field(ge=1, le=MAX_DIMENSION)
    """Rotary part of a head, cached once for all heads."""
    value_head_dim: int = Field(ge=1, le=MAX_DIMENSION)


class IndexerSpec(Spec):
    """The indexer of DeepSeek sparse attention, which selects the tokens to attend to and caches one key per token."""

    num_heads: int = Field(ge=1, le=MAX_DIMENSION)
    head_dim: int = Field(ge=1, le=MAX_DIMENSION)
    layers: tuple[int, ...]
    """Layers with an indexer; the others reuse the selection of the last indexer before them."""


class LinearAttentionSpec(Spec):
    """A state of constant size per sequence instead of keys and values per token: the gated delta rule, Mamba-2, or a
    short convolution.

    Source: transformers 5.19, modeling_qwen3_next.py, modeling_kimi_linear.py, modeling_nemotron_h.py and
    modeling_lfm2.py.
    """

    num_key_heads: int = Field(ge=0, le=MAX_DIMENSION)
    """Heads of queries and of keys; 0 for a short convolution, which keeps only its last inputs."""
    num_value_heads: int = Field(ge=1, le=MAX_DIMENSION)
    key_head_dim: int = Field(ge=0, le=MAX_DIMENSION)
    value_head_dim: int = Field(ge=1, le=MAX_DIMENSION)
    conv_kernel: int = Field(ge=1, le=MAX_DIMENSION)
    is_mamba: bool = False
    """Whether it is Mamba-2. Its B and C count as keys and queries, one per group of heads, as wide as the state."""
    chunk: int = Field(default=64, ge=1, le=MAX_DIMENSION)
    """Tokens that a kernel processes together."""

    @property
    def is_short_conv(self) -> bool:
        """Whether it is a short convolution (LFM2), without a recurrent state."""
        return self.num_key_heads == 0


class VisionSpec(Spec):
    """A vision or audio tower, of which only the tensors are modelled."""

    tower: str
    """Name of its tensor tables in `towers`."""
    sizes: dict[str, int]
    """Values of the tables' symbols."""
    num_layers: int = Field(ge=1, le=MAX_DIMENSION)
    """Layers of its main stack."""
    conditions: tuple[str, ...] = ()
    """Conditions that hold for its tables."""
    num_mergers: int = Field(default=0, ge=0, le=MAX_DIMENSION)
    """Extra mergers that feed deeper layers (Qwen3-VL)."""


class SharedKeysSpec(Spec):
    """Last layers that reuse keys and values of earlier ones (Gemma 4 E2B and E4B)."""

    num_layers: int = Field(ge=1, le=MAX_LAYERS)
    widens_mlp: bool
    """Whether the MLPs of these layers are twice as wide."""


class PerLayerInputSpec(Spec):
    """An extra embedding of each token for every layer (Gemma 4 E2B and E4B)."""

    width: int = Field(ge=1, le=MAX_DIMENSION)
    """Width per layer."""
    vocab_size: int = Field(ge=1, le=MAX_DIMENSION)


class GlobalAttentionSpec(Spec):
    """Sizes of the full-attention layers where they differ from the sliding ones (Gemma 4)."""

    num_kv_heads: int = Field(ge=1, le=MAX_DIMENSION)
    head_dim: int = Field(ge=1, le=MAX_DIMENSION)
    shares_kv: bool
