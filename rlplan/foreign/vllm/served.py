"""Whether `vllm serve` starts as it is given: the engine alone, by vLLM's own arithmetic.

In: Settings of vLLM, the job that they are imported as. Out: Served. Left out: seconds; slots of adapters, and rows of
drafted tokens, which take more.
Source: vLLM 0.32.0 v1/core/kv_cache_utils.py `_check_enough_kv_cache_memory`, config/offload.py `cpu_offload_gb`.
"""

from dataclasses import replace
from typing import Any

from rlplan.errors import NoFeasiblePlanError
from rlplan.foreign.convert import Imported
from rlplan.foreign.engine_share import engine_settings
from rlplan.foreign.settings import Settings
from rlplan.memory.serving.engine import EngineMemory, EngineSettings, engine_memory
from rlplan.planner.plan_parts import Verdict
from rlplan.records import dataclass
from rlplan.spec.job import JobSpec
from rlplan.spec.models.catalogue import resolve_model
from rlplan.units import GIB, format_bytes

LENGTH = "max_model_len"
_UNCOUNTED = {
    "enable_lora": "slots of adapters are not counted, which take more",
    "speculative_config.method": "rows of drafted tokens are not counted, which take more",
}


@dataclass(frozen=True)
class Served:
    """An engine of vLLM on its GPUs. length: tokens of the longest sequence; 0 where vLLM fits it to the cache.

    num_gpus: that it needs. num_given: that there are. on_host: bytes of weights that a GPU does not hold.
    """

    model: str
    gpu: str
    num_gpus: int
    num_given: int
    length: int
    on_host: int
    memory: EngineMemory
    capacity: int
    notes: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of a GPU at the engine's peak."""
        memory = self.memory
        beside = memory.activation_peak + memory.non_torch + memory.cuda_graphs
        return memory.model_bytes - self.on_host + beside + memory.kv_cache

    @property
    def needed(self) -> int:
        """Bytes of KV cache of one longest sequence; of one block where vLLM fits the length."""
        pool = self.memory.pool
        return pool.bytes_per_block * (pool.blocks_of_sequence(self.length) if self.length else 1)

    @property
    def short(self) -> str:
        """What is too small, in words; empty where it starts."""
        memory = self.memory
        if self.num_gpus > self.num_given:
            return f"it needs {self.num_gpus} GPUs, {self.num_given} are there"
        if self.num_bytes > self.capacity:
            return f"it takes {format_bytes(self.num_bytes)} of a GPU, {format_bytes(self.capacity)} are there"
        if memory.num_blocks == 0:
            weights, peak = format_bytes(memory.model_bytes - self.on_host), format_bytes(memory.activation_peak)
            return f"weights take {weights} of a GPU and passes {peak}, its share is {format_bytes(memory.requested)}"
        if self.needed > memory.kv_cache:
            needed, room = format_bytes(self.needed), format_bytes(memory.kv_cache)
            return f"one sequence of {self.length:,} tokens needs {needed} of KV cache, {room} are left for it"
        return ""

    @property
    def fits(self) -> bool:
        """Whether it starts."""
        return not self.short

    @property
    def verdict(self) -> Verdict:
        """The same as a plan has it."""
        return Verdict.FITS if self.fits else Verdict.DOES_NOT_FIT

    def as_json(self) -> dict[str, Any]:
        """The answer for other tools."""
        memory = self.memory
        return {
            "num_gpus": self.num_gpus,
            "weights": memory.model_bytes - self.on_host,
            "weights_on_host": self.on_host,
            "activation_peak": memory.activation_peak,
            "kv_cache": memory.kv_cache,
            "kv_cache_tokens": memory.num_tokens,
            "max_model_len": self.length or "auto",
            "kv_cache_of_longest": self.needed,
            "short": self.short,
        }

    def refusal(self, way_out: str) -> NoFeasiblePlanError:
        """That it does not start."""
        return NoFeasiblePlanError(
            f"vllm serve {self.model} does not start on {self.num_given}x {self.gpu}: {self.short}",
            where="the engine alone, whatever trains beside it",
            rule="weights and passes fit into its share of a GPU, and one longest sequence into what is left",
            way_out=way_out,
        )


def serve(settings: Settings, imported: Imported, job: JobSpec) -> Served:
    """The engine that the settings start. Raises: SpecError."""
    model = resolve_model(job.policy.path, where="policy.path")
    share = None if imported.share is None else imported.share.value
    usual = engine_settings(job, share or 1.0, settings.table.vllm)
    tp, dp, pp = (_count(settings, f"{name}_parallel_size") for name in ("tensor", "data", "pipeline"))
    cuts_experts = model.experts is not None and dp > usual.attention_dp
    if cuts_experts:
        usual = _with_shared_experts(usual, tp, dp)
    told = settings.value(LENGTH)
    length = model.max_position_embeddings if told is None else told if isinstance(told, int) and told > 0 else 0
    cache = job.rollout.kv_cache_memory
    asked = replace(
        usual,
        pp=pp,
        element_bytes=4 if job.rollout.dtype == "float32" else 2,
        max_model_len=length or model.max_position_embeddings,
        kv_cache_memory_bytes=cache if isinstance(cache, int) else None,
        has_lora=settings.value("enable_lora") is True,
    )
    on_host = _on_host(settings, engine_memory(model, asked))
    freed = replace(asked, total_bytes=asked.total_bytes + int(on_host / (share or 1.0)))
    notes = [note for key, note in _UNCOUNTED.items() if settings.value(key) not in (None, False)]
    if cuts_experts:
        notes.append("each expert is cut over all ranks; whole ones on its ranks are counted, which are as large")
    if told is None:
        notes.append(f"{LENGTH} is not said: the model's {length:,} tokens are counted, as vLLM has it")
    return Served(
        str(imported.data["policy"]["path"]),
        job.hardware.profile,
        tp * dp * pp,
        job.hardware.num_devices,
        length,
        on_host,
        engine_memory(model, freed),
        asked.total_bytes,
        tuple(notes),
    )


def _with_shared_experts(engine: EngineSettings, tp: int, dp: int) -> EngineSettings:
    """Data-parallel ranks of a mixture share its experts, also without `--enable-expert-parallel`."""
    seqs, tokens = (limit and limit * dp for limit in (engine.max_num_seqs, engine.max_num_batched_tokens))
    return replace(engine, ep=tp * dp, attention_dp=dp, max_num_seqs=seqs, max_num_batched_tokens=tokens)


def _count(settings: Settings, key: str) -> int:
    found = settings.value(key)
    return found if isinstance(found, int) and found > 0 else 1


def _on_host(settings: Settings, memory: EngineMemory) -> int:
    """Bytes of weights that `cpu_offload_gb` leaves on the host."""
    found = settings.value("cpu_offload_gb")
    return min(memory.weights, int(found * GIB)) if isinstance(found, int | float) else 0
