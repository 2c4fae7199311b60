"""Cluster: GPUs of one type, how many share a host, and how they are connected.

In: hardware profiles, a power limit. Out: rates in bytes and FLOP per second that real work reaches (peak x
efficiency). Left out: congestion between jobs and rails of different speed. Ranks of a group are numbered host after
host.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import TypeVar

from rlplan.errors import SpecError
from rlplan.spec.hardware.profile import (
    ComputeDtype,
    Efficiencies,
    GpuProfile,
    NodeEfficiencies,
    NodeProfile,
    ServingRates,
)
from rlplan.vocabulary import Dtype

Value = TypeVar("Value")


def _assume(value: float, source: str) -> dict[str, object]:
    return {"value": value, "provenance": "assumed", "source": source}


def assume_network_bytes_per_s(gpu: GpuProfile) -> int:
    """Bandwidth of a host's network per direction, where no node profile with this GPU states it.

    Assumes: 100 Gbit/s in a data center, one adapter; 10 Gbit/s Ethernet for GPUs that may drive a display, as in
    rtx-4090-4x.yaml.
    """
    return 1_250_000_000 if gpu.may_drive_display else 12_500_000_000


@cache
def any_host() -> NodeEfficiencies:
    """Rates of hosts without a node profile."""
    return NodeEfficiencies.model_validate(
        {
            "network": _assume(0.8, "as in node profiles with RoCE"),
            "network_latency": _assume(20e-6, "as in node profiles with RoCE"),
            "host_memory_bytes_per_s": _assume(150 * 10**9, "a server of two sockets with DDR4 at three quarters"),
            "disk_bytes_per_s": _assume(2 * 10**9, "one NVMe disk"),
        }
    )


@dataclass(frozen=True, eq=False)
class Cluster:
    """GPUs of one type. Clusters compare by identity, so that caches can use them as keys."""

    gpu: GpuProfile
    num_gpus: int
    gpus_per_host: int
    node: NodeProfile | None = None
    """Profile of the hosts; None where it is unknown."""
    host_gpus: int = 0
    """GPUs of the whole host, where this cluster is only some of them."""

    @property
    def num_hosts(self) -> int:
        """Number of hosts; the last one may be partly filled."""
        return -(-self.num_gpus // self.gpus_per_host)

    @property
    def gpus_in_link_domain(self) -> int:
        """GPUs that reach each other without the network: those of a host, or of a rack with one NVLink switch."""
        if self.node is None or self.node.num_gpus_in_link_domain <= self.node.num_gpus:
            return self.gpus_per_host
        return max(self.gpus_per_host, self.node.num_gpus_in_link_domain)

    @cached_property
    def efficiencies(self) -> Efficiencies:
        """Shares of peak rates that kernels reach. Raises: SpecError where the profile has none."""
        return self._require(self.gpu.efficiencies, "efficiencies")

    @cached_property
    def serving(self) -> ServingRates:
        """Rates that a rollout engine reaches. Raises: SpecError where the profile has none."""
        return self._require(self.gpu.serving, "serving")

    @cached_property
    def node_efficiencies(self) -> NodeEfficiencies:
        """Shares of peak rates of the node; those of `any_host` without a node profile.

        Raises: SpecError where the node's profile has none.
        """
        return any_host() if self.node is None else self._require(self.node.efficiencies, "efficiencies")

    @cached_property
    def network_bytes_per_s(self) -> float:
        """Peak network bandwidth of a whole host per direction; assumed without a node profile."""
        return float(self.node.network_bytes_per_s.value if self.node else assume_network_bytes_per_s(self.gpu))

    @cached_property
    def memory_bytes_per_s(self) -> float:
        """Peak bandwidth of the device memory. Raises: SpecError where the profile has none."""
        return float(self._require(self.gpu.memory_bytes_per_s, "memory_bytes_per_s").value)

    @cached_property
    def reached_memory_bytes_per_s(self) -> float:
        """Bandwidth of the device memory that kernels reach."""
        return self.memory_bytes_per_s * self.efficiencies.memory.value

    def flops_per_s(self, dtype: Dtype) -> float:
        """Dense matmul peak for `dtype`. Raises: SpecError where the chip does not support it."""
        return float(self.gpu.flops_per_s(ComputeDtype(dtype.value)))

    def _require(self, value: Value | None, key: str) -> Value:
        if value is None:
            raise SpecError(
                f"profile '{self.gpu.name}' has no {key}, so no time can be predicted",
                where=f"{self.gpu.name}: {key}",
                rule="predicted times need memory, matmul and link rates, each with its source",
                way_out="add it to the profile; hardware_profiles/README.md shows how",
            )
        return value


STATIC_WATTS = 100
"""Watts that do not depend on the clock: leakage, memory, links. Assumed: an idle H100 draws 70 to 120 W."""


def limit_gpu_power(gpu: GpuProfile, watts: int | None) -> GpuProfile:
    """Return the profile under a power limit; unchanged without a limit, or with one at or above the rated power.

    Counts: matmul rates follow the clock, which falls with the cube root of the dynamic power (P ~ f V^2, V ~ f). On
    Blackwell they fall linearly, as if its voltage were already at the minimum.
    Source: CMOS power. An H100 SXM limited to 500 of 700 W: (400 / 600)^(1/3) = 0.874. A GB300 with 1,400 W is 1.2
    times as fast as a GB200 with 1,200 W and the same peak (docs/lab-notes.md).

    >>> from rlplan.spec.hardware.catalogue import get_gpu
    >>> slow = limit_gpu_power(get_gpu("h100-sxm", where=""), 500)
    >>> round(slow.efficiencies.matmul.value / 0.63, 3)
    0.874
    """
    if watts is None or gpu.power is None or gpu.efficiencies is None or watts >= gpu.power.value:
        return gpu
    dynamic = max(1, watts - STATIC_WATTS) / (gpu.power.value - STATIC_WATTS)
    factor = dynamic if gpu.architecture.startswith("10.") else dynamic ** (1 / 3)
    rates = gpu.efficiencies
    slower = {
        name: share.model_copy(update={"value": share.value * factor})
        for name, share in (("matmul", rates.matmul), ("matmul_8bit", rates.matmul_8bit))
        if share
    }
    return gpu.model_copy(update={"efficiencies": rates.model_copy(update=slower)})
