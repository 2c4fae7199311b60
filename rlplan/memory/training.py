"""Training: bytes of a data-parallel rank under DeepSpeed ZeRO-2 in fp32.

In: a ModelSpec and the sizes of a mini-batch's share. Out: bytes a rank, by kind.
Left out: other stages and dtypes, offload, `overlap_comm`.

Symbols: P parameters, N ranks, S partition size in elements, b bucket size in elements.
Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py; the functions there are named in each docstring.
"""

from dataclasses import dataclass
from functools import cached_property

from rlplan.spec.model import ModelSpec, Parameter
from rlplan.units import round_up

FLOAT_BYTES = 4
PARTITION_ALIGNMENT = 2
"""Elements: `nccl_start_alignment_factor`; the flat buffer is a multiple of it times the number of ranks."""
STEP_COUNTER_BYTES = 4
"""Bytes of the `step` tensor of torch's AdamW, one a parameter group."""


@dataclass(frozen=True)
class ZeroTwo:
    """The persistent tensors of one rank. bucket_size: elements of the reduction bucket."""

    model: ModelSpec
    num_ranks: int
    rank: int
    bucket_size: int

    @property
    def flat_numel(self) -> int:
        """Elements of the flat parameter buffer: P rounded up to 2N (`flatten_dense_tensors_aligned`)."""
        return round_up(self.model.num_parameters, PARTITION_ALIGNMENT * self.num_ranks)

    @property
    def partition_numel(self) -> int:
        """Elements of this rank's partition, S."""
        return self.flat_numel // self.num_ranks

    def weight_bytes(self) -> int:
        """Bytes of the flat parameter buffer, whole on every rank, always."""
        return self.flat_numel * FLOAT_BYTES

    def master_bytes(self) -> int:
        """Bytes of the fp32 master partition (`single_partition_of_fp32_groups`), kept beside fp32 weights too."""
        return self.partition_numel * FLOAT_BYTES

    def optimizer_bytes(self) -> int:
        """Bytes of Adam's two moments of the partition and its step counter, from the first optimizer step on."""
        return 2 * self.partition_numel * FLOAT_BYTES + STEP_COUNTER_BYTES

    def gradient_bytes(self) -> int:
        """Bytes of accumulated gradients between backward and step.

        Counts: every parameter that has an element in the partition, whole (`copy_grads_in_partition` allocates
        `grads_in_partition` of that size). Differs: 4S plus what sticks out at the borders.
        """
        return sum(parameter.numel for parameter in self.owned) * FLOAT_BYTES

    @cached_property
    def owned(self) -> tuple[Parameter, ...]:
        """Parameters with an element in this rank's partition (`get_partition_info`)."""
        first, last = self.rank * self.partition_numel, (self.rank + 1) * self.partition_numel
        owned, offset = [], 0
        for parameter in self.model.parameters:
            if offset < last and offset + parameter.numel > first:
                owned.append(parameter)
            offset += parameter.numel
        return tuple(owned)
