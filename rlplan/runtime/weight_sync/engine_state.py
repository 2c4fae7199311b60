"""Verification that an engine computes with the trainer's weights, by loading the same weights twice.

If the engine already held the weights, the second load changes no bit of a parameter, a buffer or a packed matrix. So
fused, stacked, sharded, tied, padded and quantized parameters need no mapping of names. Both loads could be wrong in
the same way, if a weight reaches no parameter or is read after its packet was overwritten. So the record also notes
which weights reach a parameter's loader, and when.
In: the model, before and after. Out: names that differ, and weights that were not loaded, or too late.
Left out: experts with padding, which vLLM does not write; adapters.

Memory: 8 bytes per tensor, and for a packed matrix its product with 32 rows; no copy of the weights.

vLLM's layerwise reload buffers received tensors until their layer is complete. Buffered tensors are views of the arena,
which later packets overwrite, so they are copied before their packet is released. vLLM counts elements to detect a
complete layer. Some layers never complete. A vocabulary padded to a multiple of 64 has rows that no checkpoint fills,
and a layer may have buffers or scales that nobody sends. Such a layer waits for `finalize_layerwise_reload`.
Source: vLLM 0.32.0, model_loader/reload/layerwise.py.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only
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


def set_loaded_sizes(model: torch.nn.Module) -> None:
    """Set the number of elements that a checkpoint fills of each padded embedding, so that its layer can complete.

    vLLM reads it from `weight_loader_numel`, but sets that only for experts. Otherwise `copy_buffered` would copy each
    padded embedding until the end of the update.
    """
    for module in model.modules():
        if not isinstance(module, VocabParallelEmbedding):
            continue
        rows = module.shard_indices.num_org_elements
        as_loaded, _ = layerwise.get_layerwise_info(module).restore_metadata
        for tensor in (*as_loaded.values(), *module.parameters(recurse=False)):
            is_cut_by_rows = getattr(tensor, "output_dim", None) == 0 and getattr(tensor, "packed_dim", None) is None
            if is_cut_by_rows and tensor.ndim and tensor.shape[0]:
                tensor.weight_loader_numel = rows * (tensor.numel() // tensor.shape[0])


def copy_buffered(model: torch.nn.Module, payload: torch.Tensor) -> int:
    """Replace vLLM's buffered views of a packet by copies. Returns: bytes of the copies."""
    memory, num_bytes = payload.untyped_storage().data_ptr(), 0

    def copy_out(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal num_bytes
        if not _shares_storage(tensor, {memory}):
            return tensor
        num_bytes += tensor.nbytes
        return tensor.clone()

    for _, _, values in _list_deferred_loads(model):
        values |= {name: tree_map_only(torch.Tensor, copy_out, value) for name, value in values.items()}
    return num_bytes


def find_buffered_parameters(model: torch.nn.Module, memories: set[int]) -> list[str]:
    """Parameters for which vLLM still buffers a view of a packet. memories: start addresses of packets' storages."""
    return [
        f"{path}.{parameter}"
        for path, parameter, values in _list_deferred_loads(model)
        if any(_shares_storage(leaf, memories) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    ]


def _list_deferred_loads(model: torch.nn.Module) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (module, parameter, arguments of its loader) of every load that vLLM has deferred."""
    for path, module in model.named_modules():
        for parameter, arguments in layerwise.get_layerwise_info(module).loaded_weights:
            yield path, parameter, arguments.arguments


def _shares_storage(tensor: torch.Tensor, memories: set[int]) -> bool:
    return not tensor.is_meta and tensor.untyped_storage().data_ptr() in memories
