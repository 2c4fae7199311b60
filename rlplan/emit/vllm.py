"""vLLM's engine arguments for the rollout engine, under vLLM's own names.

In: a ResolvedJob. Out: a plain dict for `vllm.LLM(**arguments)`, without the model's path. Source: vLLM 0.32.0.
"""

from typing import Any

from rlplan.memory.weight_sync.adapters import find_engine_adapters, round_lora_rank
from rlplan.spec.resolved import ResolvedJob
from rlplan.vocabulary import Placement

WORKER_EXTENSION = "rlplan.runtime.weight_sync.vllm_extension.WeightSyncExtension"
WEIGHT_TRANSFER_BACKEND = "rlplan"

MAX_IMAGES = 16
"""Most images in a prompt."""

LONGEST_NGRAM = 3
"""Longest n-gram that speculative decoding looks up in the preceding tokens."""


def engine_arguments(job: ResolvedJob, placement: Placement = Placement.HYBRID) -> dict[str, Any]:
    """Build the engine arguments. `kv_cache_memory_bytes` skips vLLM's profiling run and fixes the planned KV cache.

    On a CPU prompts are not chunked, so a batch holds the longest sequence. vLLM 0.32 undoes the random draw of a
    partial prompt by moving the offset of its generator, and CPU generators have no offset.

    `processed_logprobs` are log-probs of the sampled distribution (after temperature), which the importance ratio
    needs. Every rank of an engine is one of our processes (`external_launcher`). vLLM needs the tokenizer only for stop
    texts. For mxfp4 the kernel is Marlin, which keeps activations; on Blackwell vLLM would round them to 4 bits as well
    (kernels/linear/mxfp4). The config of a 4-bit checkpoint names its format.
    """
    arguments: dict[str, Any] = {
        "dtype": job.rollout.dtype.value,
        "seed": job.seed,
        "tensor_parallel_size": job.rollout.tp,
        "distributed_executor_backend": "uni" if job.rollout.tp == 1 else "external_launcher",
        "skip_tokenizer_init": not any(isinstance(part, str) for part in job.rollout.stop),
        "trust_remote_code": False,
        "load_format": "safetensors",
        "max_model_len": job.workload.max_seq_len,
        "max_num_seqs": job.rollout.max_num_seqs,
        "max_num_batched_tokens": job.rollout.max_num_batched_tokens,
        "kv_cache_memory_bytes": job.rollout.kv_cache_memory,
        "block_size": job.rollout.block_size,
        "enable_prefix_caching": not job.rollout.replays_experts,  # no router sees the tokens of a cached prefix
        "enable_chunked_prefill": job.device_kind == "cuda",
        "enforce_eager": not job.rollout.has_cuda_graphs,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": WORKER_EXTENSION,
        "weight_transfer_config": {"backend": WEIGHT_TRANSFER_BACKEND},
        **_adapter_arguments(job),
        **(_gpu_arguments(job, placement) if job.device_kind == "cuda" else {}),
    }
    if job.takes_images:
        arguments |= {"limit_mm_per_prompt": {"image": MAX_IMAGES}, "mm_processor_cache_gb": 0}
    if job.rollout.quantization != "none":
        arguments["quantization"] = job.rollout.quantization
    if job.rollout.quantization == "mxfp4":
        arguments["kernel_config"] = {"linear_backend_per_quant": {"mxfp4": "marlin"}}
    if job.rollout.speculative_tokens:
        arguments["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": job.rollout.speculative_tokens,
            "prompt_lookup_max": LONGEST_NGRAM,
        }
    return arguments


LEAST_UTILIZATION = 0.01
"""Share of the GPU that must be free when vLLM starts (v1/worker/utils.py, `request_memory`). It has no other effect
with `kv_cache_memory_bytes`. The share is small because other processes already use the same GPU."""


def _gpu_arguments(job: ResolvedJob, placement: Placement) -> dict[str, Any]:
    """Additional arguments of an engine on GPUs.

    Each rank sees one GPU, so vLLM's custom all-reduce, which opens the memory of peers by device number, is replaced
    by NCCL's. So is FlashInfer's all-reduce fused with a norm, which is on by default on Hopper and Blackwell.
    Not yet run on a GPU.
    """
    rollout = job.rollout
    arguments: dict[str, Any] = {
        "gpu_memory_utilization": LEAST_UTILIZATION,
        "disable_custom_all_reduce": True,
        "compilation_config": {"pass_config": {"fuse_allreduce_rms": False}},
        "enable_sleep_mode": placement is Placement.COLOCATED,
        "async_scheduling": False,
    }
    if rollout.kv_dtype == "fp8":
        arguments["kv_cache_dtype"] = "fp8"
    if rollout.has_expert_parallel:
        arguments["enable_expert_parallel"] = True
    return arguments


def _adapter_arguments(job: ResolvedJob) -> dict[str, Any]:
    """LoRA arguments where only adapters are synced: one slot for each adapter version that exists at the same time."""
    adapters = find_engine_adapters(job)
    if adapters is None:
        return {}
    rank = round_lora_rank(adapters.lora.rank)
    return {"enable_lora": True, "max_loras": adapters.num_versions, "max_lora_rank": rank}
