"""Overheads: bytes that belong to no tensor of the model.

In: a profile and the bytes of the tensors. Out: bytes. Left out: CUDA contexts, graphs and communicators.
"""

from rlplan.spec.hardware.profile import SourcedBytes
from rlplan.units import ceil_div

UNSEEN_SHARE_PERCENT = 1
"""Percent of a process's tensors at its peak that the formulas do not see: temporaries smaller than a layer's own, and
garbage that Python has not collected yet. Measured on four models of 40 to 154 M parameters: 0.0 to 0.9."""

HEAP_SHARE_PERCENT = 40
"""Percent of an action's passing tensors by which a heap that is kept grows beyond them: holes between long-lived and
short-lived ones. Measured in training passes of a model of 40 M parameters, packs of 1024 tokens: 24 to 38."""


def heap_bytes(passing_bytes: int) -> int:
    """Bytes of the holes in a process's heap at the peak of an action (`hardware.keeps_heap`).

    Counts: 40 % of the tensors that are there at the peak and not after it.
    Source: HEAP_SHARE_PERCENT. Assumes: the heap is given back when an action ends (`runtime.workers.worker`).

    >>> heap_bytes(1000)
    400
    """
    return ceil_div(passing_bytes * HEAP_SHARE_PERCENT, 100)


def slack_bytes(constant: SourcedBytes, tensor_bytes: int) -> int:
    """Bytes that a process holds beyond its imports and its tensors, at its peak.

    Counts: the profile's constant (heap, thread stacks, objects) and 1 % of the tensors.
    Source: the profile; UNSEEN_SHARE_PERCENT. Assumes: glibc gives freed memory back (`rlplan.emit.ray`).
    """
    return constant.value + ceil_div(tensor_bytes * UNSEEN_SHARE_PERCENT, 100)
