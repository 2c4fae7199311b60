"""What differs between machines in the memory of one and the same trainer, scorer or engine: a CPU host, a GPU.

In: nothing, or bytes allocated. Out: `CPU` and `CUDA`, of which the formulas ask what they need; what torch reserves on
a GPU. Left out: what a profile states (contexts,
libraries, communicators) and what an engine's settings say.
"""

from dataclasses import dataclass

from rlplan.units import MIB, round_up


@dataclass(frozen=True)
class Machine:
    """A kind of device that trains."""

    collective_copies: int
    """Times that a collective holds what it gathers or scatters: gloo has a buffer of its own, NCCL writes where it is
    wanted. Source: torch 2.13, ProcessGroupGloo.cpp; DeepSpeed 0.19.8, partition_parameters.py."""
    counts_touched: bool
    """Whether memory counts once it is written (pages of a host) and not when it is taken (cudaMalloc)."""
    steps_in_place: bool
    """Whether 8-bit optimizers update in place. Source: bitsandbytes 0.50, backends/cpu/ops.py."""


CPU = Machine(collective_copies=2, counts_touched=True, steps_in_place=False)
CUDA = Machine(collective_copies=1, counts_touched=False, steps_in_place=True)

SEGMENT_BYTES = 2 * MIB
"""Large requests take segments of a multiple of this (`kRoundLarge`)."""


def reserved_bytes(allocated: int, layer: int, uncast_logits: int = 0) -> int:
    """Bytes that torch reserves on a GPU when the loss has `allocated` in use and a layer's tensors take `layer`.

    uncast_logits: of the logits in the model's type, where the loss upcasts them and lets them go.

    Counts: what is allocated, and one layer's tensors once more: the segments that layers cut for themselves are each
    smaller than one tensor of logits, and segments are never joined, so that the logits take new ones; in the same way
    the segment of the 16-bit logits is too small for any tensor of the loss in fp32.
    Source: torch 2.13 c10/cuda/CUDACachingAllocator.cpp. Left out: `expandable_segments`, which leaves almost no gap.
    Assumes: the logits are the largest tensors, as with every vocabulary of today; batches do not grow.

    >>> reserved_bytes(100 << 20, 1)
    106954752
    """
    return round_up(allocated + layer + uncast_logits, SEGMENT_BYTES)
