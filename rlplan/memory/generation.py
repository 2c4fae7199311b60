"""Generation: bytes of the rollout engine beside its weights, by vLLM's own arithmetic.

In: a ModelSpec and the engine's settings. Out: bytes. Left out: GPUs (profiling, CUDA
graphs, sleep), states of linear attention.
Source: vLLM 0.32.0, v1/core/kv_cache_utils.py and v1/worker/cpu_model_runner.py.

Symbols: L layers, k kv heads, d head_dim, e bytes an element, B block size in tokens, t tensor-parallel ranks.
"""

from collections import Counter

from rlplan.errors import SpecError
from rlplan.memory.activations import forward_working_bytes
from rlplan.spec.model import ModelSpec
from rlplan.spec.models.kv import layer_caches
from rlplan.spec.models.parts import LINEAR


def kv_bytes_per_token(model: ModelSpec, element_bytes: int, tp: int = 1) -> int:
    """Bytes of keys and values of one token over all layers, on one rank.

    Counts: 2 * L * k * d * e, with max(1, k/t) heads; MLA's latent whole on every rank. Left out: linear layers.
    """
    return sum(cache.elements_per_token + cache.index_elements_per_token for cache in layer_caches(model, tp)) * (
        element_bytes
    )


def kv_block_bytes(model: ModelSpec, element_bytes: int, block_size: int, tp: int = 1) -> int:
    """Bytes of one block of the pool, on one rank. Raises: SpecError for layers that need pages of different sizes.

    Counts: a page of B tokens for every layer where all attend alike. Where full and sliding layers mix, layers of one
    kind share blocks in groups of the smaller number of layers (of the larger where it is less than half as many
    again), and a block holds a page for each layer of a group.
    Source: vLLM 0.32.0, v1/core/kv_cache_utils.py, `_get_kv_cache_groups_uniform_page_size`.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> kv_block_bytes(find_model("google/gemma-2-9b"), 2, 16) // 16  # 21 full and 21 sliding: 21 * 2*8*256 * 2
    172032
    """
    caches = layer_caches(model, tp)
    kinds = Counter((cache.kind, cache.window) for cache in caches)
    pages = {cache.elements_per_token + cache.index_elements_per_token for cache in caches}
    if LINEAR in (kind for kind, _ in kinds) or (len(kinds) > 1 and len(pages) > 1):
        raise SpecError(
            f"{model.architecture} caches pages of different sizes",
            where="model",
            rule="each token takes the same bytes in every layer, or all layers attend alike",
            way_out="use another model",
        )
    if len(kinds) == 1:
        return kv_bytes_per_token(model, element_bytes, tp) * block_size
    fewest, most = min(kinds.values()), max(kinds.values())
    layers = most if most < 1.5 * fewest else fewest
    return layers * max(pages) * element_bytes * block_size


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
