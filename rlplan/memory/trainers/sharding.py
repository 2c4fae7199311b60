"""What a rank holds under trainers other than rlplan's own (for planning and export), and under ZeRO, as `RankState`.

In: sizes of a model, how it is trained. Out: RankState, which step_peak.py turns into memory snapshots.
Left out: communication buffers of NCCL, hybrid sharding, activation memory (step_peak.py).

Symbols: P trainable parameters, N ranks that share, e bytes of a weight in the passes, t p d e tensor, pipeline, data
and expert parallel sizes.
Source: torch 2.13 optim and distributed/fsdp; Megatron-Core 0.14 distributed/distributed_optimizer; DeepSpeed 0.19.8.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rlplan.memory.machine.machine import CUDA, Machine
from rlplan.memory.trainers.backward import ZeroWalk, layer_of
from rlplan.memory.trainers.optimizers import quantized_bytes
from rlplan.memory.trainers.step_peak import RankState
from rlplan.memory.trainers.zero import ZeroStates
from rlplan.spec.model import Parameter
from rlplan.units import ceil_div
from rlplan.vocabulary import MemoryKind

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Sizes:
    """Elements of a model that is trained."""

    trainable: tuple[int, ...]
    """Of each trained tensor, in order."""

    frozen_bytes: int
    """Of everything else, as it is stored."""

    layer: int
    """Trained, of one layer."""

    table: int
    """Trained, of one vocabulary table."""

    root: int
    """Outside the layers, trained or not."""

    layer_weights: int
    """Of one layer, trained or not."""

    is_tied: bool
    """One table for both ends."""

    largest_table: int = 0
    """Of a vocabulary table, trained or not."""

    @property
    def num_trainable(self) -> int:
        """P."""
        return sum(self.trainable)


def sizes_of(
    parameters: Sequence[Parameter],
    num_layers: int,
    *,
    is_tied: bool,
    adapters: Sequence[Parameter] = (),
    frozen_bytes: int = 0,
) -> Sizes:
    """Sizes of a model trained in full, or of adapters beside frozen weights of `frozen_bytes`.

    >>> model = [Parameter("model.embed_tokens.weight", (10, 4)), Parameter("model.layers.0.w", (4, 4))]
    >>> sizes = sizes_of(model, 1, is_tied=True)
    >>> sizes.num_trainable, sizes.root, sizes.layer, sizes.table
    (56, 40, 16, 40)
    """
    trained = tuple(adapters) if adapters else tuple(parameters)
    outside = [parameter.numel for parameter in parameters if layer_of(parameter.name) is None]
    inside = sum(parameter.numel for parameter in parameters) - sum(outside)
    return Sizes(
        trainable=tuple(parameter.numel for parameter in trained),
        frozen_bytes=frozen_bytes,
        layer=sum(parameter.numel for parameter in trained if layer_of(parameter.name) is not None) // num_layers,
        table=0 if adapters else max(outside),
        root=sum(outside),
        layer_weights=inside // num_layers,
        is_tied=is_tied,
        largest_table=max(outside),
    )


@dataclass(frozen=True)
class FsdpSettings:
    """How FSDP2 shares a model."""

    num_ranks: int
    master_bytes: int = FLOAT_BYTES
    """Of a weight that is kept."""

    compute_bytes: int = 2
    """Of a weight that is gathered."""

    reduce_bytes: int = FLOAT_BYTES
    """Of a gradient that is reduced."""

    tp_size: int = 1
    """Tensor parallel ranks, over which everything is split beforehand."""

    frozen_layer_bytes: int | None = None
    """Of a quantised layer, which is gathered as it is."""

    is_on_host: bool = False
    """Shards and moments live there (`cpu_offload`)."""

    counts_every_stream: bool = False
    """For `reserved`: gradients live in the reduction stream's pool and gathers in that of their own stream, before
    they are copied; no other stream reuses either, so they count at every moment."""

    moment_bytes: int = 0
    """Of each moment; 0: as of a weight that is kept."""

    has_8bit_moments: bool = False
    """Both moments in a byte each (`adamw_8bit`)."""

    @property
    def gathers(self) -> bool:
        """Whether passes use copies of the weights: gathered from other ranks, or cast from what is kept."""
        return self.num_ranks * self.tp_size > 1 or self.compute_bytes != self.master_bytes

    def moments(self, numel: int) -> int:
        """Bytes of both moments of so many elements."""
        return quantized_bytes(numel) if self.has_8bit_moments else 2 * (self.moment_bytes or self.master_bytes) * numel


def rank_state_under_fsdp(sizes: Sizes, fsdp: FsdpSettings) -> RankState:
    """FSDP2 with mixed precision: master weights, gradients and moments are shards; layers are gathered when needed.

    Counts: m*P/N each for weights and gradients, 2m*P/N moments; two layers and the root (tables, last norm), which
    stays whole from forward to backward, in the compute type; one layer's gradient before and while it is reduced. The
    step is fused. One GPU that keeps weights as it uses them gathers nothing.
    Source: torch 2.13 distributed/fsdp/_fully_shard/_fsdp_collectives.py (`foreach_all_gather`, `foreach_reduce`;
    `reshard_after_forward` is False for the root). Differs: FSDP1 under `no_sync` accumulates whole gradients.

    >>> sizes = Sizes((1600,), 0, 100, 50, 100, 100, is_tied=True)
    >>> rank_state = rank_state_under_fsdp(sizes, FsdpSettings(4))  # 400 * (4 + 8) and 400 * 4
    >>> sum(rank_state.resident.values()), rank_state.gradients
    (4800, 1600)
    >>> rank_state.passing, rank_state.layer_passing
    (400, 800)
    """
    tp_size, compute = fsdp.tp_size, fsdp.compute_bytes
    updated = 0 if fsdp.is_on_host else ceil_div(sizes.num_trainable, fsdp.num_ranks * tp_size)
    kept = fsdp.master_bytes * updated
    frozen = 0 if fsdp.is_on_host else ceil_div(sizes.frozen_bytes, fsdp.num_ranks * tp_size)
    whole = fsdp.frozen_layer_bytes
    layer = sizes.layer_weights * compute // tp_size if whole is None else whole
    root = compute * sizes.root // tp_size
    if not fsdp.gathers:
        layer = root = 0
    pools = max(root, 2 * layer) if fsdp.counts_every_stream else 0
    return RankState(
        {MemoryKind.WEIGHTS: kept + frozen, MemoryKind.OPTIMIZER: fsdp.moments(updated)},
        gradients=kept,
        kept_gradients=kept if fsdp.counts_every_stream else 0,
        head_gradient=compute * sizes.table // tp_size,
        passing=layer + pools + root,
        layer_passing=layer + (compute + fsdp.reduce_bytes) * sizes.layer // tp_size,
        accumulates=fsdp.counts_every_stream,
    )


STAND_IN_BYTES = 2
"""Of an element of the tensor that autograd is handed for a gradient that lies in the buffer already. Source:
Transformer Engine 2, module/base.py (`get_dummy_wgrad`, one a shape); Megatron-Core 0.14, tensor_parallel/layers.py
(`gradient_accumulation_fusion`: `torch.empty(main_grad.shape)`)."""


@dataclass(frozen=True)
class MegatronRank:
    """What one rank trains under Megatron-Core."""

    dense: int
    """Elements outside the routed experts."""

    experts: int
    """Elements inside them."""

    over: int
    """Ranks that share the states of `dense`."""

    over_experts: int
    """Ranks that share the states of `experts`."""

    frozen: int = 0
    """Elements beside them that are not trained."""

    weight_bytes: int = 2
    """Of a weight in the passes."""

    master_bytes: int = FLOAT_BYTES
    """Of a master weight and of each moment: 2 with the precision-aware optimizer."""

    gradient_bytes: int = FLOAT_BYTES
    """Of a gradient in the buffer: 2 where gradients are reduced in bf16."""

    moment_bytes: int = 0
    """Of each moment; 0: as of a master weight."""

    layer_matrices: int = 0
    """Elements of one layer's matrices. Each shape has a tensor in bf16 that stands for its gradient, once the matmul
    has added the real one to the buffer."""

    head: int = 0
    """Elements of the head, whose own such tensor comes and goes."""

    has_states: bool = True
    """False where they live on the host."""

    @property
    def num_updated(self) -> int:
        """Elements whose states the rank keeps."""
        return ceil_div(self.dense, self.over) + ceil_div(self.experts, self.over_experts)


def rank_state_of_megatron_rank(rank: MegatronRank) -> RankState:
    """A Megatron-Core rank by its own elements: weights e, gradients 4 in one buffer that always lives, states 12.

    Counts: e of every weight; 4 of every trained one; m of a master weight (none beside fp32 weights) and 2m of moments
    of what the rank updates. Source: Megatron-Core 0.14, param_and_grad_buffer.py, distrib_optimizer.py.
    Assumes: parameters are gathered into their own buffer, so that the passes hold nothing more.

    >>> rank_state = rank_state_of_megatron_rank(MegatronRank(dense=600, experts=200, over=4, over_experts=2))
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


def rank_state_under_zero(states: ZeroStates, machine: Machine = CUDA, *, reduces_in_step: bool = False) -> RankState:
    """A DeepSpeed rank with a fused step. reduces_in_step: of rlplan's runtime, where stage 1 reduces in the step.

    Counts: `ZeroStates`, what is on its device; gradients as `ZeroWalk` has them come.

    >>> from rlplan.memory.trainers.zero import ZeroSettings
    >>> states = ZeroStates(ZeroSettings(1, 2, reduce_bucket_size=10), (Parameter("a", (1000,)),))
    >>> rank_state = rank_state_under_zero(states)
    >>> max(moment.buffers for moment in rank_state.moments(1) if moment.place == "step")  # 500 * 4
    2000
    """
    walk = ZeroWalk(states, machine, reduces_in_step=reduces_in_step)
    return RankState(
        states.after_step().device, head_gradient=walk.table_bytes, walk=walk, kept_bucket=walk.kept_bucket_bytes
    )
