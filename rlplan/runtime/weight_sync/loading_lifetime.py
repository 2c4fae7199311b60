"""Lifetime of received weights: vLLM's layerwise reload keeps the tensors that it was given until a layer is whole.

What it keeps are views of the arena, which the next packets overwrite. It counts elements to know when a layer is
whole, and of some layers never gets there: a vocabulary that is padded to a multiple of 64 has rows that no checkpoint
fills, a layer may have buffers or scales that nobody sends. Such a layer waits for `finalize`.
In: the model, and a packet that is about to be given back. Out: nothing that vLLM still holds lies in the packet.
Left out: tensors that a model's own `load_weights` would keep; engine_state.py notices these.
Source: vLLM 0.32.0, model_loader/reload/layerwise.py.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import layerwise


def count_without_padding(model: torch.nn.Module) -> None:
    """Tell vLLM how many rows of each table a checkpoint fills, so that a table is processed as soon as it has come.

    vLLM has `weight_loader_numel` for it, and sets it for experts alone. Without it each padded table would be copied
    by `keep_buffered` until the end of the update.
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


def keep_buffered(model: torch.nn.Module, payload: torch.Tensor) -> int:
    """Give vLLM copies of its own in place of views of a packet that it has not used yet. Returns: their bytes."""
    memory, num_bytes = payload.untyped_storage().data_ptr(), 0

    def own(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal num_bytes
        if not _is_stored_in(tensor, {memory}):
            return tensor
        num_bytes += tensor.nbytes
        return tensor.clone()

    for _, _, values in _list_deferred_loads(model):
        values |= {name: tree_map_only(torch.Tensor, own, value) for name, value in values.items()}
    return num_bytes


def find_buffered_parameters(model: torch.nn.Module, memories: set[int]) -> list[str]:
    """Parameters for which vLLM still holds a view of a packet. memories: where the packets' storages begin."""
    return [
        f"{path}.{parameter}"
        for path, parameter, values in _list_deferred_loads(model)
        if any(_is_stored_in(leaf, memories) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    ]


def _list_deferred_loads(model: torch.nn.Module) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(module, parameter, arguments of its loader) of every call that vLLM has put off."""
    for path, module in model.named_modules():
        for parameter, arguments in layerwise.get_layerwise_info(module).loaded_weights:
            yield path, parameter, arguments.arguments


def _is_stored_in(tensor: torch.Tensor, memories: set[int]) -> bool:
    return not tensor.is_meta and tensor.untyped_storage().data_ptr() in memories
