"""Where a job runs: its hardware, and how roles share devices.

In: the `hardware:` and `placement:` parts of a job. Out: frozen Specs. Left out: whether they agree with each other and
with the rest of the job (JobSpec).
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlplan.spec.base import Auto, ByteCount, Spec
from rlplan.spec.parts.workload import MAX_COUNT
from rlplan.vocabulary import SyncContent, Transport


class PoolSpec(Spec):
    """A second group of GPUs, used for generation."""

    profile: str
    """Profile of a GPU or of a node of GPUs."""
    num_devices: int = Field(ge=1, le=1 << 20)
    """Number of GPUs in the group."""


class HardwareSpec(Spec):
    """The hardware of the job. Short forms: `8xH100`, `8xH100 + 8xL40S`, `cpu-host` (job_forms.py)."""

    profile: str
    """Profile of a CPU host (its devices are process slots), of a GPU, or of a node of GPUs (its devices are GPUs)."""
    num_devices: int = Field(ge=1, le=1 << 20)
    """Devices over all hosts; `2xdgx-h100` has sixteen."""
    num_hosts: Annotated[int, Field(ge=1, le=1 << 20)] | Auto = "auto"
    """Number of hosts, filled in order and evenly. `auto`: one CPU host, or full nodes of GPUs."""
    generation: PoolSpec | None = None
    """A second group of GPUs that generates; the GPUs of `profile` then train and score."""
    memory: Annotated[ByteCount, Field(ge=1 << 20)] | None = None
    """Bytes that the job may use on each GPU, or on each CPU host; None: all of it."""
    host_memory: Annotated[ByteCount, Field(ge=1 << 20)] | None = None
    """Host memory per GPU host in bytes; None: the value of the named node, or of the first bundled node with this
    GPU."""
    power_limit: int | None = Field(default=None, ge=1, le=100_000)
    """Power limit of each GPU in watts (`nvidia-smi -pl`), below the profile's own limit; None: the profile's limit."""
    price_per_gpu_hour: float | None = Field(default=None, gt=0, le=1e6)
    """Price in US dollars per GPU and hour, the same for both groups of GPUs."""
    rendezvous_port: int = Field(default=0, ge=0, lt=65536)
    """Port where trainer ranks meet, on the host of the first rank (on its loopback if there is one host); 0: any free
    port."""
    keeps_heap: bool = False
    """Whether processes on a CPU host keep freed memory for reuse: faster passes, higher peaks."""

    @model_validator(mode="after")
    def _hosts_have_devices(self) -> "HardwareSpec":
        if self.num_hosts != "auto" and self.num_hosts > self.num_devices:
            raise ValueError(f"num_hosts = {self.num_hosts} must be at most num_devices = {self.num_devices}")
        return self

    @property
    def all_devices(self) -> int:
        """Devices of both groups."""
        return self.num_devices + (self.generation.num_devices if self.generation else 0)


class PlacementSpec(Spec):
    """Device sharing of roles, and synchronization of weights."""

    placement: Literal["auto", "colocated", "hybrid", "disaggregated"] = "auto"
    """colocated: roles take turns on the same devices. hybrid: roles stay on the same devices side by side.
    disaggregated: generation and training have separate devices."""
    num_generation_devices: Annotated[int, Field(ge=1, le=1 << 20)] | Auto = "auto"
    """Devices for generation, in a disaggregated placement."""
    num_scoring_devices: Annotated[int, Field(ge=0, le=1 << 20)] | Auto = "auto"
    """Devices for frozen roles, in a disaggregated placement; 0: they share the training devices."""
    max_staleness: Annotated[int, Field(ge=0, le=64)] | Auto = 0
    """Policy versions by which a rollout may lag behind; with 1 or more, generation can run during training. `auto`:
    the smallest of 0, 1, 2, 4 and 8 that reaches the shortest step time."""
    partial_rollouts: bool = True
    """Whether a weight sync pauses running rollouts, which then continue with the new weights. New adapters do not
    pause rollouts: those that run keep their old adapter. If false, running rollouts finish first."""
    max_buffered_groups: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Limit on prompts whose rollouts are running or waiting for a step; None: as many as max_staleness allows."""
    max_groups_in_memory: int | None = Field(default=None, ge=0, le=MAX_COUNT)
    """Limit on finished groups held in memory; further ones wait on disk. None: all stay in memory."""
    spreads_scoring: bool | Auto = "auto"
    """Whether a frozen role has a process on every device of its group, or only on the first."""
    offload: Literal["auto", "none", "host", "disk"] = "auto"
    """Destination of offloaded idle roles."""
    offload_roles: Literal["auto", "all", "frozen"] = "auto"
    """Idle roles that are offloaded: all (colocated only), or only the frozen ones."""
    transport: Literal[
        "auto", Transport.SHARED_MEMORY, Transport.GLOO, Transport.DISK, Transport.CUDA_IPC, Transport.NCCL
    ] = "auto"
    """How weights reach the engines."""
    sync_senders: Literal["auto", "one", "each"] = "auto"
    """`one`: one trainer rank sends to all engines. `each`: every rank sends to the engine on its own device (required
    for CUDA IPC)."""
    sync_content: SyncContent | Auto = "auto"
    """Contents of a sync: all weights, changes since the last one, or adapters. On GPUs `auto` may mean adapters."""
    sync_bucket: Annotated[ByteCount, Field(ge=0)] | Auto = "auto"
    """Bytes in flight during a sync; 0 sends each tensor on its own (verl without a checkpoint engine)."""
    sync_verification: Literal["first", "every"] = "first"
    """Syncs after which the engine's parameters are compared with the trainer's: the first of a run, or every one."""
