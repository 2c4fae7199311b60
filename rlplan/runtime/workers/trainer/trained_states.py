"""Trained states: the persistent tensors of a DeepSpeed engine by memory kind, under any ZeRO stage.

In: an engine. Out: tensors, and their bytes, by memory kind. Left out: activations and logits.
Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py, stage3.py, runtime/fp16/unfused_optimizer.py.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from rlplan.runtime.measure.memory_meter import touched_bytes
from rlplan.runtime.models.quantized_base import list_scales
from rlplan.vocabulary import MemoryKind

if TYPE_CHECKING:
    from rlplan.runtime.weight_sync.shared_base import HeldBase

STATE_KINDS = (
    MemoryKind.WEIGHTS,
    MemoryKind.MASTER_WEIGHTS,
    MemoryKind.OPTIMIZER,
    MemoryKind.GRADIENTS,
    MemoryKind.COMM_BUFFERS,
)

_ATTRIBUTES = {
    MemoryKind.WEIGHTS: ("bit16_groups_flat", "fp16_partitioned_groups_flat", "lp_param_buffer"),
    MemoryKind.MASTER_WEIGHTS: ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups"),
    MemoryKind.GRADIENTS: (
        "averaged_gradients",
        "all_grad_tensors",
        "grad_partitions_flat_buffer",
        "cpu_offload_gradients",
        "fp32_accum_grad_buffers",
    ),
    MemoryKind.COMM_BUFFERS: ("ipg_buckets", "temp_grad_buffer_for_cpu_offload", "temp_grad_buffer_for_gpu_offload"),
}
"""Attributes of DeepSpeed's optimizers that hold tensors of each kind."""


def list_tensors(engine: Any, kind: MemoryKind) -> list[torch.Tensor]:
    """Current tensors of one kind; several may be views of one storage."""
    zero = engine.optimizer
    tensors = [t for name in _ATTRIBUTES.get(kind, ()) for t in find_tensors(getattr(zero, name, None))]
    parameters = list(engine.module.parameters())
    if kind is MemoryKind.WEIGHTS:
        tensors += [parameter.data for parameter in parameters]
        tensors += [parameter.ds_tensor for parameter in parameters if hasattr(parameter, "ds_tensor")]
        tensors += [scale for parameter in parameters for scale in list_scales(parameter)]
    elif kind is MemoryKind.GRADIENTS:
        tensors += [parameter.grad for parameter in parameters if parameter.grad is not None]
        tensors += [grad for parameter in parameters for grad in find_tensors(getattr(parameter, "grad_accum", None))]
    elif kind is MemoryKind.OPTIMIZER:
        tensors += find_tensors([list(state.values()) for state in getattr(zero, "optimizer", zero).state.values()])
    return tensors


def list_storages(engine: Any) -> dict[MemoryKind, list[torch.UntypedStorage]]:
    """Distinct non-empty storages by kind; a shared storage counts for the first kind that has it."""
    seen: set[int] = set()
    storages: dict[MemoryKind, list[torch.UntypedStorage]] = {kind: [] for kind in STATE_KINDS}
    for kind in STATE_KINDS:
        for tensor in list_tensors(engine, kind):
            storage = tensor.untyped_storage()
            if tensor.device.type != "meta" and storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                storages[kind].append(storage)
    return storages


def count_bytes(engine: Any) -> dict[MemoryKind, int]:
    """Bytes by kind.

    Gradient buckets are allocated at full size and filled as gradients arrive; stage 1 fills them only during the step.
    On a CPU only their touched pages count; on a GPU the allocator holds the full size.
    """
    by_kind = list_storages(engine).items()
    return {kind: sum(_count_storage_bytes(storage, kind) for storage in storages) for kind, storages in by_kind}


def _count_storage_bytes(storage: torch.UntypedStorage, kind: MemoryKind) -> int:
    num_bytes: int = storage.nbytes()
    if kind is not MemoryKind.COMM_BUFFERS or storage.device.type != "cpu":
        return num_bytes
    return touched_bytes(storage.data_ptr(), num_bytes)


def copy_mapped_parameters(module: torch.nn.Module, base: "HeldBase | None" = None) -> None:
    """Copy parameters out of a mapped file into resizable memory, so that they can be offloaded.

    base: weights shared with an engine, which stay where they are.
    """
    for parameter in module.parameters():
        if not parameter.untyped_storage().resizable() and not (base and base.holds(parameter.data)):
            parameter.data = parameter.data.clone()


def find_tensors(value: Any, depth: int = 0) -> list[torch.Tensor]:
    """Tensors inside lists, dictionaries and DeepSpeed's buckets."""
    if isinstance(value, torch.Tensor):
        return [value]
    if depth > 5 or value is None:
        return []
    return [tensor for item in _items(value) for tensor in find_tensors(item, depth + 1)]


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value
    elif type(value).__name__.startswith("IPGBucket"):
        yield value.buffer
