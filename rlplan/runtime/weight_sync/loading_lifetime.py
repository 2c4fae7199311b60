"""Lifetime of received weights: vLLM's layerwise reload buffers tensors until their layer is complete.

Buffered tensors are views of the arena, which later packets overwrite. vLLM counts elements to detect a complete layer.
Some layers never complete: a vocabulary padded to a multiple of 64 has rows that no checkpoint fills, and a layer may
have buffers or scales that nobody sends. Such a layer waits for `finalize_layerwise_reload`.
In: the model, and a packet that is about to be released. Out: no tensor that vLLM buffers lies in the packet any more.
Left out: tensors that a model's own `load_weights` keeps; engine_state.py detects these.
Source: vLLM 0.32.0, model_loader/reload/layerwise.py.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import layerwise


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
