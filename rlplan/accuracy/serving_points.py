"""Predictors of points of engines: bytes of an engine by kind, and latencies under a constant number of requests.

In: a point. Out: a job of `framework: vllm` or `tensorrt_llm`, and what `rlplan estimate` or `rlplan simulate` answers.
Left out: other engines, the formulas themselves.

Settings that a latency row leaves open follow published sweeps. All prompts differ. An engine serves as many sequences
as there are requests. The KV cache is fp8 where the
checkpoint is quantized and the GPU has fp8 matmuls: 64 requests of 9,216 tokens fit beside Llama-3.1-70B-FP8 on one
B200 in fp8 only. The engine may use 0.9 of the memory. A row whose expert columns are 0 comes from a sweep over a whole
host of 8 GPUs with 8/tp engines: its concurrency is that of all engines together.
"""

import re
from typing import Any

from rlplan.accuracy.named_models import QUANTIZATION_KEYS, find_point_model, has_quantized_name, make_policy
from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.predict import serve_job, simulate_load
from rlplan.accuracy.predictions import CannotPredict, Prediction
from rlplan.accuracy.settings import Settings, find_gpu, total_bytes, unit_bytes
from rlplan.accuracy.training.job import make_hardware
from rlplan.spec.base import shorten_value
from rlplan.spec.hardware.profile import ComputeDtype
from rlplan.units import GIB

GPUS_OF_A_SWEEP = 8
"""GPUs of the host in a sweep over whole hosts."""
UTILIZATION = 0.9
"""`gpu_memory_utilization` of published sweeps."""
SWEPT = ((1024, 1024), (1024, 8192), (8192, 1024))
"""Prompt and response lengths of InferenceX (formerly InferenceMAX), whose rows state the replicas of the attention or
have one of the last two shapes. Its responses are 0.8 to 1 of the length; its servers get `--max-num-seqs $CONC
--max-num-batched-tokens 8192`. Source: README and benchmarks/ of https://github.com/SemiAnalysisAI/InferenceX."""
SWEPT_TOKENS, SHORTEST = 8192, 0.8
GENERATED_TOKENS = 1500
"""Tokens beyond a prompt and the requests in the budget of a step of AIConfigurator's own deployments, whose responses
have one length. Source: https://github.com/ai-dynamo/aiconfigurator, generator/rule_plugin/vllm.rule."""
SERVED_WORDS = {"fp4": "nvfp4", "w4afp8": "int4_wo", "w4a16_mxfp4": "mxfp4", "w4a8_mxfp4_mxfp8": "mxfp4"}
"""Weight formats by words of serving tables: these words mean another format elsewhere, or name activations too."""
PLAIN = ("", "none", "bf16", "bfloat16", "fp16", "float16", "half", "auto")
"""Words for weights that are not quantized."""
UNSTATED, BEFORE_KNOWN = "0.10", "0.6.0 V0"
"""The release for points without one, and for releases before the oldest with a known profile run."""
ENGINE_KINDS = (
    *("vllm_weights", "vllm_profile_peak", "vllm_activation_peak", "vllm_cuda_graph", "vllm_kv", "kv_per_token"),
)
"""Kinds of bytes and capacities of an engine."""
ANY_RELEASE = ("vllm_weights", "kv_per_token")
"""Kinds that depend neither on the release's profile run nor on the size of the GPU."""
OFFLINE = ("llm", "llm_class", "offline")


def predict_engine(point: MeasuredPoint) -> Prediction:
    """Bytes of an engine, or tokens, blocks or sequences of its KV cache, by kind and unit."""
    kind, unit = point.kind, point.measured.unit.lower()
    is_size = point.measured.bytes_per_unit is not None
    if not is_size and kind not in ("vllm_kv", "kv_per_token"):
        unit_bytes(point)
    memory = serve_job(engine_job(point)).memory
    if is_size:
        sizes = {
            "vllm_weights": memory.model_bytes,
            "vllm_profile_peak": memory.model_bytes + memory.activation_peak,
            "vllm_activation_peak": memory.activation_peak,
            "vllm_cuda_graph": memory.cuda_graphs,
            "vllm_kv": memory.kv_budget,
            "kv_per_token": memory.pool.bytes_per_token,
        }
        return Prediction(sizes[kind] / unit_bytes(point))
    if re.search(r"\bblocks?\b", unit):
        return Prediction(memory.num_blocks)
    if "concurren" in unit or "sequence" in unit:
        return Prediction(memory.max_concurrency)
    if "token" in unit:
        return Prediction(memory.num_tokens)
    raise CannotPredict(f"unit {shorten_value(unit)} is neither a size nor tokens, blocks or sequences")


def predict_capacity(point: MeasuredPoint) -> Prediction:
    """Sequences of the largest length that TensorRT-LLM's KV cache holds at once."""
    if "sequence" not in point.measured.unit.lower():
        raise CannotPredict(f"unit {shorten_value(point.measured.unit)} is not a number of sequences")
    settings = Settings(point)
    tp, longest = (
        settings.degree("tp"),
        settings.read_count("isl", 0, at_least=0) + settings.read_count("osl", 0, at_least=0),
    )
    longest = settings.read_count("max_seq_len", longest)
    rollout: dict[str, Any] = _read_formats(settings) | {
        "tp": tp,
        "pp": settings.degree("pp"),
        "attention_dp": settings.degree("attention_dp"),
        "gpu_memory_utilization": settings.number("free_gpu_memory_fraction", 0.0, high=1.0) or None,
        "max_num_batched_tokens": settings.read_count("max_num_tokens", SWEPT_TOKENS),
    }
    job = {
        "policy": make_policy(point, longest=longest),
        "framework": "tensorrt_llm",
        "hardware": make_hardware(point, tp * rollout["pp"] * rollout["attention_dp"]) | {"memory": total_bytes(point)},
        "workload": {"max_prompt_len": 1, "max_response_len": longest - 1},
        "rollout": rollout,
    }
    memory = serve_job(job).memory
    return Prediction(memory.num_blocks * memory.block_size // longest)


def predict_latency(point: MeasuredPoint) -> Prediction:
    """Mean milliseconds per output token (TPOT), or to the first token (TTFT), as the unit says."""
    unit = point.measured.unit.lower()
    if not unit.startswith("ms") or ("tpot" not in unit and "ttft" not in unit):
        raise CannotPredict(f"unit {shorten_value(point.measured.unit)} is neither ms TPOT nor ms TTFT")
    latency = simulate_load(latency_job(point)).latency
    return Prediction(1e3 * (latency.first_token_s if "ttft" in unit else latency.token_s))


def judge_saturation(point: MeasuredPoint) -> Prediction:
    """The verdict whether requests wait for the KV cache; it is right if they do, because a wait was measured."""
    unit = point.measured.unit.lower()
    if "queue" not in unit and "exhaust" not in unit:
        raise CannotPredict(f"unit {shorten_value(unit)} does not say whether requests waited for the cache")
    waits = simulate_load(latency_job(point)).waits_for_cache
    return Prediction("exhausted" if waits else "enough", is_right=waits)


def engine_job(point: MeasuredPoint) -> dict[str, Any]:
    """The job of an engine's point. Raises: CannotPredict."""
    settings = Settings(point)
    ranks = {
        "tp": settings.degree("tp", "tensor_parallel_size"),
        "pp": settings.degree("pp", "pipeline_parallel_size"),
        "cp": settings.degree("decode_context_parallel", "dcp", "decode_context_parallel_size"),
    }
    length = settings.read_count("max_model_len", 0, at_least=0) or find_point_model(point).max_position_embeddings
    rollout = ranks | _read_formats(settings) | _read_limits(settings, length)
    rollout["engine_version"] = _read_release(settings, is_any=point.kind in ANY_RELEASE)
    if settings.degree("ep") > 1:
        rollout["has_expert_parallel"] = True
    if settings.flag("enforce_eager"):
        rollout["has_cuda_graphs"] = False
    if point.kind == "kv_per_token" and point.measured.bytes_per_unit is None:
        rollout["kv_cache_memory"] = int(settings.number("available_kv_gib", low=0.0) * GIB)
    elif utilization := settings.number("gpu_memory_utilization", 0.0, high=1.0):
        rollout["gpu_memory_utilization"] = utilization
    if point.kind == "vllm_kv" and "non_torch_gib" in settings:
        rollout["non_torch_memory"] = int(settings.number("non_torch_gib", low=0.0) * GIB)
    hardware = make_hardware(point, ranks["tp"] * ranks["pp"])
    if _depends_on_gpu(point, settings):
        hardware["memory"] = total_bytes(point)
    return {
        "policy": make_policy(point, longest=length),
        "framework": "vllm",
        "hardware": hardware,
        "workload": {"max_prompt_len": 1, "max_response_len": max(1, length - 1)},
        "rollout": rollout,
    }


def _depends_on_gpu(point: MeasuredPoint, settings: Settings) -> bool:
    if point.kind in ANY_RELEASE:
        return False
    return point.kind == "vllm_kv" or not ("max_num_batched_tokens" in settings and "max_num_seqs" in settings)


def _read_release(settings: Settings, *, is_any: bool) -> str:
    stated = settings.word("vllm", settings.word("version"))[:40]
    if is_any and re.search(r"(?<!\d)0\.[0-5](\.|\b)", stated):
        return BEFORE_KNOWN
    if not stated:
        settings.assume("vllm", UNSTATED)
    return stated or UNSTATED


def _read_formats(settings: Settings) -> dict[str, Any]:
    """Formats of weights and KV cache. Raises: CannotPredict."""
    # fp8 as a dtype names the format of the weights; activations stay 16 bits
    element_bytes = max(2, settings.element_bytes("dtype", "model_dtype"))
    cached = settings.element_bytes("kv_dtype", "kv_cache_dtype", default="none") or element_bytes
    if cached not in (1, element_bytes):
        raise CannotPredict(
            f"a cache of {cached} bytes an element beside weights of {element_bytes}: a job cannot express that"
        )
    formats = {"dtype": "float32" if element_bytes == 4 else "bfloat16", "kv_dtype": "fp8" if cached == 1 else "auto"}
    words = (settings.raw(key) for key in QUANTIZATION_KEYS)
    word = next((word for word in words if isinstance(word, str) and word), "none")
    return formats | {"quantization": word[:40]}


def _read_limits(settings: Settings, length: int) -> dict[str, Any]:
    """Stated limits of a batch and size of a block. Raises: CannotPredict."""
    limits = {key: settings.read_count(key, 0, at_least=0) for key in ("max_num_seqs", "max_num_batched_tokens")}
    if not limits["max_num_batched_tokens"] and settings.raw("chunked_prefill") is False:
        limits["max_num_batched_tokens"] = max(length, 2048)
    limits["block_size"] = settings.read_count("block_size", settings.read_count("block", 0, at_least=0), at_least=0)
    if settings.word("usage").lower() in OFFLINE and not (limits["max_num_seqs"] and limits["max_num_batched_tokens"]):
        raise CannotPredict("vLLM's LLM class has other limits than its server, and the point does not state them")
    return {key: value for key, value in limits.items() if value}


def latency_job(point: MeasuredPoint) -> dict[str, Any]:
    """The job of a row of latencies. Raises: CannotPredict."""
    settings, gpu = Settings(point), find_gpu(point)
    if gpu is None:
        raise CannotPredict(f"GPU {shorten_value(point.gpu)} has no profile")
    _refuse_others(settings)
    key = settings.first(("batch_size", "concurrency", "num_clients"))
    if key is None:
        raise CannotPredict("the number of concurrent requests is not stated (batch_size or concurrency)")
    tp, is_sweep = settings.degree("tp_size", "tp", "tensor_parallel_size"), settings.raw("moe_tp_size") == 0
    whole = settings.degree("moe_ep_size") if settings.raw("moe_ep_size") else settings.degree("ep")
    replicas = settings.read_count("attention_dp_size", 1) if settings.raw("attention_dp_size") else 1
    has_experts = find_point_model(point).experts is not None
    num_gpus = max(tp, GPUS_OF_A_SWEEP // tp * tp) if is_sweep else tp * replicas
    prompt, response, requests = settings.read_count("isl"), settings.read_count("osl"), settings.read_count(key)
    is_swept = (prompt, response) in SWEPT[1 if settings.raw("attention_dp_size") in (None, "") else 0 :]
    budget = SWEPT_TOKENS if is_swept else prompt + requests + GENERATED_TOKENS
    quantization = _read_served_format(point, settings, has_experts=has_experts)
    kv_bytes = settings.element_bytes("kv_dtype", "kv_cache_dtype", default="none")
    is_quantized = quantization != "none" or has_quantized_name(point)
    has_fp8 = kv_bytes == 1 or (not kv_bytes and is_quantized and ComputeDtype.FLOAT8 in gpu.dense_flops_per_s)
    release = settings.word("backend_version", settings.word("version"))
    return {
        "policy": make_policy(point, longest=prompt + response),
        "framework": f"vllm@{release}" if re.fullmatch(r"\d+(\.\d+)+", release) else "vllm",
        "hardware": make_hardware(point, num_gpus),
        "workload": {
            "max_prompt_len": prompt,
            "max_response_len": response,
            "num_concurrent_requests": requests,
            "response_lengths": {"kind": "uniform", "low": round(SHORTEST * response), "high": response}
            if is_swept
            else {"kind": "constant"},
        },
        "rollout": {
            "tp": tp,
            "attention_dp": replicas if has_experts and not is_sweep else 1,
            "has_expert_parallel": has_experts and whole > 1,
            "quantization": quantization,
            "kv_dtype": "fp8" if has_fp8 else "auto",
            "gpu_memory_utilization": settings.number("gpu_memory_utilization", UTILIZATION, high=1.0),
            "max_num_seqs": settings.read_count("max_num_seqs", requests),
            "max_num_batched_tokens": settings.read_count("max_num_batched_tokens", budget),
        },
    }


def _refuse_others(settings: Settings) -> None:
    if settings.word("backend", "vllm").lower() != "vllm":
        raise CannotPredict(f"the constants are vLLM's, not {shorten_value(settings.word('backend'))}'s")
    if settings.word("mode", "agg").lower() not in ("agg", "aggregated", ""):
        raise CannotPredict("disaggregated prefill and decode are not timed")
    if settings.degree("pp_size", "pp") > 1:
        raise CannotPredict("engines with pipeline parallelism are not timed")


def _read_served_format(point: MeasuredPoint, settings: Settings, *, has_experts: bool) -> str:
    """The weight format in a row's columns; `none` where the checkpoint's name decides.

    Raises: CannotPredict where experts and dense layers have different formats.
    """
    dense, experts = (str(settings.raw(key) or "").lower() for key in ("gemm_quant_mode", "moe_quant_mode"))
    stated = str(settings.raw("precision") or settings.raw("quantization") or "").lower()
    if has_experts and experts not in ("", dense) and not has_quantized_name(point):
        raise CannotPredict(f"dense layers in {dense or 'bf16'} and experts in {experts}: a job cannot express that")
    word = dense or ("" if experts else stated)
    return "none" if word in PLAIN else SERVED_WORDS.get(word, word)[:40]
