"""Hardware profiles: the capabilities of a host, a GPU or a node, each value with its source.

In: the YAML files of `hardware_profiles/`, read by `rlplan.spec.hardware.catalogue`. Out: frozen profiles,
distinguished by `kind`. Left out: prices (prices.py).

Peaks are stored separately from the fraction of them that work reaches (`efficiencies`, `serving`), so that
measurements can replace either. Bytes and rates are integers. A rate is for one direction: vendors often print the sum
of both. FLOP/s are dense: vendors often print the figure with 2:4 sparsity, which is twice as high.
"""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rlplan.errors import SpecError
from rlplan.spec.base import ByteCount, Spec
from rlplan.spec.hardware.rates import parse_bytes_per_s, parse_flops_per_s, parse_watts
from rlplan.vocabulary import Provenance


class ComputeDtype(StrEnum):
    """Element type of a matmul's operands, for which a FLOP/s figure holds."""

    FLOAT32 = "float32"
    TFLOAT32 = "tfloat32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT8 = "float8"
    INT8 = "int8"
    FLOAT4 = "float4"


class Sourced(Spec):
    """A value with its source."""

    provenance: Provenance
    """How the value was obtained: measured, datasheet, derived or assumed."""
    source: str = Field(min_length=1)
    """Document, log or command from which the value comes."""
    date: str | None = Field(default=None, pattern=r"^\d{4}(-\d{2}(-\d{2})?)?$")
    """Year, month or day of the source; for a public log, of the look-up."""


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
    """A fraction of a peak."""

    value: float = Field(gt=0, le=1)


class SourcedSeconds(Sourced):
    """A duration in seconds."""

    value: float = Field(ge=0, le=3600)


class SourcedCount(Sourced):
    """A count."""

    value: int = Field(ge=1)


class ProcessOverheads(Spec):
    """Resident memory of each kind of process once its libraries are imported and before it holds a model."""

    policy_trainer: SourcedBytes
    scorer: SourcedBytes
    rollout_engine: SourcedBytes
    driver: SourcedBytes
    ray_system: SourcedBytes
    adapters: SourcedBytes | None = None
    """Bytes that PEFT adds to a trainer with adapters; None counts nothing."""
    environment: SourcedBytes | None = None
    """Bytes of a process that runs environments or tools; None counts nothing."""


class ProcessSlack(Spec):
    """Bytes that a process holds beyond its imports and tensors: freed heap that it keeps, thread stacks, objects."""

    policy_trainer: SourcedBytes
    scorer: SourcedBytes
    rollout_engine: SourcedBytes
    speculative_decoding: SourcedBytes | None = None
    """Bytes of Numba, which an engine with speculative decoding loads; None counts nothing."""


class WeightPacking(Spec):
    """How the rollout engine repacks linear weights on this machine."""

    row_block: int = Field(ge=1)
    """Rows of a block, in elements."""
    column_block: int = Field(ge=1)
    """Columns of a block, in elements."""
    bytes_per_weight: SourcedBytes
    """Bytes of the handler that accompanies each packed weight."""
    bytes_per_shape: SourcedBytes
    """Bytes of code compiled once per shape."""
    bytes_per_batch_size: SourcedBytes
    """Bytes of code compiled per shape and number of input rows."""


class ProfileBase(Spec):
    """Fields of every profile."""

    schema_version: Literal[1]
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,39}$")
    """Name of the profile and of its file."""
    description: str
    """The profile in words."""


class CpuRates(Spec):
    """Measured peak rates of a host without a GPU, over all its cores."""

    flops_per_s: dict[ComputeDtype, SourcedFlopRate] = Field(default_factory=dict)
    """Rates of large square matmuls, by operand type."""
    memory_bytes_per_s: SourcedByteRate | None = None
    """Rate of a copy, reads and writes together."""
    collective_bytes_per_s: SourcedByteRate | None = None
    """Rate at which each of two processes sends in a large all-reduce."""
    disk_bytes_per_s: SourcedByteRate | None = None
    """Rate of writing and flushing a file."""
    launch: SourcedSeconds | None = None
    """Seconds of one operation on one element."""
    num_cores: SourcedCount | None = None
    """Number of cores that these rates hold for."""
    fresh_memory_bytes_per_s: SourcedByteRate | None = None
    """Rate of one process that writes results into memory fresh from the operating system, where page faults take most
    of the time. More threads do not raise it."""


class CpuLatencies(Spec):
    """Fixed costs on a host without a GPU, in seconds, which depend on neither bytes nor FLOPs."""

    call: SourcedSeconds
    """Round trip of a call to a worker process."""
    rollout: SourcedSeconds
    """Cost per rollout of assigning, sending, decoding or inspecting it once."""
    gradient: SourcedSeconds
    """Cost per parameter in a backward pass (the trainer's hooks)."""
    update: SourcedSeconds
    """Cost per parameter in an optimizer step."""
    engine_step: SourcedSeconds
    """Cost of an engine step over all sequences."""
    engine_layer: SourcedSeconds
    """Cost per layer of an engine step."""
    engine_sequence: SourcedSeconds
    """Cost per sequence of an engine step."""
    engine_request: SourcedSeconds
    """Cost per prompt."""
    reload_tensor: SourcedSeconds
    """Cost of loading and packing one parameter again."""
    start_trainer: SourcedSeconds
    """Time on one core until a trainer has its libraries and an empty model."""
    start_scorer: SourcedSeconds
    """The same for a scorer."""
    start_engine: SourcedSeconds
    """The same for an engine."""
    stop_engine: SourcedSeconds
    """Time to shut an engine down."""
    restart_engine: SourcedSeconds
    """Time to create an engine again in a process that already has its libraries."""


class CpuProfile(ProfileBase):
    """A host without a GPU, whose "devices" are process slots."""

    kind: Literal["cpu"]
    memory: SourcedBytes
    """Memory of the host, shared by all devices."""
    max_devices: int = Field(ge=1)
    """Limit on process slots."""
    weight_packing: WeightPacking
    """How vLLM's CPU build repacks linear weights into opaque buffers after loading."""
    process_overheads: ProcessOverheads
    process_slack: ProcessSlack
    rates: CpuRates | None = None
    """Measured rates; None: not measured, so that a plan has no times."""
    latencies: CpuLatencies | None = None
    """Measured fixed costs; None: not measured."""


HardwareProfile = CpuProfile
"""Profiles that jobs on CPU hosts are planned for."""


class HostLink(Spec):
    """The link between a GPU and its host."""

    technology: Literal["pcie", "c2c", "xgmi"]
    """Kind of the link; `c2c` is NVLink between the chips of a superchip."""
    generation: int | None = Field(default=None, ge=1)
    """PCIe generation; None for a C2C link."""
    num_lanes: int | None = Field(default=None, ge=1)
    """Number of PCIe lanes; None for a C2C link."""
    bytes_per_s: SourcedByteRate
    """Raw line rate per direction, before protocol overhead."""


class DeviceLink(Spec):
    """The link between GPUs."""

    technology: Literal["nvlink", "nvlink_bridge", "xgmi"]
    """Kind of the link; `nvlink` is a switch or a mesh, `nvlink_bridge` joins two or four GPUs."""
    generation: int = Field(ge=1)
    num_links: int = Field(ge=1)
    """Links of one GPU."""
    bytes_per_s: SourcedByteRate
    """Rate of one GPU per direction, over all its links."""


class Efficiencies(Spec):
    """Fraction of each peak that sustained work reaches."""

    matmul: SourcedShare
    """Fraction of `dense_flops_per_s` that large 16-bit matmuls of training and scoring reach."""
    matmul_8bit: SourcedShare | None = None
    """Fraction for 8-bit and 4-bit matmuls, if it differs."""
    memory: SourcedShare
    """Fraction of `memory_bytes_per_s` that elementwise kernels between matmuls reach."""
    host_link: SourcedShare
    """Fraction of the host link's rate that large copies reach."""
    device_link: SourcedShare | None = None
    """Fraction of the device link's rate that large collectives reach."""


class ServingRates(Spec):
    """Efficiencies and fixed costs of a rollout engine."""

    memory: SourcedShare
    """Fraction of `memory_bytes_per_s` at which a decode step's matmuls read their weights."""
    matmul: SourcedShare
    """Fraction of `dense_flops_per_s` that 16-bit matmuls reach in a prefill."""
    matmul_8bit: SourcedShare | None = None
    """The same of 8-bit matmuls, with the quantization of their input."""
    matmul_4bit: SourcedShare | None = None
    """The same of 4-bit matmuls."""
    layer: SourcedSeconds
    """Seconds per layer of attention, norms and activation beyond their bytes and FLOPs, inside a CUDA graph."""
    collective: SourcedSeconds
    """Seconds of one small all-reduce between the ranks of an engine."""
    expert_layer: SourcedSeconds
    """Seconds of a layer's experts beyond their bytes and FLOPs: kernels that sort, quantize, multiply and combine."""


class NodeEfficiencies(Spec):
    """Fractions of peaks and rates that work on a whole node reaches."""

    network: SourcedShare
    """Fraction of `network_bytes_per_s` that large collectives reach."""
    network_latency: SourcedSeconds
    """Latency of one small message between nodes."""
    host_memory_bytes_per_s: SourcedByteRate
    """Rate of optimizer steps on the host, in bytes that they read and write."""
    disk_bytes_per_s: SourcedByteRate
    """Rate of writing checkpoints."""


class GpuOverheads(Spec):
    """Device memory that belongs to no tensor."""

    context: SourcedBytes
    """Bytes of each process that uses the GPU (CUDA context, loaded kernels), before its first tensor."""
    allocator_granularity: SourcedBytes
    """Granularity to which the caching allocator rounds up a large segment."""
    communicator_of_two: SourcedBytes
    """NCCL or RCCL buffers per process for a group of two ranks."""
    communicator_of_many: SourcedBytes
    """NCCL or RCCL buffers per process for a group of more ranks."""


class GpuProfile(ProfileBase):
    """One GPU as a process sees it (an MI250X counts as two). Optional parts are None if unknown."""

    kind: Literal["cuda", "rocm"]
    driver_names: tuple[str, ...] = Field(min_length=1)
    """Names of the GPU in NVML or ROCm."""
    architecture: str = Field(pattern=r"^(\d{1,2}\.\d|gfx[0-9a-f]+)$")
    """Compute capability (`9.0`) or ROCm target (`gfx942`)."""
    memory: SourcedBytes
    """Total memory as `cudaMemGetInfo` reports it, without the part that firmware reserves."""
    nvml_memory: SourcedBytes | None = None
    """Total memory as NVML and `nvidia-smi` show it; they count the part that firmware reserves as used."""
    power: SourcedPower | None = None
    """Factory power limit of the whole board, memory included."""
    memory_bytes_per_s: SourcedByteRate | None = None
    """Peak bandwidth of device memory, reads and writes together."""
    dense_flops_per_s: dict[ComputeDtype, SourcedFlopRate] = Field(default_factory=dict)
    """Dense peak FLOP/s by operand type."""
    host_link: HostLink | None = None
    """Link to the host."""
    device_link: DeviceLink | None = None
    """Link to other GPUs."""
    efficiencies: Efficiencies | None = None
    supports_sleep: bool
    """Whether vLLM's sleep mode works on this GPU."""
    supports_peer_access: bool
    """Whether GPUs can access each other's memory (peer access)."""
    may_drive_display: bool = False
    """Whether the GPU has display outputs, so that a display may use some of its memory."""
    shares_host_memory: bool
    """Whether `memory` is the host's own memory (unified memory)."""
    overheads: GpuOverheads
    serving: ServingRates | None = None

    @property
    def kept_by_driver(self) -> int:
        """Bytes that NVML counts as used on an idle GPU and that no process can allocate; 0 if unknown."""
        return max(0, self.nvml_memory.value - self.memory.value) if self.nvml_memory else 0

    def flops_per_s(self, dtype: ComputeDtype) -> int:
        """Dense peak for operands of `dtype`. Raises: SpecError where the GPU lacks it or the profile does."""
        if dtype not in self.dense_flops_per_s:
            raise SpecError(
                f"profile '{self.name}' has no {dtype} rate",
                where=f"{self.name}: dense_flops_per_s",
                rule=f"rates there: {', '.join(self.dense_flops_per_s) or 'none'}",
                way_out="use one of these types, or add the rate with its source to the profile",
            )
        return self.dense_flops_per_s[dtype].value


class NodeProfile(ProfileBase):
    """A machine with GPUs: topology, network and host."""

    kind: Literal["node"]
    gpu: str
    """Name of the GPU's profile."""
    num_gpus: int = Field(ge=1)
    topology: Literal["nvswitch", "nvlink_mesh", "nvlink_pairs", "xgmi_mesh", "pcie", "single"]
    """Interconnect of the GPUs; `nvlink_pairs` are joined by bridges."""
    num_gpus_in_link_domain: int = Field(ge=1)
    """GPUs joined by the device link; more than `num_gpus` if it spans machines."""
    peer_bytes_per_s: SourcedByteRate | None = None
    """Rate between one pair of GPUs per direction: all links of a GPU behind a switch, one link in a mesh."""
    network: Literal["infiniband", "roce", "efa", "ethernet"]
    network_bytes_per_s: SourcedByteRate
    """Rate of the whole node to other nodes, per direction, over all adapters."""
    host_memory: SourcedBytes
    """Main memory of the node."""
    num_cores: SourcedCount
    """Physical cores, or virtual ones if the source counts those."""
    efficiencies: NodeEfficiencies | None = None


Profile = CpuProfile | GpuProfile | NodeProfile
