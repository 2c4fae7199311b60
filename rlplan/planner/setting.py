"""Where a job on GPUs runs and what with: one group of GPUs, or two of different kinds that do not share devices.

In: a SettledJob. Out: frozen pools with their profiles, capacities and rates; models by role.
Left out: which roles lie where (gpu/candidates.py). Of two pools the first trains and scores, the second generates.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlplan.dataflow.placements import GENERATION
from rlplan.planner.margins import get_reserve
from rlplan.spec.hardware.catalogue import find_profile, get_gpu, usual_node
from rlplan.spec.hardware.profile import GpuOverheads, GpuProfile, NodeProfile
from rlplan.spec.model import ModelSpec
from rlplan.spec.models.catalogue import resolve_model
from rlplan.spec.parts.placement import LinkSpec
from rlplan.spec.resolved import SettledJob
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.network.power import limited_gpu
from rlplan.units import ceil_div
from rlplan.vocabulary import Role


@dataclass(frozen=True)
class GpuPool:
    """GPUs of one kind."""

    gpu: GpuProfile
    num_gpus: int
    capacity: int
    """Bytes of one GPU that may be used."""
    gpus_per_host: int
    host_capacity: int | None
    """Bytes of one host, None where not known."""
    node: NodeProfile | None = None
    """The machine they sit in, None where none is known."""

    @property
    def num_hosts(self) -> int:
        """Hosts, the last of them perhaps not full."""
        return -(-self.num_gpus // self.gpus_per_host)

    @property
    def overheads(self) -> GpuOverheads:
        """What belongs to no tensor."""
        return self.gpu.overheads

    @property
    def cluster(self) -> Cluster:
        """Their rates."""
        return Cluster(self.gpu, self.num_gpus, self.gpus_per_host, self.node)


@dataclass(frozen=True)
class GpuSetting:
    """Where a job on GPUs runs and what with.

    What is asked of the whole setting (`gpu`, `capacity`, ...) is the first pool's, but for `num_gpus`.
    """

    pools: tuple[GpuPool, ...]
    """One group of GPUs, or those that train and those that generate."""
    models: Mapping[Role, ModelSpec]
    link: LinkSpec | None = None
    """Between two pools, where it is slower than the network of their hosts."""

    def get_pool(self, group: str) -> GpuPool:
        """The GPUs of a device group of a schedule."""
        return self.pools[-1] if group == GENERATION else self.pools[0]

    def cluster(self, group: str) -> Cluster:
        """The rates of a device group."""
        return self.get_pool(group).cluster

    def get_partial_cluster(self, group: str, num_gpus: int) -> Cluster:
        """The rates of so many GPUs of a device group."""
        whole = self.cluster(group)
        per_host = whole.gpus_per_host
        return replace(whole, num_gpus=num_gpus, gpus_per_host=min(num_gpus, per_host), host_gpus=per_host)

    def replace_gpus(self, num_gpus: int, num_hosts: int) -> "GpuSetting":
        """The same with so many GPUs of its one group, on so many hosts."""
        fewer = replace(self.pools[0], num_gpus=num_gpus, gpus_per_host=ceil_div(num_gpus, num_hosts))
        return replace(self, pools=(fewer,))

    def scale_capacity(self, share: float) -> "GpuSetting":
        """The same with a share of each GPU's memory."""
        return replace(self, pools=tuple(replace(pool, capacity=int(pool.capacity * share)) for pool in self.pools))

    @property
    def has_pools(self) -> bool:
        """Whether training and generation have GPUs of different groups."""
        return len(self.pools) > 1

    @property
    def split(self) -> tuple[int, int] | None:
        """GPUs that train and that generate, where the groups say so; None where all may do both."""
        return (self.pools[0].num_gpus, self.pools[1].num_gpus) if self.has_pools else None

    @property
    def words(self) -> str:
        """The GPUs as they are named: `8x h100-sxm + 8x l40s`."""
        return " + ".join(f"{pool.num_gpus}x {pool.gpu.name}" for pool in self.pools)

    @property
    def gpu(self) -> GpuProfile:
        """The GPU that trains."""
        return self.pools[0].gpu

    @property
    def num_gpus(self) -> int:
        """All GPUs."""
        return sum(pool.num_gpus for pool in self.pools)

    @property
    def capacity(self) -> int:
        """Bytes of a GPU that trains."""
        return self.pools[0].capacity

    @property
    def gpus_per_host(self) -> int:
        """GPUs of a host of those that train."""
        return self.pools[0].gpus_per_host

    @property
    def host_capacity(self) -> int | None:
        """Bytes of a host: the smaller one of two kinds; None where none is known."""
        return min((pool.host_capacity for pool in self.pools if pool.host_capacity is not None), default=None)

    @property
    def num_hosts(self) -> int:
        """All hosts."""
        return sum(pool.num_hosts for pool in self.pools)

    @property
    def policy(self) -> ModelSpec:
        """The policy's shape."""
        return self.models[Role.POLICY]

    @property
    def overheads(self) -> GpuOverheads:
        """What belongs to no tensor, on a GPU that trains."""
        return self.gpu.overheads

    def get_model(self, role: Role) -> ModelSpec:
        """A role's shape: the policy's where it has none of its own."""
        return self.models.get(role, self.policy)


def read_setting(job: SettledJob) -> GpuSetting:
    """Profiles and models of a job on GPUs. Raises: SpecError."""
    models = {Role.POLICY: job.load_model()}
    for role, name in job.roles.paths.items():
        if role in job.scored_roles:
            models[role] = resolve_model(
                name, where=f"roles.{role}.path", may_classify=role in (Role.REWARD, Role.VALUE)
            )
    return GpuSetting(read_pools(job), models, job.hardware.link)


def read_pools(job: SettledJob) -> tuple[GpuPool, ...]:
    """The groups of GPUs of a job; memory and host_memory hold for each. Raises: SpecError."""
    hardware = job.hardware
    named = [(hardware.profile, hardware.num_devices, hardware.devices_per_host)]
    if hardware.generation is not None:
        named.append((hardware.generation.profile, hardware.generation.num_devices, 0))
    return tuple(_read_pool(job, *pool) for pool in named)


def _read_pool(job: SettledJob, profile: str, num_gpus: int, per_host: int) -> GpuPool:
    named = find_profile(profile, where="hardware.profile")
    gpu = limited_gpu(get_gpu(profile, where="hardware.profile"), job.hardware.power_limit)
    node = named if isinstance(named, NodeProfile) else usual_node(gpu)
    limit = job.hardware.memory
    room = gpu.memory.value - get_reserve(gpu)
    capacity = room if limit is None else min(limit, room)
    each = min(num_gpus, per_host or (node.num_gpus if node else num_gpus))
    host_memory = job.hardware.host_memory or (node.host_memory.value if node else None)
    return GpuPool(gpu, num_gpus, capacity, each, host_memory, node)


def gpus_of(job: SettledJob) -> tuple[int, GpuProfile, int]:
    """How many of which GPU train, and the bytes of each that may be used. Raises: SpecError."""
    first = read_pools(job)[0]
    return first.num_gpus, first.gpu, first.capacity
