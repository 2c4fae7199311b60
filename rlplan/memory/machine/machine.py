"""Properties of machines that change memory: kinds of devices, bytes that belong to no tensor.

In: bytes allocated, a profile. Out: `CPU` and `CUDA`, which the formulas query; bytes that torch reserves on a GPU;
slack and holes of a process on a CPU host. Left out: CUDA contexts, graphs and communicators; an engine's settings.
"""

from dataclasses import dataclass

from rlplan.spec.hardware.profile import SourcedBytes
from rlplan.units import MIB, ceil_div, round_up
from rlplan.vocabulary import MemoryKind


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
    """Bytes that torch reserves on a GPU at the loss, with `allocated` bytes in use and layers of `layer` bytes.

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


UNSEEN_SHARE_PERCENT = 1
"""Percent of a process's tensors at its peak that no formula counts: small temporaries, and garbage that Python has not
collected yet. Measured on four models of 40 to 154 M parameters: 0.0 to 0.9."""

COMPILED_MATMUL_BYTES = 14 << 20
"""Bytes of matmuls that oneDNN compiles in a 16-bit training process, which caches 32 of them and 32 of torch's own
(`rlplan.emit.ray`). fp32 matmuls use neither cache. Measured: 14 MB after 60 different numbers of rows
(docs/lab-notes.md, "Compiled matmuls in bf16 on a CPU")."""

HEAP_SHARE_PERCENT = 40
"""Holes of a kept heap, in percent of an action's temporary tensors: gaps between long-lived and short-lived tensors.
Measured in two training passes of one length, 40 M parameters on one core: 24 to 38."""

TRAINING_HOLES_BYTES = 110 << 20
TRAINING_HOLES_PERCENT = 25, 130
"""Holes of a training pass or an optimizer's step: bytes, and percent of the temporary tensors and of the gradients at
the peak. Each gradient stays in the middle of the memory that its pass frees, and the next passes have other lengths.
Source: runs of two models in bf16 (docs/lab-notes.md, "Holes of a heap that is kept")."""


def heap_bytes(passing_bytes: int, gradient_bytes: int = 0) -> int:
    """Bytes of the holes in a process's heap at the peak of an action (`hardware.keeps_heap`).

    passing_bytes: bytes of temporary tensors at the peak. gradient_bytes: bytes of gradients at the peak.
    Counts: with gradients 110 MiB, 25 % of the temporary tensors and 1.3 times the gradients, capped at the temporary
    tensors; otherwise 40 % of the temporary tensors.
    Source: TRAINING_HOLES_BYTES, TRAINING_HOLES_PERCENT, HEAP_SHARE_PERCENT.
    Assumes: the heap is returned to the system when an action ends (`runtime.workers.worker`).

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
    """Bytes of a process in addition to its imports and its tensors, at its peak.

    Counts: the profile's constant (heap, thread stacks, objects) and 1 % of the tensors.
    Source: the profile; UNSEEN_SHARE_PERCENT. Assumes: glibc returns freed memory (`rlplan.emit.ray`).
    """
    return constant.value + ceil_div(tensor_bytes * UNSEEN_SHARE_PERCENT, 100)


def set_slack(sizes: dict[MemoryKind, int], constant: SourcedBytes, compiled: int = 0) -> None:
    """Replace the FRAGMENTATION of a CPU process by the slack of all its tensors and the bytes of compiled code."""
    tensors = sum(sizes.values()) - sizes[MemoryKind.PROCESS] - sizes[MemoryKind.FRAGMENTATION]
    sizes[MemoryKind.FRAGMENTATION] = slack_bytes(constant, tensors) + compiled
