"""Trained states: the tensors that a DeepSpeed engine keeps, by what they are for, under any ZeRO stage.

In: an engine. Out: tensors, and their bytes, by memory kind. Left out: activations and logits, which the passes hold.
Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py, stage3.py, runtime/fp16/unfused_optimizer.py.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from rlplan.runtime.measure.memory_meter import touched_bytes
from rlplan.runtime.models.quantized_base import scales_of
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
"""Where DeepSpeed's optimizers keep what is not a parameter's own."""


def tensors_of(engine: Any, kind: MemoryKind) -> list[torch.Tensor]:
    """Tensors of one kind, asked anew each time, for they appear and go; several may be views of one storage."""
    zero = engine.optimizer
    found = [t for name in _ATTRIBUTES.get(kind, ()) for t in tensors_in(getattr(zero, name, None))]
    parameters = list(engine.module.parameters())
    if kind is MemoryKind.WEIGHTS:
        found += [parameter.data for parameter in parameters]
        found += [parameter.ds_tensor for parameter in parameters if hasattr(parameter, "ds_tensor")]
        found += [scale for parameter in parameters for scale in scales_of(parameter)]
    elif kind is MemoryKind.GRADIENTS:
        found += [parameter.grad for parameter in parameters if parameter.grad is not None]
        found += [grad for parameter in parameters for grad in tensors_in(getattr(parameter, "grad_accum", None))]
    elif kind is MemoryKind.OPTIMIZER:
        found += tensors_in([list(state.values()) for state in getattr(zero, "optimizer", zero).state.values()])
    return found


def storages_of(engine: Any) -> dict[MemoryKind, list[torch.UntypedStorage]]:
    """Distinct storages that hold something, each under the first kind that has it."""
    seen: set[int] = set()
    answer: dict[MemoryKind, list[torch.UntypedStorage]] = {kind: [] for kind in STATE_KINDS}
    for kind in STATE_KINDS:
        for tensor in tensors_of(engine, kind):
            storage = tensor.untyped_storage()
            if tensor.device.type != "meta" and storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                answer[kind].append(storage)
    return answer


def bytes_of(engine: Any) -> dict[MemoryKind, int]:
    """Bytes by kind.

    Buckets are made whole and filled as gradients come, in stage 1 inside the step alone: on a CPU they count as far as
    they were ever touched; on a GPU the allocator holds all of them.
    """
    return {kind: sum(_held_bytes(each, kind) for each in held) for kind, held in storages_of(engine).items()}


def _held_bytes(storage: torch.UntypedStorage, kind: MemoryKind) -> int:
    num_bytes: int = storage.nbytes()
    if kind is not MemoryKind.COMM_BUFFERS or storage.device.type != "cpu":
        return num_bytes
    return touched_bytes(storage.data_ptr(), num_bytes)


def own_storages(module: torch.nn.Module, base: "HeldBase | None" = None) -> None:
    """Give parameters that lie in a mapped file memory of their own, which can be emptied while they are offloaded.

    base: what an engine shares, which stays where it is.
    """
    for parameter in module.parameters():
        if not parameter.untyped_storage().resizable() and not (base and base.holds(parameter.data)):
            parameter.data = parameter.data.clone()


def tensors_in(value: Any, depth: int = 0) -> list[torch.Tensor]:
    """Tensors inside lists, dictionaries and DeepSpeed's buckets."""
    if isinstance(value, torch.Tensor):
        return [value]
    if depth > 5 or value is None:
        return []
    return [tensor for item in _items(value) for tensor in tensors_in(item, depth + 1)]


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value
    elif type(value).__name__.startswith("IPGBucket"):
        yield value.buffer
