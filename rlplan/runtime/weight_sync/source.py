"""WeightSource: the trainer's weights, whole, one decoder layer after the other, under any ZeRO stage.

In: a module that DeepSpeed trains. Out: (name, whole tensor), each valid until the next one is asked for; of the whole
module also the buffers that a checkpoint keeps, such as a router's bias, which are never cut and never sent.
Left out: where they go (the transports).

Under ZeRO-3 a layer's partitions are gathered when its first tensor is asked for and let go after its last, so at most
one layer is whole at a time. Gathering is collective: every rank iterates over the same, and one of them sends.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from typing import Any

import torch
from torch import nn

from rlplan.memory.weight_sync.buckets import Bucket, layer_of


class WeightSource:
    """The weights of a module by the module's own names; tied tensors once."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters = dict(module.named_parameters())

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors(self._parameters)
        yield from kept_buffers(self._module)

    def tensors(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights of one bucket, in its order. A bucket never cuts a layer, so no layer is gathered twice."""
        return self._tensors(entry.name for entry in bucket.entries)

    def take_part(self, names: Iterable[str] | None = None) -> None:
        """Iterate for the other ranks' sake alone. names: what they iterate over; everything where left out."""
        for _ in self._tensors(self._parameters if names is None else names):
            pass

    def _tensors(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for _, layer in groupby(names, key=layer_of):
            members = list(layer)
            with gather_parameters(self.needed_for(members)):
                for name in members:
                    yield name, self.read(name)

    def read(self, name: str) -> torch.Tensor:
        """One weight, whole; its layer is gathered."""
        return self._parameters[name].detach()

    def needed_for(self, names: Sequence[str]) -> list[nn.Parameter]:
        """The parameters that `read` reads for these weights."""
        return [self._parameters[name] for name in names]


def kept_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that belong to a checkpoint: they are not trained, and an engine has them from its files."""
    for path, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def gather_parameters(parameters: Sequence[Any]) -> AbstractContextManager[Any]:
    """Makes parameters whole inside the `with` block, on every rank, where ZeRO-3 has cut them; else nothing.

    Those that stay gathered anyway are left alone: DeepSpeed would cut them on the way out.
    """
    cut = [parameter for parameter in parameters if is_cut(parameter)]
    if not cut:
        return nullcontext()
    import deepspeed

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(cut, modifier_rank=None)
    return context


def is_cut(parameter: Any) -> bool:
    """Whether a parameter is in shares now, so that nothing but its own lies on this rank."""
    status = getattr(parameter, "ds_status", None)
    return status is not None and status.name == "NOT_AVAILABLE"
