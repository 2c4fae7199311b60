"""Modules that Megatron's selective recomputation recomputes, and the bytes that they then need not save.

In: a Block, names of modules. Out: bytes of a token. Left out: the attention core, whose flash kernel saves only its
inputs anyway.
Source: Megatron-Core 0.14, transformer_config.py (`recompute_modules`), tensor_parallel/random.py
(`CheckpointWithoutOutput`, which also frees the output of norms, activations and up-projections).
"""

from rlplan.memory.model.activations import mlp_saved_bytes, norm_saved_bytes
from rlplan.memory.model.block import Block


def module_bytes(block: Block, name: str, element_bytes: int) -> int:
    """Bytes that a module saves for one token, and does not save when it is recomputed.

    Counts: layernorm the outputs that linear layers read; mlp a dense layer's tensors; moe the tensors of experts and
    router; moe_act the input of each chosen expert's last matrix; shared_experts their tensors; mla_up_proj keys,
    queries and values of all heads.

    >>> block = Block(hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate=128)
    >>> [module_bytes(block, name, 2) for name in ("layernorm", "mlp", "moe", "core_attn")]  # 2 * 2*64; 4 * 2*128
    [256, 1024, 0, 0]
    """
    e, experts, latent = element_bytes, block.experts, block.latent
    if name == "layernorm":
        with_output = norm_saved_bytes(block.norm, block.hidden, e)
        without_output = norm_saved_bytes(block.norm, block.hidden, e, keeps_output=False)
        return block.norms_feed_linears * (with_output - without_output)
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
    """Bytes of a token that a layer need not save. `moe` includes the modules inside the experts."""
    inside = {"moe_act", "shared_experts"} if "moe" in names else set()
    return sum(module_bytes(block, name, element_bytes) for name in names - inside)
