"""Memory of vLLM's weights before and after it packs them on a CPU.

On a CPU vLLM copies each linear weight into an opaque buffer and drops the parameter. The embedding keeps its weight
and may get a packed copy in addition. Opaque buffers are not tensors, so their size is read from the allocator.
In: a call that loads a model. Out: bytes.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlplan.runtime.measure.memory_meter import storage_bytes

if TYPE_CHECKING:
    from rlplan.runtime.weight_sync.shared_base import OpenedBase


class _MallInfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


@dataclass
class WeightPacking:
    loaded_bytes: int = 0
    """Parameters as loaded, before packing."""

    kept_bytes: int = 0
    """Parameters that remain tensors."""

    packed_bytes: int = 0
    """Opaque buffers that hold the packed weights."""


@contextmanager
def watch_weight_packing(base: "OpenedBase | None" = None) -> Iterator[WeightPacking]:
    """Measure the packing of a model that is loaded inside the `with` block.

    base: shared weights, which the trainer counts.
    """
    from vllm.model_executor.model_loader import base_loader

    packing = WeightPacking()
    original = base_loader.process_weights_after_loading

    def count_own_bytes(model: Any) -> int:
        return storage_bytes(p for p in model.parameters() if base is None or not base.holds(p))

    def process_and_measure(model: Any, *arguments: Any, **keywords: Any) -> Any:
        packing.loaded_bytes = count_own_bytes(model)
        with _count_layer_allocations(model) as allocated:
            result = original(model, *arguments, **keywords)
        packing.kept_bytes = count_own_bytes(model)
        is_packed = next(model.parameters()).device.type == "cpu"  # on a GPU weights stay tensors
        growth = sum(allocated) if is_packed else packing.kept_bytes - packing.loaded_bytes
        packing.packed_bytes = 0 if base else growth + packing.loaded_bytes - packing.kept_bytes
        return result

    base_loader.process_weights_after_loading = process_and_measure
    try:
        yield packing
    finally:
        base_loader.process_weights_after_loading = original


@contextmanager
def _count_layer_allocations(model: Any) -> Iterator[list[int]]:
    """Inside the `with` block, list the bytes allocated by each layer's `process_weights_after_loading`.

    vLLM's loop over the layers allocates other memory, which must not count as packed weights. It takes up to 110 KiB
    in the first mixture-of-experts model of a process that has held other models (vLLM 0.32.0).
    """
    allocated: list[int] = []
    name = "process_weights_after_loading"
    depth = 0

    def count_allocations(process: Any) -> Any:
        def process_and_count(*arguments: Any, **keywords: Any) -> Any:
            nonlocal depth
            before, depth = _count_allocated_bytes(), depth + 1
            try:
                return process(*arguments, **keywords)
            finally:
                depth -= 1
                if not depth:  # a layer's method may call another layer's
                    allocated.append(_count_allocated_bytes() - before)

        return process_and_count

    holders = [holder for module in model.modules() for holder in (module, getattr(module, "quant_method", None))]
    wrapped = {id(holder): holder for holder in holders if callable(getattr(holder, name, None))}.values()
    for holder in wrapped:
        object.__setattr__(holder, name, count_allocations(getattr(holder, name)))
    try:
        yield allocated
    finally:
        for holder in wrapped:
            object.__delattr__(holder, name)


def _count_allocated_bytes() -> int:
    """Bytes that are allocated in glibc's heap and by mmap, over all arenas."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _MallInfo2
    information = library.mallinfo2()
    return int(information.uordblks + information.hblkhd)
