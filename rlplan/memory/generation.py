"""Generation: bytes of the rollout engine beside its weights, by vLLM's own arithmetic.

In: a ModelSpec and the engine's settings. Out: bytes. Left out: GPUs (profiling, CUDA graphs, sleep).
Source: vLLM 0.32.0, v1/core/kv_cache_utils.py and v1/worker/cpu_model_runner.py.

Symbols: L layers, k kv heads, d head_dim, e bytes an element, B block size in tokens.
"""

from rlplan.memory.activations import forward_working_bytes
from rlplan.spec.model import ModelSpec


def kv_bytes_per_token(model: ModelSpec, element_bytes: int) -> int:
    """Bytes of keys and values of one token over all layers.

    Counts: 2 * L * k * d * e.
    """
    return 2 * model.num_layers * model.kv_size * element_bytes


def num_kv_blocks(model: ModelSpec, element_bytes: int, block_size: int, kv_cache_memory: int) -> int:
    """Whole blocks of B tokens that fit into the memory given: rounded down, for it is a capacity."""
    return kv_cache_memory // (kv_bytes_per_token(model, element_bytes) * block_size)


def kv_cache_bytes(model: ModelSpec, element_bytes: int, block_size: int, kv_cache_memory: int) -> int:
    """Bytes that vLLM allocates for the KV cache at the start: whole blocks.

    Differs: up to one block less than the memory given.
    """
    per_block = kv_bytes_per_token(model, element_bytes) * block_size
    return num_kv_blocks(model, element_bytes, block_size, kv_cache_memory) * per_block


def engine_activation_bytes(model: ModelSpec, max_num_batched_tokens: int) -> int:
    """Bytes in flight while the engine computes its largest batch of tokens."""
    return forward_working_bytes(model, max_num_batched_tokens) + 2 * max_num_batched_tokens * model.hidden_size * 4


def sampler_bytes(vocab_size: int, max_num_seqs: int) -> int:
    """Bytes of the sampler: logits, probabilities, log-probs and random draws of each running sequence, in fp32.

    Source: vLLM 0.32.0, v1/sample/sampler.py with `processed_logprobs`.
    """
    return 4 * max_num_seqs * vocab_size * 4
