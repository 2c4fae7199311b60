"""Offload to NVMe: bytes on the host and on disk when DeepSpeed's stage 3 swaps states.

In: a rank's host states under CPU offload, sizes of buffers. Out: bytes. Left out: the drive's speed and alignment.

Source: DeepSpeed 0.19.8, runtime/swap_tensor/optimizer_utils.py (`SwapBufferManager`: pinned fp32 buffers of a whole
sub-group), partitioned_param_swapper.py (one pinned tensor of `buffer_count` buffers), zero/offload_config.py (counts).
"""

from collections.abc import Mapping

from rlplan.memory.model.block import FLOAT_BYTES
from rlplan.vocabulary import MemoryKind

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
