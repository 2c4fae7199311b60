"""vLLM's sleep on the stand-in for a GPU: an allocator whose memory goes and comes back, behind vLLM's own interface.

In: tensors that vLLM makes while a pool is in use. Out: their bytes, released while vLLM sleeps.
vLLM's code for GPUs (levels, tags, what it saves before level 2) runs over it unchanged. Source: vLLM 0.32.0,
`device_allocator.MemAllocator`, `v1/worker/gpu_worker.py`.
Left out: addresses that stay (a tensor finds its storage by itself), and who gives it to vLLM: a test
(tests/runtime/device/stand_in_workers.py).
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.runtime.device.host_device import HostDevice

_DEFERRABLE = ("weights", "kv_cache")
"""Tags that wake only where they are named, or nothing is."""
_OF_A_NAN = 0xFF
"""Every byte of weights that come back without a copy: who reads them before they are sent finds NaNs."""


@dataclass
class _Allocation:
    tag: str
    storage: weakref.ref[Any]
    num_bytes: int
    backup: torch.Tensor | None = None
    is_asleep: bool = False


class HostAllocator:
    """`vllm.device_allocator.MemAllocator` on a HostDevice: a pool for each tag."""

    def __init__(self, device: HostDevice) -> None:
        self.device = device
        self._allocations: dict[int, _Allocation] = {}

    @contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        """Tag the tensors that are created in the block and still live at its end. An inner block's tag wins."""
        with _NewStorages() as created:
            yield
        for key, reference in created.found.items():
            storage = reference()
            if storage is not None and key not in self._allocations:
                followed = weakref.ref(storage, partial(self._forget, key))
                self._allocations[key] = _Allocation(tag or "default", followed, storage.nbytes())

    def sleep(self, offload_tags: tuple[str, ...] | str | None = None) -> None:
        """Give everything back; what has one of the tags is kept on the host."""
        kept = (offload_tags,) if isinstance(offload_tags, str) else offload_tags or ("default",)
        for allocation, storage in self._awake():
            if allocation.tag in kept:
                allocation.backup = self.device.pinned(storage.nbytes()).copy_(_bytes_of(storage))
            storage.resize_(0)
            allocation.is_asleep = True

    def discard(self, tags: tuple[str, ...] | str) -> None:
        """Give back what has one of the tags, and keep nothing of it."""
        for allocation, storage in self._awake():
            if allocation.tag in ((tags,) if isinstance(tags, str) else tags):
                storage.resize_(0)
                allocation.is_asleep = True

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take room again; for weights and KV cache where they are named, or nothing is. Raises: OutOfMemoryError."""
        for allocation in list(self._allocations.values()):
            storage = allocation.storage()
            defers = bool(tags) and allocation.tag in _DEFERRABLE and allocation.tag not in (tags or ())
            if storage is None or not allocation.is_asleep or defers:
                continue
            storage.resize_(allocation.num_bytes)
            whole = _bytes_of(storage)
            self.device.memory.count(whole)
            if allocation.backup is not None:
                whole.copy_(allocation.backup)
            else:
                whole.fill_(_OF_A_NAN if allocation.tag == "weights" else 0)
            allocation.backup, allocation.is_asleep = None, False

    def get_current_usage(self) -> int:
        """Bytes in all pools."""
        return sum(allocation.num_bytes for allocation, _ in self._awake())

    def _forget(self, key: int, _: Any) -> None:
        self._allocations.pop(key, None)

    def _awake(self) -> list[tuple[_Allocation, torch.UntypedStorage]]:
        pairs = [(allocation, allocation.storage()) for allocation in list(self._allocations.values())]
        return [
            (allocation, storage) for allocation, storage in pairs if storage is not None and not allocation.is_asleep
        ]


class _NewStorages(TorchDispatchMode):
    """Storages behind the results of the operations inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                storage = leaf.untyped_storage()
                self.found[storage._cdata] = weakref.ref(storage)
        return result


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)
