"""The GPUs and models of a job: one group of GPUs, or two groups of different kinds that share no devices.

In: a SettledJob. Out: frozen pools with profiles, capacities and rates; models by role. Left out: where roles are
placed (gpu/candidates.py). With two pools, the first trains and scores and the second generates.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlplan.dataflow.placements import GENERATION
from rlplan.planner.margins import get_reserve
from rlplan.spec.hardware.catalogue import count_gpus_per_host, find_profile, find_usual_node, get_gpu
from rlplan.spec.hardware.profile import GpuOverheads, GpuProfile, NodeProfile
from rlplan.spec.model import ModelSpec
from rlplan.spec.models.catalogue import resolve_model
from rlplan.spec.resolved import SettledJob
from rlplan.timing.network.cluster import Cluster, limit_gpu_power
from rlplan.units import ceil_div
from rlplan.vocabulary import Role


@dataclass(frozen=True)
class GpuPool:
    """GPUs of one kind."""

    gpu: GpuProfile
    num_gpus: int
    capacity: int
    """Usable bytes per GPU."""
    gpus_per_host: int
    host_capacity: int | None
    """Bytes per host; None if unknown."""
    node: NodeProfile | None = None
    """The node that holds them; None if unknown."""

    @property
    def num_hosts(self) -> int:
        """Number of hosts; the last one may be partly used."""
        return -(-self.num_gpus // self.gpus_per_host)

    @property
    def overheads(self) -> GpuOverheads:
        """GPU memory that belongs to no tensor: CUDA context, communicators."""
        return self.gpu.overheads

    @property
    def cluster(self) -> Cluster:
        """Compute and network rates of these GPUs."""
        return Cluster(self.gpu, self.num_gpus, self.gpus_per_host, self.node)


@dataclass(frozen=True)
class GpuSetting:
    """The GPUs and models of a job.

    Properties of the whole setting (`gpu`, `capacity`, ...) are those of the first pool, except `num_gpus`.
    """

    pools: tuple[GpuPool, ...]
    """One pool, or the pool that trains and the pool that generates."""
    models: Mapping[Role, ModelSpec]

    def get_pool(self, group: str) -> GpuPool:
        """Pool of a device group of a schedule."""
        return self.pools[-1] if group == GENERATION else self.pools[0]

    def get_cluster(self, group: str) -> Cluster:
        """Rates of a device group."""
        return self.get_pool(group).cluster

    def get_partial_cluster(self, group: str, num_gpus: int) -> Cluster:
        """Rates of `num_gpus` GPUs of a device group."""
        cluster = self.get_cluster(group)
        per_host = cluster.gpus_per_host
        return replace(cluster, num_gpus=num_gpus, gpus_per_host=min(num_gpus, per_host), host_gpus=per_host)

    def replace_gpus(self, num_gpus: int, num_hosts: int) -> "GpuSetting":
        """The setting with `num_gpus` GPUs of its only pool on `num_hosts` hosts."""
        fewer = replace(self.pools[0], num_gpus=num_gpus, gpus_per_host=ceil_div(num_gpus, num_hosts))
        return replace(self, pools=(fewer,))

    def scale_capacity(self, share: float) -> "GpuSetting":
        """The setting with a share of each GPU's memory."""
        return replace(self, pools=tuple(replace(pool, capacity=int(pool.capacity * share)) for pool in self.pools))

    @property
    def has_pools(self) -> bool:
        """Whether training and generation use different pools."""
        return len(self.pools) > 1

    @property
    def split(self) -> tuple[int, int] | None:
        """(GPUs that train, GPUs that generate) with two pools; None if all GPUs may do both."""
        return (self.pools[0].num_gpus, self.pools[1].num_gpus) if self.has_pools else None

    @property
    def words(self) -> str:
        """The GPUs in words: `8x h100-sxm + 8x l40s`."""
        return " + ".join(f"{pool.num_gpus}x {pool.gpu.name}" for pool in self.pools)

    @property
    def gpu(self) -> GpuProfile:
        """GPU model of the training pool."""
        return self.pools[0].gpu

    @property
    def num_gpus(self) -> int:
        """Number of GPUs in all pools."""
        return sum(pool.num_gpus for pool in self.pools)

    @property
    def capacity(self) -> int:
        """Usable bytes per training GPU."""
        return self.pools[0].capacity

    @property
    def gpus_per_host(self) -> int:
        """GPUs per host of the training pool."""
        return self.pools[0].gpus_per_host

    @property
    def host_capacity(self) -> int | None:
        """Bytes per host, the minimum over both pools; None if unknown."""
        return min((pool.host_capacity for pool in self.pools if pool.host_capacity is not None), default=None)

    @property
    def num_hosts(self) -> int:
        """Number of hosts of all pools."""
        return sum(pool.num_hosts for pool in self.pools)

    @property
    def policy(self) -> ModelSpec:
        """The policy."""
        return self.models[Role.POLICY]

    @property
    def overheads(self) -> GpuOverheads:
        """GPU memory of the training pool that belongs to no tensor."""
        return self.gpu.overheads

    def get_model(self, role: Role) -> ModelSpec:
        """Model of a role; the policy if the role has none of its own."""
        return self.models.get(role, self.policy)


def read_setting(job: SettledJob) -> GpuSetting:
    """Read the hardware profiles and models of a job on GPUs. Raises: SpecError."""
    models = {Role.POLICY: job.load_model()}
    for role, name in job.roles.paths.items():
        if role in job.scored_roles:
            models[role] = resolve_model(
                name, where=f"roles.{role}.path", may_classify=role in (Role.REWARD, Role.VALUE)
            )
    return GpuSetting(read_pools(job), models)


def read_pools(job: SettledJob) -> tuple[GpuPool, ...]:
    """Read the GPU pools of a job; `hardware.memory` and `host_memory` apply to each. Raises: SpecError."""
    hardware = job.hardware
    named = [(hardware.profile, hardware.num_devices, hardware.devices_per_host)]
    if hardware.generation is not None:
        named.append((hardware.generation.profile, hardware.generation.num_devices, 0))
    return tuple(_read_pool(job, *pool) for pool in named)


def _read_pool(job: SettledJob, profile: str, num_gpus: int, per_host: int) -> GpuPool:
    named = find_profile(profile, where="hardware.profile")
    gpu = limit_gpu_power(get_gpu(profile, where="hardware.profile"), job.hardware.power_limit)
    node = named if isinstance(named, NodeProfile) else find_usual_node(gpu)
    limit = job.hardware.memory
    # a stated limit never overrides the reserve
    room = gpu.memory.value - get_reserve(gpu)
    capacity = room if limit is None else min(limit, room)
    gpus_per_host = min(num_gpus, per_host or count_gpus_per_host(named))
    host_memory = job.hardware.host_memory or (node.host_memory.value if node else None)
    return GpuPool(gpu, num_gpus, capacity, gpus_per_host, host_memory, node)


def read_gpus(job: SettledJob) -> tuple[int, GpuProfile, int]:
    """Read (number of training GPUs, their profile, usable bytes per GPU). Raises: SpecError."""
    first = read_pools(job)[0]
    return first.num_gpus, first.gpu, first.capacity
