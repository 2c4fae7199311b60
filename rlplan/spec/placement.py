"""Where a job runs: its hardware, its rollout engines, and how roles share devices.

In: the keys `hardware`, `rollout` and `placement` of a job file. Out: frozen Specs.
Left out: whether they go together, and with the rest of the job: JobSpec.
"""

from typing import Literal

from pydantic import Field, model_validator

from rlplan.spec.base import ByteCount, Spec
from rlplan.spec.environment import EnvironmentSpec
from rlplan.spec.workload import MAX_COUNT
from rlplan.units import MIB
from rlplan.vocabulary import Dtype, SyncContent, Transport


class HardwareSpec(Spec):
    """Where the job runs: a profile by name, how many of its devices, and how much of the host's memory it may use.

    profile: of a CPU host, whose devices are process slots, or of a GPU or a node of GPUs, whose devices these are.
    num_hosts: the devices lie on so many hosts, dealt out in order and evenly. memory: of each host, on GPUs of each
    GPU; host_memory: on GPUs of each host.
    rendezvous_port: where the trainer's ranks meet, on the first one's host (its loopback where there is one host);
    0 takes any free port.
    keeps_heap: on a host without a GPU, processes use freed memory again within an action instead of giving it back at
    once: faster passes, higher peaks.
    """

    profile: str
    num_devices: int = Field(ge=1, le=16_384)
    num_hosts: int = Field(default=1, ge=1, le=2048)
    memory: ByteCount | None = None
    host_memory: ByteCount | None = None
    rendezvous_port: int = Field(default=0, ge=0, lt=65536)
    keeps_heap: bool = False

    @model_validator(mode="after")
    def _every_host_has_a_device(self) -> "HardwareSpec":
        if self.num_hosts > self.num_devices:
            raise ValueError(f"num_hosts = {self.num_hosts} must be at most num_devices = {self.num_devices}")
        return self

    def host_of(self, device: int) -> int:
        """The host of a device: in order, as evenly as it goes.

        >>> [HardwareSpec(profile="cpu-host", num_devices=5, num_hosts=2).host_of(device) for device in range(5)]
        [0, 0, 0, 1, 1]
        """
        return device * self.num_hosts // self.num_devices


class RolloutSpec(Spec):
    """How the rollout engines are held. kv_cache_memory: bytes of KV cache, never a guessed fraction.

    num_engines: replicas; tp: tensor-parallel ranks of each. stop: texts and tokens that end a response.
    quantization: of the weights while they are loaded. speculative_tokens: guessed at a time from what stands before.
    On GPUs only: kv_dtype (`fp8` halves the KV cache), has_cuda_graphs, has_expert_parallel (whole experts on an
    engine's ranks), sleep_level (of an engine that sleeps: 2 drops its weights, 1 keeps them on the host).
    """

    dtype: Literal[Dtype.FLOAT32, Dtype.BFLOAT16] = Dtype.FLOAT32
    num_engines: int = Field(default=1, ge=1, le=16_384)
    tp: int = Field(default=1, ge=1, le=64)
    stop: tuple[str | int, ...] = ()
    quantization: Literal["none", "fp8"] = "none"
    speculative_tokens: int = Field(default=0, ge=0, le=16)
    environment: EnvironmentSpec = EnvironmentSpec()
    kv_dtype: Literal["auto", "fp8"] = "auto"
    has_cuda_graphs: bool = False
    has_expert_parallel: bool = False
    sleep_level: Literal[1, 2] = 2
    kv_cache_memory: ByteCount = 64 * MIB
    max_num_seqs: int = Field(default=256, ge=1, le=MAX_COUNT)
    max_num_batched_tokens: int = Field(default=2048, ge=1, le=MAX_COUNT)
    block_size: Literal[16, 32, 64, 128] = 32

    @property
    def num_processes(self) -> int:
        """Ranks of all engines: each is a process on a device of its own."""
        return self.num_engines * self.tp


class PlacementSpec(Spec):
    """Who shares devices with whom, and how weights travel.

    num_generation_devices, num_scoring_devices: a disaggregated placement's own groups; with 0 the frozen roles lie
    with training. max_staleness: policy versions that a rollout may be behind; from 1 on, generation runs beside
    training. partial_rollouts: new weights interrupt rollouts, which go on under them; otherwise these end first.
    max_buffered_groups: prompts whose rollouts are under way or wait for a step, at most; max_groups_in_memory of those
    that are finished wait in memory, the others on the disk; null: as many as max_staleness allows.
    spreads_scoring: a frozen role has a process on every device of its group instead of one on the first; with
    zero_stage 3 these share its weights. parks: where trained and frozen roles of a colocated placement go while they
    wait. parks_only_frozen: frozen roles alone go, whatever the placement.
    sync_senders: trainer rank `one` hands over to all, or `each` to the engine on its own device (CUDA IPC must).
    sync_content: all weights, or what has changed since the last sync. sync_bucket: bytes that may be on their way.
    check_sync_every: after so many syncs, what the engines were fed is compared with what the trainer holds; 0 never.
    """

    placement: Literal["auto", "colocated", "hybrid", "disaggregated"] = "auto"
    num_generation_devices: int = Field(default=1, ge=1, le=16_384)
    num_scoring_devices: int = Field(default=0, ge=0, le=16_384)
    max_staleness: int = Field(default=0, ge=0, le=64)
    partial_rollouts: bool = True
    max_buffered_groups: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    max_groups_in_memory: int | None = Field(default=None, ge=0, le=MAX_COUNT)
    spreads_scoring: bool = False
    parks: Literal["none", "host", "disk"] = "none"
    parks_only_frozen: bool = False
    transport: Literal[
        "auto", Transport.SHARED_MEMORY, Transport.GLOO, Transport.DISK, Transport.CUDA_IPC, Transport.NCCL
    ] = "auto"
    sync_senders: Literal["one", "each"] = "one"
    sync_content: SyncContent = SyncContent.FULL
    sync_bucket: ByteCount = 64 * MIB
    check_sync_every: int = Field(default=0, ge=0, le=MAX_COUNT)
