"""Shared base on the engine's side: each vLLM parameter becomes a view of the trainer's frozen base.

In: the opened base, while `vllm.LLM` is created. Out: a model without weights of its own. Left out: where the memory
comes from (weight_sync/shared_base.py).

vLLM's own loader reads the trainer's weights by name instead of files. Each parameter that it builds is compared with
the base bit by bit, then replaced by a view of the base. Every start thus proves that both sides agree on each name.
On a CPU a parameter takes memory once it is loaded, so only one exists twice at a time. On a GPU all of them exist
twice until they are compared.
On a CPU vLLM would pack each linear weight into a separate buffer. With a base it multiplies with torch instead, as it
does where oneDNN has no packed format. Source: vLLM 0.32.0, default_loader.py, layers/utils.py. vLLM's
weight_cache/ipc_loader.py shares weights only between engines, and only on GPUs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rlplan.runtime.weight_sync.contents.checkpoint_names import rename_for_checkpoint
from rlplan.runtime.weight_sync.shared_base import OpenedBase, base_error


@contextmanager
def load_from_base(base: OpenedBase | None) -> Iterator[None]:
    """Context in which a model that vLLM creates takes its parameters from the base, if there is one.

    Raises: RunError where a parameter is not one of the trainer's weights.
    """
    if base is None:
        yield
        return
    from vllm.model_executor.layers import utils
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader as Loader

    before = Loader.get_all_weights, Loader.load_weights, utils.dispatch_cpu_unquantized_gemm

    def load(loader: Any, model: Any, config: Any) -> None:
        before[1](loader, model, config)
        _replace_remaining(base, dict(model.named_parameters()))

    Loader.get_all_weights = lambda _, config, model: _iterate_weights(base, config, model)
    Loader.load_weights, utils.dispatch_cpu_unquantized_gemm = load, _multiply_with_torch
    try:
        yield
    finally:
        Loader.get_all_weights, Loader.load_weights, utils.dispatch_cpu_unquantized_gemm = before


def _iterate_weights(base: OpenedBase, config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the trainer's weights; replace each complete parameter when the loader asks for the next weight.

    Parameters of a loader that defers weights are replaced at the end (`_replace_remaining`).
    """
    parameters, current = dict(model.named_parameters()), ""
    for name, tensor, part_of in base.weights():
        if part_of != current and current in parameters and _is_same(base, current, parameters[current]):
            parameters[current].data = base.tensors[current]
        current = part_of
        yield from rename_for_checkpoint(config.hf_config.architectures[0], [(name, tensor)])


def _replace_remaining(base: OpenedBase, parameters: dict[str, Any]) -> None:
    """Replace the parameters that do not yet share the base. Raises: RunError where the trainer has no such weight."""
    for name, parameter in parameters.items():
        if base.holds(parameter.data):
            continue
        if not _is_same(base, name, parameter):
            raise base_error(f"the engine's weight {name} {tuple(parameter.shape)} is not the trainer's")
        parameter.data = base.tensors[name]


def _is_same(base: OpenedBase, name: str, parameter: torch.Tensor) -> bool:
    theirs = base.tensors.get(name)
    if theirs is None or parameter.dtype is not theirs.dtype or parameter.shape != theirs.shape:
        return False
    return torch.equal(parameter.data, theirs)


def _multiply_with_torch(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Replace vLLM's `dispatch_cpu_unquantized_gemm`: keep the weight and build no packed copy."""
    layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]
