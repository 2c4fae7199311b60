"""Hardware profiles: what a host, a GPU or a node offers, each value with its source.

In: the YAML files of `hardware_profiles/`, read by `rlplan.spec.hardware.catalogue`. Out: frozen profiles, told apart
by `kind`. Peaks stand beside the share of them that work reaches (`efficiencies`, `serving`), so that both can be
replaced by what was measured on a machine. Left out: prices (prices.py).

Bytes and rates are integers. A rate has one direction: vendors often print the sum of both. FLOP/s are dense: vendors
often print the figure with 2:4 sparsity, which is twice that.
"""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rlplan.errors import SpecError
from rlplan.spec.base import ByteCount, Spec
from rlplan.spec.hardware.rates import parse_bytes_per_s, parse_flops_per_s, parse_watts
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
    """Where a value comes from."""

    provenance: Provenance
    source: str = Field(min_length=1)
    date: str | None = Field(default=None, pattern=r"^\d{4}(-\d{2}(-\d{2})?)?$")
    """Year, month or day of the source; of the look-up where the source is a public log."""


class SourcedBytes(Sourced):
    """A byte count."""

    value: ByteCount


class SourcedByteRate(Sourced):
    """Bytes per second in one direction."""

    value: Annotated[int, BeforeValidator(parse_bytes_per_s)]


class SourcedFlopRate(Sourced):
    """Dense floating-point (or integer) operations per second; a multiply-add is two."""

    value: Annotated[int, BeforeValidator(parse_flops_per_s)]


class SourcedPower(Sourced):
    """Watts."""

    value: Annotated[int, BeforeValidator(parse_watts)]


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
    """Resident memory of each kind of process once its libraries are imported and before it holds a model."""

    policy_trainer: SourcedBytes
    scorer: SourcedBytes
    rollout_engine: SourcedBytes
    driver: SourcedBytes
    ray_system: SourcedBytes
    adapters: SourcedBytes | None = None
    """What PEFT adds to a trainer with adapters; None counts nothing."""
    environment: SourcedBytes | None = None
    """A process that answers between turns; None counts nothing."""


class ProcessSlack(Spec):
    """What a process holds beyond its imports and its tensors: heap that is not given back, thread stacks, objects."""

    policy_trainer: SourcedBytes
    scorer: SourcedBytes
    rollout_engine: SourcedBytes
    speculative_decoding: SourcedBytes | None = None
    """Numba, which an engine with speculative decoding loads; None counts nothing."""


class WeightPacking(Spec):
    """How the rollout engine repacks linear weights on this machine."""

    row_block: int = Field(ge=1)
    """In elements."""
    column_block: int = Field(ge=1)
    """In elements."""
    bytes_per_weight: SourcedBytes
    """The handler beside each packed weight."""
    bytes_per_shape: SourcedBytes
    """Code compiled once for each shape."""
    bytes_per_batch_size: SourcedBytes
    """Code compiled for each number of rows with which a shape is multiplied."""


class ProfileBase(Spec):
    """What every profile has."""

    schema_version: Literal[1]
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,39}$")
    """Also its file's name."""
    description: str


class CpuRates(Spec):
    """What a host without a GPU reaches, all its cores together."""

    flops_per_s: dict[ComputeDtype, SourcedFlopRate] = Field(default_factory=dict)
    """Of large square matmuls, by operand type."""
    memory_bytes_per_s: SourcedByteRate | None = None
    """Of a copy, reads and writes together."""
    collective_bytes_per_s: SourcedByteRate | None = None
    """What each of two processes sends in a large all-reduce."""
    disk_bytes_per_s: SourcedByteRate | None = None
    """Written and flushed."""
    launch: SourcedSeconds | None = None
    """One operation on one element."""
    num_cores: SourcedCount | None = None
    """Cores that these rates are for."""
    fresh_memory_bytes_per_s: SourcedByteRate | None = None
    """Of results written into memory that the system has just given: page faults take most of the time. Of one process,
    whatever its threads."""


class CpuLatencies(Spec):
    """Seconds on a host without a GPU that neither a byte nor a FLOP explains."""

    call: SourcedSeconds
    """A call of a worker process and its answer."""
    rollout: SourcedSeconds
    """A rollout assigned, sent, decoded or looked at once."""
    gradient: SourcedSeconds
    """A parameter's part in a backward pass (the trainer's hooks)."""
    update: SourcedSeconds
    """A parameter's part in an optimizer step."""
    engine_step: SourcedSeconds
    """Of the rollout engine, for each step of all sequences."""
    engine_layer: SourcedSeconds
    """For each layer of an engine step."""
    engine_sequence: SourcedSeconds
    """For each sequence of an engine step."""
    engine_request: SourcedSeconds
    """For each prompt."""
    reload_tensor: SourcedSeconds
    """A parameter loaded and packed again."""
    start_trainer: SourcedSeconds
    """On one core, until the process has its libraries and an empty model; so are the next two."""
    start_scorer: SourcedSeconds
    start_engine: SourcedSeconds
    stop_engine: SourcedSeconds
    """The engine taken apart."""
    restart_engine: SourcedSeconds
    """The engine created again in a process that has its libraries."""


class CpuProfile(ProfileBase):
    """A host whose "devices" are process slots."""

    kind: Literal["cpu"]
    memory: SourcedBytes
    """The host's, which the devices share."""
    max_devices: int = Field(ge=1)
    weight_packing: WeightPacking
    """How vLLM's CPU build repacks linear weights into opaque buffers after loading."""
    process_overheads: ProcessOverheads
    process_slack: ProcessSlack
    rates: CpuRates | None = None
    """None where not measured, as `latencies`: a plan then has no times."""
    latencies: CpuLatencies | None = None


HardwareProfile = CpuProfile
"""What jobs on CPU hosts are planned for."""


class HostLink(Spec):
    """Between a GPU and its host."""

    technology: Literal["pcie", "c2c", "xgmi"]
    """`c2c` is NVLink between the chips of a superchip."""
    generation: int | None = Field(default=None, ge=1)
    """Of PCIe, as `num_lanes`; None for a C2C link."""
    num_lanes: int | None = Field(default=None, ge=1)
    bytes_per_s: SourcedByteRate
    """Each direction, as the line carries it, before protocol overhead."""


class DeviceLink(Spec):
    """Between GPUs."""

    technology: Literal["nvlink", "nvlink_bridge", "xgmi"]
    """`nvlink` is a switch or a mesh, `nvlink_bridge` joins pairs or fours."""
    generation: int = Field(ge=1)
    num_links: int = Field(ge=1)
    bytes_per_s: SourcedByteRate
    """Of one GPU, each direction, all its links together."""


class Efficiencies(Spec):
    """The share of a peak that long-running work reaches."""

    matmul: SourcedShare
    """Of `dense_flops_per_s`, by large 16-bit matmuls of training and scoring."""
    matmul_8bit: SourcedShare | None = None
    """The same of matmuls in 8 and 4 bits, where it is another."""
    memory: SourcedShare
    """Of `memory_bytes_per_s`, by the elementwise work between matmuls."""
    host_link: SourcedShare
    """Of the link's rate, by large copies."""
    device_link: SourcedShare | None = None
    """Of the link's rate, by large collectives."""


class ServingRates(Spec):
    """What a rollout engine reaches."""

    memory: SourcedShare
    """Of `memory_bytes_per_s`, by a decode step's reads."""
    matmul: SourcedShare
    """Of `dense_flops_per_s`, by a prefill."""
    layer: SourcedSeconds
    """What a layer takes beyond its bytes and FLOPs, inside a CUDA graph."""
    collective: SourcedSeconds
    """One small all-reduce between the ranks of an engine."""
    expert_layer: SourcedSeconds
    """What a kernel each for choosing, sorting, quantising, multiplying and combining adds to a layer with experts."""


class NodeEfficiencies(Spec):
    """The share of a peak that work on a whole node reaches."""

    network: SourcedShare
    """Of `network_bytes_per_s`, by large collectives."""
    network_latency: SourcedSeconds
    """One small message between nodes."""
    host_memory_bytes_per_s: SourcedByteRate
    """What optimizer steps on the host stream."""
    disk_bytes_per_s: SourcedByteRate
    """What checkpoints are written with."""


class GpuOverheads(Spec):
    """Device memory that belongs to no tensor."""

    context: SourcedBytes
    """Of each process that uses the GPU (driver, loaded kernels), before its first tensor."""
    allocator_granularity: SourcedBytes
    """What the caching allocator rounds a large segment up to."""
    communicator_of_two: SourcedBytes
    """NCCL or RCCL buffers of a process for one group of two ranks."""
    communicator_of_many: SourcedBytes
    """The same for one group of more ranks."""


class GpuProfile(ProfileBase):
    """One GPU as a process sees it (of an MI250X: one of its two dies). None in an optional part: not known."""

    kind: Literal["cuda", "rocm"]
    driver_names: tuple[str, ...] = Field(min_length=1)
    """What NVML or ROCm call it."""
    architecture: str = Field(pattern=r"^(\d{1,2}\.\d|gfx[0-9a-f]+)$")
    """`9.0` is a compute capability, `gfx942` a ROCm target."""
    memory: SourcedBytes
    """Total as `cudaMemGetInfo` reports it: what firmware keeps is already gone."""
    nvml_memory: SourcedBytes | None = None
    """Total as NVML and `nvidia-smi` show it, which count what firmware keeps as used."""
    power: SourcedPower | None = None
    """The most that the whole board draws, its memory included, as it is sold."""
    memory_bytes_per_s: SourcedByteRate | None = None
    """Peak of the device memory, reads and writes together."""
    dense_flops_per_s: dict[ComputeDtype, SourcedFlopRate] = Field(default_factory=dict)
    host_link: HostLink | None = None
    device_link: DeviceLink | None = None
    efficiencies: Efficiencies | None = None
    supports_sleep: bool
    """vLLM can put its engine to sleep there."""
    supports_peer_access: bool
    """GPUs reach each other's memory."""
    may_drive_display: bool = False
    """It has outputs, on which a display may hang."""
    shares_host_memory: bool
    """`memory` is the host's own, not beside it."""
    overheads: GpuOverheads
    serving: ServingRates | None = None

    @property
    def kept_by_driver(self) -> int:
        """Bytes that NVML's `used` counts on an idle GPU and no process can have; 0 where not known."""
        return max(0, self.nvml_memory.value - self.memory.value) if self.nvml_memory else 0

    def flops_per_s(self, dtype: ComputeDtype) -> int:
        """Dense peak for operands of `dtype`. Raises: SpecError where the chip does not have it, or it is not known."""
        if dtype not in self.dense_flops_per_s:
            raise SpecError(
                f"profile '{self.name}' has no {dtype} rate",
                where=f"{self.name}: dense_flops_per_s",
                rule=f"rates there: {', '.join(self.dense_flops_per_s) or 'none'}",
                way_out="use one of these types, or add the rate with its source to the profile",
            )
        return self.dense_flops_per_s[dtype].value


class NodeProfile(ProfileBase):
    """A machine with GPUs: its inside, its network and its host."""

    kind: Literal["node"]
    gpu: str
    """A GPU profile's name."""
    num_gpus: int = Field(ge=1)
    topology: Literal["nvswitch", "nvlink_mesh", "nvlink_pairs", "xgmi_mesh", "pcie", "single"]
    """How its GPUs reach each other; `nvlink_pairs` over bridges."""
    num_gpus_in_link_domain: int = Field(ge=1)
    """GPUs that the device link joins; more than `num_gpus` where it leaves the machine."""
    peer_bytes_per_s: SourcedByteRate | None = None
    """Between one pair of GPUs, each direction: all of a GPU's links behind a switch, one in a mesh."""
    network: Literal["infiniband", "roce", "efa", "ethernet"]
    network_bytes_per_s: SourcedByteRate
    """Of the whole node to other nodes, each direction, all adapters together."""
    host_memory: SourcedBytes
    """Main memory of the node."""
    num_cores: SourcedCount
    """Physical cores, or virtual ones, as the source says."""
    efficiencies: NodeEfficiencies | None = None


Profile = CpuProfile | GpuProfile | NodeProfile
