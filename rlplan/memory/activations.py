"""Activations: bytes that a dense decoder keeps for its backward pass, and needs while it goes forward.

In: a ModelSpec and a token count. Out: bytes in fp32. Left out: recomputation, other dtypes, sharding.

Symbols (elements): T tokens, h hidden_size, a heads, k kv heads, q = a*head_dim, v = k*head_dim, I intermediate_size.
Source: tensors saved by Hugging Face's decoder layer (transformers 5.19, modeling_qwen3.py) with SDPA on CPU, counted
with `torch.autograd.graph.saved_tensors_hooks`.
"""

from rlplan.spec.model import ModelSpec

FLOAT_BYTES = 4


def layer_saved_bytes(model: ModelSpec, num_tokens: int) -> int:
    """Bytes that one decoder layer saves for its backward pass.

    Counts, for a token: norms and residuals 6h; queries raw, normed, rotated and the attention's output 4q (3q less
    the normed copy without qk-norm); keys raw, normed, rotated and values 4v; gate, its activation, up and product 4I;
    the norms' scales and the attention's log-sum 2 + 2a + k.
    Assumes: SDPA without a mask, so no tensor of T squared; no dropout.
    Differs: Korthikanti et al. count 34h and a T squared term for a GPT block with dropout.

    >>> from rlplan.spec.model import ModelSpec
    >>> tiny = ModelSpec(architecture="Qwen3ForCausalLM", hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=1,
    ...     head_dim=4, intermediate_size=16, vocab_size=32, max_position_embeddings=64, has_tied_embeddings=True,
    ...     has_qkv_bias=False, has_qk_norm=True)
    >>> layer_saved_bytes(tiny, 1)  # (48 + 32 + 16 + 64 + 7) elements of 4 bytes
    668
    """
    q, v = model.q_size, model.kv_size
    heads = (
        (4 * q + 4 * v + 2 * model.num_heads + model.num_kv_heads)
        if model.has_qk_norm
        else (2 * q + 2 * v + model.num_heads)
    )
    return num_tokens * FLOAT_BYTES * (6 * model.hidden_size + heads + 4 * model.intermediate_size + 2)


def head_saved_bytes(model: ModelSpec, num_tokens: int, num_response_tokens: int) -> int:
    """Bytes saved outside the layers: the last norm's input and output, the selected rows, the rotary table."""
    rows = 3 * num_tokens * model.hidden_size + num_response_tokens * model.hidden_size
    return FLOAT_BYTES * (rows + 2 * num_tokens * model.head_dim)


def layer_backward_bytes(model: ModelSpec, num_tokens: int) -> int:
    """Bytes of gradients in flight inside one layer's backward pass, at most.

    Counts, for a token: gradients of two tensors of the MLP 2I, of the residual 2h.
    Assumes: autograd frees each when its last reader is done.
    """
    return num_tokens * FLOAT_BYTES * (2 * model.intermediate_size + 2 * model.hidden_size)


def mlp_saved_bytes(model: ModelSpec, num_tokens: int) -> int:
    """The part of `layer_saved_bytes` that is free once the backward pass has left a layer's MLP.

    Counts, for a token: gate, its activation, up and product 4I, and the MLP's norm 2h.
    """
    return num_tokens * FLOAT_BYTES * (4 * model.intermediate_size + 2 * model.hidden_size)


def forward_working_bytes(model: ModelSpec, num_tokens: int) -> int:
    """Bytes in flight inside one layer's forward pass when nothing is saved, at most.

    Counts, for a token: residual, normed input and output 3h; gate, its activation and up 3I, beside the product I.
    """
    return num_tokens * FLOAT_BYTES * (4 * model.intermediate_size + 3 * model.hidden_size)
