"""StoredStates: the tensors of a checkpoint, whole or in ranges, whichever ranks wrote them.

In: open tensor files. Out: elements, read straight into tensors of any type on any device.
"""

import ctypes
from collections import defaultdict
from collections.abc import Sequence

import torch

from rlplan.errors import SpecError
from rlplan.memory.trainers.checkpoints import SAVED_KINDS
from rlplan.runtime.checkpoints.fragments import MASTER
from rlplan.runtime.checkpoints.tensor_file import TensorFile


class StoredStates:
    """Fragments in files, found by kind and name. part: only names that end in it (`fragments.part_name`)."""

    def __init__(self, files: Sequence[TensorFile], part: str = "") -> None:
        self._parts: dict[tuple[str, str], list[tuple[int, int, TensorFile, str]]] = defaultdict(list)
        for file in files:
            for key, tensor in file.tensors.items():
                kind, _, rest = key.partition("/")
                name, _, start = rest.rpartition("@")
                if kind in SAVED_KINDS and name.endswith(part):
                    self._parts[(kind, name)].append((int(start), tensor.numel, file, key))
        for parts in self._parts.values():
            parts.sort(key=lambda part: part[:2])

    def check(self, shapes: dict[str, list[int]], *, others_too: bool = False) -> None:
        """Every parameter's fragments lie side by side. others_too: there may be more. Raises: SpecError."""
        names = {name for kind, name in self._parts if kind == MASTER}
        for name in sorted(set(shapes) - names if others_too else names.symmetric_difference(shapes)):
            raise _other_parameters(f"parameter {name} is {'only in the checkpoint' if name in names else 'not in it'}")
        for (_, name), parts in self._parts.items():
            if name not in shapes:
                continue
            end = 0
            for start, numel, _, _ in parts:
                if start != end:
                    break
                end += numel
            if end != torch.Size(shapes[name]).numel():
                raise _other_parameters(f"parameter {name} has another size than {shapes[name]}, or lacks a part")

    def fill(self, target: torch.Tensor, kind: str, name: str, start: int = 0) -> None:
        """Read elements from `start` on into a tensor, whatever its type and place."""
        is_direct = target.dtype is torch.float32 and target.device.type == "cpu" and target.is_contiguous()
        whole = target.detach().view(-1) if is_direct else torch.empty(target.numel(), dtype=torch.float32)
        end = start + whole.numel()
        for first, numel, file, key in self._parts[(kind, name)]:
            low, high = max(start, first), min(end, first + numel)
            if low < high:
                file.read_into(key, low - first, memory_of(whole.narrow(0, low - start, high - low)))
        if not is_direct:
            target.detach().copy_(whole.view(target.shape))


def memory_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's bytes in place."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B") if size else memoryview(b"")


def _other_parameters(what: str) -> SpecError:
    return SpecError(
        f"the checkpoint is of another model: {what}",
        where="checkpoint",
        rule="the trained parameters of the job and of the checkpoint are the same",
        way_out="resume with the model and the adapters that the checkpoint was made with",
    )
