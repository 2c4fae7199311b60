"""Cost: the seconds of one action, by what takes them.

In: seconds of each resource, computed elsewhere in timing/. Out: a frozen value that adds up.
Left out: what runs at the same time: a cost already has the larger of two that overlap.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Resource(StrEnum):
    """What an action waits for."""

    COMPUTE = "compute"
    MEMORY = "memory"
    LATENCY = "latency"
    DEVICE_LINK = "device_link"
    NETWORK = "network"
    HOST_LINK = "host_link"
    HOST = "host"
    DISK = "disk"
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds by resource; resources that take nothing are left out.

    LATENCY: launches and small messages. IDLE: pipeline bubbles, ranks that wait for the slowest, the last rollouts.

    >>> step = Cost({Resource.COMPUTE: 2.0}) + Cost({Resource.COMPUTE: 1.0, Resource.NETWORK: 0.5})
    >>> step.seconds, step.bound_by.value, step.times(2).seconds
    (3.5, 'compute', 7.0)
    """

    parts: Mapping[Resource, float]

    @property
    def seconds(self) -> float:
        """All parts, one after the other."""
        return sum(self.parts.values())

    @property
    def bound_by(self) -> Resource:
        """What takes the most; IDLE where nothing takes anything."""
        return max(self.parts, key=lambda resource: self.parts[resource], default=Resource.IDLE)

    @property
    def least_part(self) -> float:
        """The seconds of the resource that takes least; below zero only inside a difference of two costs."""
        return min(self.parts.values(), default=0.0)

    def __add__(self, other: "Cost") -> "Cost":
        parts = dict(self.parts)
        for resource, seconds in other.parts.items():
            parts[resource] = parts.get(resource, 0.0) + seconds
        return Cost(parts)

    def times(self, count: float) -> "Cost":
        """The same so many times in a row."""
        return Cost({resource: seconds * count for resource, seconds in self.parts.items()})


NOTHING = Cost({})
