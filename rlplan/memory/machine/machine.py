"""Properties of CPU hosts and GPUs that change the memory of the same trainer, scorer or engine.

In: nothing, or bytes allocated. Out: `CPU` and `CUDA`, which the formulas query; bytes that torch reserves on a GPU.
Left out: values of a hardware profile (contexts, libraries, communicators), and an engine's settings.
"""

from dataclasses import dataclass

from rlplan.units import MIB, round_up


@dataclass(frozen=True)
class Machine:
    """A kind of device that trains."""

    collective_copies: int
    """Copies of the data that a collective gathers or scatters: gloo has a buffer of its own, NCCL writes directly to
    the output. Source: torch 2.13, ProcessGroupGloo.cpp; DeepSpeed 0.19.8, partition_parameters.py."""
    counts_written: bool
    """Whether memory counts when it is first written (pages of a host), not when it is allocated (cudaMalloc)."""
    steps_in_place: bool
    """Whether 8-bit optimizers update in place. Source: bitsandbytes 0.50, backends/cpu/ops.py."""


CPU = Machine(collective_copies=2, counts_written=True, steps_in_place=False)
CUDA = Machine(collective_copies=1, counts_written=False, steps_in_place=True)

SEGMENT_BYTES = 2 * MIB
"""Segments of large requests are a multiple of this (`kRoundLarge`)."""


def reserved_bytes(allocated: int, layer: int, uncast_logits: int = 0) -> int:
    """Bytes that torch reserves on a GPU when the loss has `allocated` in use and a layer's tensors take `layer`.

    uncast_logits: bytes of the logits in the model's type, which the loss upcasts and frees.

    Counts: the allocated bytes, one layer's tensors once more, and the uncast logits. Each freed segment of a layer is
    smaller than a tensor of logits, and segments are never joined, so the logits take new ones. Likewise the segment of
    the 16-bit logits is too small for any fp32 tensor of the loss.
    Source: torch 2.13 c10/cuda/CUDACachingAllocator.cpp. Left out: `expandable_segments`, which leaves almost no gap.
    Assumes: the logits are the largest tensors, as with all current vocabularies; batches do not grow.

    >>> reserved_bytes(100 << 20, 1)
    106954752
    """
    return round_up(allocated + layer + uncast_logits, SEGMENT_BYTES)
