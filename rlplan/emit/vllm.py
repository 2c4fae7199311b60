"""vLLM's engine arguments for the rollout engine, by vLLM's own names.

In: a ResolvedJob. Out: a plain dict for `vllm.LLM(**arguments)`, without the model's path. Source: vLLM 0.32.0.
"""

from typing import Any

from rlplan.memory.weight_sync.adapters import engine_adapters, engine_lora_rank
from rlplan.spec.resolved import ResolvedJob
from rlplan.vocabulary import Placement

WORKER_EXTENSION = "rlplan.runtime.weight_sync.vllm_extension.WeightSyncExtension"
WEIGHT_TRANSFER_BACKEND = "rlplan"

MAX_IMAGES = 16
"""Of a prompt."""

LONGEST_NGRAM = 3
"""Longest n-gram that speculative decoding looks up in what came before."""


def engine_arguments(job: ResolvedJob, placement: Placement = Placement.HYBRID) -> dict[str, Any]:
    """Engine arguments. `kv_cache_memory_bytes` skips vLLM's profiling run, so the KV cache is what the plan says.

    On a CPU prompts are not cut (a batch holds one longest sequence): vLLM 0.32 takes back the random draw of a cut
    prompt by moving its generator's offset, which a generator on a CPU has not, and every request has one.

    `processed_logprobs` are the log-probs of the distribution that was sampled from (after temperature), which is
    what the ratio needs. Every rank of an engine is a process of ours (`external_launcher`). vLLM needs the tokenizer
    only to stop at texts. Weights in mxfp4 are multiplied by a kernel that leaves activations alone: on Blackwell vLLM
    would round them to 4 bits too (kernels/linear/mxfp4). Of a checkpoint in 4 bits its own config says the format.
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
        "enable_prefix_caching": True,
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


NCCL_ALONE = {
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
}
"""Environment of an engine on GPUs: vLLM's other ways to all-reduce are off, for NCCL's is what was timed
(timing/serving/step.py) and two of them are on by themselves. Source: vLLM 0.32.0, envs.py, cuda_communicator.py."""

TESTED_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
"""Environment of an engine on GPUs: the model runner that every test of ours has met. On a CPU vLLM 0.32 has no other;
with Triton at hand it takes its second one by itself (`use_v2_model_runner` of its own configuration)."""

LEAST_UTILIZATION = 0.01
"""With `kv_cache_memory_bytes` vLLM takes what it is told to; at its start alone it asks that this share of the GPU is
free (vLLM's v1/worker/utils.py, `request_memory`). Others lie on the same GPU already, so it asks for almost none."""


def _gpu_arguments(job: ResolvedJob, placement: Placement) -> dict[str, Any]:
    """What an engine on GPUs is told beside. Its ranks see one GPU each, so their own all-reduce, which opens their
    peers' memory by device numbers, is left out for NCCL's, and so is the one that is fused with a norm (FlashInfer's,
    on by itself on Hopper and Blackwell). Not yet run on a GPU.
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
    """A slot for each version of the adapter that is held at once, where adapters alone are handed over."""
    held = engine_adapters(job)
    if held is None:
        return {}
    return {"enable_lora": True, "max_loras": held.num_versions, "max_lora_rank": engine_lora_rank(held.lora.rank)}
