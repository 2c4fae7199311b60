"""What vLLM's weights weigh before and after it packs them on a CPU.

On CPU vLLM copies each linear weight into an opaque buffer and drops the parameter; the embedding keeps its own weight
and may get a packed copy beside it. The opaque buffers are no tensors: the allocator is asked instead.
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
    kept_bytes: int = 0
    """Of these, those that stay tensors."""

    packed_bytes: int = 0
    """The opaque buffers that the others are packed into."""


@contextmanager
def watch_weight_packing(base: "OpenedBase | None" = None) -> Iterator[WeightPacking]:
    """Fill in a WeightPacking while a model is loaded inside the `with` block. base: what the trainer counts."""
    from vllm.model_executor.model_loader import base_loader

    packing = WeightPacking()
    original = base_loader.process_weights_after_loading

    def own(model: Any) -> int:
        return storage_bytes(p for p in model.parameters() if base is None or not base.holds(p))

    def watched(model: Any, *arguments: Any, **keywords: Any) -> Any:
        packing.loaded_bytes = own(model)
        with _counted_in_layers(model) as allocated:
            result = original(model, *arguments, **keywords)
        packing.kept_bytes = own(model)
        is_packed = next(model.parameters()).device.type == "cpu"  # on a GPU weights stay tensors
        handed_out = sum(allocated) if is_packed else packing.kept_bytes - packing.loaded_bytes
        packing.packed_bytes = 0 if base else handed_out + packing.loaded_bytes - packing.kept_bytes
        return result

    base_loader.process_weights_after_loading = watched
    try:
        yield packing
    finally:
        base_loader.process_weights_after_loading = original


@contextmanager
def _counted_in_layers(model: Any) -> Iterator[list[int]]:
    """Inside the `with` block, list what the allocator hands out in each layer's `process_weights_after_loading`.

    vLLM's walk between the layers allocates and frees too: up to 110 KiB more in the first model with experts of a
    process that has held others (vLLM 0.32.0), nothing in the next one. None of it is a pack.
    """
    allocated: list[int] = []
    name = "process_weights_after_loading"
    depth = 0

    def counted(process: Any) -> Any:
        def count(*arguments: Any, **keywords: Any) -> Any:
            nonlocal depth
            before, depth = _allocated_bytes(), depth + 1
            try:
                return process(*arguments, **keywords)
            finally:
                depth -= 1
                if not depth:  # one layer's may call another's
                    allocated.append(_allocated_bytes() - before)

        return count

    holders = [holder for module in model.modules() for holder in (module, getattr(module, "quant_method", None))]
    wrapped = {id(holder): holder for holder in holders if callable(getattr(holder, name, None))}.values()
    for holder in wrapped:
        object.__setattr__(holder, name, counted(getattr(holder, name)))
    try:
        yield allocated
    finally:
        for holder in wrapped:
            object.__delattr__(holder, name)


def _allocated_bytes() -> int:
    """Bytes that glibc's allocator has handed out and not got back, over all its arenas."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _MallInfo2
    information = library.mallinfo2()
    return int(information.uordblks + information.hblkhd)
