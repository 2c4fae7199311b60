"""Points about a vLLM engine: weights, cache, peaks, graphs, and whether a load is more than the cache holds.

In: points. Out: predictions. Left out: how the bytes come about (rlplan.memory.serving.engine and its siblings).
"""

import re

from rlplan.accuracy.named_models import model_of, quantization_of
from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.registry import CannotPredict, Prediction, Refusal, predicts
from rlplan.accuracy.settings import Settings, gpu_of, total_bytes, unit_bytes
from rlplan.errors import SpecError
from rlplan.memory.serving.engine import (
    EngineMemory,
    EngineSettings,
    engine_memory,
    engine_pool,
    limits_of,
    logged_tokens,
)
from rlplan.memory.serving.versions import VllmVersion, parse_version
from rlplan.spec.base import shorten
from rlplan.units import GIB

ANY_TOTAL = 80 * GIB
"""Stands in where the GPU does not matter for what is asked: weights, and tokens of a known budget."""


OLD = VllmVersion(0, 6, 0, is_v0=True)
"""Stands in for older engines where only weights or the tokens of a known cache are asked for: they count alike."""


def engine_settings(point: MeasuredPoint, *, needs_gpu: bool, needs_profile: bool = True) -> EngineSettings:
    """A point's settings as the engine's. needs_gpu: the answer depends on the GPU's size. needs_profile: and on what
    the engine's profile run counts. Raises: CannotPredict, SpecError for a version whose profile is not modelled.
    """
    settings, gpu = Settings(point), gpu_of(point)
    utilization = settings.number("gpu_memory_utilization", 0.0, high=1.0)
    limit = settings.number("non_torch_gib", -1.0, low=-1.0, high=1e6)
    total = total_bytes(point) if needs_gpu else ANY_TOTAL
    chunked = settings.raw("chunked_prefill")
    batched = settings.count("max_num_batched_tokens", 0, at_least=0)
    length = settings.count("max_model_len", 0, at_least=0)
    if not batched and chunked is False:
        batched = max(length, 2048)
    element_bytes = max(2, settings.element_bytes("dtype", "model_dtype"))  # fp8 as a dtype says what is quantised
    kv_element_bytes = settings.element_bytes("kv_dtype", "kv_cache_dtype", default="none") or element_bytes
    context = gpu.overheads if gpu else None
    usual = EngineSettings(total)
    return EngineSettings(
        total,
        gpu_memory_utilization=utilization or None,
        tp=settings.degree("tp", "tensor_parallel_size"),
        pp=settings.degree("pp", "pipeline_parallel_size"),
        ep=settings.degree("ep"),
        context_ranks=settings.degree("decode_context_parallel", "dcp", "decode_context_parallel_size"),
        element_bytes=element_bytes,
        kv_element_bytes=kv_element_bytes,
        quantization=quantization_of(point),
        max_num_seqs=settings.count("max_num_seqs", 0, at_least=0) or None,
        max_num_batched_tokens=batched or None,
        max_model_len=length or None,
        block_size=settings.count("block_size", settings.count("block", 0, at_least=0), at_least=0) or None,
        enforce_eager=settings.flag("enforce_eager"),
        is_offline=settings.word("usage").lower() in ("llm", "llm_class", "offline"),
        is_a100="a100" in (point.gpu or "").lower(),
        non_torch_bytes=int(limit * GIB) if limit >= 0 else None,
        context_bytes=context.context.value if context else usual.context_bytes,
        communicator_bytes=context.communicator_of_many.value if context else usual.communicator_bytes,
        version=_version_of(settings, needs_profile),
    )


def _version_of(settings: Settings, needs_profile: bool) -> VllmVersion:
    try:
        return parse_version(settings.word("vllm", settings.word("version")))
    except SpecError:
        if needs_profile:
            raise
        return OLD


def memory_of(point: MeasuredPoint, *, needs_gpu: bool = True) -> EngineMemory:
    """What the engine of a point holds."""
    return engine_memory(model_of(point), engine_settings(point, needs_gpu=needs_gpu))


@predicts("vllm_weights")
def predict_weights(point: MeasuredPoint) -> Prediction:
    """What `Model loading took` says of a rank."""
    settings = engine_settings(point, needs_gpu=False, needs_profile=False)
    return _sized(point, engine_memory(model_of(point), settings).model_bytes)


@predicts("kv_per_token")
def predict_tokens(point: MeasuredPoint) -> Prediction:
    """Tokens in a cache of known size; or bytes of a token, where the unit is a size."""
    settings, model = engine_settings(point, needs_gpu=False, needs_profile=False), model_of(point)
    pool = engine_pool(model, settings)
    if point.measured.bytes_per_unit is not None:
        return _sized(point, pool.bytes_per_block * len(pool.groups) / pool.block_size)
    budget = int(Settings(point).number("available_kv_gib", low=0.0) * GIB)
    length = settings.max_model_len or model.max_position_embeddings
    batched = limits_of(model, settings).max_num_batched_tokens
    blocks = pool.num_blocks(budget)
    if re.search(r"\bblocks?\b", point.measured.unit.lower()):
        return Prediction(blocks)
    if "concurren" in point.measured.unit.lower():
        return Prediction(blocks / pool.blocks_of_sequence(length, batched * settings.version.num_batches_in_flight))
    return Prediction(logged_tokens(pool, blocks, settings, length, batched))


@predicts("vllm_kv")
def predict_cache(point: MeasuredPoint) -> Prediction:
    """The cache of an engine from its settings alone: bytes, tokens, blocks or sequences, as the unit says."""
    memory, unit = memory_of(point), point.measured.unit.lower()
    if point.measured.bytes_per_unit is not None:
        return _sized(point, memory.kv_budget)
    if re.search(r"\bblocks?\b", unit):
        return Prediction(memory.num_blocks)
    if "token" in unit:
        return Prediction(memory.num_tokens)
    if "concurren" in unit or "sequence" in unit:
        return Prediction(memory.max_concurrency)
    raise CannotPredict(f"unit {shorten(unit)} is neither a size nor tokens, blocks or sequences")


@predicts("vllm_profile_peak")
def predict_profile_peak(point: MeasuredPoint) -> Prediction:
    """Weights and the peak of the profile run together."""
    memory = memory_of(point, needs_gpu=_depends_on_gpu(point))
    return _sized(point, memory.model_bytes + memory.activation_peak)


@predicts("vllm_activation_peak")
def predict_activation_peak(point: MeasuredPoint) -> Prediction:
    """The peak of the profile run beyond the weights."""
    return _sized(point, memory_of(point, needs_gpu=_depends_on_gpu(point)).activation_peak)


@predicts("vllm_cuda_graph")
def predict_graphs(point: MeasuredPoint) -> Prediction:
    """Captured CUDA graphs of a rank; before 0.11 the GPU, which decides max_num_seqs, is not asked for."""
    version = parse_version(Settings(point).word("vllm", Settings(point).word("version")))
    needs_gpu = (version.major, version.minor) >= (0, 11) and "max_num_seqs" not in Settings(point)
    return _sized(point, memory_of(point, needs_gpu=needs_gpu).cuda_graphs)


@predicts("kv_saturation")
def judge_saturation(point: MeasuredPoint) -> Prediction | Refusal:
    """Whether a load is more than the cache holds, so that requests wait: right where a wait was measured.

    Counts: concurrency sequences of prompt and half the response, on average, against the pool's blocks.
    """
    unit = point.measured.unit.lower()
    if "queue" not in unit and "exhaust" not in unit:
        return Refusal(f"unit {shorten(unit)} does not say whether requests waited for the cache")
    settings, memory = Settings(point), memory_of(point)
    length = settings.count("isl") + settings.count("osl") // 2
    wanted = settings.count("concurrency") * memory.pool.blocks_of_sequence(length)
    is_exhausted = wanted > memory.num_blocks
    return Prediction("exhausted" if is_exhausted else "enough", is_right=is_exhausted)


@predicts("rl_colocated_residual")
def refuse_residual(point: MeasuredPoint) -> Refusal:
    """What is left on a GPU after the engine sleeps or the trainer is offloaded: no point says whose it is."""
    return Refusal("what stays depends on the trainer's states and NCCL groups, which the point does not state")


def _depends_on_gpu(point: MeasuredPoint) -> bool:
    settings = Settings(point)
    return not ("max_num_batched_tokens" in settings and "max_num_seqs" in settings)


def _sized(point: MeasuredPoint, num_bytes: float) -> Prediction:
    return Prediction(num_bytes / unit_bytes(point))
