"""Points about the latency of a vLLM server under a fixed concurrency: to the first token, and of each token after it.

In: points. Out: predictions in milliseconds. Left out: other engines, disaggregated serving, pipelines, speculative
drafts, and how the seconds come about (rlplan.timing).

What rows leave open is read as published sweeps do it: all prompts differ, the cache is fp8 where the checkpoint is
quantised and the GPU multiplies fp8 (64 requests of 9,216 tokens fit beside Llama-3.1-70B-FP8 on one B200 in fp8 only),
0.9 of the memory. A row whose expert columns are 0 comes from a sweep that loads a whole host of 8 GPUs with 8/tp
engines: its concurrency is that of all of them.
"""

from dataclasses import replace

from rlplan.accuracy.named_models import model_of, quantization_of
from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.registry import CannotPredict, Prediction, predicts
from rlplan.accuracy.settings import Settings, gpu_of
from rlplan.errors import SpecError
from rlplan.memory.model.quantization import INT4_GROUP_128, MXFP4, NVFP4, Quantization
from rlplan.memory.model.quantized_checkpoints import EXPERTS, quantization_by_name, quantization_by_word
from rlplan.memory.serving.engine import EngineSettings, engine_memory, limits_of
from rlplan.memory.serving.versions import LATEST, VllmVersion, parse_version
from rlplan.records import dataclass
from rlplan.spec.base import shorten
from rlplan.spec.hardware.catalogue import load_profiles
from rlplan.spec.hardware.profile import ComputeDtype, GpuProfile, NodeProfile
from rlplan.spec.model import ModelSpec
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.serving.counts import EngineCut, engine_counts
from rlplan.timing.serving.load import ClosedLoop, Latency, closed_loop_latency
from rlplan.timing.serving.step import EngineRates

GPUS_OF_A_SWEEP = 8
"""GPUs of the host that a sweep over whole hosts loads."""
SERVED_WORDS = {
    "fp4": Quantization(NVFP4),
    "w4afp8": Quantization(INT4_GROUP_128),
    "w4a16_mxfp4": Quantization(MXFP4),
    "w4a8_mxfp4_mxfp8": Quantization(MXFP4),
}
"""Words of servers' tables that mean something else elsewhere (bitsandbytes' `fp4`), or name activations too."""
UTILIZATION = 0.9
"""The fraction of memory that published sweeps give vLLM."""


@predicts("serving_tpot", "serving_ttft", "throughput_infer")
def predict_latency(point: MeasuredPoint) -> Prediction:
    """Mean milliseconds of a token after the first, or to the first one, as the unit says."""
    unit = point.measured.unit.lower()
    if not unit.startswith("ms") or ("tpot" not in unit and "ttft" not in unit):
        raise CannotPredict(f"unit {shorten(point.measured.unit)} is neither ms TPOT nor ms TTFT")
    latency = latency_of(point)
    return Prediction(1e3 * (latency.first_token_s if "ttft" in unit else latency.token_s))


@dataclass(frozen=True)
class Server:
    """The engine of a point."""

    model: ModelSpec
    gpu: GpuProfile
    cut: EngineCut
    concurrency: float
    """Requests in flight at this one engine."""
    version: VllmVersion


def latency_of(point: MeasuredPoint) -> Latency:
    """Both latencies of a point. Raises: CannotPredict, SpecError."""
    server = server_of(point)
    counts = engine_counts(server.model, server.cut)
    rates = EngineRates(
        counts, cluster_of(server.gpu), kv_element_bytes=server.cut.kv_element_bytes, version=server.version
    )
    return closed_loop_latency(rates, loop_of(point, server))


def loop_of(point: MeasuredPoint, server: Server) -> ClosedLoop:
    """The clients of a point, and how many of them its engine serves at once. Raises: CannotPredict, SpecError."""
    settings, cut = Settings(point), server.cut
    prompt, response = settings.count("isl"), settings.count("osl")
    held = EngineSettings(server.gpu.memory.value, gpu_memory_utilization=UTILIZATION, version=server.version)
    # a rank holds the same bytes of experts, whether it holds a part of each or whole ones
    ranks = cut.tp * cut.replicas
    held = replace(
        held,
        tp=cut.tp,
        ep=ranks if cut.replicas > 1 else cut.ep,
        kv_element_bytes=cut.kv_element_bytes,
        quantization=cut.scheme,
    )
    held = replace(held, max_model_len=prompt + response)
    memory = engine_memory(server.model, held)
    fitting = cut.replicas * memory.num_blocks / memory.pool.blocks_of_sequence(prompt + response // 2)
    if fitting < 1:
        raise CannotPredict(f"the cache holds {fitting:.2f} of one request beside the weights")
    limit = settings.count("max_num_seqs", 1 << 20)
    batched = settings.count("max_num_batched_tokens", limits_of(server.model, held).max_num_batched_tokens)
    return ClosedLoop(server.concurrency, prompt, response, min(limit, fitting), float(batched))


def server_of(point: MeasuredPoint) -> Server:
    """The engine that a point was measured on. Raises: CannotPredict, SpecError."""
    settings, gpu = Settings(point), gpu_of(point)
    if gpu is None:
        raise CannotPredict(f"GPU {shorten(point.gpu)} has no profile")
    _refuse_others(settings)
    tp = settings.degree("tp_size", "tp", "tensor_parallel_size")
    whole = settings.degree("moe_ep_size") if settings.raw("moe_ep_size") else settings.degree("ep")
    replicas = settings.count("attention_dp_size", 1) if settings.raw("attention_dp_size") else 1
    model, scheme = model_of(point), scheme_of(point)
    if settings.raw("moe_tp_size") == 0:
        replicas = max(1, GPUS_OF_A_SWEEP // tp)
    key = settings.first(("batch_size", "concurrency", "num_clients"))
    if key is None:
        raise CannotPredict("the number of concurrent requests is not stated (batch_size or concurrency)")
    shared, alone = (replicas, 1) if model.experts and settings.raw("moe_tp_size") != 0 else (1, replicas)
    kv_bytes = _kv_element_bytes(settings, scheme, gpu)
    cut = EngineCut(tp, tp * shared if whole > 1 else 1, shared, 2, kv_bytes, scheme)
    return Server(model, gpu, cut, settings.count(key) / alone, _version_of(settings))


def _refuse_others(settings: Settings) -> None:
    if settings.word("backend", "vllm").lower() != "vllm":
        raise CannotPredict(f"the constants are vLLM's, not {shorten(settings.word('backend'))}'s")
    if settings.word("mode", "agg").lower() not in ("agg", "aggregated", ""):
        raise CannotPredict("prefill and decode on engines of their own are not timed")
    if settings.degree("pp_size", "pp") > 1:
        raise CannotPredict("an engine in pipeline stages is not timed")


def scheme_of(point: MeasuredPoint) -> Quantization | None:
    """What is quantised: by the checkpoint's name, then by the words of a row's columns. Raises: CannotPredict.

    A row that names the experts' format alone quantises them alone.
    """
    settings = Settings(point)
    named = quantization_by_name(point.model or "")
    if named is not None or isinstance(point.settings.get("config"), dict):
        return quantization_of(point)
    words = [str(settings.raw(key) or "") for key in ("gemm_quant_mode", "moe_quant_mode")]
    if not any(words):
        words = [str(settings.raw("precision") or settings.raw("quantization") or "")] * 2
    try:
        dense, experts = (
            SERVED_WORDS.get(word.lower()) or quantization_by_word(word, where=point.id) for word in words
        )
    except SpecError as error:
        raise CannotPredict(f"{error.what}: {error.rule}") from None
    if dense is None and experts is not None:
        return replace(experts, only=EXPERTS)
    return dense


def _kv_element_bytes(settings: Settings, scheme: Quantization | None, gpu: GpuProfile) -> int:
    stated = settings.element_bytes("kv_dtype", "kv_cache_dtype", default="none")
    if stated:
        return stated
    return 1 if scheme is not None and ComputeDtype.FLOAT8 in gpu.dense_flops_per_s else 2


def _version_of(settings: Settings) -> VllmVersion:
    text = settings.word("backend_version", settings.word("version"))
    try:
        return parse_version(text) if text else LATEST
    except SpecError:
        return LATEST


def cluster_of(gpu: GpuProfile) -> Cluster:
    """GPUs of a kind in the first bundled node that has them; one host of 8 where there is none."""
    nodes = (one for one in load_profiles().values() if isinstance(one, NodeProfile) and one.gpu == gpu.name)
    node = next(nodes, None)
    return Cluster(gpu, 1 << 10, node.num_gpus if node else 8, node)
