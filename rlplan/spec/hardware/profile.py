"""Hardware profiles: what a host, a GPU or a node offers, each value with its source.

In: the YAML files of `hardware_profiles/`, read by `rlplan.spec.hardware.catalogue`. Out: frozen profiles, told apart
by `kind`. Peaks stand beside the share of them that work reaches (`efficiencies`, `serving`), so that both can be
replaced by what was measured on a machine. Left out: prices, which a job gives.

Bytes and rates are integers. A rate has one direction: vendors often print the sum of both. FLOP/s are dense: vendors
often print the figure with 2:4 sparsity, which is twice that.
"""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rlplan.errors import SpecError
from rlplan.spec.base import ByteCount, Spec
from rlplan.spec.hardware.rates import parse_bytes_per_s, parse_flops_per_s
from rlplan.vocabulary import Provenance


class ComputeDtype(StrEnum):
    """The element type of a matmul's operands: what a FLOP/s figure is for."""

    FLOAT32 = "float32"
    TFLOAT32 = "tfloat32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT8 = "float8"
    INT8 = "int8"
    FLOAT4 = "float4"


class Sourced(Spec):
    """Where a value comes from. date: year, month or day of the source, or of the look-up for a log."""

    provenance: Provenance
    source: str = Field(min_length=1)
    date: str | None = Field(default=None, pattern=r"^\d{4}(-\d{2}(-\d{2})?)?$")


class SourcedBytes(Sourced):
    """A byte count."""

    value: ByteCount


class SourcedByteRate(Sourced):
    """Bytes per second in one direction."""

    value: Annotated[int, BeforeValidator(parse_bytes_per_s)]


class SourcedFlopRate(Sourced):
    """Dense floating-point (or integer) operations per second; a multiply-add is two."""

    value: Annotated[int, BeforeValidator(parse_flops_per_s)]


class SourcedShare(Sourced):
    """A part of a peak."""

    value: float = Field(gt=0, le=1)


class SourcedSeconds(Sourced):
    """A duration in seconds."""

    value: float = Field(ge=0, le=3600)


class SourcedCount(Sourced):
    """A number of things."""

    value: int = Field(ge=1)


class ProcessOverheads(Spec):
    """Resident memory of each kind of process once its libraries are imported and before it holds a model.

    adapters: what PEFT adds to a trainer with adapters. environment: a process that answers between turns. A profile
    without one of these counts nothing for it.
    """

    policy_trainer: SourcedBytes
    scorer: SourcedBytes
    rollout_engine: SourcedBytes
    driver: SourcedBytes
    ray_system: SourcedBytes
    adapters: SourcedBytes | None = None
    environment: SourcedBytes | None = None


class ProcessSlack(Spec):
    """What a process holds beyond its imports and its tensors: heap that is not given back, thread stacks, objects.

    speculative_decoding: Numba, which such an engine loads; a profile without it counts nothing for it.
    """

    policy_trainer: SourcedBytes
    scorer: SourcedBytes
    rollout_engine: SourcedBytes
    speculative_decoding: SourcedBytes | None = None


class WeightPacking(Spec):
    """How the rollout engine repacks linear weights on this machine. Blocks are in elements.

    bytes_per_weight: the handler beside each packed weight. bytes_per_shape: code compiled once a shape.
    bytes_per_batch_size: code compiled for each number of rows with which a shape is multiplied.
    """

    row_block: int = Field(ge=1)
    column_block: int = Field(ge=1)
    bytes_per_weight: SourcedBytes
    bytes_per_shape: SourcedBytes
    bytes_per_batch_size: SourcedBytes


class ProfileBase(Spec):
    """What every profile has. name: also its file's name."""

    schema_version: Literal[1]
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,39}$")
    description: str


class CpuRates(Spec):
    """What a host without a GPU reaches, all its cores together.

    flops_per_s: of large square matmuls, by operand type. memory_bytes_per_s: of a copy, reads and writes together.
    collective_bytes_per_s: that each of two processes sends in a large all-reduce. disk_bytes_per_s: written and
    flushed. launch: seconds of one operation on one element. num_cores: that these rates are for.
    fresh_memory_bytes_per_s: of results that one process writes into memory that the system has just given to it,
    whatever its threads: page faults take most of it.
    """

    flops_per_s: dict[ComputeDtype, SourcedFlopRate] = Field(default_factory=dict)
    memory_bytes_per_s: SourcedByteRate | None = None
    collective_bytes_per_s: SourcedByteRate | None = None
    disk_bytes_per_s: SourcedByteRate | None = None
    launch: SourcedSeconds | None = None
    num_cores: SourcedCount | None = None
    fresh_memory_bytes_per_s: SourcedByteRate | None = None


class CpuLatencies(Spec):
    """Seconds on a host without a GPU that neither a byte nor a FLOP explains.

    call: a call of a worker process and its answer. rollout: a rollout dealt out, sent, decoded or looked at once.
    gradient, update: a parameter's part in a backward pass (the trainer's hooks) and in an optimizer step.
    engine_step, engine_layer, engine_sequence, engine_request: of the rollout engine, once a step of all sequences, a
    layer and step, a sequence and step, a prompt. reload_tensor: a parameter loaded and packed anew. start_trainer,
    start_scorer, start_engine: seconds of one core until the process has its libraries and an empty model.
    stop_engine, restart_engine: taken apart, and made anew in a process that has its libraries.
    """

    call: SourcedSeconds
    rollout: SourcedSeconds
    gradient: SourcedSeconds
    update: SourcedSeconds
    engine_step: SourcedSeconds
    engine_layer: SourcedSeconds
    engine_sequence: SourcedSeconds
    engine_request: SourcedSeconds
    reload_tensor: SourcedSeconds
    start_trainer: SourcedSeconds
    start_scorer: SourcedSeconds
    start_engine: SourcedSeconds
    stop_engine: SourcedSeconds
    restart_engine: SourcedSeconds


class CpuProfile(ProfileBase):
    """A host whose "devices" are process slots.

    memory: the host's, which the devices share. rates, latencies: None where nobody measured; a plan then has no times.
    weight_packing: how vLLM's CPU build repacks linear weights into opaque buffers after loading.
    """

    kind: Literal["cpu"]
    memory: SourcedBytes
    max_devices: int = Field(ge=1)
    weight_packing: WeightPacking
    process_overheads: ProcessOverheads
    process_slack: ProcessSlack
    rates: CpuRates | None = None
    latencies: CpuLatencies | None = None


HardwareProfile = CpuProfile
"""What jobs on CPU hosts are planned for."""


class HostLink(Spec):
    """Between a GPU and its host. bytes_per_s: each direction, as the line carries it, before protocol overhead.

    technology: `pcie`, `c2c` (NVLink between the chips of a superchip), or `xgmi`.
    generation and num_lanes: of PCIe; a C2C link has neither.
    """

    technology: Literal["pcie", "c2c", "xgmi"]
    generation: int | None = Field(default=None, ge=1)
    num_lanes: int | None = Field(default=None, ge=1)
    bytes_per_s: SourcedByteRate


class DeviceLink(Spec):
    """Between GPUs. bytes_per_s: of one GPU, each direction, all its links together.

    technology: `nvlink` (a switch or a mesh), `nvlink_bridge` (pairs, or fours) or `xgmi`.
    """

    technology: Literal["nvlink", "nvlink_bridge", "xgmi"]
    generation: int = Field(ge=1)
    num_links: int = Field(ge=1)
    bytes_per_s: SourcedByteRate


class Efficiencies(Spec):
    """The share of a peak that long-running work reaches.

    matmul: of `dense_flops_per_s`, by large 16-bit matmuls of training and scoring. memory: of
    `memory_bytes_per_s`, by the elementwise work between them. host_link, device_link: of the links' rates, by large
    copies and collectives.
    """

    matmul: SourcedShare
    memory: SourcedShare
    host_link: SourcedShare
    device_link: SourcedShare | None = None


class ServingRates(Spec):
    """What a rollout engine reaches.

    memory: share of `memory_bytes_per_s` of a decode step's reads. matmul: share of `dense_flops_per_s` of a prefill.
    layer: seconds that a layer takes beyond its bytes and FLOPs, inside a CUDA graph. collective: seconds of one small
    all-reduce between the ranks of an engine. expert_memory: share of `memory_bytes_per_s` at which routed experts are
    read. expert_layer: seconds that routing, spreading and gathering tokens add to a layer with experts.
    """

    memory: SourcedShare
    matmul: SourcedShare
    layer: SourcedSeconds
    collective: SourcedSeconds
    expert_memory: SourcedShare
    expert_layer: SourcedSeconds


class NodeEfficiencies(Spec):
    """The share of a peak that work on a whole node reaches.

    network: of `network_bytes_per_s`, by large collectives. network_latency: seconds of one small message between
    nodes. host_memory_bytes_per_s: that optimizer steps on the host stream. disk_bytes_per_s: that checkpoints are
    written with.
    """

    network: SourcedShare
    network_latency: SourcedSeconds
    host_memory_bytes_per_s: SourcedByteRate
    disk_bytes_per_s: SourcedByteRate


class GpuOverheads(Spec):
    """Device memory that belongs to no tensor.

    context: of each process that uses the GPU (driver, loaded kernels), before its first tensor.
    allocator_granularity: what the caching allocator rounds a large segment up to.
    communicator_of_two, communicator_of_many: NCCL or RCCL buffers of a process for one group of two, or more, ranks.
    """

    context: SourcedBytes
    allocator_granularity: SourcedBytes
    communicator_of_two: SourcedBytes
    communicator_of_many: SourcedBytes


class GpuProfile(ProfileBase):
    """One GPU as a process sees it (of an MI250X: one of its two dies).

    driver_names: what NVML or ROCm call it. architecture: `9.0` is a compute capability, `gfx942` a ROCm target.
    memory: total bytes as `cudaMemGetInfo` reports them: what firmware keeps is already gone.
    memory_bytes_per_s: peak of the device memory, reads and writes together.
    shares_host_memory: `memory` is the host's own, not beside it. None in an optional part: not known.
    supports_sleep: vLLM can put its engine to sleep there. supports_peer_access: GPUs reach each other's memory.
    """

    kind: Literal["cuda", "rocm"]
    driver_names: tuple[str, ...] = Field(min_length=1)
    architecture: str = Field(pattern=r"^(\d{1,2}\.\d|gfx[0-9a-f]+)$")
    memory: SourcedBytes
    memory_bytes_per_s: SourcedByteRate | None = None
    dense_flops_per_s: dict[ComputeDtype, SourcedFlopRate] = Field(default_factory=dict)
    host_link: HostLink | None = None
    device_link: DeviceLink | None = None
    efficiencies: Efficiencies | None = None
    supports_sleep: bool
    supports_peer_access: bool
    shares_host_memory: bool
    overheads: GpuOverheads
    serving: ServingRates | None = None

    def flops_per_s(self, dtype: ComputeDtype) -> int:
        """Dense peak for operands of `dtype`. Raises: SpecError where the chip does not have it, or nobody said."""
        if dtype not in self.dense_flops_per_s:
            raise SpecError(
                f"profile '{self.name}' has no {dtype} rate",
                where=f"{self.name}: dense_flops_per_s",
                rule=f"rates there: {', '.join(self.dense_flops_per_s) or 'none'}",
                way_out="use one of these types, or add the rate with its source to the profile",
            )
        return self.dense_flops_per_s[dtype].value


class NodeProfile(ProfileBase):
    """A machine with GPUs: its inside, its network and its host.

    gpu: a GPU profile's name. topology: how its GPUs reach each other, `nvlink_pairs` over bridges.
    num_gpus_in_link_domain: GPUs that the device link joins; more than `num_gpus` where it leaves the machine.
    peer_bytes_per_s: between one pair of GPUs, each direction: all of a GPU's links behind a switch, one in a mesh.
    network_bytes_per_s: of the whole node to other nodes, each direction, all adapters together.
    host_memory: bytes of main memory of the node. num_cores: physical cores (or virtual ones, as the source says).
    """

    kind: Literal["node"]
    gpu: str
    num_gpus: int = Field(ge=1)
    topology: Literal["nvswitch", "nvlink_mesh", "nvlink_pairs", "xgmi_mesh", "pcie", "single"]
    num_gpus_in_link_domain: int = Field(ge=1)
    peer_bytes_per_s: SourcedByteRate | None = None
    network: Literal["infiniband", "roce", "efa", "ethernet"]
    network_bytes_per_s: SourcedByteRate
    host_memory: SourcedBytes
    num_cores: SourcedCount
    efficiencies: NodeEfficiencies | None = None


Profile = CpuProfile | GpuProfile | NodeProfile
