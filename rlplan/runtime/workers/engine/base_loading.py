"""How vLLM loads a model whose weights are the trainer's frozen base: each parameter becomes a view of it.

In: the opened base, while `vllm.LLM` is made. Out: a model without weights of its own. Left out: where the memory comes
from (weight_sync/shared_base.py).

vLLM's own loader gets the trainer's weights by their names, in place of those of files. Each parameter that it has made
of them is compared with the base, bit by bit, and given up for it, so that both sides mean the same by every name is
proved at every start. Memory of parameters is touched when they are loaded: on a CPU one at a time exists twice, on a
GPU all until they are compared.
On a CPU vLLM would pack each linear weight into a buffer of its own; here it multiplies with torch, as it does where
oneDNN has no packs. Source: vLLM 0.32.0, default_loader.py, layers/utils.py; its weight_cache/ipc_loader.py shares the
weights of engines with each other, on GPUs alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rlplan.runtime.weight_sync.contents.checkpoint_names import in_checkpoint
from rlplan.runtime.weight_sync.shared_base import OpenedBase, base_error


@contextmanager
def loading_base(base: OpenedBase | None) -> Iterator[None]:
    """For a block that makes a model: its parameters become the base's. Nothing without one. Raises: RunError."""
    if base is None:
        yield
        return
    from vllm.model_executor.layers import utils
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader as Loader

    before = Loader.get_all_weights, Loader.load_weights, utils.dispatch_cpu_unquantized_gemm

    def load(loader: Any, model: Any, config: Any) -> None:
        before[1](loader, model, config)
        _give_up_all(base, dict(model.named_parameters()))

    Loader.get_all_weights = lambda _, config, model: _handed_over(base, config, model)
    Loader.load_weights, utils.dispatch_cpu_unquantized_gemm = load, _multiply_with_torch
    try:
        yield
    finally:
        Loader.get_all_weights, Loader.load_weights, utils.dispatch_cpu_unquantized_gemm = before


def _handed_over(base: OpenedBase, config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The trainer's weights. When the loader asks for the next one, a parameter that is whole by then is given up; a
    loader that keeps weights back is looked at in the end.
    """
    parameters, whole = dict(model.named_parameters()), ""
    for name, tensor, part_of in base.weights():
        if part_of != whole and whole in parameters and _is_same(base, whole, parameters[whole]):
            parameters[whole].data = base.tensors[whole]
        whole = part_of
        yield from in_checkpoint(config.hf_config.architectures[0], [(name, tensor)])


def _give_up_all(base: OpenedBase, parameters: dict[str, Any]) -> None:
    """What is left. Raises: RunError where a parameter is none of the trainer's weights."""
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
    """In place of vLLM's `dispatch_cpu_unquantized_gemm`: the weight stays, and there is no pack beside it."""
    layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]
