"""Cluster: Ray on this host for one run, or a Ray cluster that is running already; and the devices reserved on it.

In: the bundle's Ray placement, and the address of a cluster or none. Out: placement groups, one an island. They stay
while workers are lost and started again, for starting Ray anew takes seconds and leaves memory in the driver.
Left out: the processes (worker_group.py). The hosts are chosen here (islands.py) and named to Ray, so that what cannot
be satisfied is refused with its reason before anything starts, and never waits in Ray's queue.
"""

import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rlplan.emit.ray import RayPlacement
from rlplan.errors import HostError
from rlplan.runtime.cluster.islands import Host, add_up, deal_islands
from rlplan.runtime.cluster.liveness import Liveness, dead_service, service_pids
from rlplan.runtime.cluster.network import LOOPBACK, own_addresses
from rlplan.runtime.cluster.ray_serializers import WORKER_HOOK, keep_arrow_out
from rlplan.runtime.processes.child_processes import child_processes, send_signal
from rlplan.runtime.processes.interrupts import raise_received
from rlplan.runtime.processes.machine_speed import scaled
from rlplan.runtime.processes.safe_path import ray_job

if TYPE_CHECKING:
    import psutil

STOP_S = 5.0
"""How long processes get to go by themselves before they are killed; scaled."""

ANSWER_S = 10.0
"""A cluster that is there answers within this time."""

RESERVE_S = 60.0
"""What is free is reserved within this time, scaled by the machine's slowdown, or another program took it."""

MAX_STALL_S = 30.0
"""Ray ends a driver that has not reached its GCS for 60 s, before the driver can say why. Source: Ray 2.60.0,
ray_config_def.h, gcs_rpc_server_reconnect_timeout_s."""

_NO_METRICS = {"AUTOSCALER_METRIC_PORT": "70000"}
"""No port has this number, so Ray's monitor, whose metrics ask for no token, logs that it cannot serve them and goes on
without. Source: Ray 2.60.0, autoscaler/_private/monitor.py."""

_ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Ray makes an outer address of the 127.0.0.1 that it is told, unless it takes itself for a desktop's: then all of it
listens on the loopback. Read when Ray is loaded. Source: Ray 2.60.0, _private/services.py, resolve_ip_for_localhost."""

_SYSTEM = {
    "enable_metrics_collection": False,  # its port asks for no token
    "prestart_worker_first_driver": False,  # one idle process a core, which no worker of ours would ever use
}
"""Settings of a Ray of our own. Source: Ray 2.60.0, ray_config_def.h."""

_NODE_LABEL = "ray.io/node-id"
"""The label that Ray gives to every node by itself."""


class Cluster:
    """See the module docstring. `close` always works, also half-way through the start.

    foreign_pids: child processes of the driver that were there before.
    """

    def __init__(self, address: str | None = None, stall_s: float = MAX_STALL_S) -> None:
        """address: of a running Ray cluster to join; None starts Ray on this host. stall_s: how long a process of Ray's
        own may be stopped.
        """
        self.address, self._services = address, Liveness(min(stall_s, MAX_STALL_S))
        self.placement: RayPlacement | None = None
        self.groups: list[Any] = []
        self._places: dict[int, tuple[int, int]] = {}
        self._children: list[psutil.Process] = []
        self.foreign_pids = {child.pid for child in child_processes()}

    def keep_for(self, placement: RayPlacement) -> None:
        """Between two groups of workers: close, unless what stands serves the next ones.

        Ray of our own does where nothing of it has ended; of a cluster that was joined a host may have gone, so that
        hosts are chosen again.
        """
        if self.address is not None or placement != self.placement or not is_ray_up() or self.dead_service():
            self.close()

    def reserve(self, placement: RayPlacement, timeout_s: float) -> None:
        """Start or join Ray and reserve, where it was not kept. Raises: HostError."""
        if self.placement is not None:
            return
        self.placement = placement
        self._places = {
            bundle: (island, offset)
            for island, bundles in enumerate(placement.islands)
            for offset, bundle in enumerate(bundles)
        }
        _prepare_environment()
        if self.address is None:
            _start_alone(placement)
        else:
            _join(self.address)
        self._reserve(placement, min(timeout_s, scaled(RESERVE_S)))

    def strategy(self, bundle: int) -> Any:
        """Where a process of a bundle runs."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        island, offset = self._places[bundle]
        return PlacementGroupSchedulingStrategy(self.groups[island], placement_group_bundle_index=offset)

    def dead_service(self) -> str | None:
        """Which process of a Ray of our own has ended, or is stopped for too long, in words.

        None where all live, or Ray was started by others.
        """
        if self.address is not None or not is_ray_up():
            return None
        import ray

        node = ray._private.worker._global_node
        if ended := dead_service(node):
            return ended
        stopped = self._services.check({} if node is None else service_pids(node))
        return " is ".join(stopped) if stopped else None

    def children(self) -> "list[psutil.Process]":
        """All processes that this run started, kept so that those whose parent died are still known."""
        known = self.foreign_pids | {child.pid for child in self._children}
        self._children += [child for child in child_processes() if child.pid not in known]
        return self._children

    def close(self) -> None:
        """Give back what is reserved and leave Ray; a Ray of our own ends, and what it started with it."""
        import psutil

        children = self.children()
        if self.dead_service() is not None:  # a process that is asked to exit would not hear it
            kill(children)
        # In a thread of its own, for Ray's own end has no deadline.
        ending = threading.Thread(target=self._leave, daemon=True)
        ending.start()
        ending.join(scaled(STOP_S))
        _, alive = psutil.wait_procs(children, timeout=scaled(STOP_S / 2))
        kill(alive)
        self.placement, self.groups, self._children = None, [], []

    def _leave(self) -> None:
        if not is_ray_up():
            return
        import ray
        from ray.util.placement_group import remove_placement_group

        if self.address is not None:
            for group in self.groups:
                remove_placement_group(group)
        ray.shutdown()

    def _reserve(self, placement: RayPlacement, timeout_s: float) -> None:
        """One placement group an island, on the host that was chosen for it."""
        from ray.util.placement_group import placement_group

        islands = [[placement.bundles[bundle] for bundle in island] for island in placement.islands]
        hosts = list_hosts()
        dealt = deal_islands([add_up(island) for island in islands], hosts, placement.spreads_islands)
        if isinstance(dealt, str):
            raise _unsatisfied(dealt, hosts)
        for island, host in zip(islands, dealt, strict=True):
            pins = [{_NODE_LABEL: hosts[host].node}] * len(island)
            self.groups.append(placement_group(island, strategy="STRICT_PACK", bundle_label_selector=pins))
        deadline = time.monotonic() + timeout_s
        for group in self.groups:
            if not group.wait(timeout_seconds=max(0.1, deadline - time.monotonic())):
                raise _unsatisfied(f"not reserved within {timeout_s:.0f} s", list_hosts())


def kill(processes: "Sequence[psutil.Process]") -> None:
    """End processes at once, and wait until they are gone."""
    import psutil

    for process in processes:
        send_signal(process, signal.SIGKILL)
    psutil.wait_procs(processes, timeout=scaled(STOP_S / 2))


def list_hosts() -> list[Host]:
    """The living hosts of the cluster that this process has joined: this one first, the others by address."""
    import ray
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    mine = own_addresses()
    hosts = [
        Host(node["NodeID"], node["NodeManagerAddress"], free.get(node["NodeID"], {}), node["Resources"])
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(hosts, key=lambda host: (host.address not in mine, host.address, host.node))


def is_ray_up() -> bool:
    """Whether this process has joined a Ray. A signal may have broken off its import: then there is none to leave."""
    return bool(getattr(sys.modules.get("ray"), "is_initialized", bool)())


def _prepare_environment() -> None:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 gives the cores to whatever else runs on the host
    # A thread that outlives the run must not start another Ray by asking the one that is gone.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"


def _start_alone(placement: RayPlacement) -> None:
    # A token that only this run knows keeps other users of the host out, and the loopback other hosts.
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=_own_token(), **_ON_LOOPBACK, **_NO_METRICS)
    offered = add_up(placement.bundles)
    try:
        _init(
            address="local",
            num_cpus=int(offered.get("CPU", 0)),
            num_gpus=int(offered.get("GPU", 0)),
            include_dashboard=False,
            object_store_memory=placement.object_store_memory,
            _node_ip_address=LOOPBACK,
            _system_config=_SYSTEM,
        )
        _check_loopback()
    except Exception as error:  # Ray raises bare exceptions too
        raise_received()
        raise HostError(
            f"Ray did not start: {_first_line(error)}",
            where="ray.init",
            rule="a local Ray node on 127.0.0.1",
            way_out="end other Ray nodes on this host (`ray stop`); `rlplan doctor` looks at memory and /dev/shm",
        ) from error


def _init(**options: Any) -> None:
    import ray

    keep_arrow_out()
    options |= {"log_to_driver": False, "logging_level": logging.ERROR}
    ray.init(runtime_env=WORKER_HOOK, job_config=ray_job(), **options)


def _check_loopback() -> None:
    """Where Ray was loaded before it could be told, it listens on every interface. Raises: RuntimeError."""
    import ray

    addresses = {node["NodeManagerAddress"] for node in ray.nodes()}
    if addresses != {LOOPBACK}:
        raise RuntimeError(f"it listens on {', '.join(sorted(addresses))}")


@lru_cache(maxsize=1)
def _own_token() -> str:
    """One for this process: Ray keeps the first that it sees, also when it is started once more."""
    return secrets.token_hex(32)


def _join(address: str) -> None:
    try:
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=ANSWER_S).close()  # Ray itself would try for minutes
        _init(address=address)
    except Exception as error:
        raise_received()
        raise HostError(
            f"no Ray cluster answers at {address}: {_first_line(error)}",
            where="--address",
            rule="a running cluster's HOST:PORT, `rlplan run` on one of its hosts, the same RAY_AUTH_MODE and "
            "RAY_AUTH_TOKEN (where it has one) and the same Ray and Python versions",
            way_out="start it with `ray start --head` here and `ray start --address HOST:PORT` on the other hosts",
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _unsatisfied(reason: str, hosts: list[Host]) -> HostError:
    offers = "; ".join(
        f"{host.address}: " + ", ".join(f"{host.free.get(kind, 0):g} of {host.total[kind]:g} {kind}" for kind in kinds)
        for host in hosts
        if (kinds := [kind for kind in ("CPU", "GPU") if kind in host.total])
    )
    return HostError(
        f"the placement is not satisfied: {reason}",
        where="ray.json",
        rule=f"free on the cluster's hosts: {offers}",
        way_out="plan for what is there, add hosts (`ray start --address`), or end what holds them",
    )
