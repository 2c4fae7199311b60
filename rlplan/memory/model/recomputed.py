"""Modules of a layer that Megatron's selective recomputation computes anew: what they need not save.

In: a Block, names. Out: bytes of a token. Left out: attention's core, whose flash kernel saves nothing but its inputs.
Source: Megatron-Core 0.14, transformer_config.py (`recompute_modules`), tensor_parallel/random.py
(`CheckpointWithoutOutput`, which gives the output of norms, activations and up-projections back too).
"""

from rlplan.memory.model.activations import mlp_saved_bytes, norm_saved_bytes
from rlplan.memory.model.block import Block


def module_bytes(block: Block, name: str, element_bytes: int) -> int:
    """Bytes of a token that a module saves, and does not where it is recomputed.

    Counts: layernorm the outputs that linear layers read; mlp a dense layer's; moe all that experts and router save;
    moe_act what the last matrix of each chosen expert reads; shared_experts theirs; mla_up_proj keys, queries and
    values of all heads.

    >>> block = Block(hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate=128)
    >>> [module_bytes(block, name, 2) for name in ("layernorm", "mlp", "moe", "core_attn")]  # 2 * 2*64; 4 * 2*128
    [256, 1024, 0, 0]
    """
    e, experts, latent = element_bytes, block.experts, block.latent
    if name == "layernorm":
        whole = norm_saved_bytes(block.norm, block.hidden, e)
        return block.norms_feed_linears * (whole - norm_saved_bytes(block.norm, block.hidden, e, keeps_output=False))
    if name == "mlp":
        return mlp_saved_bytes(block, e) if experts is None else 0
    if name == "mla_up_proj" and latent is not None:
        return e * block.num_heads * (2 * latent.qk_head_dim + latent.v_head_dim)
    if experts is None:
        return 0
    shared = min(4, experts.saved_widths) * e * experts.shared_width
    routed = {"moe": mlp_saved_bytes(block, e), "moe_act": experts.top_k * e * experts.width, "shared_experts": shared}
    return routed.get(name, 0)


def recomputed_bytes(block: Block, names: frozenset[str], element_bytes: int) -> int:
    """Bytes of a token that a layer does not save; what lies inside the experts is not counted beside them."""
    inside = {"moe_act", "shared_experts"} if "moe" in names else set()
    return sum(module_bytes(block, name, element_bytes) for name in names - inside)
