"""RankState of FSDP2, Megatron-Core and DeepSpeed's ZeRO: states and gradients of one rank.

In: sizes of a model, training settings. Out: RankState, which step_peak.py turns into memory snapshots.
Left out: communication buffers of NCCL, hybrid sharding, activation memory (step_peak.py).

Symbols: P trainable parameters, N ranks that shard them, e bytes of a weight in the passes, m of a master weight.
Source: torch 2.13 optim and distributed/fsdp; Megatron-Core 0.14 distributed/distributed_optimizer; DeepSpeed 0.19.8.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rlplan.memory.machine.machine import CUDA, Machine
from rlplan.memory.model.block import FLOAT_BYTES
from rlplan.memory.trainers.backward import ZeroWalk, parse_layer
from rlplan.memory.trainers.optimizers import quantized_bytes
from rlplan.memory.trainers.step_peak import RankState
from rlplan.memory.trainers.zero import ZeroStates
from rlplan.spec.model import Parameter
from rlplan.units import ceil_div
from rlplan.vocabulary import MemoryKind


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model that is trained, in elements."""

    trainable: tuple[int, ...]
    """Elements of each trained tensor, in order."""

    frozen_bytes: int
    """Bytes of the frozen weights, as they are stored."""

    layer: int
    """Trained elements of one layer."""

    table: int
    """Trained elements of one vocabulary table."""

    root: int
    """Elements outside the layers, trained or not."""

    layer_weights: int
    """Elements of one layer, trained or not."""

    is_tied: bool
    """Whether embedding and head share one table."""

    largest_table: int = 0
    """Elements of the largest vocabulary table, trained or not."""

    @property
    def num_trainable(self) -> int:
        """P."""
        return sum(self.trainable)


def measure_sizes(
    parameters: Sequence[Parameter],
    num_layers: int,
    *,
    is_tied: bool,
    adapters: Sequence[Parameter] = (),
    frozen_bytes: int = 0,
) -> Sizes:
    """Sizes of a model trained in full, or of adapters beside frozen weights of `frozen_bytes`.

    >>> model = [Parameter("model.embed_tokens.weight", (10, 4)), Parameter("model.layers.0.w", (4, 4))]
    >>> sizes = measure_sizes(model, 1, is_tied=True)
    >>> sizes.num_trainable, sizes.root, sizes.layer, sizes.table
    (56, 40, 16, 40)
    """
    trained = tuple(adapters) if adapters else tuple(parameters)
    outside = [parameter.numel for parameter in parameters if parse_layer(parameter.name) is None]
    inside = sum(parameter.numel for parameter in parameters) - sum(outside)
    return Sizes(
        trainable=tuple(parameter.numel for parameter in trained),
        frozen_bytes=frozen_bytes,
        layer=sum(parameter.numel for parameter in trained if parse_layer(parameter.name) is not None) // num_layers,
        table=0 if adapters else max(outside),
        root=sum(outside),
        layer_weights=inside // num_layers,
        is_tied=is_tied,
        largest_table=max(outside),
    )


@dataclass(frozen=True)
class FsdpSettings:
    """FSDP2's settings that decide the memory of a rank."""

    num_ranks: int
    """Ranks that shard the model."""
    master_bytes: int = FLOAT_BYTES
    """Bytes of a stored (sharded) weight."""

    compute_bytes: int = 2
    """Bytes of a gathered weight."""

    reduce_bytes: int = FLOAT_BYTES
    """Bytes of a gradient while it is reduced."""

    tp_size: int = 1
    """Tensor parallel size. Tensors are cut over it before they are sharded."""

    frozen_layer_bytes: int | None = None
    """Bytes of a quantized layer, which is gathered in its format; None without quantization."""

    is_on_host: bool = False
    """Whether shards and moments are on the host (`cpu_offload`)."""

    counts_every_stream: bool = False
    """Whether to count reserved instead of used memory. Gradients are in the memory pool of the reduction stream, and
    gathers in that of their own stream. No other stream reuses these pools, so they count at every moment."""

    moment_bytes: int = 0
    """Bytes of each moment; 0: those of a stored weight."""

    has_8bit_moments: bool = False
    """Whether each moment takes one byte (`adamw_8bit`)."""

    @property
    def gathers(self) -> bool:
        """Whether passes use copies of the weights: gathered from other ranks, or cast from what is kept."""
        return self.num_ranks * self.tp_size > 1 or self.compute_bytes != self.master_bytes

    def moments(self, numel: int) -> int:
        """Bytes of both moments of `numel` elements."""
        return quantized_bytes(numel) if self.has_8bit_moments else 2 * (self.moment_bytes or self.master_bytes) * numel


def build_fsdp_state(sizes: Sizes, fsdp: FsdpSettings) -> RankState:
    """A rank of FSDP2 with mixed precision: states are shards, and layers are gathered when needed.

    Counts: m*P/N each for weights and gradients, 2m*P/N moments; in the compute type two layers and the root (tables,
    last norm), which stays gathered from forward to backward; one layer's gradient before and while it is reduced. The
    step is fused. A single GPU that stores weights in the compute type gathers nothing.
    Source: torch 2.13 distributed/fsdp/_fully_shard/_fsdp_collectives.py (`foreach_all_gather`, `foreach_reduce`;
    `reshard_after_forward` is False for the root). Differs: FSDP1 under `no_sync` accumulates whole gradients.

    >>> sizes = Sizes((1600,), 0, 100, 50, 100, 100, is_tied=True)
    >>> rank_state = build_fsdp_state(sizes, FsdpSettings(4))  # 400 * (4 + 8) and 400 * 4
    >>> sum(rank_state.resident.values()), rank_state.gradients
    (4800, 1600)
    >>> rank_state.passing, rank_state.layer_passing
    (400, 800)
    """
    tp_size, compute = fsdp.tp_size, fsdp.compute_bytes
    updated = 0 if fsdp.is_on_host else ceil_div(sizes.num_trainable, fsdp.num_ranks * tp_size)
    shard_bytes = fsdp.master_bytes * updated
    frozen = 0 if fsdp.is_on_host else ceil_div(sizes.frozen_bytes, fsdp.num_ranks * tp_size)
    quantized = fsdp.frozen_layer_bytes
    layer = sizes.layer_weights * compute // tp_size if quantized is None else quantized
    root = compute * sizes.root // tp_size
    if not fsdp.gathers:
        layer = root = 0
    # Gathers have a pool of their own, as large as the root or as two layers at once.
    pools = max(root, 2 * layer) if fsdp.counts_every_stream else 0
    return RankState(
        {MemoryKind.WEIGHTS: shard_bytes + frozen, MemoryKind.OPTIMIZER: fsdp.moments(updated)},
        gradients=shard_bytes,
        kept_gradients=shard_bytes if fsdp.counts_every_stream else 0,
        head_gradient=compute * sizes.table // tp_size,
        passing=layer + pools + root,
        layer_passing=layer + (compute + fsdp.reduce_bytes) * sizes.layer // tp_size,
        accumulates=fsdp.counts_every_stream,
    )


STAND_IN_BYTES = 2
"""Bytes of an element of the dummy gradient that autograd gets when the real one was accumulated in the buffer. Source:
Transformer Engine 2, module/base.py (`get_dummy_wgrad`, one per shape); Megatron-Core 0.14, tensor_parallel/layers.py
(`gradient_accumulation_fusion`: `torch.empty(main_grad.shape)`)."""


@dataclass(frozen=True)
class MegatronRank:
    """Elements and types of one Megatron-Core rank."""

    dense: int
    """Elements outside the routed experts."""

    experts: int
    """Elements inside the routed experts."""

    state_ranks: int
    """Ranks that shard the states of `dense`."""

    expert_state_ranks: int
    """Ranks that shard the states of `experts`."""

    frozen: int = 0
    """Frozen elements."""

    weight_bytes: int = 2
    """Bytes of a weight in the passes."""

    master_bytes: int = FLOAT_BYTES
    """Bytes of a master weight and of each moment: 2 with the precision-aware optimizer."""

    gradient_bytes: int = FLOAT_BYTES
    """Bytes of a gradient in the buffer: 2 where gradients are reduced in bf16."""

    moment_bytes: int = 0
    """Bytes of each moment; 0: those of a master weight."""

    layer_matrices: int = 0
    """Elements of one layer's matrices. Each shape keeps a dummy gradient in bf16."""

    head: int = 0
    """Elements of the head, whose dummy gradient is temporary."""

    has_states: bool = True
    """False where master weights and moments are on the host."""

    @property
    def num_updated(self) -> int:
        """Elements whose states the rank keeps."""
        return ceil_div(self.dense, self.state_ranks) + ceil_div(self.experts, self.expert_state_ranks)


def build_megatron_state(rank: MegatronRank) -> RankState:
    """A Megatron-Core rank: weights, gradients in one permanent buffer, and the states that the rank updates.

    Counts: e for every weight; 4 for every trained one; m for a master weight (none beside fp32 weights) and 2m for the
    moments of each updated element. Source: Megatron-Core 0.14, param_and_grad_buffer.py, distrib_optimizer.py.
    Assumes: parameters are gathered into their own buffer, so that the passes need no additional memory.

    >>> rank_state = build_megatron_state(MegatronRank(dense=600, experts=200, state_ranks=4, expert_state_ranks=2))
    >>> sum(rank_state.resident.values())  # 800 * (2 + 4) + (150 + 100) * 12
    7800
    """
    trained, updated = rank.dense + rank.experts, rank.num_updated * rank.has_states
    gradients = rank.gradient_bytes * trained
    has_master = rank.weight_bytes < FLOAT_BYTES
    stand_ins = {MemoryKind.COMM_BUFFERS: STAND_IN_BYTES * rank.layer_matrices} if rank.layer_matrices else {}
    return RankState(
        {
            MemoryKind.WEIGHTS: rank.weight_bytes * (trained + rank.frozen),
            MemoryKind.GRADIENTS: gradients,
            MemoryKind.MASTER_WEIGHTS: rank.master_bytes * updated * has_master,
            MemoryKind.OPTIMIZER: 2 * (rank.moment_bytes or rank.master_bytes) * updated,
            **stand_ins,
        },
        gradients=gradients,
        kept_gradients=gradients,
        head_gradient=STAND_IN_BYTES * rank.head,
    )


def build_zero_state(states: ZeroStates, machine: Machine = CUDA, *, reduces_in_step: bool = False) -> RankState:
    """A DeepSpeed rank with a fused step. reduces_in_step: stage 1 reduces in the step, as in rlplan's runtime.

    Counts: the states of `ZeroStates` on the device; gradients by `ZeroWalk`.

    >>> from rlplan.memory.trainers.zero import ZeroSettings
    >>> states = ZeroStates(ZeroSettings(1, 2, reduce_bucket_size=10), (Parameter("a", (1000,)),))
    >>> rank_state = build_zero_state(states)
    >>> max(moment.buffers for moment in rank_state.moments(1) if moment.place == "step")  # 500 * 4
    2000
    """
    walk = ZeroWalk(states, machine, reduces_in_step=reduces_in_step)
    return RankState(
        states.after_step().device, head_gradient=walk.table_bytes, walk=walk, kept_bucket=walk.kept_bucket_bytes
    )
