"""Tensor parallelism by DeepSpeed's AutoTP: whole weights and the gradient norm are computed from the ranks' shards.

In: a module that DeepSpeed has sharded. Out: whole tensors, one by one; the gradient norm over all shards.
Left out: the sharding itself (configured by `emit.deepspeed.tensor_parallel_section`).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rlplan.runtime.weight_sync.source import WeightSource


class PartWeights(WeightSource):
    """Whole weights of a module that is sharded over ranks. Iterating is collective: all these ranks must do it."""

    def __init__(self, module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(module)
        self._shapes = shapes

    def read(self, name: str) -> torch.Tensor:
        part = super().read(name)
        full_shape = self._shapes.get(name, tuple(part.shape))
        axes = [axis for axis, size in enumerate(full_shape) if size != part.shape[axis]]  # AutoTP shards one axis
        return _gather_parts(part, axes[0]) if axes else part


def disable_input_check(engine: Any) -> None:
    """Remove DeepSpeed's check that all ranks get the same first input, which supports only plain tensors."""
    check = getattr(engine, "first_dataloader_check", None)
    if check is not None:
        check.remove()


def compute_gradient_norm(parameters: list[nn.Parameter]) -> float:
    """Gradient norm over all ranks. Shards are summed over the ranks; replicated tensors count once."""
    import torch.distributed as dist
    from deepspeed.runtime.utils import is_model_parallel_parameter

    squares = torch.zeros(2, dtype=torch.float64)
    for parameter in parameters:
        if parameter.grad is not None:
            squares[int(not is_model_parallel_parameter(parameter))] += parameter.grad.double().square().sum().cpu()
    dist.all_reduce(squares[:1], group=_get_group())
    return float(squares.sum().sqrt())


def _gather_parts(part: torch.Tensor, axis: int) -> torch.Tensor:
    import torch.distributed as dist

    group = _get_group()
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, axis)


def _get_group() -> Any:
    from deepspeed.utils import groups

    return groups.get_tensor_model_parallel_group()
