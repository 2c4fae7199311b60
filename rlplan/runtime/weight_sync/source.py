"""WeightSource: the trainer's full weights, one decoder layer at a time, under any ZeRO stage.

In: a module that DeepSpeed trains. Out: (name, full tensor), each valid until the next one is requested. Iterating over
the module also yields the buffers of a checkpoint, such as a router's bias, which are never sharded and never sent.
Left out: sending them (the transports).

Under ZeRO-3 a layer's partitions are gathered before its first tensor and released after its last one. So at most one
layer is gathered at a time. Gathering is collective: every rank iterates over the same names, and one of them sends.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from typing import Any

import torch
from torch import nn

from rlplan.memory.weight_sync.packets import Bucket, name_layer


class WeightSource:
    """The weights of a module by the module's own names; tied tensors appear once."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters = dict(module.named_parameters())

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors(self._parameters)
        yield from persistent_buffers(self._module)

    def tensors(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights of one bucket, in order. Buckets never split a layer, so no layer is gathered twice."""
        return self._tensors(entry.name for entry in bucket.entries)

    def join_gathers(self, names: Iterable[str] | None = None) -> None:
        """Take part in the gathers of other ranks. names: the weights that they iterate over; None means all."""
        for _ in self._tensors(self._parameters if names is None else names):
            pass

    def _tensors(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for _, layer in groupby(names, key=name_layer):
            members = list(layer)
            with gather_parameters(self.find_parameters(members)):
                for name in members:
                    yield name, self.read(name)

    def read(self, name: str) -> torch.Tensor:
        """One full weight; its layer must be gathered."""
        return self._parameters[name].detach()

    def find_parameters(self, names: Sequence[str]) -> list[nn.Parameter]:
        """The parameters that `read` needs for these weights."""
        return [self._parameters[name] for name in names]


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Persistent buffers: they belong to a checkpoint, are not trained, and engines load them from files."""
    for path, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def gather_parameters(parameters: Sequence[Any]) -> AbstractContextManager[Any]:
    """Context that gathers parameters which ZeRO-3 has sharded, on every rank; no effect on others.

    Parameters that are gathered already are skipped, because DeepSpeed would shard them at the end of the block.
    """
    cut = [parameter for parameter in parameters if is_sharded(parameter)]
    if not cut:
        return nullcontext()
    import deepspeed

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(cut, modifier_rank=None)
    return context


def is_sharded(parameter: Any) -> bool:
    """Whether a parameter is sharded now, so that this rank holds only its own part."""
    status = getattr(parameter, "ds_status", None)
    return status is not None and status.name == "NOT_AVAILABLE"
