"""Memory of the engine that `vllm serve` starts, by vLLM's own arithmetic.

In: Settings of vLLM, the imported job. Out: Served. Left out: seconds; LoRA slots and rows of drafted tokens, which
need more memory.
Source: vLLM 0.32.0 v1/core/kv_cache_utils.py `_check_enough_kv_cache_memory`, config/offload.py `cpu_offload_gb`.
"""

from dataclasses import replace

from rlplan.foreign.convert import Imported
from rlplan.foreign.settings import Settings
from rlplan.memory.serving.engine import EngineMemory, EngineSettings, predict_engine_memory
from rlplan.planner.serving import Served, ServingJob
from rlplan.spec.job import JobSpec
from rlplan.units import GIB

LENGTH = "max_model_len"
_UNCOUNTED = {
    "enable_lora": "LoRA slots are not counted; they need more memory",
    "speculative_config.method": "rows of drafted tokens are not counted; they need more memory",
}


def serve(settings: Settings, imported: Imported, job: JobSpec) -> Served:
    """The engine that the settings start. Raises: SpecError."""
    usual = ServingJob(job)
    model, share = usual.model, None if imported.share is None else imported.share.value
    tp, dp, pp = (_read_count(settings, f"{name}_parallel_size") for name in ("tensor", "data", "pipeline"))
    cuts_experts = model.experts is not None and dp > usual.attention_dp
    stated = settings.value(LENGTH)
    length = (
        model.max_position_embeddings if stated is None else stated if isinstance(stated, int) and stated > 0 else 0
    )
    asked = replace(
        usual.settings,
        gpu_memory_utilization=share or 1.0,
        pp=pp,
        max_model_len=length or model.max_position_embeddings,
        has_lora=settings.value("enable_lora") is True,
    )
    if cuts_experts:
        asked = _share_experts(asked, tp, dp)
    on_host = _read_offloaded_bytes(settings, predict_engine_memory(model, asked))
    freed = replace(asked, total_bytes=asked.total_bytes + int(on_host / (share or 1.0)))
    notes = [note for key, note in _UNCOUNTED.items() if settings.value(key) not in (None, False)]
    if cuts_experts:
        notes.append("every expert is sharded over all ranks; whole experts per rank are counted, which are as large")
    if stated is None:
        notes.append(f"{LENGTH} is not set: the model's {length:,} tokens are counted, as in vLLM")
    return Served(
        str(imported.data["policy"]["path"]),
        job.hardware.profile,
        tp * dp * pp,
        job.hardware.num_devices,
        length,
        on_host,
        predict_engine_memory(model, freed),
        asked.total_bytes,
        tuple(notes),
    )


def _share_experts(engine: EngineSettings, tp: int, dp: int) -> EngineSettings:
    """The engine with experts sharded over data-parallel ranks: vLLM does that even without expert parallelism."""
    seqs, tokens = (limit and limit * dp for limit in (engine.max_num_seqs, engine.max_num_batched_tokens))
    return replace(engine, ep=tp * dp, attention_dp=dp, max_num_seqs=seqs, max_num_batched_tokens=tokens)


def _read_count(settings: Settings, key: str) -> int:
    value = settings.value(key)
    return value if isinstance(value, int) and value > 0 else 1


def _read_offloaded_bytes(settings: Settings, memory: EngineMemory) -> int:
    """Bytes of weights that `cpu_offload_gb` leaves on the host."""
    gib = settings.value("cpu_offload_gb")
    return min(memory.weights, int(gib * GIB)) if isinstance(gib, int | float) else 0
