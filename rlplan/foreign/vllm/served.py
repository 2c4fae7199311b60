"""Whether `vllm serve` starts as it is given: the engine alone, by vLLM's own arithmetic.

In: Settings of vLLM, the job that they are imported as. Out: Served. Left out: seconds; slots of adapters, and rows of
drafted tokens, which take more.
Source: vLLM 0.32.0 v1/core/kv_cache_utils.py `_check_enough_kv_cache_memory`, config/offload.py `cpu_offload_gb`.
"""

from dataclasses import replace

from rlplan.foreign.convert import Imported
from rlplan.foreign.settings import Settings
from rlplan.memory.serving.engine import EngineMemory, EngineSettings, engine_memory
from rlplan.planner.serving import Served, ServingJob
from rlplan.spec.job import JobSpec
from rlplan.units import GIB

LENGTH = "max_model_len"
_UNCOUNTED = {
    "enable_lora": "slots of adapters are not counted, which take more",
    "speculative_config.method": "rows of drafted tokens are not counted, which take more",
}


def serve(settings: Settings, imported: Imported, job: JobSpec) -> Served:
    """The engine that the settings start. Raises: SpecError."""
    usual = ServingJob(job)
    model, share = usual.model, None if imported.share is None else imported.share.value
    tp, dp, pp = (_count(settings, f"{name}_parallel_size") for name in ("tensor", "data", "pipeline"))
    cuts_experts = model.experts is not None and dp > usual.attention_dp
    told = settings.value(LENGTH)
    length = model.max_position_embeddings if told is None else told if isinstance(told, int) and told > 0 else 0
    asked = replace(
        usual.settings,
        gpu_memory_utilization=share or 1.0,
        pp=pp,
        max_model_len=length or model.max_position_embeddings,
        has_lora=settings.value("enable_lora") is True,
    )
    if cuts_experts:
        asked = _with_shared_experts(asked, tp, dp)
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
