"""Engine state: whether an engine computes with the trainer's weights, found in its own parameters after loading.

The weights are sent a second time and loaded again. If the engine held them before, the second loading changes nothing:
not a bit of a parameter, a buffer or a packed matrix. So fused, stacked, sharded, tied, padded and quantized parameters
need no map between names. Two loadings could be wrong alike: where a weight reaches no parameter, or is read when its
packet is gone. So it is also noted which weights reach a loader, and when.
In: the model, before and after. Out: names that differ, and weights that were not taken, or not in time.
Left out: experts with padding, which vLLM does not write; adapters.

Counts: 8 bytes a tensor, and for a packed matrix its products with 32 rows: no weights beside the model's own.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

from rlplan.runtime.weight_sync.checksums import Checksums

NUM_PROBES = 32
"""Rows with which a packed matrix is multiplied. Each of its columns is in one of them."""


def state_checksums(model: torch.nn.Module) -> dict[str, int]:
    """Checksums of what a model computes with, by the engine's names. Tied tensors are read once."""
    sums: dict[str, int] = {}
    read: set[tuple[int, torch.Size]] = set()
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or not tensor.numel() or (tensor.data_ptr(), tensor.shape) in read:
                continue
            read.add((tensor.data_ptr(), tensor.shape))
            if not _has_unwritten_padding(module, name):
                sums[f"{path}.{name}"] = Checksums(tensor.dtype).compute(_as_stored(tensor.data))
        if "cpu_linear" in vars(module):
            sums[f"{path}.weight (packed)"] = _probe_pack(module)
    return sums


def padded_parameters(model: torch.nn.Module) -> list[str]:
    """Parameters that cannot be compared, for vLLM leaves their padding as it finds it in memory."""
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        for name in module._parameters
        if _has_unwritten_padding(module, name)
    ]


def _has_unwritten_padding(module: torch.nn.Module, name: str) -> bool:
    as_loaded, _ = layerwise.get_layerwise_info(module).restore_metadata
    tensor = as_loaded.get(name)
    if tensor is None or isinstance(module, VocabParallelEmbedding):  # vLLM fills its rows of padding with zeros
        return False
    return bool(getattr(tensor, "weight_loader_numel", tensor.numel()) != tensor.numel())


def _as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements in the order in which they lie in memory: what is contiguous can be read without a copy."""
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))


def _probe_pack(module: Any) -> int:
    """A checksum of the products of a CPU's packed matrix, which cannot be read, with rows that take every column.

    The packs are vLLM's own; equal packs give equal products, for the kernel and the rows are the same.
    """
    as_loaded, _ = layerwise.get_layerwise_info(module).restore_metadata
    weight = as_loaded["weight"]
    if weight.ndim != 2:
        return 0
    columns = torch.arange(weight.shape[1])
    factors = 1 + torch.randint(64, columns.shape, generator=torch.Generator().manual_seed(0)) / 64  # exact in bfloat16
    rows = torch.zeros(min(NUM_PROBES, len(columns)), len(columns), dtype=weight.dtype)
    rows[columns % len(rows), columns] = factors.to(weight.dtype)
    products = module.cpu_linear(rows, module.weight, None)
    return Checksums(products.dtype).compute(products)


class LoadRecord:
    """Which of the weights that a model is given reach the loader of a parameter, and while their packet is there."""

    def __init__(self) -> None:
        self.kept_back: list[str] = []
        """Weights that were still waiting when their packet was given back."""
        self.memories: set[int] = set()
        """Where the storages begin through which packets came."""
        self._is_taken: dict[str, bool] = {}
        self._current = ""

    @property
    def untaken(self) -> list[str]:
        """Weights that no parameter has taken; the engine goes on with what it had before."""
        return [name for name, is_taken in self._is_taken.items() if not is_taken]

    def handed_out(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same weights; those that come next are noted under their names."""
        for name, tensor in weights:
            self._current = name
            self._is_taken[name] = name.rpartition(".")[2] in SKIP_LOAD_TENSORS  # vLLM does not watch these loaders
            yield name, tensor

    def packet_ends(self, payload: torch.Tensor) -> None:
        """Everything that was handed out has reached a loader, or the model reads it when it is overwritten."""
        self.memories.add(payload.untyped_storage().data_ptr())
        self.kept_back += [name for name in self.untaken if name not in self.kept_back]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note every call of a parameter's loader inside the block."""
        count = layerwise.get_numel_loaded

        def noted(loader: Any, arguments: Any) -> Any:
            self._is_taken[self._current] = True
            return count(loader, arguments)

        layerwise.get_numel_loaded = noted
        try:
            yield
        finally:
            layerwise.get_numel_loaded = count
