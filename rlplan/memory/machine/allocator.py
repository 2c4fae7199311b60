"""The caching allocator: bytes that torch has reserved from the driver when a number of bytes is allocated.

In: bytes allocated at the loss, one layer's, the logits'. Out: bytes reserved. Left out: `expandable_segments`, which
leaves almost no gap; batches that grow from step to step.

Source: torch 2.13 c10/cuda/CUDACachingAllocator.cpp.
"""

from rlplan.units import MIB, round_up

SEGMENT_BYTES = 2 * MIB
"""Large requests take segments of a multiple of this (`kRoundLarge`)."""


def reserved_bytes(allocated: int, layer: int, uncast_logits: int = 0) -> int:
    """Bytes reserved when the loss has `allocated` in use and a layer's tensors take `layer`.

    uncast_logits: of the logits in the model's type, where the loss upcasts them and lets them go.

    Counts: what is allocated, and one layer's tensors once more: the segments that layers cut for themselves are each
    smaller than one tensor of logits, and segments are never joined, so that the logits take new ones; in the same way
    the segment of the 16-bit logits is too small for any tensor of the loss in fp32.
    Assumes: the logits are the largest tensors, as with every vocabulary of today.

    >>> reserved_bytes(100 << 20, 1)
    106954752
    """
    return round_up(allocated + layer + uncast_logits, SEGMENT_BYTES)
