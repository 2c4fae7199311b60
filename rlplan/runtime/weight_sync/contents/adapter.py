"""Adapter content: loads a received LoRA adapter into the engine's LoRA manager.

In: the tensors of one version, by name. Out: the `LoRARequest` with which the engine uses it. The base weights are
never sent. vLLM reads adapters only from a folder in PEFT's layout. So each engine process writes a folder into
/dev/shm, and removes it once vLLM has a copy. It holds a lock on the folder until then. A folder without a lock was
left by a killed process, and the next process that loads an adapter removes it. Each version has its own name and id,
because vLLM never rereads the files of a known id.
"""

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplan.runtime.measure.memory_meter import storage_bytes
from rlplan.runtime.run_folder.disk_errors import writing_file
from rlplan.runtime.weight_sync.channel import sync_error
from rlplan.runtime.weight_sync.transports.arena import SHARED_FOLDER
from rlplan.spec.parts.adapter_files import CONFIG_FILE, PEFT_PREFIX, WEIGHTS_FILE
from rlplan.spec.resolved import ResolvedJob

if TYPE_CHECKING:
    import torch


def load_adapter(llm: Any, job: ResolvedJob, tensors: "Mapping[str, torch.Tensor]", version: int) -> Any:
    """Load an adapter into a free slot. Returns: the `LoRARequest` for samples that use it.

    tensors: by name in the trainer's module, in the engine's type.
    """
    from safetensors.torch import save_file
    from vllm.lora.request import LoRARequest

    with _folder_in_memory(version) as folder:
        with writing_file(folder / WEIGHTS_FILE, sum(tensor.nbytes for tensor in tensors.values())):
            named = {PEFT_PREFIX + name: tensor for name, tensor in tensors.items()}
            save_file(named, str(folder / WEIGHTS_FILE), metadata={"format": "pt"})
            (folder / CONFIG_FILE).write_text(json.dumps(_config(job)), encoding="utf-8")
        adapter = LoRARequest(f"policy-{version}", version, str(folder))  # vLLM caches KV blocks by the adapter's name
        if not llm.llm_engine.add_lora(adapter):
            raise sync_error(f"the engine did not load the adapter of version {version}")
    return adapter


@contextmanager
def _folder_in_memory(version: int) -> Iterator[Path]:
    """Context with a folder in host memory, removed afterwards; removes folders of killed processes first."""
    for abandoned in Path(SHARED_FOLDER).glob("rlplan-*-adapter-*"):
        with suppress(OSError), _lock_folder(abandoned):
            shutil.rmtree(abandoned)
    draft = Path(tempfile.mkdtemp(prefix=f"rlplan-{os.getpid()}-new-", dir=SHARED_FOLDER))
    with _lock_folder(draft):  # lock before renaming: other engine processes remove unlocked folders of the final name
        folder = draft.rename(draft.with_name(draft.name.replace("-new-", f"-adapter-{version}-")))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Context that holds a lock on a folder. Raises: OSError if another process holds it, or the folder is gone."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def adapter_bytes(model: Any) -> int:
    """Bytes of the adapter slots in a vLLM model, and of the copies from which they were filled."""
    slots = [
        tensor
        for module in model.modules()
        for name in ("lora_a_stacked", "lora_b_stacked")
        for tensor in getattr(module, name, ())
    ]
    return storage_bytes([*slots, *_iterate_copies(model)])


def _iterate_copies(model: Any) -> Iterator[Any]:
    """Yield A and B of every version that vLLM's manager keeps in host memory; fused layers hold a list of each."""
    manager = getattr(model, "lora_manager", None)
    for adapter in manager.list_adapters().values() if manager else ():
        for layer in adapter.loras.values():
            for half in (layer.lora_a, layer.lora_b):
                yield from (part for part in (half if isinstance(half, list) else [half]) if part is not None)


def _config(job: ResolvedJob) -> dict[str, Any]:
    """The keys of PEFT's `adapter_config.json` that vLLM reads, written without importing PEFT."""
    lora = job.training.lora
    assert lora is not None, "there are adapters"
    modules = job.adapted_modules(job.load_model())
    return {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha, "target_modules": modules, "bias": "none"}
