"""Layouts: device groups, and the assignment of a role's processes and shards to them.

A device is named `cpu:0`, a process slot of a host, or `cuda:0`. Devices are numbered over all hosts.

In: a candidate's choices. Out: frozen groups, layouts and processes. Left out: bytes.
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
    """The worker processes of one role on a device group: one process per device, from the first device on."""

    role: Role
    worker: Worker
    group: str
    devices: tuple[str, ...]
    dp: int = 1
    """Data parallel size: groups of ranks that compute passes of their own. Ranks of a group are consecutive."""
    tp: int = 1
    """Tensor parallel size of one replica. An engine counts all its ranks, data-parallel attention included."""
    zero_stage: int = 0
    """ZeRO stage. A frozen role has 3 where its ranks share the weights, else 0."""

    @property
    def shares_frozen_weights(self) -> bool:
        """Whether these are ranks of a frozen role that shard its weights."""
        return self.worker == "scorer" and self.zero_stage == 3

    @property
    def num_ranks_per_pass(self) -> int:
        """Ranks that compute one pass together."""
        return len(self.devices) // self.dp

    @property
    def num_shards(self) -> int:
        """Ranks over which ZeRO shards a state. Ranks of one Ulysses group hold the same weights, so they count."""
        return len(self.devices) // self.tp

    @property
    def processes(self) -> tuple[tuple[str, str], ...]:
        """(process, device) of every worker process, such as `policy_trainer/0` on `cpu:0`."""
        name = self.worker if self.worker != "scorer" else f"scorer/{self.role}"
        return tuple((f"{name}/{rank}", device) for rank, device in enumerate(self.devices))
