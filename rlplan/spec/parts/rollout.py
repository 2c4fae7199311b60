"""How a job's rollout engines are held.

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
    """A number without a unit is bytes; 0 is the cache of a job without rollouts."""
    if 0 < num_bytes < 1 << 10:
        raise ValueError(f"a byte count of {num_bytes} holds no token")
    return num_bytes


class RolloutSpec(Spec):
    """How the engines are held. What is `auto` is decided by the planner, or by a rule of resolved.py."""

    engine: Literal["auto", "vllm", "sglang", "transformers"] = "auto"
    """What samples where a plan is written for another stack: `auto` is what that stack takes by itself. rlplan's own
    runtime has vLLM. `transformers` generates in the trainer, with the weights that it trains (TRL without vLLM); its
    seconds are predicted as an engine's, which it does not reach.
    """
    engine_version: str | None = Field(default=None, max_length=40)
    """Release of vLLM, such as 0.23.0, whose memory is predicted; None for the one that rlplan installs."""
    shares_process: bool = False
    """Whether an engine runs in its trainer's process, and has no CUDA context of its own (TRL's
    `vllm_mode=colocate`)."""
    dtype: Dtype | Auto = "auto"
    """Of weights and activations."""
    num_engines: Annotated[int, Field(ge=1, le=16_384)] | Auto = "auto"
    """Replicas; on GPUs as many as fill those that generate."""
    tp: Ranks = "auto"
    """Tensor-parallel ranks of each; of each rank of `attention_dp`, where there is more than one."""
    attention_dp: Ranks = "auto"
    """Data-parallel ranks of an engine's attention: each has sequences and a KV cache of its own, whole experts are
    spread over all tp x attention_dp GPUs (vLLM's `data_parallel_size` with `enable_expert_parallel`)."""
    pp: Annotated[int, Field(ge=1, le=1024)] = 1
    """Pipeline stages of an engine that serves alone (`framework: vllm`); engines of a step have one."""
    cp: Annotated[int, Field(ge=1, le=1024)] = 1
    """Tensor-parallel ranks that share the cache of each sequence (vLLM's `decode_context_parallel_size`), of an engine
    that serves alone."""
    stop: tuple[str | int, ...] = ()
    """Texts and tokens that end a response."""
    quantization: str = Field(default="none", max_length=40)
    """Of the weights, by a format's name: quantised while loading. `auto` may take fp8 where the GPU computes it."""
    speculative_tokens: Annotated[int, Field(ge=0, le=16)] | Auto = 0
    """Tokens that are proposed at a time from what stands before (n-gram speculative decoding); `auto` takes as many as
    make a step fastest at the acceptance rate, and none without one.
    """
    acceptance_rate: float | None = Field(default=None, gt=0, lt=1)
    """The share of proposed tokens that the policy takes, each for itself: what speculative decoding on GPUs is
    timed by. It differs from job to job; engines log it."""
    environment: EnvironmentSpec = EnvironmentSpec.by_default()
    """What answers the policy between its turns."""
    kv_dtype: Literal["auto", "fp8"] = "auto"
    """Of the KV cache: `auto` is the weights', `fp8` halves it (GPUs only)."""
    base_path: str | None = None
    """A folder with the policy's weights in 4 bits (AWQ, GPTQ, compressed-tensors), which engines load in place of the
    policy's; the trainer keeps its own. For LoRA whose adapters alone are handed over. None: `policy.path`."""
    shares_base: bool = False
    """Whether an engine computes with the frozen base that the trainer on its device holds, and has no weights of its
    own (LoRA whose adapters alone are handed over)."""
    has_cuda_graphs: bool | Auto = "auto"
    """Whether steps are CUDA graphs; false is vLLM's `enforce_eager`."""
    has_expert_parallel: bool | Auto = "auto"
    """Whether whole experts lie on an engine's ranks instead of a slice of each."""
    sleep_level: Literal["auto", 0, 1, 2] = "auto"
    """Of a colocated engine on GPUs: 0 stays awake, 1 keeps its weights on the host, 2 drops them."""
    kv_cache_memory: Annotated[ByteCount, AfterValidator(_holds_tokens)] | Auto = "auto"
    """Bytes of KV cache of a rank; `auto` is what the rollouts ask for at P99, or what is free."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of a GPU's total that the engine takes, as vLLM means it: its KV cache is what weights, activations and
    graphs leave of it. None follows kv_cache_memory."""
    max_num_seqs: Count | Auto = "auto"
    """Sequences of an engine at once, at most; ranks of `attention_dp` have equal parts of them."""
    max_num_batched_tokens: Count | Auto = "auto"
    """Tokens of one step of an engine, at most; ranks of `attention_dp` have equal parts of them."""
    block_size: Literal["auto", 16, 32, 64, 128] = "auto"
    """Tokens of a block of the KV cache."""

    @model_validator(mode="after")
    def _one_size_of_the_cache(self) -> "RolloutSpec":
        if self.gpu_memory_utilization is not None and self.kv_cache_memory != "auto":
            raise ValueError(
                f"rollout.kv_cache_memory = {self.kv_cache_memory} and rollout.gpu_memory_utilization = "
                f"{self.gpu_memory_utilization} both say how large the KV cache is: give one of them"
            )
        return self

    @property
    def generates_in_trainer(self) -> bool:
        """Whether the trainer generates by itself, without an engine beside it."""
        return self.engine == "transformers"
