"""Optimizer states: bytes that an optimizer keeps between steps, for the elements that one rank updates, and bytes
on the host and on disk when DeepSpeed's stage 3 swaps them to NVMe.

In: parameter sizes and an optimizer; a rank's host states under CPU offload. Out: bytes. Left out: master weights and
sharding (zero.py, sharding.py), the drive's speed and alignment.

Symbols: n elements of a tensor, e bytes of an element of a moment.
Source of NVMe: DeepSpeed 0.19.8, runtime/swap_tensor/optimizer_utils.py (`SwapBufferManager`: pinned fp32 buffers of a
whole sub-group), partitioned_param_swapper.py (one pinned tensor of `buffer_count` buffers), zero/offload_config.py.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum

from rlplan.memory.model.block import FLOAT_BYTES
from rlplan.units import ceil_div
from rlplan.vocabulary import MemoryKind

STEP_COUNTER_BYTES = 4
"""Bytes of the `step` tensor that torch's AdamW keeps for every tensor it updates (torch 2.13, optim/adamw.py)."""
BLOCK_SIZE = 256
"""Elements that share one scale. Source: bitsandbytes 0.50, optim/optimizer.py; torchao 0.14 low_bit_optim."""
MIN_QUANTIZED_NUMEL = 4096
"""Tensors below this keep fp32 moments. Source: bitsandbytes 0.50, `min_8bit_size`; torchao 0.14 `subclass_8bit`."""
SCALE_BYTES = 4
CODE_BYTES = 4 * 256
"""Bytes of the code table of 256 values. Source: bitsandbytes 0.50, optim/optimizer.py, `name2qmap`."""


class Optimizer(StrEnum):
    """The optimizers whose memory is known."""

    ADAMW = "adamw"
    ADAMW_8BIT = "adamw_8bit"
    MUON = "muon"


def optimizer_bytes(optimizer: Optimizer, numels: Iterable[int], moment_bytes: int = 4) -> int:
    """Bytes of the states that an optimizer keeps for tensors of these sizes, from the first step on.

    Counts: AdamW two moments of n*e and a step counter; 8-bit AdamW two bytes an element and two scales a block of 256,
    fp32 moments for tensors below 4096 elements, and once the two codes of 256 values; Muon one momentum of n*e.
    Source: torch 2.13 optim/adamw.py; bitsandbytes 0.50 optim/optimizer.py; DeepSpeed 0.19.8 runtime/zero/muon.
    Assumes: Muon gets only the matrices of the hidden layers; AdamW's tensors are counted in another call.

    >>> optimizer_bytes(Optimizer.ADAMW, [1000])
    8004
    >>> optimizer_bytes(Optimizer.ADAMW_8BIT, [8192, 10])  # 2 * (8192 + 32 scales of 4) + 8 * 10 + 2 * 256 * 4
    18768
    """
    if optimizer is Optimizer.MUON:
        return sum(numels) * moment_bytes
    if optimizer is Optimizer.ADAMW:
        return sum(2 * numel * moment_bytes + STEP_COUNTER_BYTES for numel in numels)
    sizes = tuple(numels)
    codes = 2 * CODE_BYTES if any(numel >= MIN_QUANTIZED_NUMEL for numel in sizes) else 0
    return sum(map(quantized_bytes, sizes)) + codes


def eight_bit_step_bytes(optimizer: Optimizer, numels: Iterable[int]) -> int:
    """Temporary bytes of a step of 8-bit AdamW on a CPU, which updates one tensor at a time.

    Counts: both moments in fp32, the scaled gradient, the root of the second moment and its corrected copy, 5 * 4 bytes
    an element of the largest tensor.
    Source: bitsandbytes 0.50, backends/cpu/ops.py, `_optimizer_update_8bit_blockwise_cpu`.
    Differs: the kernels for GPUs update in place. Assumes: gradients and master weights in fp32.

    >>> eight_bit_step_bytes(Optimizer.ADAMW_8BIT, [100_000, 10]), eight_bit_step_bytes(Optimizer.ADAMW, [100_000])
    (2000000, 0)
    """
    return 5 * 4 * max(numels, default=0) if optimizer is Optimizer.ADAMW_8BIT else 0


def quantized_bytes(numel: int) -> int:
    """Bytes of both 8-bit moments of a tensor, with their scales; small tensors have fp32 moments.

    >>> quantized_bytes(8192), quantized_bytes(10)  # 2 * (8192 + 32 scales of 4), 8 * 10
    (16640, 80)
    """
    if numel < MIN_QUANTIZED_NUMEL:
        return 2 * numel * 4
    return 2 * (numel + ceil_div(numel, BLOCK_SIZE) * SCALE_BYTES)


OPTIMIZER_BUFFERS = 4
PARAMETER_BUFFERS = 5
PARAMETER_BUFFER_NUMEL = 100_000_000
_ON_DISK = (MemoryKind.MASTER_WEIGHTS, MemoryKind.OPTIMIZER, MemoryKind.WEIGHTS)


def swap_buffer_bytes(sub_group_numel: int, *, swaps_parameters: bool, element_bytes: int) -> int:
    """Bytes of the swap buffers: four of a sub-group in fp32, and five of 1e8 parameters.

    >>> swap_buffer_bytes(1000, swaps_parameters=False, element_bytes=2)
    16000
    >>> swap_buffer_bytes(1000, swaps_parameters=True, element_bytes=2)
    1000016000
    """
    parameters = PARAMETER_BUFFERS * PARAMETER_BUFFER_NUMEL * element_bytes if swaps_parameters else 0
    return OPTIMIZER_BUFFERS * FLOAT_BYTES * sub_group_numel + parameters


def keep_on_host(host: Mapping[MemoryKind, int], buffers: int) -> dict[MemoryKind, int]:
    """Bytes that stay in the host's memory: gradients, and the swap buffers.

    >>> keep_on_host({MemoryKind.OPTIMIZER: 8, MemoryKind.GRADIENTS: 4}, 2)
    {<MemoryKind.GRADIENTS: 'gradients'>: 4, <MemoryKind.COMM_BUFFERS: 'comm_buffers'>: 2}
    """
    return {kind: size for kind, size in host.items() if kind not in _ON_DISK} | {MemoryKind.COMM_BUFFERS: buffers}


def disk_bytes(host: Mapping[MemoryKind, int]) -> int:
    """Bytes of a rank's states on disk: master weights, moments, offloaded parameters.

    >>> disk_bytes({MemoryKind.OPTIMIZER: 8, MemoryKind.MASTER_WEIGHTS: 4, MemoryKind.GRADIENTS: 4})
    12
    """
    return sum(size for kind, size in host.items() if kind in _ON_DISK)
