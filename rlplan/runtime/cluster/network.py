"""Network: the address at which the other processes of a run reach this one.

In: Ray's address of this host. Out: the interface for collectives, set in the environment.
"""

import os
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Hello:
    """A started process's greeting. missing: paths of models that it cannot read."""

    pid: int
    address: str
    missing: tuple[str, ...]


def join_network() -> str:
    """Return this host's address in the cluster, and make gloo and NCCL use its interface. Call it before torch loads.

    On a single host the address is the loopback, so nothing is reachable from other hosts.
    """
    import ray

    num_hosts = sum(node["Alive"] for node in ray.nodes())
    # Ray replaces 127.0.0.1 by an external address, so it cannot be asked on a single host.
    address = LOOPBACK if num_hosts == 1 else str(ray.util.get_node_ip_address())
    interface = find_interface(address)
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        os.environ["NCCL_SOCKET_IFNAME"] = interface
    return address


def find_interface(address: str) -> str:
    import psutil

    interfaces = psutil.net_if_addrs().items()
    return next((name for name, bound in interfaces if any(entry.address == address for entry in bound)), "")


def own_addresses() -> set[str]:
    import psutil

    return {entry.address for bound in psutil.net_if_addrs().values() for entry in bound}
