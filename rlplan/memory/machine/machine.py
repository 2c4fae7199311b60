"""What differs between machines in the memory of one and the same trainer, scorer or engine: a CPU host, a GPU.

In: nothing. Out: `CPU` and `CUDA`, of which the formulas ask what they need. Left out: what a profile states (contexts,
libraries, communicators) and what an engine's settings say.
"""

from rlplan.records import dataclass


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
