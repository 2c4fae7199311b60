"""Weights of a CPU engine: bytes of a model's parameters as vLLM allocates them and as oneDNN packs them.

In: a ModelSpec. Out: bytes. Left out: quantization.

Symbols: P parameters, e bytes an element, N rows and K columns of a linear weight.
"""

from collections.abc import Collection

from rlplan.memory.serving.weights import VOCABULARY_MULTIPLE, list_engine_tensors, list_linear_weights, stored_bytes
from rlplan.spec.hardware.profile import WeightPacking
from rlplan.spec.model import ModelSpec
from rlplan.units import round_up

_NO_HEAD = ("Gemma2ForCausalLM", "CohereForCausalLM", "Cohere2ForCausalLM")
"""Architectures without a head in vLLM, which computes their logits with the embedding."""


def engine_parameter_bytes(model: ModelSpec, element_bytes: int, tp: int = 1) -> int:
    """Bytes of the parameters that one rank of vLLM allocates, before any packing.

    Counts: `list_engine_tensors`: P * e with tied tensors once, cut over tp, the vocabulary padded to a multiple of 64.
    Source: vLLM 0.32.0, vocab_parallel_embedding.py, DEFAULT_VOCAB_PADDING_SIZE.
    """
    return stored_bytes(list_engine_tensors(model, tp), element_bytes)


def fused_linear_shapes(model: ModelSpec, tp: int = 1, without: Collection[str] = ()) -> list[tuple[int, int]]:
    """(N, K) of each linear weight that vLLM packs: q, k and v fused, gate and up fused, and every vocabulary table.

    Embedding and head are packed separately, even if they share one tied table. Gemma 2 and Cohere have no head.
    without: names of 4-bit weights, which stay tensors.
    Source: vLLM 0.32.0, models/qwen3.py, models/gemma2.py and vocab_parallel_embedding.py.
    """
    linear = [tensor for tensor in list_linear_weights(list_engine_tensors(model, tp)) if tensor.name not in without]
    layers = [(tensor.shape[0], tensor.shape[1]) for tensor in linear]
    table = (round_up(model.vocab_size, VOCABULARY_MULTIPLE) // tp, model.hidden_size)
    return layers + [table] * (1 if model.architecture in _NO_HEAD else 2)


def largest_linear_bytes(model: ModelSpec, element_bytes: int, tp: int = 1, without: Collection[str] = ()) -> int:
    """Bytes of the largest linear weight, which exists twice while it is loaded and repacked."""
    return max(n * k for n, k in fused_linear_shapes(model, tp, without)) * element_bytes


def expert_bytes(model: ModelSpec, element_bytes: int, tp: int = 1) -> tuple[int, int]:
    """Bytes of one layer's experts, (gate and up, down); zeros for a dense model.

    Source: vLLM 0.32.0, fused_moe/experts/cpu_moe.py: each of the two is packed whole, into a tensor of its size.
    """
    sizes = {"gate_up_proj": 0, "down_proj": 0}
    for tensor in list_engine_tensors(model, tp):
        kind = tensor.name.rpartition(".")[2]
        if ".experts." in tensor.name and kind in sizes:
            sizes[kind] = max(sizes[kind], tensor.numel * element_bytes)
    return sizes["gate_up_proj"], sizes["down_proj"]


def packed_weight_bytes(
    model: ModelSpec, element_bytes: int, packing: WeightPacking, tp: int = 1, without: Collection[str] = ()
) -> int:
    """Bytes of the opaque buffers into which vLLM repacks linear weights on a CPU, in place of the parameters.

    Counts: `_block_elements` of each weight, its handler, and the code that is compiled once per shape.
    Source: oneDNN blocked layouts through vLLM 0.32.0 (`create_onednn_mm`); the constants are the profile's, measured
    with glibc's allocator statistics. Assumes: a CPU without AMX tiles, for which vLLM packs small bf16 weights
    differently. Differs: the linear parameters themselves are up to a few percent smaller.
    """
    shapes = fused_linear_shapes(model, tp, without)
    blocks = sum(_block_elements(n, k, element_bytes, packing) for n, k in shapes) * element_bytes
    return blocks + len(shapes) * packing.bytes_per_weight.value + len(set(shapes)) * packing.bytes_per_shape.value


def _block_elements(rows: int, columns: int, element_bytes: int, packing: WeightPacking) -> int:
    """N rounded up to 64 and K to 16 fp32 or 32 bf16 elements (64 bytes); a single row is not blocked."""
    if rows == 1:
        return columns
    return round_up(rows, packing.row_block) * round_up(columns, packing.column_block * 4 // element_bytes)


def unpacked_remainder_bytes(model: ModelSpec, element_bytes: int, tp: int = 1) -> int:
    """Bytes of the parameters that are not packed: vocabulary tables, norms and biases.

    Source: vLLM 0.32.0, linear.py (`remove_weight=True`) and vocab_parallel_embedding.py (`remove_weight=False`).
    """
    tensors = list_engine_tensors(model, tp)
    linear = sum(tensor.numel for tensor in list_linear_weights(tensors))
    return stored_bytes(tensors, element_bytes) - linear * element_bytes
