"""Cost of Megatron's selective recomputation, which recomputes chosen modules of a layer.

In: a ModelSpec, module names (rlplan/memory/model/activations.py). Out: shares of a forward pass. Left out: launches.
"""

from functools import lru_cache
from typing import NamedTuple

from rlplan.spec.model import Component, ModelSpec
from rlplan.spec.models.parts import NONE
from rlplan.timing.training.elementwise import FUSED_NORM, dense_mlp_bytes, experts_bytes, layers_bytes
from rlplan.timing.training.flops import kinds_of_layers, layer_parameters, matmul_parameters


class Recomputed(NamedTuple):
    """Shares of a forward pass that are computed a second time."""

    matmuls: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    expert_exchanges: float = 0.0


@lru_cache(maxsize=256)
def count_recomputed(model: ModelSpec, names: frozenset[str]) -> Recomputed:
    """Share of a forward pass of all layers that the modules make up.

    Counts: parameters that a token is multiplied with, bytes of fused kernels; `moe` also exchanges its rows again.
    Source: Megatron-Core 0.14, transformer_layer.py, moe/moe_layer.py.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> qwen = find_model("Qwen/Qwen2.5-7B")
    >>> round(count_recomputed(qwen, frozenset(("mlp",))).matmuls, 3)  # 3*18944 of 3*18944 + 2*3584 + 2*512 columns
    0.874
    >>> count_recomputed(qwen, frozenset(("core_attn",)))
    Recomputed(matmuls=0.0, attention=1.0, elementwise=0.0, expert_exchanges=0.0)
    """
    counts, experts, latent = matmul_parameters(model), model.experts, model.latent_attention
    attention_layers = model.num_layers - kinds_of_layers(model).get(NONE, 0)
    matmuls = moved = 0.0
    if "mlp" in names:
        matmuls += counts.get(Component.MLP, 0)
        moved += dense_mlp_bytes(model)
    if "layernorm" in names:
        moved += 2 * FUSED_NORM * model.hidden_size * model.num_layers
    if "mla_up_proj" in names and latent is not None:
        keys = latent.nope_head_dim + latent.rope_head_dim
        ups = latent.q_rank * keys + latent.kv_rank * (latent.nope_head_dim + latent.value_head_dim)
        matmuls += model.num_heads * ups * attention_layers
    if experts is not None:
        if "moe" in names:
            matmuls += counts.get(Component.EXPERTS, 0) * experts.num_active / experts.num_experts
            matmuls += counts.get(Component.ROUTER, 0)
            moved += experts_bytes(model)
        elif "moe_act" in names:
            moved += experts_bytes(model, has_rows=False)
        if names & {"moe", "shared_experts"}:
            matmuls += counts.get(Component.SHARED_EXPERTS, 0)
    return Recomputed(
        matmuls / layer_parameters(model),
        float("core_attn" in names),
        moved / layers_bytes(model, is_fused=True),
        float("moe" in names and experts is not None),
    )
