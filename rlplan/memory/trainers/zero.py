"""Training states: what one rank holds between steps under DeepSpeed's ZeRO stages, on the device and on the host.

In: trainable and frozen parameters, the engine's settings. Out: bytes by kind for three moments: after the engine is
built, between backward and step, after a step. Left out: NVMe (nvme.py), ZenFlow, hierarchical partitions.

Symbols: P trainable parameters, F frozen ones, N ranks, S = P/N rounded up, e bytes of a weight, g of an accumulated
gradient, m of a master weight, b elements of the reduction bucket.
Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py, stage3.py, runtime/bf16_optimizer.py, fp16/fused_optimizer.py.
Proved exact, row by row, against live engines: tests/memory/trainers/test_training_states.py.
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
"""Elements: `nccl_start_alignment_factor`; the flat buffer is a multiple of it times the number of ranks."""


@dataclass(frozen=True)
class ZeroSettings:
    """The keys of a DeepSpeed config that decide bytes, with DeepSpeed's own defaults."""

    stage: int
    """0 to 3."""

    num_ranks: int
    """That share the states."""

    weight_bytes: int = 2
    """Of a weight in the passes: 2 in bf16 or fp16, 4 in fp32."""

    gradient_bytes: int = 2
    """`grad_accum_dtype`, which is the weights' type unless given."""

    master_bytes: int = 4
    """4, or 2 with `bf16_master_weights_and_grads`."""

    moment_bytes: int = 4
    """4, or 2 with `bf16_optimizer_states`."""

    optimizer: Optimizer = Optimizer.ADAMW
    reduce_bucket_size: int = 500_000_000
    """Elements."""

    overlaps_communication: bool | None = None
    """`overlap_comm`; None: DeepSpeed's own, on at stage 3 alone."""

    sub_group_size: int = 1_000_000_000
    """Elements."""

    max_live_parameters: int = 1_000_000_000
    """Elements."""

    max_reuse_distance: int = 1_000_000_000
    """Elements."""

    prefetch_bucket_size: int = 50_000_000
    """Elements."""

    persistence_threshold: int = 100_000
    """Elements: smaller tensors stay whole on every rank."""

    offloads_optimizer: bool = False
    """Master weights and moments live on the host."""

    offloads_parameters: bool = False
    """So do the weights, at stage 3."""

    @property
    def overlaps(self) -> bool:
        """Whether communication overlaps the backward pass (config.py, `overlap_comm_valid`)."""
        return self.stage == 3 if self.overlaps_communication is None else self.overlaps_communication

    @property
    def accumulates_in_full(self) -> bool:
        """ZeRO-1 in bf16 with fp32 accumulation is DeepSpeed's BF16_Optimizer: whole fp32 gradients on every rank."""
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
    """In the module's order; tied tensors once."""

    frozen: tuple[Parameter, ...] = ()
    """As above."""

    rank: int = 0
    frozen_bytes: int | None = None
    """Of all frozen tensors up to stage 2, where they are not of the weights' type."""

    @cached_property
    def num_trainable(self) -> int:
        """P."""
        return sum([parameter.numel for parameter in self.trainable])

    @cached_property
    def partition_numel(self) -> int:
        """S: elements that this rank updates.

        Counts: stage 0 all; stages 1 and 2 the flat buffer, rounded up to 2N, over N (`flatten_dense_tensors_aligned`);
        stage 3 every tensor's own share rounded up (DeepSpeed's `partition_parameters.py`, `_partition_param`).
        """
        ranks = self.settings.num_ranks
        if self.settings.stage == 0:
            return self.num_trainable
        if self.settings.stage == 3:
            return _shares(self.trainable, ranks)
        return round_up(self.num_trainable, PARTITION_ALIGNMENT * ranks) // ranks

    @cached_property
    def persistent_numel(self) -> int:
        """Elements of tensors small enough to stay gathered after the first step: up to the threshold (stage 3)."""
        if self.settings.stage < 3 or self.settings.num_ranks == 1:
            return 0
        limit = self.settings.persistence_threshold
        return sum([p.numel for p in (*self.trainable, *self.frozen) if p.numel <= limit])

    def weight_bytes(self, *, has_stepped: bool = True) -> int:
        """Bytes of the weights, trainable and frozen.

        Counts: stages 0 to 2 the whole flat buffer e*N*S and the frozen e*F; stage 3 the shares, and the small tensors
        that stay gathered beside them.
        """
        settings = self.settings
        if settings.stage == 3:
            shares = self.partition_numel + _shares(self.frozen, settings.num_ranks)
            return settings.weight_bytes * (shares + self.persistent_numel * has_stepped)
        flat = self.partition_numel * (settings.num_ranks if settings.stage else 1)
        frozen = settings.weight_bytes * sum([parameter.numel for parameter in self.frozen])
        return settings.weight_bytes * flat + (frozen if self.frozen_bytes is None else self.frozen_bytes)

    def master_bytes(self) -> int:
        """Bytes of the master weights m*S.

        Counts: none in stage 0 in fp32, where torch updates the weights themselves; the other stages keep a copy in
        fp32 and with bf16 master weights too. Differs: `_create_fp32_partitions` of stage 3 means to do without, but
        compares a device with its name and so never does.
        """
        settings = self.settings
        if settings.weight_bytes == settings.master_bytes and settings.stage == 0:
            return 0
        return settings.master_bytes * self.partition_numel

    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's states of the share: one flat tensor a group, except in stage 0 (each parameter)."""
        return self._optimizer_bytes

    @cached_property
    def _optimizer_bytes(self) -> int:
        return optimizer_bytes(self.settings.optimizer, self.stepped_numels(), self.settings.moment_bytes)

    def stepped_numels(self) -> list[int]:
        """Elements of the tensors that the optimizer knows: parameters in stage 0, else flat ones."""
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
        buffer`); BF16_Optimizer 4*P beside the e*P of its last backward pass; stage 3 a flat buffer g*S that stays.
        Differs: 4S plus what sticks out at the borders.
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
        """Bytes of the part of `gradient_bytes` that lives through step and forward pass too."""
        if self.settings.stage == 3:
            return self.gradient_bytes()
        if self.settings.accumulates_in_full:
            return 4 * self.partition_numel * self.settings.num_ranks
        return 0

    def backward_gradient_bytes(self) -> int:
        """Bytes of gradients when a backward pass ends, before what other ranks own is let go.

        Counts: stages 0 and 1 the whole g*P; stages 2 and 3 `gradient_bytes`. In flight on the way: backward.py.
        Source: `reduce_ipg_grads`: stage 1 clears other ranks' gradients in the step only.
        """
        if self.settings.stage == 1 and not self.settings.accumulates_in_full:
            return max(self.settings.weight_bytes * self.num_trainable, self.gradient_bytes())
        return self.gradient_bytes()

    def bucket_bytes(self) -> int:
        """Bytes of the reduction bucket: b elements, twice in stages 1 and 2 when communication overlaps.

        Counts: in stage 3 it is allocated once and stays; in stages 1 and 2 it is made in every backward pass.
        Source: `setup_buckets`, `_setup_for_real_optimizer`. Differs: BF16_Optimizer and stage 0 have none.
        """
        settings = self.settings
        if settings.stage == 0 or settings.accumulates_in_full:
            return 0
        copies = 2 if settings.overlaps and settings.stage < 3 else 1
        return copies * settings.reduce_bucket_size * settings.weight_bytes

    def after_build(self) -> States:
        """Held when the engine is built: no gradients before the first backward pass, no moments before a step."""
        return self._states(has_gradients=False, has_stepped=False)

    def after_backward(self) -> States:
        """Held between backward and step, with the moments of an earlier step."""
        return self._states(has_gradients=True, has_stepped=True)

    def after_step(self) -> States:
        """Held after a step: the steady state."""
        return self._states(has_gradients=False, has_stepped=True)

    def _states(self, *, has_gradients: bool, has_stepped: bool) -> States:
        settings = self.settings
        # The 16-bit optimizer of stage 0 makes an empty step while it is built.
        early = settings.weight_bytes == 2 and settings.stage == 0
        device = Counter({MemoryKind.WEIGHTS: self.weight_bytes(has_stepped=has_stepped)})
        states = {
            MemoryKind.MASTER_WEIGHTS: self.master_bytes(),
            MemoryKind.GRADIENTS: self.gradient_bytes() if has_gradients else self.kept_gradient_bytes(),
        }
        if has_stepped or early:
            states[MemoryKind.OPTIMIZER] = self.optimizer_bytes()
        if settings.stage == 3:
            device[MemoryKind.COMM_BUFFERS] = self.bucket_bytes()
        if not settings.offloads_optimizer:
            device.update(states)
            host = self._offload_weights(device)
            return States(_positive(device), host)
        return self._offloaded(device, states)

    def _offloaded(self, device: Counter[MemoryKind], states: dict[MemoryKind, int]) -> States:
        """CPU offload: master weights, moments and gradients live on the host.

        Counts: on the host beside them a 16-bit copy of the share (stages 1 and 2: the way back; stage 3: the weights
        themselves when they are offloaded too), fp32 gradients m*S, and two staging buffers of the largest tensor.
        """
        settings = self.settings
        host = Counter({**states, MemoryKind.OPTIMIZER: self.optimizer_bytes()})
        host[MemoryKind.GRADIENTS] = settings.master_bytes * self.partition_numel
        largest = max([parameter.numel for parameter in self.trainable], default=0)
        if settings.stage == 3:
            host[MemoryKind.GRADIENTS] += settings.gradient_bytes * self.partition_numel
            host.update(self._offload_weights(device))
        else:
            host[MemoryKind.WEIGHTS] = settings.weight_bytes * self.partition_numel
            host[MemoryKind.COMM_BUFFERS] = settings.weight_bytes * largest
            device[MemoryKind.COMM_BUFFERS] += settings.weight_bytes * largest
        return States(_positive(device), _positive(host))

    def _offload_weights(self, device: Counter[MemoryKind]) -> dict[MemoryKind, int]:
        """Takes offloaded weights (stage 3) from the device, but for those that stay gathered; what the host holds."""
        if self.settings.stage < 3 or not self.settings.offloads_parameters:
            return {}
        device[MemoryKind.WEIGHTS] = self.settings.weight_bytes * self.persistent_numel
        shares = self.partition_numel + _shares(self.frozen, self.settings.num_ranks)
        return {MemoryKind.WEIGHTS: self.settings.weight_bytes * shares}

    def _sub_groups(self) -> list[int]:
        """Elements of the flat tensors that are stepped one after the other.

        Counts: stages 1 and 2 one; stage 3 tensors in order until `sub_group_size` is reached.
        Source: stage3.py, `_create_fp16_sub_groups`.
        """
        if self.settings.stage < 3 or self.settings.sub_group_size >= self.partition_numel:
            return [self.partition_numel]
        groups, used = [], 0
        for parameter in self.trainable:
            used += ceil_div(parameter.numel, self.settings.num_ranks)
            if used >= self.settings.sub_group_size:
                groups.append(used)
                used = 0
        return groups + [used] * (used > 0)

    def step_copy_bytes(self) -> int:
        """Bytes of the copies of the gradients of what is stepped at once, beside the accumulated gradients.

        Counts: a flat copy in the gradients' type and, where master weights are of another type, one of theirs while
        the first still lives: (g + m) * the largest sub-group. Source: `flatten(...).to(...)` in `step` of stages 1 and
        2 and in `_prepare_fp32_grad_for_sub_group` of stage 3.
        Differs: none where the host steps, nor where gradients are accumulated flat in the master's type.
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
        """Bytes of gathered weights at most at a time in stage 3.

        Counts: at the turn from forward to backward what is used again within `max_reuse_distance` elements is not
        released, so the last half of that distance; beside it what is in use and what is prefetched.
        Source: partitioned_param_coordinator.py (`__params_to_release`, `__n_available_params`).
        Differs: `max_live_parameters` bounds the prefetch only.
        """
        settings = self.settings
        if settings.stage < 3 or settings.num_ranks == 1:
            return 0
        window = settings.max_reuse_distance // 2 + settings.prefetch_bucket_size + used_numel
        return settings.weight_bytes * min(self._gathered_numel, window)

    @cached_property
    def _gathered_numel(self) -> int:
        return self.num_trainable + sum([p.numel for p in self.frozen]) - self.persistent_numel


def _shares(parameters: Iterable[Parameter], num_ranks: int) -> int:
    return sum([-(-parameter.numel // num_ranks) for parameter in parameters])  # each rounded up


def _positive(counts: Mapping[MemoryKind, int]) -> dict[MemoryKind, int]:
    return {kind: size for kind, size in counts.items() if size}
