"""Network: at which address a process is reached by the other processes of its run.

In: Ray's address of this host. Out: the interface that collectives use, in the environment.
"""

import os
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Hello:
    """What a process says when it is up. missing: what it cannot read of what it was asked about."""

    pid: int
    address: str
    missing: tuple[str, ...]


def join_network() -> str:
    """This host's address in the cluster; gloo and NCCL are told to use its interface, before torch is loaded.

    Alone on one host that is the loopback, so that nothing is reachable from elsewhere.
    """
    import ray

    num_hosts = sum(node["Alive"] for node in ray.nodes())
    # Ray itself makes an outer address of 127.0.0.1, whatever it is told.
    address = LOOPBACK if num_hosts == 1 else str(ray.util.get_node_ip_address())
    interface = interface_of(address)
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        os.environ["NCCL_SOCKET_IFNAME"] = interface
    return address


def interface_of(address: str) -> str:
    import psutil

    interfaces = psutil.net_if_addrs()
    return next((name for name, held in interfaces.items() if any(one.address == address for one in held)), "")


def own_addresses() -> set[str]:
    import psutil

    return {one.address for held in psutil.net_if_addrs().values() for one in held}
