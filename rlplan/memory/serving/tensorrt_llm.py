"""TensorRT-LLM's share of a GPU: a fraction of what weights, activations and its own overhead leave free.

In: a GPU's total bytes and the ranks of an engine. Out: bytes. Left out: weights and activations (as in vLLM), its
kernels, speculative decoding, the C++ engine of 2024 and before.
"""

from rlplan.units import GIB

NAME = "tensorrt_llm"
"""Name of the engine and of its framework."""
BLOCK = 32
"""Tokens in a block. Source: TensorRT-LLM 1.0 llmapi/llm_args.py `KvCacheConfig.tokens_per_block`."""
FREE_FRACTION = 0.9
"""Default `free_gpu_memory_fraction`. Source: the same `KvCacheConfig`."""
FIXED_OVERHEAD = 13 * GIB // 4
PEER_OVERHEAD = GIB // 2
SHARED_OVERHEAD = 0.008
"""Context, workspaces and graphs: 3.25 GiB, 0.5 GiB more with peers, 0.8 % of the GPU. Fitted to 32 capacities of
aiconfigurator's test_trtllm_kv_cache_capacity.py (two GPUs, two models), where the mean error is 0.3 %; fitted without
GB300 it is 0.7 % there, without H100 1.0 %, without Qwen3-32B-FP8 0.8 %, without Llama-3.1-8B 0.6 %. With unfitted
guesses (2 GiB, 0.4 GiB, nothing) the mean error is 1.7 %."""


def overhead_bytes(total_bytes: int, ranks: int) -> int:
    """Bytes of a rank beside weights, activations and KV cache.

    >>> round(overhead_bytes(80 * GIB, 1) / GIB, 2)  # 3.25 + 0.008 * 80
    3.89
    """
    return FIXED_OVERHEAD + (PEER_OVERHEAD if ranks > 1 else 0) + int(SHARED_OVERHEAD * total_bytes)


def kv_budget_bytes(total_bytes: int, occupied: int, share: float) -> int:
    """Bytes of KV cache beside `occupied` bytes of weights, activations and overhead.

    Counts: share * (total - occupied). Source: TensorRT-LLM 1.0 pyexecutor/_util.py `KvCacheCreator`, which takes the
    fraction of what a dry run leaves. Differs: vLLM's fraction is of the total.

    >>> kv_budget_bytes(80 * GIB, 20 * GIB, 0.5) // GIB
    30
    """
    return max(0, int(share * (total_bytes - occupied)))
