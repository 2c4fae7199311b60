"""TensorRT-LLM's KV cache: sequences of the largest length that one engine holds at once.

In: a ModelSpec, ranks, the GPU's total bytes and the engine's limits. Out: a count. Left out: its kernels, LoRA,
speculative decoding, attention windows (every layer is given all tokens), the C++ engine of 2024 and before.

Symbols: T max_num_tokens, t tensor-parallel ranks, B tokens in a block.
"""

from rlplan.memory.model.quantization import Quantization
from rlplan.memory.serving.peaks import prefill_peak_bytes
from rlplan.memory.serving.weights import engine_layout, engine_weight_bytes
from rlplan.records import dataclass
from rlplan.spec.model import ModelSpec
from rlplan.spec.models.kv import kv_elements_per_token
from rlplan.units import GIB

BLOCK = 32
"""Tokens in a block. Source: TensorRT-LLM 1.0 llmapi/llm_args.py `KvCacheConfig.tokens_per_block`."""
FIXED_OVERHEAD = 13 * GIB // 4
PEER_OVERHEAD = GIB // 2
SHARED_OVERHEAD = 0.008
"""Context, workspaces and graphs: 3.25 GiB, 0.5 GiB more with peers, 0.8 % of the GPU. Fitted to 32 capacities of
aiconfigurator's test_trtllm_kv_cache_capacity.py (two GPUs, two models), where the mean error is 0.3 %; fitted without
GB300 it is 0.7 % there, without H100 1.0 %, without Qwen3-32B-FP8 0.8 %, without Llama-3.1-8B 0.6 %. Unfitted guesses
(2 GiB, 0.4 GiB, nothing) leave 1.7 %."""


@dataclass(frozen=True, slots=True)
class TrtllmSettings:
    """What a TensorRT-LLM engine is built with."""

    total_bytes: int
    """Of the GPU."""

    max_seq_len: int
    max_num_tokens: int
    free_fraction: float = 0.9
    """`free_gpu_memory_fraction` of its KV cache."""

    tp: int = 1
    element_bytes: int = 2
    """Of a weight."""

    kv_element_bytes: int = 2
    quantization: Quantization | None = None


def num_trtllm_sequences(model: ModelSpec, settings: TrtllmSettings) -> int:
    """Sequences of the largest length that the cache holds: a capacity, rounded down.

    Counts: fraction * (total - weights - activations - overhead) in whole blocks of 32 tokens, over max_seq_len.
    Source: TensorRT-LLM 1.0 pyexecutor/_util.py `KvCacheCreator`, which takes the fraction of what a dry run leaves.
    Assumes: activations as in vLLM's prefill of T tokens. Differs: vLLM's fraction is of the total.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> settings = TrtllmSettings(80 * GIB, max_seq_len=7168, max_num_tokens=8192)
    >>> num_trtllm_sequences(find_model("meta-llama/Llama-3.1-8B"), settings)  # 0.9 * 60.31 GiB / (7168 * 128 KiB)
    62
    """
    weights = engine_weight_bytes(model, engine_layout(settings.tp), settings.element_bytes, settings.quantization)
    peak = prefill_peak_bytes(model, settings.tp, settings.max_num_tokens, settings.element_bytes)
    overhead = FIXED_OVERHEAD + (PEER_OVERHEAD if settings.tp > 1 else 0) + int(SHARED_OVERHEAD * settings.total_bytes)
    free = max(0, settings.total_bytes - weights - peak - overhead)
    per_token = sum(kv_elements_per_token(model, settings.tp).values()) * settings.kv_element_bytes
    blocks = int(settings.free_fraction * free) // (per_token * BLOCK)
    return blocks * BLOCK // settings.max_seq_len
