"""Hosts on one box: network namespaces joined by a bridge, each with its own address, /dev/shm and Ray node.

Needs root and iproute2 (`make system-packages`). Without them the tests that use this fail.
"""

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rlplan.runtime.processes.machine_speed import scale_seconds
from tests.waiting import Patience

RAY = str(Path(sys.executable).parent / "ray")
PORT = 6379
START_S = 120

FIRST_CLASS = {"RAY_worker_niceness": "0"}
"""Settings that docs/runtime/placements.md recommends for hosts with other work."""


@dataclass(frozen=True)
class Hosts:
    """A running cluster. namespaces and addresses: of each host; the first is Ray's head."""

    namespaces: tuple[str, ...]
    addresses: tuple[str, ...]
    environment: dict[str, str]

    @property
    def address(self) -> str:
        """Address for `rlplan run --address`."""
        return f"{self.addresses[0]}:{PORT}"

    def command(self, host: int, *words: str) -> list[str]:
        """A command that runs on a host."""
        return ["ip", "netns", "exec", self.namespaces[host], *words]

    def pids(self) -> list[int]:
        """Everything that runs on the hosts."""
        texts = [
            subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout
            for name in self.namespaces
        ]
        return [int(pid) for text in texts for pid in text.split()]


@contextmanager
def cluster_of(num_hosts: int, num_cpus: int, log_folder: Path) -> Iterator[Hosts]:
    """Hosts 10.77.0.1, 10.77.0.2 …, each a Ray node of one cluster."""
    _remove_left_over()
    mark = f"rlp{os.getpid()}"
    switch, names = f"{mark}s", tuple(f"{mark}h{index}" for index in range(num_hosts))
    addresses = tuple(f"10.77.0.{index + 1}" for index in range(num_hosts))
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    hosts = Hosts(names, addresses, {**os.environ, **token})
    children: list[subprocess.Popen[bytes]] = []
    try:
        _wire(switch, names, addresses)
        for index in range(num_hosts):
            children.append(_start_node(hosts, index, num_cpus, log_folder / f"ray-{index}.log"))
            _wait_for_text(log_folder / f"ray-{index}.log", "Ray runtime started", children[-1])
        yield hosts
    finally:
        for child in children:
            child.send_signal(signal.SIGTERM)
        _end(hosts, children)
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _remove_left_over() -> None:
    """Namespaces of test runs that were killed outright: their process is gone."""
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    for name, pid in re.findall(r"^(rlp(\d+)(?:s|h\d+))\b", listed, flags=re.MULTILINE):
        if not Path(f"/proc/{pid}").exists():
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _wire(switch: str, names: tuple[str, ...], addresses: tuple[str, ...]) -> None:
    """One namespace with a bridge, and one a host whose eth0 is plugged into it."""

    def do(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    do("netns", "add", switch)
    do("-n", switch, "link", "add", "bridge", "type", "bridge")
    do("-n", switch, "link", "set", "bridge", "up")
    for index, (name, address) in enumerate(zip(names, addresses, strict=True)):
        do("netns", "add", name)
        do("-n", name, "link", "set", "lo", "up")
        do("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"port{index}", "netns", switch)
        do("-n", switch, "link", "set", f"port{index}", "master", "bridge", "up")
        do("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        do("-n", name, "link", "set", "eth0", "up")
        do("-n", name, "route", "add", "default", "via", address)


def _start_node(hosts: Hosts, index: int, num_cpus: int, log: Path) -> "subprocess.Popen[bytes]":
    role = ["--head", f"--port={PORT}", "--include-dashboard=false"] if index == 0 else [f"--address={hosts.address}"]
    start = [
        RAY,
        "start",
        *role,
        f"--node-ip-address={hosts.addresses[index]}",
        f"--num-cpus={num_cpus}",
        "--num-gpus=0",
    ]
    start += ["--object-store-memory=134217728", "--disable-usage-stats", "--block"]
    script = 'mount -t tmpfs -o size=1g tmpfs /dev/shm && exec "$@"'
    command = hosts.command(index, "unshare", "--mount", "sh", "-c", script, "sh", *start)
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=hosts.environment | FIRST_CLASS)


def _wait_for_text(log: Path, text: str, child: "subprocess.Popen[bytes]") -> None:
    patience = Patience(START_S)
    while text not in log.read_text():
        assert child.poll() is None, log.read_text()
        assert patience.left_s() > 0, log.read_text()
        time.sleep(0.1)


def _end(hosts: Hosts, children: "list[subprocess.Popen[bytes]]") -> None:
    """End every process of the hosts, by its id."""
    patience = Patience(10)
    while hosts.pids() and patience.left_s() > 0:
        time.sleep(0.1)
        for child in children:
            child.poll()
    for pid in hosts.pids():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for child in children:
        child.wait(scale_seconds(10))
