"""Training: bytes of a data-parallel rank under DeepSpeed ZeRO-2 in fp32, which the CPU runtime runs.

In: a ModelSpec and the sizes of a mini-batch's share. Out: bytes a rank, by kind.
Left out: other stages, dtypes and offload, which `zero.ZeroStates` counts and this rests on.

Symbols: P parameters, N ranks, S partition size in elements, b bucket size in elements.
Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py; the functions there are named in each docstring.
"""

from dataclasses import dataclass
from functools import cached_property

from rlplan.memory.zero import ZeroSettings, ZeroStates
from rlplan.spec.model import ModelSpec, Parameter

FLOAT_BYTES = 4


@dataclass(frozen=True)
class ZeroTwo:
    """The persistent tensors of one rank. bucket_size: elements of the reduction bucket."""

    model: ModelSpec
    num_ranks: int
    rank: int
    bucket_size: int

    @cached_property
    def states(self) -> ZeroStates:
        """The same rank as the general formulas see it."""
        settings = ZeroSettings(
            stage=2,
            num_ranks=self.num_ranks,
            weight_bytes=FLOAT_BYTES,
            gradient_bytes=FLOAT_BYTES,
            reduce_bucket_size=self.bucket_size,
        )
        return ZeroStates(settings, self.model.parameters, rank=self.rank)

    @property
    def flat_numel(self) -> int:
        """Elements of the flat parameter buffer."""
        return self.states.partition_numel * self.num_ranks

    @property
    def partition_numel(self) -> int:
        """Elements of this rank's partition, S."""
        return self.states.partition_numel

    @property
    def owned(self) -> tuple[Parameter, ...]:
        """Parameters with an element in this rank's partition."""
        return self.states.owned

    def weight_bytes(self) -> int:
        """Bytes of the flat parameter buffer, whole on every rank, always."""
        return self.states.weight_bytes()

    def master_bytes(self) -> int:
        """Bytes of the fp32 master partition (`single_partition_of_fp32_groups`), kept beside fp32 weights too."""
        return self.states.master_bytes()

    def optimizer_bytes(self) -> int:
        """Bytes of Adam's two moments of the partition and its step counter, from the first optimizer step on."""
        return self.states.optimizer_bytes()

    def gradient_bytes(self) -> int:
        """Bytes of accumulated gradients between backward and step."""
        return self.states.gradient_bytes()
