"""Cluster: a local Ray for one run, or a running Ray cluster to join; and the devices reserved on it.

Placement groups stay while lost workers are restarted, because a restart of Ray takes seconds and leaves memory in the
driver. The hosts are chosen here (islands.py) and passed to Ray, so an impossible placement fails at once with its
reason instead of waiting in Ray's queue.
In: the bundle's Ray placement, and a cluster's address or None. Out: placement groups, one per island.
Left out: the processes (worker_group.py).
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
from rlplan.runtime.processes.child_processes import list_child_processes, send_signal
from rlplan.runtime.processes.interrupts import raise_received
from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.runtime.processes.safe_path import make_ray_job

if TYPE_CHECKING:
    import psutil

STOP_S = 5.0
"""Seconds that processes get to exit by themselves before they are killed; scaled."""

ANSWER_S = 10.0
"""Seconds within which a running cluster accepts a connection."""

RESERVE_S = 60.0
"""Seconds within which free devices are reserved; scaled. If it takes longer, another program took them."""

MAX_STALL_S = 30.0
"""Ray kills a driver that has not reached its GCS for 60 s; the driver must report the cause before that.
Source: Ray 2.60.0, ray_config_def.h, gcs_rpc_server_reconnect_timeout_s."""

_NO_METRICS = {"AUTOSCALER_METRIC_PORT": "70000"}
"""An invalid port number turns off the metrics of Ray's monitor, which would be served without a token.
Source: Ray 2.60.0, autoscaler/_private/monitor.py."""

_ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Ray replaces 127.0.0.1 by an external address unless this is set; with it, all of Ray listens on the loopback.
The variable is read when Ray is imported. Source: Ray 2.60.0, _private/services.py, resolve_ip_for_localhost."""

_SYSTEM = {
    "enable_metrics_collection": False,  # the metrics port requires no token
    "prestart_worker_first_driver": False,  # it would start one idle process per core, which no worker here uses
}
"""Settings of a local Ray. Source: Ray 2.60.0, ray_config_def.h."""

_NODE_LABEL = "ray.io/node-id"
"""The label that Ray itself gives to every node."""


class Cluster:
    """A Ray cluster and its reserved devices. `close` always works, also during an unfinished start.

    foreign_pids: child processes that the driver had before this object was created.
    """

    def __init__(self, address: str | None = None, stall_s: float = MAX_STALL_S) -> None:
        """Remember how to reach Ray; nothing is started yet.

        address: a running Ray cluster to join; None starts Ray on this host. stall_s: seconds that a Ray process may be
        stopped.
        """
        self.address, self._services = address, Liveness(min(stall_s, MAX_STALL_S))
        self.placement: RayPlacement | None = None
        self.groups: list[Any] = []
        self._places: dict[int, tuple[int, int]] = {}
        self._children: list[psutil.Process] = []
        self.foreign_pids = {child.pid for child in list_child_processes()}

    def keep_or_close(self, placement: RayPlacement) -> None:
        """Keep Ray and the reservation for the next worker group if they can serve it; otherwise close.

        A local Ray is kept if none of its processes has ended. A joined cluster may have lost a host, so hosts are
        chosen again.
        """
        if self.address is not None or placement != self.placement or not is_ray_up() or self.dead_service():
            self.close()

    def reserve(self, placement: RayPlacement, timeout_s: float) -> None:
        """Start or join Ray and reserve the devices, unless both were kept. Raises: HostError."""
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
        self._reserve(placement, min(timeout_s, scale_seconds(RESERVE_S)))

    def strategy(self, bundle: int) -> Any:
        """Ray's scheduling strategy for a process of a bundle."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        island, offset = self._places[bundle]
        return PlacementGroupSchedulingStrategy(self.groups[island], placement_group_bundle_index=offset)

    def dead_service(self) -> str | None:
        """Describe a process of a local Ray that has ended, or has been stopped for too long.

        None when all are alive, or when Ray was joined.
        """
        if self.address is not None or not is_ray_up():
            return None
        import ray

        node = ray._private.worker._global_node
        if ended := dead_service(node):
            return ended
        stopped = self._services.check({} if node is None else service_pids(node))
        return " is ".join(stopped) if stopped else None

    def list_children(self) -> "list[psutil.Process]":
        """All processes that this run started. They are remembered, so orphans stay known."""
        self._children += list_child_processes(self.foreign_pids | {child.pid for child in self._children})
        return self._children

    def close(self) -> None:
        """Release the devices and leave Ray; stop a local Ray with everything that it started."""
        import psutil

        children = self.list_children()
        if self.dead_service() is not None:  # a broken Ray cannot ask its workers to exit
            kill(children)
        # ray.shutdown has no deadline, so it runs in a thread.
        ending = threading.Thread(target=self._leave, daemon=True)
        ending.start()
        ending.join(scale_seconds(STOP_S))
        _, alive = psutil.wait_procs(children, timeout=scale_seconds(STOP_S / 2))
        kill(alive)
        self.placement, self.groups, self._children = None, [], []

    def _leave(self) -> None:
        if not is_ray_up():
            return
        import ray
        from ray.util.placement_group import remove_placement_group

        # a local Ray ends with its groups; a joined cluster would keep the devices reserved
        if self.address is not None:
            for group in self.groups:
                remove_placement_group(group)
        ray.shutdown()

    def _reserve(self, placement: RayPlacement, timeout_s: float) -> None:
        """Create one placement group per island, on the host chosen for it."""
        from ray.util.placement_group import placement_group

        islands = [[placement.bundles[bundle] for bundle in island] for island in placement.islands]
        hosts = list_hosts()
        assigned = deal_islands([add_up(island) for island in islands], hosts, placement.spreads_islands)
        if isinstance(assigned, str):
            raise _refuse_resources(assigned, hosts)
        for island, host in zip(islands, assigned, strict=True):
            pins = [{_NODE_LABEL: hosts[host].node}] * len(island)
            self.groups.append(placement_group(island, strategy="STRICT_PACK", bundle_label_selector=pins))
        deadline = time.monotonic() + timeout_s
        # all groups were requested above, so that Ray reserves them at the same time
        for group in self.groups:
            if not group.wait(timeout_seconds=max(0.1, deadline - time.monotonic())):
                raise _refuse_resources(f"not reserved within {timeout_s:.0f} s", list_hosts())


def kill(processes: "Sequence[psutil.Process]") -> None:
    """Kill processes, and wait until they are gone."""
    import psutil

    for process in processes:
        send_signal(process, signal.SIGKILL)
    psutil.wait_procs(processes, timeout=scale_seconds(STOP_S / 2))


def list_hosts() -> list[Host]:
    """List the live hosts of the joined cluster: this one first, the others by address."""
    import ray
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    local = own_addresses()
    hosts = [
        Host(node["NodeID"], node["NodeManagerAddress"], free.get(node["NodeID"], {}), node["Resources"])
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(hosts, key=lambda host: (host.address not in local, host.address, host.node))


def is_ray_up() -> bool:
    """Whether this process has joined a Ray cluster. If a signal interrupted the import of Ray, it has not."""
    return bool(getattr(sys.modules.get("ray"), "is_initialized", bool)())


def _prepare_environment() -> None:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default of 15 lets every other program go first
    # A thread that outlives the run must not start a new Ray by a call to the old one.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"


def _start_alone(placement: RayPlacement) -> None:
    # The run's own token keeps out other users of the host; the loopback keeps out other hosts.
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
    except Exception as error:  # Ray also raises plain Exception
        raise_received()
        raise HostError(
            f"Ray did not start: {_first_line(error)}",
            where="ray.init",
            rule="a local Ray node on 127.0.0.1",
            way_out="stop other Ray nodes on this host (`ray stop`); `rlplan doctor` checks memory and /dev/shm",
        ) from error


def _init(**options: Any) -> None:
    import ray

    keep_arrow_out()
    options |= {"log_to_driver": False, "logging_level": logging.ERROR}
    ray.init(runtime_env=WORKER_HOOK, job_config=make_ray_job(), **options)


def _check_loopback() -> None:
    """Check that Ray listens on the loopback only: it does not if it was imported too early. Raises: RuntimeError."""
    import ray

    addresses = {node["NodeManagerAddress"] for node in ray.nodes()}
    if addresses != {LOOPBACK}:
        raise RuntimeError(f"it listens on {', '.join(sorted(addresses))}")


@lru_cache(maxsize=1)
def _own_token() -> str:
    """A token for this process. Ray keeps the first one that it sees, also when it is started again."""
    return secrets.token_hex(32)


def _join(address: str) -> None:
    try:
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=ANSWER_S).close()  # Ray itself would retry for minutes
        _init(address=address)
    except Exception as error:
        raise_received()
        raise HostError(
            f"no Ray cluster answers at {address}: {_first_line(error)}",
            where="--address",
            rule="HOST:PORT of a running cluster; `rlplan run` on one of its hosts, with the same RAY_AUTH_MODE and "
            "RAY_AUTH_TOKEN (if it has one), Ray and Python versions",
            way_out="start it with `ray start --head` here and `ray start --address HOST:PORT` on the other hosts",
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _refuse_resources(reason: str, hosts: list[Host]) -> HostError:
    offers = "; ".join(
        f"{host.address}: " + ", ".join(f"{host.free.get(kind, 0):g} of {host.total[kind]:g} {kind}" for kind in kinds)
        for host in hosts
        if (kinds := [kind for kind in ("CPU", "GPU") if kind in host.total])
    )
    return HostError(
        f"the placement cannot be reserved: {reason}",
        where="ray.json",
        rule=f"free on the cluster's hosts: {offers}",
        way_out="plan for the free devices, add hosts (`ray start --address`), or stop the programs that use them",
    )
