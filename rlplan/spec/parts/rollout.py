"""The rollout engines of a job: their number, parallelism, precision and memory.

In: the `rollout:` part of a job. Out: frozen values. Left out: bytes (memory/), vLLM's own names (emit/vllm.py).
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from rlplan.spec.base import Auto, ByteCount, Spec
from rlplan.spec.parts.environment import EnvironmentSpec
from rlplan.spec.parts.training import Ranks
from rlplan.spec.parts.workload import Count
from rlplan.vocabulary import Dtype


def _holds_tokens(num_bytes: int) -> int:
    """A KV cache size of at least 1 KiB: a smaller number lacks its unit. 0 is the cache of a job without rollouts."""
    if 0 < num_bytes < 1 << 10:
        raise ValueError(f"a byte count of {num_bytes} holds no token")
    return num_bytes


class RolloutSpec(Spec):
    """Settings of the rollout engines. `auto` is decided by the planner, or by a rule in resolved.py."""

    engine: Literal["auto", "vllm", "sglang", "tensorrt_llm", "transformers"] = "auto"
    """Generation backend. `auto`: the default of the job's framework (vLLM for rlplan's own runtime). `transformers`
    generates in the trainer with the weights being trained (TRL without vLLM). The predicted time is that of an engine;
    the real time is longer."""
    engine_version: str | None = Field(default=None, max_length=40)
    """vLLM release whose memory is predicted, such as 0.23.0; None: the release that rlplan installs."""
    non_torch_memory: ByteCount | None = None
    """Bytes outside of torch that the engine subtracts from its share of a GPU, as vLLM's start-up log states them
    (`non_torch_memory takes`); None: predicted."""
    shares_process: bool = False
    """Whether the engine runs in the trainer's process, without a CUDA context of its own (TRL's
    `vllm_mode=colocate`)."""
    dtype: Dtype | Auto = "auto"
    """Data type of weights and activations."""
    num_engines: Annotated[int, Field(ge=1, le=16_384)] | Auto = "auto"
    """Number of engine replicas. `auto` fills the GPUs that generate."""
    tp: Ranks = "auto"
    """Tensor-parallel size of an engine, or of each `attention_dp` rank where there are several."""
    attention_dp: Ranks = "auto"
    """Data-parallel size of the attention in an engine. Each rank has its own sequences and KV cache; experts are
    spread over all tp x attention_dp GPUs (vLLM's `data_parallel_size` with `enable_expert_parallel`)."""
    pp: Annotated[int, Field(ge=1, le=1024)] = 1
    """Pipeline-parallel size of a standalone engine (`framework: vllm`); engines of an RL step have 1."""
    cp: Annotated[int, Field(ge=1, le=1024)] = 1
    """Decode context-parallel size of a standalone engine: tensor-parallel ranks that share each sequence's KV cache
    (vLLM's `decode_context_parallel_size`)."""
    replays_experts: bool = False
    """Whether the trainer uses the experts that the engine's routers chose for each token (router replay, R3). The
    engine then computes every prompt again, since no router sees cached prefixes."""
    stop: tuple[str | int, ...] = ()
    """Strings and token ids that end a response."""
    quantization: str = Field(default="none", max_length=40)
    """Quantization format that weights are converted to while loading. `auto` may choose fp8 on GPUs that compute in
    it."""
    speculative_tokens: Annotated[int, Field(ge=0, le=16)] | Auto = 0
    """Tokens proposed at a time by n-gram speculative decoding. `auto` chooses the fastest number for the acceptance
    rate, or 0 if no rate is set."""
    acceptance_rate: float | None = Field(default=None, gt=0, lt=1)
    """Probability that a proposed token is accepted, used to time speculative decoding on GPUs. It depends on the job;
    engines log it."""
    environment: EnvironmentSpec = EnvironmentSpec.create_default()
    """The environment or the tools that answer the policy between turns."""
    kv_dtype: Literal["auto", "fp8"] = "auto"
    """Data type of the KV cache. `auto`: same as the weights; `fp8` halves it (GPUs only)."""
    base_path: str | None = None
    """Folder with the policy's weights in 4 bits (AWQ, GPTQ, compressed-tensors), loaded by engines in place of the
    policy's own. Requires LoRA with adapter-only sync; the trainer keeps its weights. None: `policy.path`."""
    shares_base: bool = False
    """Whether the engine uses the frozen base weights of the trainer on its device instead of a copy. Requires LoRA
    with adapter-only sync."""
    has_cuda_graphs: bool | Auto = "auto"
    """Whether decode steps run as CUDA graphs; false is vLLM's `enforce_eager`."""
    has_expert_parallel: bool | Auto = "auto"
    """Whether experts are distributed whole over an engine's ranks (expert parallelism) instead of sliced."""
    sleep_level: Literal["auto", 0, 1, 2] = "auto"
    """Sleep level of a colocated engine on GPUs. 0: stays awake; 1: offloads weights to the host; 2: discards
    weights."""
    kv_cache_memory: Annotated[ByteCount, AfterValidator(_holds_tokens)] | Auto = "auto"
    """KV cache size in bytes per rank. `auto`: the 99th percentile of the rollouts' demand, or the free memory if that
    is less."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of a GPU's total memory for the engine, as in vLLM. The KV cache gets what weights, activations and graphs
    leave of it. With TensorRT-LLM it is the KV cache's share of the memory that they leave free
    (`free_gpu_memory_fraction`). None: follows kv_cache_memory."""
    max_num_seqs: Count | Auto = "auto"
    """Limit on sequences that an engine runs at once, split evenly over `attention_dp` ranks."""
    max_num_batched_tokens: Count | Auto = "auto"
    """Limit on tokens in one engine step, split evenly over `attention_dp` ranks."""
    block_size: Literal["auto", 16, 32, 64, 128] = "auto"
    """Tokens per KV cache block."""

    @model_validator(mode="after")
    def _one_size_of_the_cache(self) -> "RolloutSpec":
        if self.gpu_memory_utilization is not None and self.kv_cache_memory != "auto":
            raise ValueError(
                f"rollout.kv_cache_memory = {self.kv_cache_memory} and rollout.gpu_memory_utilization = "
                f"{self.gpu_memory_utilization} both set the size of the KV cache: give one of them"
            )
        return self

    @property
    def generates_in_trainer(self) -> bool:
        """Whether the trainer generates without a separate engine."""
        return self.engine == "transformers"
