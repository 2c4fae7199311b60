"""StoredStates: reads the tensors of a checkpoint, whole or in ranges, regardless of which ranks wrote them.

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
    """Fragments in files, indexed by kind and name. part: suffix of the names to read (`fragments.part_name`)."""

    def __init__(self, files: Sequence[TensorFile], part: str = "") -> None:
        self._parts: dict[tuple[str, str], list[tuple[int, int, TensorFile, str]]] = defaultdict(list)
        for file in files:
            for key, tensor in file.tensors.items():
                kind, _, place = key.partition("/")
                name, _, start = place.rpartition("@")
                if kind in SAVED_KINDS and name.endswith(part):
                    self._parts[(kind, name)].append((int(start), tensor.numel, file, key))
        # the ranks' files come in any order; `check` needs the fragments side by side
        for parts in self._parts.values():
            parts.sort(key=lambda part: part[:2])

    def check(self, shapes: dict[str, list[int]], *, others_too: bool = False) -> None:
        """Check that every parameter's fragments join without a gap. others_too: the files may have more parameters.

        Raises: SpecError.
        """
        names = {name for kind, name in self._parts if kind == MASTER}
        for name in sorted(set(shapes) - names if others_too else names.symmetric_difference(shapes)):
            place = "only in the checkpoint" if name in names else "not in the checkpoint"
            raise _other_parameters(f"parameter {name} is {place}")
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
        """Fill a tensor of any type and device with elements from `start` on."""
        is_direct = target.dtype is torch.float32 and target.device.type == "cpu" and target.is_contiguous()
        values = target.detach().view(-1) if is_direct else torch.empty(target.numel(), dtype=torch.float32)
        end = start + values.numel()
        for first, numel, file, key in self._parts[(kind, name)]:
            low, high = max(start, first), min(end, first + numel)
            if low < high:
                file.read_into(key, low - first, view_bytes(values.narrow(0, low - start, high - low)))
        if not is_direct:
            target.detach().copy_(values.view(target.shape))


def view_bytes(tensor: torch.Tensor) -> memoryview:
    """View a contiguous CPU tensor's bytes in place."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B") if size else memoryview(b"")


def _other_parameters(what: str) -> SpecError:
    return SpecError(
        f"the checkpoint belongs to another model: {what}",
        where="checkpoint",
        rule="the job and the checkpoint have the same trained parameters",
        way_out="resume with the checkpoint's own model and adapters",
    )
