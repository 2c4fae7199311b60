"""Verification that an engine computes with the trainer's weights, by loading the same weights twice.

If the engine already held the weights, the second load changes no bit of a parameter, a buffer or a packed matrix. So
fused, stacked, sharded, tied, padded and quantized parameters need no mapping of names. Both loads could be wrong in
the same way, if a weight reaches no parameter or is read after its packet was overwritten. So the record also notes
which weights reach a parameter's loader, and when.
In: the model, before and after. Out: names that differ, and weights that were not loaded, or too late.
Left out: experts with padding, which vLLM does not write; adapters.

Counts: 8 bytes per tensor, and for a packed matrix its product with 32 rows; no copy of the weights.
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
"""Probe rows that a packed matrix is multiplied with; together they are nonzero in every column."""


def checksum_state(model: torch.nn.Module) -> dict[str, int]:
    """Checksums of all parameters, buffers and packed matrices, by the engine's names. Tied tensors are read once."""
    sums: dict[str, int] = {}
    read: set[tuple[int, torch.Size]] = set()
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or not tensor.numel() or (tensor.data_ptr(), tensor.shape) in read:
                continue
            read.add((tensor.data_ptr(), tensor.shape))
            if not _has_unwritten_padding(module, name):
                sums[f"{path}.{name}"] = Checksums(tensor.dtype).compute(_view_in_memory_order(tensor.data))
        if "cpu_linear" in vars(module):
            sums[f"{path}.weight (packed)"] = _probe_pack(module)
    return sums


def list_padded_parameters(model: torch.nn.Module) -> list[str]:
    """Parameters that cannot be compared, because vLLM leaves their padding uninitialized."""
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        for name in module._parameters
        if _has_unwritten_padding(module, name)
    ]


def _has_unwritten_padding(module: torch.nn.Module, name: str) -> bool:
    as_loaded, _ = layerwise.get_layerwise_info(module).restore_metadata
    tensor = as_loaded.get(name)
    if tensor is None or isinstance(module, VocabParallelEmbedding):  # vLLM fills its padding rows with zeros
        return False
    return bool(getattr(tensor, "weight_loader_numel", tensor.numel()) != tensor.numel())


def _view_in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """View with dimensions in memory order, which can be flattened without a copy."""
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))


def _probe_pack(module: Any) -> int:
    """Checksum of the product of a packed matrix with probe rows; a packed matrix itself cannot be read.

    Equal packed matrices give equal products, because kernel and rows are the same.
    """
    as_loaded, _ = layerwise.get_layerwise_info(module).restore_metadata
    weight = as_loaded["weight"]
    if weight.ndim != 2:
        return 0
    columns = torch.arange(weight.shape[1])
    # Different factors per column reveal exchanged columns; the fixed seed gives the same rows in every call.
    factors = 1 + torch.randint(64, columns.shape, generator=torch.Generator().manual_seed(0)) / 64  # exact in bfloat16
    rows = torch.zeros(min(NUM_PROBES, len(columns)), len(columns), dtype=weight.dtype)
    rows[columns % len(rows), columns] = factors.to(weight.dtype)
    products = module.cpu_linear(rows, module.weight, None)
    return Checksums(products.dtype).compute(products)


class LoadRecord:
    """Records which weights reach a parameter's loader while their packet is still valid."""

    def __init__(self) -> None:
        self.kept_back: list[str] = []
        """Weights that no loader had read when their packet was released."""
        self.memories: set[int] = set()
        """Start addresses of the storages that packets arrived in."""
        self._is_taken: dict[str, bool] = {}
        self._current = ""

    @property
    def untaken(self) -> list[str]:
        """Weights that no parameter loaded; the engine keeps its previous values."""
        return [name for name, is_taken in self._is_taken.items() if not is_taken]

    def track_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass weights through and attribute the following loader calls to the current weight."""
        for name, tensor in weights:
            self._current = name
            self._is_taken[name] = name.rpartition(".")[2] in SKIP_LOAD_TENSORS  # vLLM does not wrap these loaders
            yield name, tensor

    def end_packet(self, payload: torch.Tensor) -> None:
        """Note weights that have not reached a loader, because their packet is about to be overwritten."""
        self.memories.add(payload.untyped_storage().data_ptr())
        self.kept_back += [name for name in self.untaken if name not in self.kept_back]

    @contextmanager
    def watch_loaders(self) -> Iterator[None]:
        """Context that records every call of a parameter's loader."""
        count = layerwise.get_numel_loaded

        def record_call(loader: Any, arguments: Any) -> Any:
            self._is_taken[self._current] = True
            return count(loader, arguments)

        layerwise.get_numel_loaded = record_call
        try:
            yield
        finally:
            layerwise.get_numel_loaded = count
