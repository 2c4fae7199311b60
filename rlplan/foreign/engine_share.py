"""Conversion between an engine's fraction of a GPU's memory and bytes of KV cache, by the engine's own arithmetic.

In: a job, a fraction, a version of vLLM. Out: bytes of a rank. Left out: other roles on the GPU.
Source: memory/serving/engine.py, for vLLM and TensorRT-LLM. SGLang's `mem_fraction_static` covers weights and KV
cache only.
"""

import math

from rlplan.errors import NoFeasiblePlanError
from rlplan.foreign.convert import MEMORY, Share
from rlplan.memory.model.quantization import parse_quantization
from rlplan.memory.serving.engine import EngineMemory, EngineSettings, predict_engine_memory
from rlplan.memory.serving.tensorrt_llm import NAME as TENSORRT_LLM
from rlplan.memory.serving.versions import parse_version
from rlplan.planner.plan import Plan
from rlplan.planner.setting import read_pools
from rlplan.spec.job import JobSpec
from rlplan.spec.resolved import settle
from rlplan.units import format_bytes


def add_kv_cache(job: JobSpec, share: Share, version: str) -> JobSpec:
    """The job with the bytes of KV cache that a fraction leaves. Raises: NoFeasiblePlanError where it leaves none."""
    memory = _size_engine(job, share.value, version)
    size = memory.kv_cache
    if share.is_static:
        # SGLang's fraction excludes activations, so all of it beside the weights is KV cache, in whole blocks
        size = (
            max(0, memory.requested - memory.model_bytes) // memory.pool.bytes_per_block * memory.pool.bytes_per_block
        )
    if share.is_of_shared_weights and size > 0:
        # a plan counts the weights in the engine too, so the cache gives way, down to one longest sequence
        least = math.ceil(size / memory.max_concurrency) + memory.pool.bytes_per_block
        size = max(size - memory.model_bytes, min(size, least))
    if size <= 0:
        raise NoFeasiblePlanError(
            f"the engine's weights need {format_bytes(memory.model_bytes)} and its passes "
            f"{format_bytes(memory.activation_peak)} of the {format_bytes(memory.requested)} that it may use on a GPU",
            where=share.taken.place or f"upstream's default of {share.taken.key}",
            rule=f"{share.taken.key} = {share.value:g} leaves room for a KV cache",
            way_out="raise it, or use more GPUs per engine (tensor parallel)",
        )
    return job.model_copy(update={"rollout": job.rollout.model_copy(update={MEMORY.split(".")[1]: size})})


def _size_engine(job: JobSpec, share: float, version: str) -> EngineMemory:
    """The memory of the job's engine with a fraction of a GPU's memory.

    Differs: `ServingJob.settings` follows the job's own release, and a checkpoint's quantization. A foreign file
    follows the release of its table.
    """
    settled = settle(job)
    pool, rollout = read_pools(settled)[-1], settled.rollout
    tp, dp = (1 if ranks == "auto" else ranks for ranks in (rollout.tp, rollout.attention_dp))
    settings = EngineSettings(
        pool.gpu.memory.value,
        gpu_memory_utilization=share,
        tp=tp,
        ep=tp * dp if rollout.has_expert_parallel is True or dp > 1 else 1,
        attention_dp=dp,
        kv_element_bytes=1 if rollout.kv_dtype == "fp8" else 2,
        max_num_seqs=None if rollout.max_num_seqs == "auto" else rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        max_model_len=job.workload.max_seq_len,
        enforce_eager=rollout.has_cuda_graphs is False,
        version=parse_version(version),
        quantization=parse_quantization(rollout.quantization, where="rollout.quantization"),
        is_tensorrt_llm=rollout.engine == TENSORRT_LLM,
    )
    return predict_engine_memory(job.load_model(), settings)


def find_share(plan: Plan, version: str, *, is_static: bool) -> float:
    """The fraction of a GPU with which an engine gets the KV cache of a plan, rounded up to six digits.

    A plan may use a GPU up to its last block. With fewer digits, or a block more, the exported files would not fit.
    """
    memory = _size_engine(plan.job, 1.0, version)
    cache = max(plan.job.rollout.kv_cache_memory, memory.pool.bytes_per_block)  # 0 in a plan that does not fit
    beside = memory.model_bytes if is_static else memory.requested - memory.kv_budget
    total = memory.requested
    if plan.job.rollout.engine == TENSORRT_LLM:  # its fraction is of the free memory
        beside, total = 0, max(1, memory.kv_budget)
    return math.ceil((cache + beside) / total * 1e6) / 1e6
