"""Memory of a CPU rollout engine by vLLM's own arithmetic: its weights as vLLM allocates them and as oneDNN packs them,
and what it holds in addition.

In: a ModelSpec and the engine's settings. Out: bytes. Left out: GPUs (profiling, CUDA graphs, sleep).
Source: vLLM 0.32.0, v1/core/kv_cache_utils.py and v1/worker/cpu_model_runner.py.

Symbols: L layers, k kv heads, d head_dim, e bytes an element, B block size in tokens, t tensor-parallel ranks;
P parameters, N rows and K columns of a linear weight.
"""

from collections.abc import Collection
from pathlib import Path

from rlplan.memory.model.activations import forward_working_bytes
from rlplan.memory.model.block import FLOAT_BYTES
from rlplan.memory.serving.kv import CachePool, build_cache_pool, list_layer_caches
from rlplan.memory.serving.weights import VOCABULARY_MULTIPLE, list_engine_tensors, list_linear_weights, stored_bytes
from rlplan.spec.hardware.profile import WeightPacking
from rlplan.spec.model import ModelSpec
from rlplan.spec.models.headers import has_weights, read_index
from rlplan.spec.resolved import ResolvedJob, ResolvedRollout
from rlplan.units import ceil_div, round_up

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


def kv_bytes_per_token(model: ModelSpec, element_bytes: int) -> int:
    """Bytes of keys and values of one token over all layers.

    Counts: 2 * L * k * d * e; MLA's latent. Left out: linear layers.
    """
    return sum(cache.elements_per_token + cache.index_elements_per_token for cache in list_layer_caches(model)) * (
        element_bytes
    )


def build_host_pool(model: ModelSpec, rollout: ResolvedRollout) -> CachePool:
    """The blocks of a CPU rank's KV cache, with every state in the cache's dtype."""
    e = rollout.dtype.num_bytes
    return build_cache_pool(model, tp=rollout.tp, element_bytes=e, state_bytes=e, block_size=rollout.block_size)


def engine_activation_bytes(model: ModelSpec, max_num_batched_tokens: int) -> int:
    """Bytes in flight while the engine computes its largest batch of tokens."""
    return forward_working_bytes(model, max_num_batched_tokens) + 2 * max_num_batched_tokens * model.hidden_size * 4


def sampler_bytes(vocab_size: int, max_num_seqs: int, speculative_tokens: int = 0) -> int:
    """Bytes of the sampler in fp32, each row over the vocabulary V.

    Counts: logits, probabilities, log-probs and random draws of the S running sequences, 4 S rows. With k draft tokens
    R = S (1 + k) rows each of logits, final logits, those of accepted tokens and their log-probs (4 R); target logits
    (S k); logits and processed logits of bonus tokens (2 S).
    Source: vLLM 0.32.0, v1/sample/sampler.py with `processed_logprobs`; `_get_logprobs_tensors` of
    v1/sample/rejection_sampler.py.

    >>> sampler_bytes(1, 1), sampler_bytes(1, 1, speculative_tokens=3)  # 4 * 4; (4*4 + 3 + 2) * 4
    (16, 84)
    """
    rows = 4 * max_num_seqs * (1 + speculative_tokens)
    if speculative_tokens:
        rows += max_num_seqs * (speculative_tokens + 2)
    return rows * vocab_size * 4


MAX_KERNELS = 1024
"""Kernels that oneDNN caches: the default of ONEDNN_PRIMITIVE_CACHE_CAPACITY."""

SIZES_PER_POSITION = 5
"""Different batch sizes at one position of the responses in a run of many steps. Measured: after 40 steps the
quickstart's engine has code for some 60 sizes, with responses of 12 positions."""


def count_batch_sizes(job: ResolvedJob) -> int:
    """Different batch sizes that one engine decodes with in a run.

    Counts: 5 for each position of a response (fewer in a run of fewer steps), and as many again for evaluations that
    sample; at most the sequences (and draft tokens) at once.
    Source: SIZES_PER_POSITION. Assumes: a batch shrinks one by one, as rollouts end. Left out: sizes of prefills.
    """
    workload, versions_under_way = job.workload, 1 + job.placement.max_staleness
    at_once = max(versions_under_way * workload.num_rollouts_per_step, job.num_evaluated_responses)
    per_engine = ceil_div(at_once, job.rollout.num_engines)
    max_batch = min(job.rollout.max_num_seqs, per_engine) * (1 + job.rollout.speculative_tokens)
    sizes_per_position = min(SIZES_PER_POSITION, workload.num_steps) * (2 if workload.evaluation_temperature else 1)
    return min(max_batch, sizes_per_position * workload.max_response_len)


def compiled_kernel_bytes(model: ModelSpec, packing: WeightPacking, num_sizes: int, tp: int = 1) -> int:
    """Bytes of the code that oneDNN compiles for matmuls of packed weights, one kernel per shape and batch size.

    Counts: distinct shapes x batch sizes, at most 1,024 kernels, times the profile's bytes of one.
    Source: oneDNN's primitive cache; the bytes are the profile's, measured. Assumes: a CPU without AMX tiles.
    """
    num_kernels = min(MAX_KERNELS, len(set(fused_linear_shapes(model, tp))) * num_sizes)
    return num_kernels * packing.bytes_per_batch_size.value


def mapped_checkpoint_bytes(folder: Path | None, model: ModelSpec, *, is_drawn: bool) -> int:
    """Bytes of the largest file of a checkpoint, whose pages count for the engine while it reads them.

    is_drawn: whether the start weights are random, which rlplan writes as one fp32 file.
    Source: vLLM 0.32.0, weight_utils.py, `safetensors_weights_iterator`: one mapped file after the other. Assumes: one
    fp32 file where the checkpoint is not on disk.
    """
    if is_drawn or folder is None or not has_weights(folder):
        return FLOAT_BYTES * model.num_parameters
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    names = {single.name} if single.is_file() else set(read_index(index).values())
    return max((folder / name).stat().st_size for name in names)
