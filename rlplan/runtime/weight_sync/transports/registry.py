"""Transports by name: one file in this folder each.

In: an endpoint. Out: the sender's or a reader's side.
"""

import importlib
from collections.abc import Sequence
from typing import Any, cast

from rlplan.memory.weight_sync.packets import Packet
from rlplan.runtime.weight_sync.channel import Endpoint, Inlet, Outlet
from rlplan.vocabulary import Transport

_MODULES = {
    Transport.SHARED_MEMORY: ("shared_memory", "SharedMemory"),
    Transport.GLOO: ("gloo", "Gloo"),
    Transport.DISK: ("disk", "Disk"),
    Transport.CUDA_IPC: ("cuda_ipc", "CudaIpc"),
    Transport.NCCL: ("nccl", "Nccl"),
}


def make_outlet(endpoint: Endpoint, packets: Sequence[Packet]) -> Outlet:
    """Create the sender's side; its `endpoint` names the file, port or device memory that readers open."""
    return cast(Outlet, _load_class(endpoint, "Outlet")(endpoint, packets))


def open_inlet(endpoint: Endpoint, packets: Sequence[Packet], reader: int) -> Inlet:
    """Create a reader's side. reader: its number among all processes of all engines."""
    return cast(Inlet, _load_class(endpoint, "Inlet")(endpoint, packets, reader))


def _load_class(endpoint: Endpoint, side: str) -> Any:
    module, prefix = _MODULES[endpoint.transport]
    return getattr(importlib.import_module(f"rlplan.runtime.weight_sync.transports.{module}"), prefix + side)
