"""Verification that an engine computes with the trainer's adapter, by reading vLLM's adapter slots after loading.

A slot holds A and B of each layer. B is scaled by alpha / rank, and rows beyond the adapter's rank are zero. Each
tensor-parallel rank has its shard, which vLLM's own layers define. The trainer's matrices are converted to that form
and must equal the slot bit for bit.
In: vLLM's model, a version, the trainer's matrices. Out: names of matrices that differ, have no slot, or cannot be
read back.
Left out: the base weights, which are not sent; experts and embeddings, whose slots have other layouts.
Source: vLLM 0.32.0, lora/model_manager.py and lora/layers/.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.utils import parse_fine_tuned_lora_name

from rlplan.runtime.weight_sync.channel import VerificationReport
from rlplan.spec.parts.adapter_files import PEFT_PREFIX
from rlplan.spec.resolved import ResolvedJob

_Matrices = list[torch.Tensor | None]


@dataclass
class _Slot:
    """A layer's slot. a_names, b_names: the trainer's names, per module that the layer fuses; "" for a missing one."""

    layer: BaseLinearLayerWithLoRA
    a_names: list[str]
    b_names: list[str]

    @property
    def names(self) -> list[str]:
        return [name for name in (*self.a_names, *self.b_names) if name]


def compare_adapter(
    model: Any, job: ResolvedJob, tensors: Mapping[str, torch.Tensor], version: int
) -> VerificationReport:
    """Compare a version's slots with the trainer's matrices. tensors: by name in the trainer's module."""
    manager, lora = model.lora_manager, job.training.lora
    assert lora is not None, "adapters are sent"
    if version not in manager.lora_index_to_id:
        return VerificationReport(0, untaken=tuple(tensors))
    index = manager.lora_index_to_id.index(version)
    names = _names_in_engine(model, tensors)
    slots = list(_slots(manager, names))
    compared = [name for slot in slots for name in slot.names]
    members = {member for path in manager.modules for member in manager.packed_modules.get(path, [path])}
    untaken = [name for (module, _), name in names.items() if module not in members]  # vLLM ignores these silently
    different = [name for slot in slots for name in _find_differences(slot, index, tensors, lora.alpha / lora.rank)]
    not_compared = sorted(tensors.keys() - {*compared, *untaken})
    is_conclusive = any(bool(tensors[name].any()) for slot in slots for name in slot.b_names if name)
    return VerificationReport(
        len(compared),
        tuple(different),
        tuple(untaken),
        not_compared=tuple(not_compared),
        is_conclusive=is_conclusive or not compared,
    )


def _names_in_engine(model: Any, names: Iterable[str]) -> dict[tuple[str, bool], str]:
    """Map (vLLM's module name, whether it is A) to the trainer's name."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    renaming = mapper.get_rename_mapper() if mapper is not None else None  # as vLLM's own LoRA manager does
    return {parse_fine_tuned_lora_name(PEFT_PREFIX + name, renaming): name for name in names}


def _slots(manager: Any, names: Mapping[tuple[str, bool], str]) -> Iterator[_Slot]:
    """Yield the slots of linear layers that the adapter changes."""
    for path, layer in manager.modules.items():
        members = manager.packed_modules.get(path, [path])
        a_names, b_names = ([names.get((member, is_a), "") for member in members] for is_a in (True, False))
        is_adapted = any(a_names) or any(b_names)
        if is_adapted and isinstance(layer, BaseLinearLayerWithLoRA) and len(layer.lora_a_stacked) == len(members):
            yield _Slot(layer, a_names, b_names)


def _find_differences(slot: _Slot, index: int, tensors: Mapping[str, torch.Tensor], scale: float) -> Iterator[str]:
    layer = slot.layer
    dtype = layer.lora_a_stacked[0].dtype
    whole_a: _Matrices = [tensors[name].to(dtype) if name else None for name in slot.a_names]
    whole_b: _Matrices = [tensors[name].to(dtype) * scale if name else None for name in slot.b_names]
    for names, stacked, expected in (
        (slot.a_names, layer.lora_a_stacked, _shard_matrices(layer, layer.slice_lora_a, whole_a)),
        (slot.b_names, layer.lora_b_stacked, _shard_matrices(layer, layer.slice_lora_b, whole_b)),
    ):
        for name, slots, matrix in zip(names, stacked, expected, strict=True):
            if not _slot_equals(slots[index, 0], matrix):
                yield name or f"a matrix beside {', '.join(slot.names)} that the trainer does not have"


def _shard_matrices(layer: Any, cut: Any, matrices: _Matrices) -> Sequence[torch.Tensor | None]:
    """This rank's shards, sliced by the layer's own method; a fused layer slices all its modules at once."""
    if layer.tp_size == 1:
        return matrices
    return cut(matrices) if len(matrices) > 1 else [cut(matrices[0])]


def _slot_equals(slot: torch.Tensor, matrix: torch.Tensor | None) -> bool:
    """Whether a slot holds a matrix in its upper left corner and zeros elsewhere."""
    expected = torch.zeros_like(slot)
    if matrix is not None:
        rows, columns = matrix.shape
        if rows > slot.shape[0] or columns > slot.shape[1]:
            return False
        expected[:rows, :columns] = matrix.to(slot.device)
    return torch.equal(slot, expected)
