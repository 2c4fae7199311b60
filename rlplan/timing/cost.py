"""Cost: the seconds of one action, split by the resource that they are spent on.

In: seconds of each resource, computed elsewhere in timing/. Out: a frozen value that can be added up.
Left out: overlap. Where two resources work at the same time, a cost already holds the larger of the two.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Resource(StrEnum):
    """A resource that an action waits for."""

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
    """Seconds by resource; resources without any are absent.

    LATENCY covers kernel launches and small messages. IDLE covers pipeline bubbles, ranks that wait for the slowest
    one, and the last running rollouts.

    >>> step = Cost({Resource.COMPUTE: 2.0}) + Cost({Resource.COMPUTE: 1.0, Resource.NETWORK: 0.5})
    >>> step.seconds, step.bound_by.value, step.times(2).seconds
    (3.5, 'compute', 7.0)
    """

    parts: Mapping[Resource, float]

    @property
    def seconds(self) -> float:
        """Sum of all parts, which follow each other."""
        return sum(self.parts.values())

    @property
    def bound_by(self) -> Resource:
        """The resource with the most seconds; IDLE for an empty cost."""
        return max(self.parts, key=lambda resource: self.parts[resource], default=Resource.IDLE)

    @property
    def least_part(self) -> float:
        """The smallest part. Only a difference of two costs can have one below zero."""
        return min(self.parts.values(), default=0.0)

    def __add__(self, other: "Cost") -> "Cost":
        parts = dict(self.parts)
        for resource, seconds in other.parts.items():
            parts[resource] = parts.get(resource, 0.0) + seconds
        return Cost(parts)

    def times(self, count: float) -> "Cost":
        """The cost of `count` repetitions, one after the other."""
        return Cost({resource: seconds * count for resource, seconds in self.parts.items()})


NOTHING = Cost({})
