"""Where a job runs: its hardware, and how roles share devices.

In: the `hardware:` and `placement:` parts of a job. Out: frozen Specs.
Left out: whether they go together, and with the rest of the job: JobSpec.
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from rlplan.spec.base import Auto, ByteCount, Spec
from rlplan.spec.hardware.rates import parse_link_rate
from rlplan.spec.parts.workload import MAX_COUNT
from rlplan.vocabulary import SyncContent, Transport


class PoolSpec(Spec):
    """A second group of GPUs, which generates."""

    profile: str
    """Of a GPU or of a node of GPUs."""
    num_devices: int = Field(ge=1, le=1 << 20)
    """How many of them."""


LinkRate = Annotated[int, BeforeValidator(parse_link_rate, json_schema_input_type=int | str)]


class LinkSpec(Spec):
    """A slow link between the place that trains and those that generate, as over the internet. All places are alike."""

    bandwidth: LinkRate
    """Bytes per second into a place and out of one, each direction: 590Mb/s, 1.2GB/s."""
    latency_s: float = Field(default=0.0, ge=0, le=60)
    """Seconds one way; an answer is back after twice that."""
    loss: float = Field(default=0.0, ge=0, lt=1)
    """The share of packets that are lost: 0.001 is one of a thousand."""
    num_connections: int = Field(default=1, ge=1, le=1024)
    """TCP connections that share a transfer; loss slows each down by itself."""
    num_places: int = Field(default=1, ge=1, le=1 << 20)
    """Places that generate; the GPUs of `generation` are spread evenly over them."""
    fan_out: Annotated[int, Field(ge=1, le=1 << 20)] | Auto = "auto"
    """Places that one place passes weights on to, in a tree from the trainers on; num_places: the trainers send to all
    themselves.
    """


class HardwareSpec(Spec):
    """Where the job runs. The short forms `8xH100`, `8xH100 + 8xL40S` and `cpu-host` stand for it (job_forms.py)."""

    profile: str
    """Of a CPU host, whose devices are process slots, or of a GPU or a node of GPUs, whose devices these are."""
    num_devices: int = Field(ge=1, le=1 << 20)
    """Over all hosts; `2xdgx-h100` are sixteen."""
    num_hosts: Annotated[int, Field(ge=1, le=1 << 20)] | Auto = "auto"
    """The devices lie on so many, filled in order and evenly; `auto` is one CPU host, or full nodes of GPUs."""
    generation: PoolSpec | None = None
    """GPUs of another kind that generate, where those of `profile` train and score."""
    link: LinkSpec | None = None
    """Between the two groups, where it is slower than the network of their hosts; None for that network."""
    memory: Annotated[ByteCount, Field(ge=1 << 20)] | None = None
    """Bytes that may be used of each host, on GPUs of each GPU; None for all there are."""
    host_memory: Annotated[ByteCount, Field(ge=1 << 20)] | None = None
    """On GPUs, bytes of each host; None as in the node that is named, or the first bundled one with this GPU."""
    power_limit: int | None = Field(default=None, ge=1, le=100_000)
    """Watts that each GPU is limited to (`nvidia-smi -pl`), below what its profile has; None for that."""
    price_per_gpu_hour: float | None = Field(default=None, gt=0, le=1e6)
    """Dollars, of each group of GPUs alike."""
    rendezvous_port: int = Field(default=0, ge=0, lt=65536)
    """Where trainer ranks meet, on the first one's host (its loopback where that is the only one); 0: any."""
    keeps_heap: bool = False
    """On a CPU host, whether processes use freed memory again and do not give it back: faster passes, higher peaks."""

    @model_validator(mode="after")
    def _every_host_has_a_device(self) -> "HardwareSpec":
        if self.num_hosts != "auto" and self.num_hosts > self.num_devices:
            raise ValueError(f"num_hosts = {self.num_hosts} must be at most num_devices = {self.num_devices}")
        return self

    @model_validator(mode="after")
    def _link_joins_two_groups(self) -> "HardwareSpec":
        if self.link is None:
            return self
        if self.generation is None:
            raise ValueError("link joins two groups of GPUs, and generation is missing: 16xH100 + 64xL40S over 1Gb/s")
        if self.link.num_places > self.generation.num_devices:
            raise ValueError(
                f"link.num_places = {self.link.num_places} must be at most generation.num_devices = "
                f"{self.generation.num_devices}"
            )
        return self

    @property
    def all_devices(self) -> int:
        """Devices of both groups."""
        return self.num_devices + (self.generation.num_devices if self.generation else 0)


class PlacementSpec(Spec):
    """Who shares devices with whom, and how weights travel."""

    placement: Literal["auto", "colocated", "hybrid", "disaggregated"] = "auto"
    """colocated: time sharing of the same devices; hybrid: the same devices side by side; disaggregated: groups of
    their own.
    """
    num_generation_devices: Annotated[int, Field(ge=1, le=1 << 20)] | Auto = "auto"
    """Devices that generate, where these have a group of their own."""
    num_scoring_devices: Annotated[int, Field(ge=0, le=1 << 20)] | Auto = "auto"
    """Devices of the frozen roles' own, where generation has its own; 0 has them with training."""
    max_staleness: Annotated[int, Field(ge=0, le=64)] | Auto = 0
    """Policy versions that a rollout may be behind; from 1 on, generation may run beside training. `auto`: the fewest
    of 0, 1, 2, 4 and 8 with which a step is as fast as with any of them.
    """
    partial_rollouts: bool = True
    """Whether new weights interrupt rollouts, which go on under them, and new adapters come in beside rollouts, which
    keep theirs; otherwise these end first.
    """
    max_buffered_groups: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Prompts whose rollouts are under way or wait for a step, at most; None as max_staleness allows."""
    max_groups_in_memory: int | None = Field(default=None, ge=0, le=MAX_COUNT)
    """Of those that are finished so many wait in memory, the others on the disk; None for all."""
    spreads_scoring: bool | Auto = "auto"
    """Whether a frozen role has a process on every device of its group instead of one on the first."""
    offload: Literal["auto", "none", "host", "disk"] = "auto"
    """Where roles go while they wait."""
    offload_roles: Literal["auto", "all", "frozen"] = "auto"
    """Which go: every role that waits (colocated only), or frozen ones alone."""
    transport: Literal[
        "auto", Transport.SHARED_MEMORY, Transport.GLOO, Transport.DISK, Transport.CUDA_IPC, Transport.NCCL
    ] = "auto"
    """How weights reach the engines."""
    sync_senders: Literal["auto", "one", "each"] = "auto"
    """Trainer rank `one` hands over to all, or `each` to the engine on its own device (CUDA IPC must)."""
    sync_content: SyncContent | Auto = "auto"
    """All weights, what has changed since the last sync, or adapters alone; `auto` may send adapters on GPUs."""
    sync_bucket: Annotated[ByteCount, Field(ge=0)] | Auto = "auto"
    """Bytes that may be on their way; 0 sends each tensor by itself (verl without a checkpoint engine)."""
    sync_verification: Literal["first", "every"] = "first"
    """Syncs after which the engines' own parameters are compared with the trainer's: the first of a run, or each."""
