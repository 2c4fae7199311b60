"""Overheads: bytes that belong to no tensor of the model.

In: a profile and the bytes of the tensors. Out: bytes. Left out: CUDA contexts, graphs and communicators.
"""

from rlplan.spec.hardware.profile import SourcedBytes
from rlplan.units import ceil_div

UNSEEN_SHARE_PERCENT = 1
"""Percent of a process's tensors at its peak that the formulas do not see: temporaries smaller than a layer's own, and
garbage that Python has not collected yet. Measured on four models of 40 to 154 M parameters: 0.0 to 0.9."""

COMPILED_MATMUL_BYTES = 14 << 20
"""Of matmuls that oneDNN compiled for a training process in 16 bits, which keeps 32 of them and 32 of torch's own
(`rlplan.emit.ray`); those in fp32 go through neither. Measured: 14 MB after 60 numbers of rows (docs/decisions.md,
"Compiled matmuls in bf16 on a CPU")."""

HEAP_SHARE_PERCENT = 40
"""Percent of an action's passing tensors by which a heap that is kept grows beyond them: holes between long-lived and
short-lived ones. Measured in two training passes of one length, 40 M parameters on one core: 24 to 38."""

TRAINING_HOLES_BYTES = 110 << 20
TRAINING_HOLES_PERCENT = 25, 130
"""Holes of a training pass or an optimizer's step: bytes, and percent of the passing tensors and of the gradients that
are there at the peak. Each gradient stays in the middle of what its pass frees, and the next passes have other lengths.
From runs of two models in bf16 (docs/decisions.md, "Holes of a heap that is kept")."""


def heap_bytes(passing_bytes: int, gradient_bytes: int = 0) -> int:
    """Bytes of the holes in a process's heap at the peak of an action (`hardware.keeps_heap`).

    passing_bytes: of tensors that are there at the peak and not after it. gradient_bytes: at the peak.
    Counts: beside gradients 110 MiB, 25 % of what passes and 1.3 times the gradients, at most what passes; elsewhere
    40 % of what passes.
    Source: TRAINING_HOLES_BYTES, TRAINING_HOLES_PERCENT, HEAP_SHARE_PERCENT.
    Assumes: the heap is given back when an action ends (`runtime.workers.worker`).

    >>> heap_bytes(1000), heap_bytes(1000, 100), heap_bytes(200 << 20, 100 << 20) >> 20
    (400, 1000, 200)
    >>> heap_bytes(800 << 20, 100 << 20) >> 20  # 110 + 200 + 130
    440
    """
    if not gradient_bytes:
        return ceil_div(passing_bytes * HEAP_SHARE_PERCENT, 100)
    passing, gradients = TRAINING_HOLES_PERCENT
    holes = TRAINING_HOLES_BYTES + ceil_div(passing_bytes * passing + gradient_bytes * gradients, 100)
    return min(passing_bytes, holes)


def slack_bytes(constant: SourcedBytes, tensor_bytes: int) -> int:
    """Bytes that a process holds beyond its imports and its tensors, at its peak.

    Counts: the profile's constant (heap, thread stacks, objects) and 1 % of the tensors.
    Source: the profile; UNSEEN_SHARE_PERCENT. Assumes: glibc gives freed memory back (`rlplan.emit.ray`).
    """
    return constant.value + ceil_div(tensor_bytes * UNSEEN_SHARE_PERCENT, 100)
