"""The parts of a model beyond the plain decoder: experts, latent and linear attention, an indexer, a vision tower.

In: checked numbers. Out: frozen values inside a ModelSpec. Left out: how a config spells them (`readers`).
"""

from pydantic import Field

from rlplan.spec.base import Spec
from rlplan.spec.models.config import MAX_DIMENSION, MAX_LAYERS

FULL, SLIDING, CHUNKED, LINEAR, NONE = "full", "sliding", "chunked", "linear", "none"
"""What a layer attends to: all that came before, a window, a chunk, a state of constant size, or nothing (Nemotron-H,
whose layers are attention or an MLP, not both)."""


class ExpertsSpec(Spec):
    """The routed experts of a layer."""

    num_experts: int = Field(ge=1, le=MAX_DIMENSION)
    num_active: int = Field(ge=1, le=MAX_DIMENSION)
    """Experts chosen for each token."""
    intermediate_size: int = Field(ge=1, le=MAX_DIMENSION)
    """Width of one expert."""
    shared_intermediate_size: int = Field(default=0, ge=0, le=MAX_DIMENSION)
    """Width of the experts that every token passes, all of them together; 0 for none."""
    latent_size: int = Field(default=0, ge=0, le=MAX_DIMENSION)
    """Width at which rows go to the routed experts (Nemotron 3 Super), 0 for the model's own."""
    is_gated: bool = True
    """Three matrices an expert, else two."""
    layers: tuple[int, ...]
    """The layers that have experts instead of (in Gemma 4: beside) a dense MLP."""

    @property
    def num_matrices(self) -> int:
        """Of one expert."""
        return 3 if self.is_gated else 2


class LatentAttentionSpec(Spec):
    """Multi-head latent attention: keys and values are projections of one cached latent.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """

    q_rank: int = Field(ge=0, le=MAX_DIMENSION)
    """Width of the queries' latent, 0 where queries are projected directly."""
    kv_rank: int = Field(ge=1, le=MAX_DIMENSION)
    """Width of the cached latent."""
    nope_head_dim: int = Field(ge=1, le=MAX_DIMENSION)
    rope_head_dim: int = Field(ge=1, le=MAX_DIMENSION)
    """Rotary part of a head, cached once for all heads."""
    value_head_dim: int = Field(ge=1, le=MAX_DIMENSION)


class IndexerSpec(Spec):
    """The indexer of DeepSeek sparse attention, which picks what a token attends to and caches one key a token."""

    num_heads: int = Field(ge=1, le=MAX_DIMENSION)
    head_dim: int = Field(ge=1, le=MAX_DIMENSION)
    layers: tuple[int, ...]
    """The layers that have one; the others reuse the choice of the last that has."""


class LinearAttentionSpec(Spec):
    """Gated delta rule, or Mamba-2: a state of constant size a sequence instead of keys and values a token.

    Of Mamba-2 B and C are keys and queries, one for each group of heads, and the state's width is the keys'.
    Source: transformers 5.19, modeling_qwen3_next.py, modeling_nemotron_h.py.
    """

    num_key_heads: int = Field(ge=1, le=MAX_DIMENSION)
    num_value_heads: int = Field(ge=1, le=MAX_DIMENSION)
    key_head_dim: int = Field(ge=1, le=MAX_DIMENSION)
    value_head_dim: int = Field(ge=1, le=MAX_DIMENSION)
    conv_kernel: int = Field(ge=1, le=MAX_DIMENSION)
    is_mamba: bool = False
    """Mamba-2."""
    chunk: int = Field(default=64, ge=1, le=MAX_DIMENSION)
    """Tokens that a kernel computes together."""


class VisionSpec(Spec):
    """A vision tower, counted but not modelled further."""

    tower: str
    """Name of its tables in `towers`."""
    sizes: dict[str, int]
    """The numbers behind the tables' symbols."""
    num_layers: int = Field(ge=1, le=MAX_DIMENSION)
    """Of its main stack."""
    conditions: tuple[str, ...] = ()
    """As in the language model's tables."""
    num_mergers: int = Field(default=0, ge=0, le=MAX_DIMENSION)
    """Further mergers that feed deeper layers (Qwen3-VL)."""


class SharedKeysSpec(Spec):
    """Last layers that take keys and values of earlier ones (Gemma 4 E2B and E4B)."""

    num_layers: int = Field(ge=1, le=MAX_LAYERS)
    widens_mlp: bool
    """Their MLPs are twice as wide."""


class PerLayerInputSpec(Spec):
    """A further embedding of each token for every layer (Gemma 4 E2B and E4B)."""

    width: int = Field(ge=1, le=MAX_DIMENSION)
    """In each layer."""
    vocab_size: int = Field(ge=1, le=MAX_DIMENSION)


class GlobalAttentionSpec(Spec):
    """Sizes of the full-attention layers where they differ from the sliding ones (Gemma 4)."""

    num_kv_heads: int = Field(ge=1, le=MAX_DIMENSION)
    head_dim: int = Field(ge=1, le=MAX_DIMENSION)
    shares_kv: bool
