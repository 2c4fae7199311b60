"""Training states of one rank between steps under DeepSpeed's ZeRO stages, on the device and on the host.

In: trainable and frozen parameters, the engine's settings. Out: bytes by kind for three moments: after the engine is
built, between backward and step, after a step. Left out: NVMe (optimizers.py), ZenFlow, hierarchical partitions.

Symbols: P trainable parameters, F frozen ones, N ranks, S = P/N rounded up, e bytes of a weight, g of an accumulated
gradient, m of a master weight, b elements of the reduction bucket.
Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py, stage3.py, runtime/bf16_optimizer.py, fp16/fused_optimizer.py.
Validated against live engines, exact in every row: tests/memory/trainers/test_training_states.py.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from rlplan.memory.trainers.optimizers import Optimizer, optimizer_bytes
from rlplan.spec.model import Parameter
from rlplan.units import ceil_div, round_up
from rlplan.vocabulary import MemoryKind

PARTITION_ALIGNMENT = 2
"""Alignment in elements (`nccl_start_alignment_factor`): the flat buffer is a multiple of it times the ranks."""


@dataclass(frozen=True)
class ZeroSettings:
    """The keys of a DeepSpeed config that decide memory, with DeepSpeed's defaults. Sizes are in elements."""

    stage: int
    """ZeRO stage, 0 to 3."""

    num_ranks: int
    """Data-parallel ranks that shard the states."""

    weight_bytes: int = 2
    """Bytes of a weight in the passes: 2 in bf16 or fp16, 4 in fp32."""

    gradient_bytes: int = 2
    """Bytes of an accumulated gradient (`grad_accum_dtype`, by default the weights' type)."""

    master_bytes: int = 4
    """Bytes of a master weight: 4, or 2 with `bf16_master_weights_and_grads`."""

    moment_bytes: int = 4
    """Bytes of each moment: 4, or 2 with `bf16_optimizer_states`."""

    optimizer: Optimizer = Optimizer.ADAMW
    reduce_bucket_size: int = 500_000_000
    """Elements of the reduction bucket."""

    overlaps_communication: bool | None = None
    """`overlap_comm`; None: DeepSpeed's default, on only at stage 3."""

    sub_group_size: int = 1_000_000_000
    """Elements that stage 3 updates at a time."""

    max_live_parameters: int = 1_000_000_000
    """`stage3_max_live_parameters`: upper bound of gathered elements, which limits only the prefetch."""

    max_reuse_distance: int = 1_000_000_000
    """Gathered weights that are used again within this many elements are not released."""

    prefetch_bucket_size: int = 50_000_000
    """Elements of weights that stage 3 gathers ahead."""

    persistence_threshold: int = 100_000
    """Tensors up to this many elements stay whole on every rank."""

    offloads_optimizer: bool = False
    """Whether master weights and moments are on the host."""

    offloads_parameters: bool = False
    """Whether the weights are on the host too, at stage 3."""

    @property
    def overlaps(self) -> bool:
        """Whether communication overlaps the backward pass (config.py, `overlap_comm_valid`)."""
        return self.stage == 3 if self.overlaps_communication is None else self.overlaps_communication

    @property
    def accumulates_in_full(self) -> bool:
        """Whether every rank holds whole fp32 gradients: DeepSpeed's BF16_Optimizer, ZeRO-1 with fp32 accumulation."""
        return self.stage == 1 and self.weight_bytes == 2 and self.gradient_bytes == 4 and not self.offloads_optimizer


@dataclass(frozen=True)
class States:
    """Bytes by kind on the device and on the host."""

    device: Mapping[MemoryKind, int]
    host: Mapping[MemoryKind, int] = field(default_factory=dict)

    @property
    def device_bytes(self) -> int:
        """The sum on the device."""
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        """The sum on the host."""
        return sum(self.host.values())


@dataclass(frozen=True)
class ZeroStates:
    """One rank's persistent tensors."""

    settings: ZeroSettings
    trainable: tuple[Parameter, ...]
    """Trained parameters in the module's order, tied tensors once."""

    frozen: tuple[Parameter, ...] = ()
    """Frozen parameters in the module's order, tied tensors once."""

    rank: int = 0
    frozen_bytes: int | None = None
    """Bytes of all frozen tensors up to stage 2, if they do not have the weights' type."""

    @cached_property
    def num_trainable(self) -> int:
        """P: trained elements."""
        # A list, because a search computes this for thousands of candidates, and sum() over a generator is slower.
        return sum([parameter.numel for parameter in self.trainable])

    @cached_property
    def partition_numel(self) -> int:
        """S: elements that this rank updates.

        Counts: stage 0 all; stages 1 and 2 the flat buffer, rounded up to 2N, over N (`flatten_dense_tensors_aligned`);
        stage 3 the share of each tensor, rounded up (DeepSpeed's `partition_parameters.py`, `_partition_param`).
        """
        ranks = self.settings.num_ranks
        if self.settings.stage == 0:
            return self.num_trainable
        if self.settings.stage == 3:
            return _count_shares(self.trainable, ranks)
        return round_up(self.num_trainable, PARTITION_ALIGNMENT * ranks) // ranks

    @cached_property
    def persistent_numel(self) -> int:
        """Elements of small tensors that stage 3 keeps gathered after the first step."""
        if self.settings.stage < 3 or self.settings.num_ranks == 1:
            return 0
        limit = self.settings.persistence_threshold
        return sum([p.numel for p in (*self.trainable, *self.frozen) if p.numel <= limit])

    def weight_bytes(self, *, has_stepped: bool = True) -> int:
        """Bytes of the weights, trainable and frozen.

        Counts: stages 0 to 2 the whole flat buffer e*N*S and the frozen e*F; stage 3 the shares, and the small tensors
        that stay gathered.
        """
        settings = self.settings
        if settings.stage == 3:
            shares = self.partition_numel + _count_shares(self.frozen, settings.num_ranks)
            return settings.weight_bytes * (shares + self.persistent_numel * has_stepped)
        flat = self.partition_numel * (settings.num_ranks if settings.stage else 1)
        frozen = settings.weight_bytes * sum([parameter.numel for parameter in self.frozen])
        return settings.weight_bytes * flat + (frozen if self.frozen_bytes is None else self.frozen_bytes)

    def master_bytes(self) -> int:
        """Bytes of the master weights m*S.

        Counts: none in stage 0 in fp32, where torch updates the weights themselves; the other stages keep a copy even
        in fp32 and with bf16 master weights. Differs: `_create_fp32_partitions` of stage 3 intends to skip the copy,
        but compares a device with its name, so that the condition never holds.
        """
        settings = self.settings
        if settings.weight_bytes == settings.master_bytes and settings.stage == 0:
            return 0
        return settings.master_bytes * self.partition_numel

    @cached_property
    def optimizer_bytes(self) -> int:
        """Bytes of the rank's optimizer states: of one flat tensor per group, or in stage 0 of each parameter."""
        return optimizer_bytes(self.settings.optimizer, self.stepped_numels(), self.settings.moment_bytes)

    def stepped_numels(self) -> list[int]:
        """Elements of the tensors that the optimizer updates: parameters in stage 0, otherwise flat tensors."""
        return [parameter.numel for parameter in self.trainable] if self.settings.stage == 0 else self._sub_groups()

    @cached_property
    def owned(self) -> tuple[Parameter, ...]:
        """Parameters with an element in this rank's partition of the flat buffer (`get_partition_info`)."""
        first, last = self.rank * self.partition_numel, (self.rank + 1) * self.partition_numel
        owned, offset = [], 0
        for parameter in self.trainable:
            if offset < last and offset + parameter.numel > first:
                owned.append(parameter)
            offset += parameter.numel
        return tuple(owned)

    def gradient_bytes(self) -> int:
        """Bytes of accumulated gradients between backward and step.

        Counts: stage 0 g*P; stages 1 and 2 every parameter that has an element in the partition, whole
        (`copy_grads_in_partition`), or g*S where a 16-bit model accumulates in fp32 (`_build_compact_grad_partition_
        buffer`); BF16_Optimizer 4*P and the e*P of its last backward pass; stage 3 a permanent flat buffer g*S.
        Differs: the usual 4S leaves out the parts of the first and last parameter outside the partition.
        """
        settings = self.settings
        if settings.stage == 0:
            return settings.gradient_bytes * self.num_trainable
        if settings.accumulates_in_full:
            return 4 * self.partition_numel * settings.num_ranks + settings.weight_bytes * self.num_trainable
        if settings.stage == 3 or settings.gradient_bytes != settings.weight_bytes:
            return settings.gradient_bytes * self.partition_numel
        return settings.gradient_bytes * sum(parameter.numel for parameter in self.owned)

    def kept_gradient_bytes(self) -> int:
        """Bytes of `gradient_bytes` that stay allocated during step and forward pass."""
        if self.settings.stage == 3:
            return self.gradient_bytes()
        if self.settings.accumulates_in_full:
            return 4 * self.partition_numel * self.settings.num_ranks
        return 0

    def backward_gradient_bytes(self) -> int:
        """Bytes of gradients at the end of a backward pass, before those that other ranks own are freed.

        Counts: stages 0 and 1 the whole g*P; stages 2 and 3 `gradient_bytes`. Gradients in flight: backward.py.
        Source: `reduce_ipg_grads`: stage 1 clears other ranks' gradients only in the step.
        """
        if self.settings.stage == 1 and not self.settings.accumulates_in_full:
            return max(self.settings.weight_bytes * self.num_trainable, self.gradient_bytes())
        return self.gradient_bytes()

    def bucket_bytes(self) -> int:
        """Bytes of the reduction bucket: b elements, twice in stages 1 and 2 when communication overlaps.

        Stage 3 allocates it once; stages 1 and 2 in every backward pass.
        Source: `setup_buckets`, `_setup_for_real_optimizer`. Differs: BF16_Optimizer and stage 0 have none.
        """
        settings = self.settings
        if settings.stage == 0 or settings.accumulates_in_full:
            return 0
        copies = 2 if settings.overlaps and settings.stage < 3 else 1
        return copies * settings.reduce_bucket_size * settings.weight_bytes

    def after_build(self) -> States:
        """States after the engine is built: no gradients before the first backward pass, no moments before a step."""
        return self._build_states(has_gradients=False, has_stepped=False)

    def after_backward(self) -> States:
        """States between backward and step, with the moments of an earlier step."""
        return self._build_states(has_gradients=True, has_stepped=True)

    def after_step(self) -> States:
        """States after a step: the steady state."""
        return self._build_states(has_gradients=False, has_stepped=True)

    def _build_states(self, *, has_gradients: bool, has_stepped: bool) -> States:
        settings = self.settings
        # The 16-bit optimizer of stage 0 takes an empty step while it is built, so its moments exist early.
        early = settings.weight_bytes == 2 and settings.stage == 0
        device = Counter({MemoryKind.WEIGHTS: self.weight_bytes(has_stepped=has_stepped)})
        states = {
            MemoryKind.MASTER_WEIGHTS: self.master_bytes(),
            MemoryKind.GRADIENTS: self.gradient_bytes() if has_gradients else self.kept_gradient_bytes(),
        }
        if has_stepped or early:
            states[MemoryKind.OPTIMIZER] = self.optimizer_bytes
        if settings.stage == 3:
            device[MemoryKind.COMM_BUFFERS] = self.bucket_bytes()
        if not settings.offloads_optimizer:
            device.update(states)
            host = self._offload_weights(device)
            return States(_drop_zeros(device), host)
        return self._offload_states(device, states)

    def _offload_states(self, device: Counter[MemoryKind], states: dict[MemoryKind, int]) -> States:
        """The states under CPU offload: master weights, moments and gradients are on the host.

        Counts: also on the host a 16-bit copy of the share (stages 1 and 2: the updated weights on their way back;
        stage 3: the weights themselves when they are offloaded too), fp32 gradients m*S, and two staging buffers of the
        largest tensor.
        """
        settings = self.settings
        host = Counter({**states, MemoryKind.OPTIMIZER: self.optimizer_bytes})
        host[MemoryKind.GRADIENTS] = settings.master_bytes * self.partition_numel
        largest = max([parameter.numel for parameter in self.trainable], default=0)
        if settings.stage == 3:
            host[MemoryKind.GRADIENTS] += settings.gradient_bytes * self.partition_numel
            host.update(self._offload_weights(device))
        else:
            host[MemoryKind.WEIGHTS] = settings.weight_bytes * self.partition_numel
            host[MemoryKind.COMM_BUFFERS] = settings.weight_bytes * largest
            device[MemoryKind.COMM_BUFFERS] += settings.weight_bytes * largest
        return States(_drop_zeros(device), _drop_zeros(host))

    def _offload_weights(self, device: Counter[MemoryKind]) -> dict[MemoryKind, int]:
        """Move offloaded weights (stage 3) off the device, except those that stay gathered; return the host's bytes."""
        if self.settings.stage < 3 or not self.settings.offloads_parameters:
            return {}
        device[MemoryKind.WEIGHTS] = self.settings.weight_bytes * self.persistent_numel
        shares = self.partition_numel + _count_shares(self.frozen, self.settings.num_ranks)
        return {MemoryKind.WEIGHTS: self.settings.weight_bytes * shares}

    def _sub_groups(self) -> list[int]:
        """Elements of the flat tensors that are updated one after the other.

        Counts: stages 1 and 2 one; stage 3 tensors in order until `sub_group_size` is reached.
        Source: stage3.py, `_create_fp16_sub_groups`.
        """
        if self.settings.stage < 3 or self.settings.sub_group_size >= self.partition_numel:
            return [self.partition_numel]
        # DeepSpeed closes a sub-group only after the tensor that crosses the limit, so groups may exceed it.
        groups, used = [], 0
        for parameter in self.trainable:
            used += ceil_div(parameter.numel, self.settings.num_ranks)
            if used >= self.settings.sub_group_size:
                groups.append(used)
                used = 0
        return groups + [used] * (used > 0)

    def step_copy_bytes(self) -> int:
        """Bytes of gradient copies during the step, in addition to the accumulated gradients.

        Counts: a flat copy in the gradients' type and, if master weights have another type, a copy in theirs while the
        first still exists: (g + m) * the largest sub-group. Source: `flatten(...).to(...)` in `step` of stages 1 and 2
        and in `_prepare_fp32_grad_for_sub_group` of stage 3.
        Differs: none where the host updates, or where gradients are accumulated flat in the master's type.
        """
        settings = self.settings
        if settings.offloads_optimizer or settings.accumulates_in_full:
            return 0
        same = settings.gradient_bytes == settings.master_bytes
        if settings.stage == 0:
            return 0 if settings.weight_bytes == settings.master_bytes else settings.master_bytes * self.num_trainable
        if settings.stage < 3 and same and settings.weight_bytes == 2:
            return 0
        width = settings.gradient_bytes if same else settings.gradient_bytes + settings.master_bytes
        return width * max(self._sub_groups(), default=0)

    def gathered_bytes(self, used_numel: int) -> int:
        """Peak bytes of gathered weights in stage 3.

        Counts: between forward and backward, weights that are used again within `max_reuse_distance` elements are not
        released, so half of that distance; weights in use; prefetched weights.
        Source: partitioned_param_coordinator.py (`__params_to_release`, `__n_available_params`).
        Differs: `max_live_parameters` bounds only the prefetch.
        """
        settings = self.settings
        if settings.stage < 3 or settings.num_ranks == 1:
            return 0
        window = settings.max_reuse_distance // 2 + settings.prefetch_bucket_size + used_numel
        return settings.weight_bytes * min(self._gathered_numel, window)

    @cached_property
    def _gathered_numel(self) -> int:
        return self.num_trainable + sum([p.numel for p in self.frozen]) - self.persistent_numel


def _count_shares(parameters: Iterable[Parameter], num_ranks: int) -> int:
    return sum([-(-parameter.numel // num_ranks) for parameter in parameters])  # each share is rounded up


def _drop_zeros(counts: Mapping[MemoryKind, int]) -> dict[MemoryKind, int]:
    return {kind: size for kind, size in counts.items() if size}
