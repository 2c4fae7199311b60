"""Weights: bytes of a model's parameters as each engine holds them.

In: a ModelSpec. Out: bytes. Left out: sharding (tensor parallelism, ZeRO-3) and quantisation.

Symbols: P parameters, e bytes an element, N rows and K columns of a linear weight.
"""

from rlplan.spec.hardware import WeightPacking
from rlplan.spec.model import ModelSpec
from rlplan.units import round_up


def parameter_bytes(model: ModelSpec, element_bytes: int) -> int:
    """Bytes of a model's parameters, held once, during every phase.

    Counts: P * e; tied tensors once. Source: the parameter list of the Hugging Face module.
    Assumes: nothing is padded. Differs: vLLM pads the vocabulary to a multiple of 64 (`engine_parameter_bytes`).
    """
    return model.num_parameters * element_bytes


def engine_parameter_bytes(model: ModelSpec, element_bytes: int) -> int:
    """Bytes of the parameters that vLLM allocates, before any packing.

    Counts: as `parameter_bytes`, with the vocabulary padded to a multiple of 64.
    Source: vLLM 0.32.0, vocab_parallel_embedding.py, DEFAULT_VOCAB_PADDING_SIZE.
    """
    padding = (round_up(model.vocab_size, 64) - model.vocab_size) * model.hidden_size
    tables = 1 if model.has_tied_embeddings else 2
    return (model.num_parameters + tables * padding) * element_bytes


def fused_linear_shapes(model: ModelSpec) -> list[tuple[int, int]]:
    """(N, K) of each linear weight that vLLM packs: q, k and v fused, gate and up fused, and every vocabulary table.

    Embedding and head are packed each for itself, also when they share one tied table.
    Source: vLLM 0.32.0, models/qwen3.py and vocab_parallel_embedding.py.
    """
    h, vocabulary = model.hidden_size, round_up(model.vocab_size, 64)
    layer = [
        (model.q_size + 2 * model.kv_size, h),
        (h, model.q_size),
        (2 * model.intermediate_size, h),
        (h, model.intermediate_size),
    ]
    return layer * model.num_layers + [(vocabulary, h)] * 2


def largest_linear_bytes(model: ModelSpec, element_bytes: int) -> int:
    """Bytes of the largest linear weight, which exists twice while it is loaded and packed anew."""
    return max(n * k for n, k in fused_linear_shapes(model)) * element_bytes


def packed_weight_bytes(model: ModelSpec, element_bytes: int, packing: WeightPacking) -> int:
    """Bytes of the opaque buffers into which vLLM repacks linear weights on a CPU, in place of the parameters.

    Counts: for each weight N x K, N rounded up to 64 and K to 16 elements, the handler beside it, and the code that is
    compiled once a shape. Source: oneDNN blocked layouts through vLLM 0.32.0 (`create_onednn_mm`); the constants are
    the profile's, measured with glibc's allocator statistics.
    Differs: the linear parameters alone are up to a few percent less.
    """
    shapes = fused_linear_shapes(model)
    blocks = sum(round_up(n, packing.row_block) * round_up(k, packing.column_block) for n, k in shapes) * element_bytes
    return blocks + len(shapes) * packing.bytes_per_weight.value + len(set(shapes)) * packing.bytes_per_shape.value


def unpacked_remainder_bytes(model: ModelSpec, element_bytes: int) -> int:
    """Bytes of the parameters that stay tensors beside the packs: vocabulary tables, norms and biases.

    Source: vLLM 0.32.0, linear.py (`remove_weight=True`) and vocab_parallel_embedding.py (`remove_weight=False`).
    """
    linear = sum(n * k for n, k in fused_linear_shapes(model)[:-2])
    return engine_parameter_bytes(model, element_bytes) - linear * element_bytes
