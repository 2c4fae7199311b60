"""Generation: bytes of the rollout engine beside its weights, by vLLM's own arithmetic.

In: a ModelSpec and the engine's settings. Out: bytes. Left out: GPUs (profiling, CUDA
graphs, sleep), states of linear attention.
Source: vLLM 0.32.0, v1/core/kv_cache_utils.py and v1/worker/cpu_model_runner.py.

Symbols: L layers, k kv heads, d head_dim, e bytes an element, B block size in tokens, t tensor-parallel ranks.
"""

from pathlib import Path

from rlplan.memory.model.activations import forward_working_bytes
from rlplan.memory.model.logits import FLOAT_BYTES
from rlplan.memory.model.params import fused_linear_shapes
from rlplan.memory.serving.kv import CachePool, cache_pool
from rlplan.spec.hardware.profile import WeightPacking
from rlplan.spec.model import ModelSpec
from rlplan.spec.models.headers import has_weights, read_index
from rlplan.spec.models.kv import layer_caches
from rlplan.spec.resolved import ResolvedJob, ResolvedRollout
from rlplan.units import ceil_div


def kv_bytes_per_token(model: ModelSpec, element_bytes: int) -> int:
    """Bytes of keys and values of one token over all layers.

    Counts: 2 * L * k * d * e; MLA's latent. Left out: linear layers.
    """
    return sum(cache.elements_per_token + cache.index_elements_per_token for cache in layer_caches(model)) * (
        element_bytes
    )


def host_pool(model: ModelSpec, rollout: ResolvedRollout) -> CachePool:
    """How a rank on a CPU host cuts its KV cache into blocks, with every state in the cache's dtype."""
    e = rollout.dtype.num_bytes
    return cache_pool(model, tp=rollout.tp, element_bytes=e, state_bytes=e, block_size=rollout.block_size)


def engine_activation_bytes(model: ModelSpec, max_num_batched_tokens: int) -> int:
    """Bytes in flight while the engine computes its largest batch of tokens."""
    return forward_working_bytes(model, max_num_batched_tokens) + 2 * max_num_batched_tokens * model.hidden_size * 4


def sampler_bytes(vocab_size: int, max_num_seqs: int, speculative_tokens: int = 0) -> int:
    """Bytes of the sampler in fp32, each row over the vocabulary V.

    Counts: of each of the S running sequences logits, probabilities, log-probs and random draws, 4 S rows. With k draft
    tokens R = S (1 + k) rows: logits, final logits, those of accepted tokens and their log-probs (4 R), target logits
    (S k) and logits and processed ones of bonus tokens (2 S).
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
"""Kernels that oneDNN keeps: its primitive cache's capacity, ONEDNN_PRIMITIVE_CACHE_CAPACITY, by default."""

SIZES_PER_POSITION = 5
"""Batch sizes that a run of many steps meets at one position of its responses. Measured: the quickstart's engine holds
code for some 60 sizes after 40 steps, and its responses have 12 positions."""


def num_batch_sizes(job: ResolvedJob) -> int:
    """Different numbers of sequences that one engine decodes at a time in a run.

    Counts: 5 for each position of a response (fewer in a run of fewer steps), as many again where evaluations sample,
    which meet others than rollouts; at most the sequences (and draft tokens) at once.
    Source: SIZES_PER_POSITION. Assumes: a batch shrinks one by one, as rollouts end. Left out: sizes of prefills.
    """
    workload, versions_under_way = job.workload, 1 + job.placement.max_staleness
    at_once = max(versions_under_way * workload.num_rollouts_per_step, job.num_evaluated_responses)
    per_engine = ceil_div(at_once, job.rollout.num_engines)
    most = min(job.rollout.max_num_seqs, per_engine) * (1 + job.rollout.speculative_tokens)
    sizes_per_position = min(SIZES_PER_POSITION, workload.num_steps) * (2 if workload.evaluation_temperature else 1)
    return min(most, sizes_per_position * workload.max_response_len)


def compiled_kernel_bytes(model: ModelSpec, packing: WeightPacking, num_sizes: int, tp: int = 1) -> int:
    """Bytes of the code that oneDNN compiles for matmuls of packed weights, one kernel a shape and batch size.

    Counts: distinct shapes x batch sizes, at most 1,024 kernels, times the profile's bytes of one.
    Source: oneDNN's primitive cache; the bytes are the profile's, measured. Assumes: a CPU without tiles, as packs do.
    """
    num_kernels = min(MAX_KERNELS, len(set(fused_linear_shapes(model, tp))) * num_sizes)
    return num_kernels * packing.bytes_per_batch_size.value


def mapped_checkpoint_bytes(folder: Path | None, model: ModelSpec, *, is_drawn: bool) -> int:
    """Bytes of the largest file of a checkpoint: its pages are the engine's own while it is read.

    is_drawn: whether start weights are drawn, which are written as one file in fp32.
    Source: vLLM 0.32.0, weight_utils.py, `safetensors_weights_iterator`: one file after the other, mapped. Assumes:
    where no file is there, the same.
    """
    if is_drawn or folder is None or not has_weights(folder):
        return FLOAT_BYTES * model.num_parameters
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    names = {whole.name} if whole.is_file() else set(read_index(index).values())
    return max((folder / name).stat().st_size for name in names)
