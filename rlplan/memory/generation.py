"""Generation: bytes of the rollout engine beside its weights, by vLLM's own arithmetic.

In: a ModelSpec and the engine's settings. Out: bytes. Left out: GPUs (profiling, CUDA
graphs, sleep), states of linear attention.
Source: vLLM 0.32.0, v1/core/kv_cache_utils.py and v1/worker/cpu_model_runner.py.

Symbols: L layers, k kv heads, d head_dim, e bytes an element, B block size in tokens, t tensor-parallel ranks.
"""

from rlplan.memory.activations import forward_working_bytes
from rlplan.memory.serving_kv import cache_pool
from rlplan.spec.model import ModelSpec
from rlplan.spec.models.kv import layer_caches


def kv_bytes_per_token(model: ModelSpec, element_bytes: int, tp: int = 1) -> int:
    """Bytes of keys and values of one token over all layers, on one rank.

    Counts: 2 * L * k * d * e, with max(1, k/t) heads; MLA's latent whole on every rank. Left out: linear layers.
    """
    return sum(cache.elements_per_token + cache.index_elements_per_token for cache in layer_caches(model, tp)) * (
        element_bytes
    )


def kv_block_bytes(model: ModelSpec, element_bytes: int, block_size: int, tp: int = 1) -> int:
    """Bytes of one block of the pool, on one rank: `serving_kv.cache_pool`, with every state in the cache's dtype.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> kv_block_bytes(find_model("google/gemma-2-9b"), 2, 16) // 16  # 21 full and 21 sliding: 21 * 2*8*256 * 2
    172032
    """
    pool = cache_pool(model, tp=tp, element_bytes=element_bytes, state_bytes=element_bytes, block_size=block_size)
    return pool.bytes_per_block


def num_kv_blocks(model: ModelSpec, element_bytes: int, block_size: int, kv_cache_memory: int, tp: int = 1) -> int:
    """Whole blocks of B tokens that fit into the memory given: rounded down, for it is a capacity."""
    return kv_cache_memory // kv_block_bytes(model, element_bytes, block_size, tp)


def kv_cache_bytes(model: ModelSpec, element_bytes: int, block_size: int, kv_cache_memory: int, tp: int = 1) -> int:
    """Bytes that one rank of vLLM allocates for the KV cache at the start: whole blocks.

    Differs: up to one block less than the memory given.
    """
    per_block = kv_block_bytes(model, element_bytes, block_size, tp)
    return kv_cache_memory // per_block * per_block


def engine_activation_bytes(model: ModelSpec, max_num_batched_tokens: int) -> int:
    """Bytes in flight while the engine computes its largest batch of tokens."""
    return forward_working_bytes(model, max_num_batched_tokens) + 2 * max_num_batched_tokens * model.hidden_size * 4


def sampler_bytes(vocab_size: int, max_num_seqs: int) -> int:
    """Bytes of the sampler: logits, probabilities, log-probs and random draws of each running sequence, in fp32.

    Source: vLLM 0.32.0, v1/sample/sampler.py with `processed_logprobs`.
    """
    return 4 * max_num_seqs * vocab_size * 4
