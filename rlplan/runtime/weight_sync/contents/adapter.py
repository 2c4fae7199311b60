"""Adapter content: a LoRA adapter in PEFT's layout, written to shared memory, taken in by the engine's LoRA manager.

In: a folder of one version. Out: the request with which the engine uses it from then on. The base never travels.
Each version has a name and an id of its own: vLLM keeps what it knows of an id, whatever its files say later.
"""

from typing import Any

from rlplan.runtime.measure.memory_meter import storage_bytes
from rlplan.runtime.weight_sync.channel import sync_error


def swap_adapter(llm: Any, held: Any, folder: str, version: int) -> Any:
    """Let go of the adapter that is held and take in another. Returns: the `LoRARequest` for every new request."""
    from vllm.lora.request import LoRARequest

    adapter = LoRARequest(f"policy-{version}", version, folder)
    if held is not None:
        llm.llm_engine.remove_lora(held.lora_int_id)
    if not llm.llm_engine.add_lora(adapter):
        raise sync_error(f"the engine did not take the adapters of version {version} in")
    llm.update_weight_version(str(version))
    return adapter


def slot_bytes(model: Any) -> int:
    """Bytes of the slots for adapters in a vLLM model."""
    slots = [
        tensor
        for module in model.modules()
        for name in ("lora_a_stacked", "lora_b_stacked")
        for tensor in getattr(module, name, ())
    ]
    return storage_bytes(slots)
