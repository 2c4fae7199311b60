"""Cluster: GPUs of one kind, how many share a host, and the link between any number of them.

In: hardware profiles. Out: rates in bytes and FLOP per second that work reaches (peak x efficiency).
Left out: congestion between jobs, rails that differ; ranks of a group lie side by side, host after host.
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


def _assumed(value: float, source: str) -> dict[str, object]:
    return {"value": value, "provenance": "assumed", "source": source}


@cache
def any_host() -> NodeEfficiencies:
    """Of a single host that no node profile describes."""
    return NodeEfficiencies.model_validate(
        {
            "network": _assumed(0.8, "one host has no use for it"),
            "network_latency": _assumed(20e-6, "one host has no use for it"),
            "host_memory_bytes_per_s": _assumed(150 * 10**9, "a server of two sockets with DDR4 at three quarters"),
            "disk_bytes_per_s": _assumed(2 * 10**9, "one NVMe disk"),
        }
    )


@dataclass(frozen=True, eq=False)
class Cluster:
    """GPUs of one kind. Compared by identity, so that what was computed of one can be kept."""

    gpu: GpuProfile
    num_gpus: int
    gpus_per_host: int
    node: NodeProfile | None = None
    """The machine they sit in, None where it is not known (then one host at most)."""
    host_gpus: int = 0
    """GPUs of a host, where these are some of them and others are next to them."""

    @property
    def num_hosts(self) -> int:
        """Hosts, the last of them perhaps not full."""
        return -(-self.num_gpus // self.gpus_per_host)

    @property
    def gpus_in_link_domain(self) -> int:
        """GPUs that reach each other without the network: those of a host, or of a rack that one switch joins."""
        if self.node is None or self.node.num_gpus_in_link_domain <= self.node.num_gpus:
            return self.gpus_per_host
        return max(self.gpus_per_host, self.node.num_gpus_in_link_domain)

    @cached_property
    def efficiencies(self) -> Efficiencies:
        """Shares of peaks. Raises: SpecError where the profile has none."""
        return self._known(self.gpu.efficiencies, "efficiencies")

    @cached_property
    def serving(self) -> ServingRates:
        """What a rollout engine reaches. Raises: SpecError where the profile has none."""
        return self._known(self.gpu.serving, "serving")

    @cached_property
    def node_efficiencies(self) -> NodeEfficiencies:
        """Shares of peaks of the whole node; of a host that is not known, those of `any_host`. Raises: SpecError where
        several hosts have no node, for then their network is not known."""
        if self.node is None and self.num_hosts == 1:
            return any_host()
        return self._known(self.node.efficiencies if self.node else None, "node")

    @cached_property
    def memory_bytes_per_s(self) -> float:
        """Peak of the device memory. Raises: SpecError where the profile has none."""
        return float(self._known(self.gpu.memory_bytes_per_s, "memory_bytes_per_s").value)

    def flops_per_s(self, dtype: Dtype) -> float:
        """Dense peak of matmuls of `dtype`. Raises: SpecError where the chip has none."""
        return float(self.gpu.flops_per_s(ComputeDtype(dtype.value)))

    def _known(self, value: Value | None, key: str) -> Value:
        if value is None:
            raise SpecError(
                f"profile '{self.gpu.name}' has no {key}, so no time can be predicted",
                where=f"{self.gpu.name}: {key}",
                rule="predicted times need memory, matmul and link rates, each with its source",
                way_out="add it to the profile; hardware_profiles/README.md shows how",
            )
        return value
