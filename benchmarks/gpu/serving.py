"""vLLM: what it takes, what it leaves asleep, and weights handed from one process to another without a copy.

In: a case and a device. Out: bytes and tokens, by name. Weights are vLLM's dummies: nothing is read but a config.
Left out: more than one GPU, quantised weights. Written against vLLM 0.32.
"""

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.cases import Case
from benchmarks.gpu.device import need_cuda
from benchmarks.gpu.meters import used_by_driver
from rlplan.units import GIB, MIB

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
}
UTILIZATION = 0.9
DECODED = (1, 64)
"""Sequences that are decoded together."""
DECODE_STEPS = 64
RECEIVER_TIMEOUT_S = 120.0
WORKER_BYTES = {
    "available_kv_bytes": "available_kv_cache_memory_bytes",
    "activation_bytes": "peak_activation_memory",
    "graph_bytes": "cudagraph_memory_estimate",
    "requested_bytes": "requested_memory",
    "consumed_bytes": "total_consumed",
}
"""Our name, and the worker's attribute (vLLM's v1/worker/gpu_worker.py); one that a version lacks is left out."""


def measure_engine(case: Case, device: torch.device, used_before: int | None) -> dict[str, float]:
    """Start the engine as users do, read how it divided the memory, and time its decode steps."""
    started = time.perf_counter()
    engine = _start(case, device)
    start_s = time.perf_counter() - started
    measured: dict[str, float] = engine.collective_rpc(read_worker)[0] | {"start_s": start_s}
    for num_seqs in DECODED if device.type == "cuda" else DECODED[:1]:
        measured[f"decode_{num_seqs}_s"] = _time_decode(engine, num_seqs)
    if device.type == "cuda" and used_before is not None and (used := used_by_driver()):
        measured["process_bytes"] = used - used_before
    return measured


def _time_decode(engine: Any, num_seqs: int) -> float:
    """Seconds of a decode step: two runs differ only in the number of generated tokens, so prefill cancels out."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [(number + place) % 997 + 1 for place in range(32)]} for number in range(num_seqs)]
    seconds = {}
    for num_tokens in (8, 8, 8 + DECODE_STEPS):  # the first run warms up
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds[num_tokens] = time.perf_counter() - started
        if any(len(output.outputs[0].token_ids) != num_tokens for output in outputs):
            raise RuntimeError(f"the engine generated fewer than {num_tokens} tokens")
    return (seconds[8 + DECODE_STEPS] - seconds[8]) / DECODE_STEPS


def measure_sleep(case: Case, device: torch.device, used_before: int | None) -> dict[str, float]:
    """Put the engine to sleep at both levels and wake it in the order of a weight sync: weights, then the cache."""
    need_cuda(device)
    engine = _start(case, device)
    measured = engine.collective_rpc(read_worker)[0]
    measured["awake_bytes"] = _read_used(used_before)
    for level in (1, 2):
        awake = _read_used(used_before)
        engine.sleep(level=level)
        asleep = _read_used(used_before)
        measured[f"asleep_at_level_{level}_bytes"] = asleep
        measured[f"freed_by_level_{level}_bytes"] = awake - asleep
        for tag in ("weights", "kv_cache"):
            engine.wake_up(tags=[tag])
            measured[f"woken_{tag}_from_level_{level}_bytes"] = _read_used(used_before) - asleep
    return measured


def _start(case: Case, device: torch.device) -> Any:
    """An engine in this process, with random weights."""
    os.environ.update(ENVIRONMENT)
    from vllm import LLM

    is_cuda = device.type == "cuda"
    arguments: dict[str, Any] = {
        "dtype": "bfloat16",
        "seed": 0,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "max_model_len": case.num_tokens,
        "block_size": case.block_size,
    }
    if case.action == "sleep":
        arguments |= {"enable_sleep_mode": True, "enforce_eager": True}
    if case.gives_kv_bytes:
        arguments["kv_cache_memory_bytes"] = case.kv_bytes
    else:
        arguments["gpu_memory_utilization"] = UTILIZATION
    if not is_cuda:
        arguments |= {"enforce_eager": True, "max_num_seqs": 4, "max_num_batched_tokens": case.num_tokens}
    with tempfile.TemporaryDirectory(prefix="rlplan-gpu-") as folder:
        config = case.config | {"model_type": _model_type(case), "torch_dtype": "bfloat16"}
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return LLM(model=folder, **arguments)


def _model_type(case: Case) -> str:
    import transformers

    model_class = getattr(transformers, case.config["architectures"][0])
    return str(model_class.config_class.model_type)


def read_worker(worker: Any) -> dict[str, float]:
    """Memory figures of a vLLM worker; runs inside it."""
    worker = getattr(worker, "worker", worker)
    numbers = {name: getattr(worker, attribute, None) for name, attribute in WORKER_BYTES.items()}
    numbers["weight_bytes"] = getattr(worker.model_runner, "model_memory_usage", None)
    cache = worker.vllm_config.cache_config
    if cache.num_gpu_blocks:
        numbers["kv_tokens"] = cache.num_gpu_blocks * cache.block_size
    cache_bytes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in _caches(worker)}
    if cache_bytes and numbers.get("kv_tokens"):
        numbers["kv_bytes_per_token"] = sum(cache_bytes.values()) / numbers["kv_tokens"]
    return {name: float(value) for name, value in numbers.items() if value}


def _caches(worker: Any) -> list[torch.Tensor]:
    caches = getattr(worker.model_runner, "kv_caches", [])
    return [tensor for tensor in caches if isinstance(tensor, torch.Tensor)]


def _read_used(used_before: int | None) -> int:
    """Bytes on the device beyond what was there before this process."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (used_by_driver() or total - free) - (used_before or 0)


def measure_handover(case: Case, device: torch.device, used_before: int | None) -> dict[str, float]:
    """Give a tensor to another process by handle, as a trainer does with an engine on the same device.

    Measured: what the receiver adds to the device, which is its context and no second tensor.
    Raises: RuntimeError where the receiver reads other numbers.
    """
    context = torch.multiprocessing.get_context("spawn")
    handles, answers = context.Queue(), context.Queue()
    weights = torch.arange(MIB if case.is_tiny else GIB, device=device, dtype=torch.float32)
    before = _read_used(used_before) if device.type == "cuda" else 0
    receiver = context.Process(target=_receive, args=(handles, answers), daemon=True)
    receiver.start()
    try:
        handles.put(weights)
        last, allocated = answers.get(timeout=RECEIVER_TIMEOUT_S)
        after = _read_used(used_before) if device.type == "cuda" else 0
        handles.put(None)
        receiver.join(RECEIVER_TIMEOUT_S)
    finally:
        receiver.kill()
    if last != float(weights[-1]):
        raise RuntimeError(f"the receiver read {last}, not {float(weights[-1])}")
    measured: dict[str, float] = {"handed_over_bytes": weights.numel() * weights.element_size()}
    if device.type == "cuda":
        measured |= {"receiver_process_bytes": after - before, "receiver_allocated_bytes": allocated}
    return measured


def _receive(handles: Any, answers: Any) -> None:
    """The other process: read the last number and say what this process's allocator holds; stay until told."""
    weights = handles.get(timeout=RECEIVER_TIMEOUT_S)
    allocated = torch.cuda.memory_allocated() if weights.is_cuda else 0
    answers.put((float(weights[-1]), allocated))
    handles.get(timeout=RECEIVER_TIMEOUT_S)
