"""Layouts: device groups, and how a role's processes and shards lie on them.

In: a candidate's choices. Out: frozen groups, layouts and processes.
Left out: bytes. A device is named `cpu:0`, which is a process slot of a host, or `cuda:0`, counted over all hosts.
"""

from dataclasses import dataclass
from typing import Literal

from rlplan.vocabulary import Role

Worker = Literal["policy_trainer", "value_trainer", "rollout_engine", "scorer"]


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Devices that a role uses together."""

    name: str
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RoleLayout:
    """How one role's worker processes lie on a device group, one process a device from the first on."""

    role: Role
    worker: Worker
    group: str
    devices: tuple[str, ...]
    dp: int = 1
    """Groups of ranks that compute passes of their own; a group's ranks follow one another."""
    tp: int = 1
    """Tensor-parallel ranks of one replica; of an engine all its ranks, those of data-parallel attention too."""
    zero_stage: int = 0
    """Of a role that is not trained 3 where its ranks share the weights, else 0."""

    @property
    def shares_frozen_weights(self) -> bool:
        """Whether these are ranks of a frozen role among which its weights are cut."""
        return self.worker == "scorer" and self.zero_stage == 3

    @property
    def num_ranks_per_pass(self) -> int:
        """Ranks that compute one pass together: those of a group."""
        return len(self.devices) // self.dp

    @property
    def num_shards(self) -> int:
        """Ranks over which ZeRO shares a state out: all that hold the same part of it, those of one sequence too."""
        return len(self.devices) // self.tp

    @property
    def processes(self) -> tuple[tuple[str, str], ...]:
        """(process, device) of every worker process, as `policy_trainer/0` on `cpu:0`."""
        name = self.worker if self.worker != "scorer" else f"scorer/{self.role}"
        return tuple((f"{name}/{rank}", device) for rank, device in enumerate(self.devices))
