"""A serving job runs an engine alone (`framework: vllm@0.11`): no training, no steps.

In: a JobSpec. Out: `Served`, the bytes per GPU by vLLM's own arithmetic and whether the engine starts; `ServedLoad`,
latencies of clients that keep a fixed number of requests in flight. Left out: speculative decoding, prefix caching,
client overhead, disaggregated prefill and decode.

Source: vLLM 0.32.0 v1/core/kv_cache_utils.py `_check_enough_kv_cache_memory`.
"""

from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rlplan.errors import NoFeasiblePlanError, SpecError
from rlplan.frameworks.profile import split_label
from rlplan.memory.model.quantization import (
    Quantization,
    convert_quantization_spec,
    find_quantization_by_name,
    parse_quantization,
)
from rlplan.memory.serving.engine import EngineMemory, EngineSettings, predict_engine_memory
from rlplan.memory.serving.tensorrt_llm import NAME as TENSORRT_LLM
from rlplan.memory.serving.versions import VllmVersion, find_version
from rlplan.planner.measured_errors import MeasuredError, Stratum, find_error
from rlplan.planner.plan_parts import Verdict
from rlplan.planner.setting import GpuPool, read_pools
from rlplan.spec.job import JobSpec
from rlplan.spec.model import ModelSpec
from rlplan.spec.models.catalogue import format_model_name
from rlplan.spec.resolved import settle
from rlplan.timing.serving.counts import EngineCut, engine_counts
from rlplan.timing.serving.load import ClosedLoop, Latency, closed_loop_latency
from rlplan.timing.serving.step import EngineRates
from rlplan.units import format_bytes

MIXED = 0.4
"""Width, relative to the mean, of the response lengths of one among several engines. Assumed: any width keeps equal
requests from queueing together."""


@dataclass(frozen=True)
class Served:
    """Memory of an engine on its GPUs."""

    model: str
    gpu: str
    num_gpus: int
    """GPUs of one engine."""
    num_given: int
    """GPUs available."""
    length: int
    """Maximum sequence length in tokens; 0 if vLLM fits it to the cache."""
    on_host: int
    """Weight bytes kept in host memory instead of on the GPU."""
    memory: EngineMemory
    """Memory of the rank with the fewest KV blocks."""
    capacity: int
    notes: tuple[str, ...] = ()
    command: str = "vllm serve"
    """Command that starts the engine."""

    @property
    def num_bytes(self) -> int:
        """Peak bytes per GPU."""
        memory = self.memory
        beside = memory.activation_peak + memory.non_torch + memory.cuda_graphs
        return memory.model_bytes - self.on_host + beside + memory.kv_cache

    @property
    def needed(self) -> int:
        """KV cache bytes of one longest sequence, or of one block if vLLM fits the length."""
        pool = self.memory.pool
        return pool.bytes_per_block * (pool.blocks_of_sequence(self.length) if self.length else 1)

    @property
    def short(self) -> str:
        """The reason why the engine does not start; empty if it starts."""
        memory = self.memory
        if self.num_gpus > self.num_given:
            return f"it needs {self.num_gpus} GPUs, {self.num_given} available"
        if self.num_bytes > self.capacity:
            return f"it needs {format_bytes(self.num_bytes)} per GPU, {format_bytes(self.capacity)} available"
        if memory.num_blocks == 0:
            weights, peak = format_bytes(memory.model_bytes - self.on_host), format_bytes(memory.activation_peak)
            share = format_bytes(memory.requested)
            return f"weights take {weights} per GPU and activations {peak}; its share of the GPU is {share}"
        if self.needed > memory.kv_cache:
            needed, room = format_bytes(self.needed), format_bytes(memory.kv_cache)
            return f"one sequence of {self.length:,} tokens needs {needed} of KV cache, {room} available"
        return ""

    @property
    def fits(self) -> bool:
        """Whether the engine starts."""
        return not self.short

    @property
    def verdict(self) -> Verdict:
        """`fits` as a plan's verdict."""
        return Verdict.FITS if self.fits else Verdict.DOES_NOT_FIT

    def as_json(self) -> dict[str, Any]:
        """JSON for other tools."""
        memory = self.memory
        return {
            "num_gpus": self.num_gpus,
            "weights": memory.model_bytes - self.on_host,
            "weights_on_host": self.on_host,
            "activation_peak": memory.activation_peak,
            "cuda_graphs": memory.cuda_graphs,
            "kv_cache": memory.kv_cache,
            "kv_cache_tokens": memory.num_tokens,
            "max_model_len": self.length or "auto",
            "kv_cache_of_longest": self.needed,
            "short": self.short,
        }

    def build_refusal(self, way_out: str) -> NoFeasiblePlanError:
        """Build the error for an engine that does not start."""
        return NoFeasiblePlanError(
            f"{self.command} {self.model} does not start on {self.num_given}x {self.gpu}: {self.short}",
            where="the engine alone, without any trainer",
            rule="weights and activations must fit into its share of a GPU, and one longest sequence into what is left",
            way_out=way_out,
        )


@dataclass(frozen=True)
class ServedLoad:
    """Engines under a closed loop: each client sends its next request when its last one is answered."""

    num_requests: int
    """Requests in flight over all engines."""
    num_engines: int
    response_len: float
    fitting: float
    """Average number of requests that fit into one engine's cache at once."""
    latency: Latency
    """Latency of one request."""
    is_moe: bool = False

    @property
    def errors(self) -> tuple[MeasuredError, MeasuredError]:
        """How far measured times to the first token and per further token lie from predicted ones."""
        return find_error("serving_ttft", Stratum(self.is_moe)), find_error("serving_tpot", Stratum(self.is_moe))

    @property
    def waits_for_cache(self) -> bool:
        """Whether requests queue because an engine's cache is full."""
        return self.num_requests > self.fitting * self.num_engines

    @property
    def tokens_per_s(self) -> float:
        """Response tokens per second over all engines."""
        seconds = self.latency.first_token_s + self.latency.token_s * max(0.0, self.response_len - 1)
        return self.num_requests * self.response_len / seconds

    def as_json(self) -> dict[str, Any]:
        """JSON for other tools."""
        waits = {"waits_for_cache": self.waits_for_cache, "requests_in_cache": self.fitting * self.num_engines}
        counts = {"num_concurrent_requests": self.num_requests, "num_engines": self.num_engines}
        first, token = (error.as_json() for error in self.errors)
        errors = {"first_token_error": first, "token_error": token}
        return counts | asdict(self.latency) | {"tokens_per_s": self.tokens_per_s} | waits | errors


class ServingJob:
    """The engine settings of a job. Properties raise SpecError if the job lacks them."""

    def __init__(self, job: JobSpec) -> None:
        self.job, self.rollout, self.work = job, job.rollout, job.workload
        tp, dp = (1 if ranks == "auto" else ranks for ranks in (job.rollout.tp, job.rollout.attention_dp))
        self.tp, self.attention_dp = tp, dp

    @cached_property
    def model(self) -> ModelSpec:
        """The served model."""
        return self.job.load_model()

    @cached_property
    def pool(self) -> GpuPool:
        """The GPUs that serve."""
        return read_pools(settle(self.job))[-1]

    @property
    def num_gpus(self) -> int:
        """GPUs of one engine."""
        return self.tp * self.attention_dp * self.rollout.pp

    @property
    def num_engines(self) -> int:
        """Number of engines: as stated, else as many as fit on the GPUs."""
        stated = self.rollout.num_engines
        return max(1, self.job.hardware.num_devices // self.num_gpus) if stated == "auto" else stated

    @property
    def version(self) -> VllmVersion:
        """vLLM version: `rollout.engine_version`, else the framework's release, else the one rlplan uses."""
        named = split_label(self.job.framework)[1] if self.job.release.name == "vllm" else ""
        return find_version(self.rollout.engine_version or named)

    @property
    def is_tensorrt_llm(self) -> bool:
        """Whether the engine is TensorRT-LLM: by the framework or `rollout.engine`."""
        return TENSORRT_LLM in (self.job.release.name, self.rollout.engine)

    @property
    def quantization(self) -> Quantization | None:
        """Quantization of the weights: from the checkpoint's config or name, else the requested format."""
        spec = self.model.quantization
        if spec is not None:
            return convert_quantization_spec(spec, where="policy")
        # without a config, the name is the only hint: "...-AWQ", "...-FP8"
        named = find_quantization_by_name(
            "/".join(Path(self.job.policy.path).parts[-2:])
        )  # a downloaded folder ends with the model's id
        return named or parse_quantization(self.rollout.quantization, where="rollout.quantization")

    @property
    def has_whole_experts(self) -> bool:
        """Whether ranks hold whole experts: as requested, by default only with data-parallel attention."""
        asked = self.rollout.has_expert_parallel
        return self.model.experts is not None and (self.attention_dp > 1 if asked == "auto" else asked)

    @property
    def element_bytes(self) -> int:
        """Bytes per unquantized weight."""
        return 4 if self.rollout.dtype == "float32" else 2

    @property
    def kv_element_bytes(self) -> int:
        """Bytes per element of a cached key or value."""
        return 1 if self.rollout.kv_dtype == "fp8" else self.element_bytes

    @property
    def settings(self) -> EngineSettings:
        """Settings of the engine."""
        rollout, gpu, ranks = self.rollout, self.pool.gpu, self.tp * self.attention_dp
        shares_experts = self.model.experts is not None and self.attention_dp > 1  # as slices or as whole experts
        cache = rollout.kv_cache_memory
        return EngineSettings(
            self.job.hardware.memory or gpu.memory.value,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            kv_cache_memory_bytes=None if cache == "auto" else cache,
            tp=self.tp,
            pp=rollout.pp,
            ep=ranks if shares_experts or self.has_whole_experts else 1,
            attention_dp=self.attention_dp,
            context_ranks=rollout.cp,
            element_bytes=self.element_bytes,
            kv_element_bytes=self.kv_element_bytes,
            quantization=self.quantization,
            max_num_seqs=None if rollout.max_num_seqs == "auto" else rollout.max_num_seqs,
            max_num_batched_tokens=None if rollout.max_num_batched_tokens == "auto" else rollout.max_num_batched_tokens,
            max_model_len=self.work.max_seq_len,
            block_size=None if rollout.block_size == "auto" else rollout.block_size,
            enforce_eager=rollout.has_cuda_graphs is False,
            is_a100="a100" in gpu.name,
            context_bytes=gpu.overheads.context.value,
            communicator_bytes=gpu.overheads.communicator_of_many.value,
            version=self.version,
            non_torch_bytes=rollout.non_torch_memory,
            is_tensorrt_llm=self.is_tensorrt_llm,
        )

    @cached_property
    def memory(self) -> EngineMemory:
        """Memory of one rank of the engine."""
        return predict_engine_memory(self.model, self.settings)

    @property
    def cut(self) -> EngineCut:
        """Sharding and data types that decide the engine's seconds."""
        ep = self.tp * self.attention_dp if self.has_whole_experts else 1
        formats = self.element_bytes, self.kv_element_bytes, self.quantization
        return EngineCut(self.tp, ep, self.attention_dp, *formats)

    @property
    def rates(self) -> EngineRates:
        """Rates of the engine. Raises: SpecError."""
        if self.rollout.pp > 1:
            raise SpecError(
                f"rollout.pp is {self.rollout.pp}",
                where="rollout.pp",
                rule="step times are not predicted for pipeline-parallel engines, only memory",
                way_out="rollout.pp=1 with a larger rollout.tp",
            )
        return EngineRates(
            engine_counts(self.model, self.cut),
            self.pool.cluster,
            kv_element_bytes=self.kv_element_bytes,
            has_graphs=self.rollout.has_cuda_graphs is not False,
            version=self.version,
        )

    @property
    def num_requests(self) -> int:
        """Requests in flight. Raises: SpecError if the job does not state them."""
        asked = self.work.num_concurrent_requests
        if asked is None:
            raise SpecError(
                "the number of requests in flight is not stated",
                where="workload.num_concurrent_requests",
                rule="latencies are predicted for clients that keep a fixed number of requests in flight",
                way_out="workload.num_concurrent_requests=64",
            )
        return asked

    @cached_property
    def fitting(self) -> float:
        """Requests that fit into one cache at once, each with half its response. Raises: NoFeasiblePlanError."""
        length = self.work.usual_prompt_len + round(self.work.lengths.mean) // 2
        fitting = self.attention_dp * self.memory.num_blocks / self.memory.pool.blocks_of_sequence(length)
        if fitting < 1:
            raise NoFeasiblePlanError(
                f"the KV cache holds only {fitting:.2f} of one request of {length:,} tokens",
                where="hardware",
                rule="the cache must hold a complete request",
                way_out="larger GPUs, more of them (rollout.tp), or quantised weights (rollout.quantization)",
            )
        return fitting

    @property
    def loop(self) -> ClosedLoop:
        """The clients of one engine and the number of their requests it serves at once.

        Requests of several engines mix, so that those of one do not end together however equal they are.
        """
        lengths, mixed = self.work.lengths, MIXED if self.num_engines > 1 else 0.0
        return ClosedLoop(
            self.num_requests / self.num_engines,
            self.work.usual_prompt_len,
            lambda share: lengths.quantile(share) * (1 + mixed * (share - 0.5)),
            min(self.memory.limits.max_num_seqs, self.fitting),
            float(self.memory.limits.max_num_batched_tokens),
        )


def serve(job: JobSpec) -> Served:
    """Predict the memory of the engine that a job starts. Raises: SpecError."""
    engine = ServingJob(job)
    return Served(
        format_model_name(job.policy.path),
        job.hardware.profile,
        engine.num_gpus,
        job.hardware.num_devices,
        length=job.workload.max_seq_len,
        on_host=0,
        memory=engine.memory,
        capacity=engine.settings.total_bytes,
        command="trtllm-serve" if engine.is_tensorrt_llm else "vllm serve",
    )


def serve_load(job: JobSpec) -> ServedLoad:
    """Predict latencies under the job's requests in flight. Raises: SpecError, NoFeasiblePlanError."""
    engine = ServingJob(job)
    latency, is_moe = closed_loop_latency(engine.rates, engine.loop), engine.model.experts is not None
    counts = engine.num_requests, engine.num_engines, engine.work.lengths.mean
    return ServedLoad(*counts, engine.fitting, latency, is_moe)
