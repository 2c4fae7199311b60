"""Memory of a trained role that does not depend on the tokens, under FSDP2 and Megatron-Core.

In: a model, a role, its training settings, a choice, ranks, a pipeline stage. Out: FixedStates, computed once a choice.
Left out: passes (rank.py), hybrid sharding, interleaved pipelines.

Symbols: N ranks, t tp, p pp, c cp, x ep, d = N/(tpc) copies of the model, P parameters, e bytes of a weight in passes.
Source: torch 2.13 distributed/fsdp; Megatron-Core 0.14, from knowledge of it (it is not installed here); both as in
sharding.py, which published runs judge.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from rlplan.dataflow.choice import TrainerChoice, choose_expert_tp
from rlplan.memory.machine.host import pinned_bytes
from rlplan.memory.model.quantization import BASE_FORMATS, dequantized_numel, frozen_bytes
from rlplan.memory.roles.process import Bytes
from rlplan.memory.roles.states import FixedStates, measure_trained_sizes, replace_head
from rlplan.memory.trainers.backward import parse_layer
from rlplan.memory.trainers.sharding import (
    FsdpSettings,
    MegatronRank,
    Sizes,
    build_fsdp_state,
    build_megatron_state,
)
from rlplan.memory.trainers.zero import States
from rlplan.spec.model import Component, Layout, ModelSpec, Parameter
from rlplan.spec.models.adapters import list_lora_parameters
from rlplan.spec.models.shards import list_stage_tensors, split_training_stages
from rlplan.spec.parts.training import LoraSpec
from rlplan.spec.resolved import SettledTraining
from rlplan.units import ceil_div
from rlplan.vocabulary import Dtype, MemoryKind, Role

VOCABULARY_MULTIPLE = 128
"""Megatron pads its vocabulary tables to a multiple of this times tp rows (`make_vocab_size_divisible_by`)."""


def build_fsdp_settings(training: SettledTraining, choice: TrainerChoice, num_ranks: int) -> FsdpSettings:
    """FSDP2's settings for a choice. All ranks except tensor parallel ones shard the states, or groups of `fsdp_size`.

    Ranks of one sequence (Ulysses, context parallelism) are among them.
    """
    return FsdpSettings(
        num_ranks=training.sharding_ranks(max(1, num_ranks // choice.tp)),
        master_bytes=training.master_dtype.num_bytes,
        compute_bytes=training.dtype.num_bytes,
        tp_size=choice.tp,
        is_on_host=choice.offloads_parameters,
        has_8bit_moments=training.optimizer == "adamw_8bit",
        reduce_bytes=4 if training.reduce_dtype == "auto" else training.reduce_dtype.num_bytes,
        moment_bytes=training.moment_bytes,
    )


@lru_cache(maxsize=1024)
def build_fsdp_states(model: ModelSpec, role: Role, lora: LoraSpec | None, fsdp: FsdpSettings) -> FixedStates:
    """States of an FSDP2 rank under full sharding: master weights, moments and gradients are shards.

    Counts: `build_fsdp_state`; a forward-only pass gathers the root, a layer and the next one. A frozen base is
    stored in the trained weights' type (verl and accelerate load the whole model in one type, and gather it in
    another). `CPUOffloadPolicy` moves weights, gradients and moments; weights and gradients are pinned.
    Source: torch 2.13 distributed/fsdp/_fully_shard (`cpu_offload`, `pin_memory`).
    Assumes: weights are loaded a layer at a time.
    """
    parameters, adapters, sizes = measure_trained_sizes(model, role, lora, fsdp.master_bytes)
    if lora is not None and lora.base_dtype != "auto":
        fsdp, sizes = _adapt_to_base(parameters, lora, fsdp, sizes)
    rank_state = build_fsdp_state(sizes, fsdp)
    ranks = fsdp.num_ranks * fsdp.tp_size
    updated = ceil_div(sizes.num_trainable, ranks)
    share = fsdp.master_bytes * updated
    weights = {MemoryKind.WEIGHTS: share + ceil_div(sizes.frozen_bytes, ranks)}
    gradients, moments = {MemoryKind.GRADIENTS: share}, {MemoryKind.OPTIMIZER: fsdp.moments(updated)}
    layer = fsdp.compute_bytes * sizes.layer_weights // fsdp.tp_size if fsdp.gathers else 0
    on_host = fsdp.is_on_host
    return FixedStates(
        adapters,
        States({} if on_host else weights),
        States({} if on_host else weights | gradients | moments),
        States({} if on_host else weights | moments),
        rank_state,
        rank_state.passing + layer,
        weights[MemoryKind.WEIGHTS],
        0,
        _sum_offloaded(weights | gradients, moments) if on_host else {},
        fsdp.compute_bytes * max(sizes.layer_weights, sizes.largest_table),
        dequantized_numel(parameters, BASE_FORMATS.get(lora.base_dtype) if lora else None),
        build_fsdp_state(sizes, replace(fsdp, counts_every_stream=True)) if fsdp.gathers else None,
    )


def _adapt_to_base(
    parameters: tuple[Parameter, ...], lora: LoraSpec, fsdp: FsdpSettings, sizes: Sizes
) -> tuple[FsdpSettings, Sizes]:
    """FSDP2's settings and sizes with a frozen base in a type of its own. 4-bit layers are gathered in 4 bits.

    Source: torchao NF4Tensor's all-gather; bitsandbytes under `bnb_4bit_quant_storage`.
    """
    base = BASE_FORMATS.get(lora.base_dtype)
    element_bytes = fsdp.compute_bytes if base else Dtype(lora.base_dtype).num_bytes
    stored = frozen_bytes(parameters, lora.unquantized_bytes(element_bytes), base)
    if base:
        outside = sizes.root * lora.unquantized_bytes(element_bytes)
        num_layers = (sum(parameter.numel for parameter in parameters) - sizes.root) // sizes.layer_weights
        fsdp = replace(fsdp, frozen_layer_bytes=(stored - outside) // num_layers)
    return fsdp, replace(sizes, frozen_bytes=stored)


def _sum_offloaded(pinned: Bytes, pageable: Bytes) -> Bytes:
    return {kind: pinned_bytes(size) for kind, size in pinned.items()} | pageable


class StageCut(NamedTuple):
    """Megatron-Core's parallel sizes that cut a model's tensors."""

    tp: int
    pp: int
    ep: int
    etp: int


@dataclass(frozen=True)
class MegatronSettings:
    """Megatron-Core's settings that decide the memory of a rank."""

    num_ranks: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    """`expert_tensor_parallel_size`. None: experts are whole where ep is above 1, and cut over tp otherwise."""
    weight_bytes: int = 2
    master_bytes: int = 4
    """Bytes of a master weight."""
    gradient_bytes: int = 4
    moment_bytes: int = 0
    """Bytes of each moment; 0: those of a master weight."""
    has_distributed_optimizer: bool = True
    """Whether data parallel ranks shard the optimizer states."""
    offloads_optimizer: bool = False
    """`optimizer_cpu_offload` of all states."""

    @property
    def cut(self) -> StageCut:
        """The parallel sizes that cut the model's tensors."""
        return StageCut(self.tp, self.pp, self.ep, self.etp or choose_expert_tp(self.tp, self.ep))

    @property
    def state_ranks(self) -> int:
        """Ranks that shard the states of everything except routed experts: data and context parallel ones (d*c)."""
        return max(1, self.num_ranks // (self.tp * self.pp)) if self.has_distributed_optimizer else 1

    @property
    def expert_state_ranks(self) -> int:
        """Ranks that shard the states of the routed experts."""
        return max(1, self.num_ranks // (self.pp * self.ep * self.cut.etp)) if self.has_distributed_optimizer else 1


def build_megatron_settings(training: SettledTraining, choice: TrainerChoice, num_ranks: int) -> MegatronSettings:
    """Megatron-Core's settings for a choice. zero_stage 1 stands for its distributed optimizer, 0 for none."""
    return MegatronSettings(
        num_ranks=num_ranks,
        tp=choice.tp,
        pp=choice.pp,
        ep=choice.ep,
        etp=choice.expert_tp,
        weight_bytes=training.dtype.num_bytes,
        master_bytes=training.master_dtype.num_bytes,
        gradient_bytes=4 if training.reduce_dtype == "auto" else training.reduce_dtype.num_bytes,
        moment_bytes=training.moment_bytes,
        has_distributed_optimizer=choice.zero_stage > 0,
        offloads_optimizer=choice.offloads_optimizer,
    )


def build_megatron_rank(
    model: ModelSpec, role: Role, lora: LoraSpec | None, settings: MegatronSettings, stage: int
) -> MegatronRank:
    """Elements of one rank of a pipeline stage. Raises: SpecError for sizes that do not divide.

    Counts: the rank's tensors one by one (norms, routers and latent projections whole, at least one key head, the
    vocabulary padded); adapters in equal parts over tp and stages, beside frozen weights.
    Assumes: adapters are cut like the layers that they adapt (Megatron-Bridge, `ParallelLinearAdapter`).

    >>> from rlplan.spec.models.catalogue import find_model
    >>> rank = build_megatron_rank(find_model("Qwen/Qwen2.5-7B"), Role.POLICY, None, MegatronSettings(8, tp=2), 0)
    >>> rank.dense, rank.state_ranks  # (7,615,616,512 - norms 57 * 3584) / 2 + norms
    (3807910400, 4)
    """
    sizes = _measure_stage(model, role, settings.cut, stage)
    dense, experts, frozen = sizes.dense, sizes.experts, 0
    if lora is not None:
        numels = {True: 0, False: 0}
        for adapter in list_lora_parameters(model, lora.rank, lora.target_modules):
            numels[adapter.component is Component.EXPERTS] += adapter.numel
        frozen = dense + experts
        dense = ceil_div(numels[False], settings.tp * settings.pp)
        experts = ceil_div(numels[True], settings.pp * settings.ep * settings.cut.etp)
    return MegatronRank(
        dense,
        experts,
        settings.state_ranks,
        settings.expert_state_ranks,
        frozen,
        settings.weight_bytes,
        settings.master_bytes,
        settings.gradient_bytes,
        settings.moment_bytes,
        layer_matrices=0 if lora else sizes.layer_matrices,
        head=0 if lora or stage < settings.pp - 1 else sizes.head,
        has_states=not settings.offloads_optimizer,
    )


class _StageSizes(NamedTuple):
    """Elements of a rank of a pipeline stage."""

    dense: int
    experts: int
    layer_matrices: int
    """Elements of the largest layer's matrices, counting one expert: the shapes of dummy weight gradients."""
    head: int
    """Elements of the head's matrix, or of the embedding table that is tied to it."""


@lru_cache(maxsize=4096)
def _measure_stage(model: ModelSpec, role: Role, cut: StageCut, stage: int) -> _StageSizes:
    dense = experts = head = 0
    matrices: dict[int, int] = {}
    for tensor in _stage_share(model, role, cut, stage):
        is_expert = tensor.component is Component.EXPERTS
        experts, dense = experts + tensor.numel * is_expert, dense + tensor.numel * (not is_expert)
        if tensor.component in (Component.HEAD, Component.EMBEDDINGS):
            head = max(head, tensor.numel)
        layer = parse_layer(tensor.name)
        if layer is not None and len(tensor.shape) >= 2:
            num_stacked = tensor.shape[0] if is_expert and len(tensor.shape) == 3 else 1
            matrices[layer] = matrices.get(layer, 0) + tensor.numel // num_stacked
    return _StageSizes(dense, experts, max(matrices.values(), default=0), head)


# Small: the tensors of a large model take megabytes, and only the sizes above are needed for every candidate.
@lru_cache(maxsize=64)
def _stage_share(model: ModelSpec, role: Role, cut: StageCut, stage: int) -> tuple[Parameter, ...]:
    """Trained tensors of a rank of a stage."""
    tp, pp, ep, etp = cut
    layout = Layout(tp=tp, pp=pp, ep=ep, etp=etp, vocab_multiple=VOCABULARY_MULTIPLE * tp)
    stages = split_training_stages(model, pp, has_head=role not in (Role.VALUE, Role.REWARD))
    share = tuple(tensor for tensor in list_stage_tensors(model, layout, stage, stages) if not tensor.is_buffer)
    return replace_head(share, role, model.hidden_size) if stage == pp - 1 else share


def _pinned_copies(model: ModelSpec, role: Role, settings: MegatronSettings, stage: int) -> int:
    """Pinned bytes of one fp32 copy of the elements that a rank updates, rounded up per tensor and expert matrix.

    Source: Megatron-Core 0.14, hybrid_optimizer.py: a pinned clone of each parameter's shard, and a gradient's buffer.
    """
    total = 0.0
    for pinned, is_expert in _pinned_tensors(model, role, settings.cut, stage):
        total += pinned / (settings.expert_state_ranks if is_expert else settings.state_ranks)
    return ceil(total)


@lru_cache(maxsize=4096)
def _pinned_tensors(model: ModelSpec, role: Role, cut: StageCut, stage: int) -> tuple[tuple[int, bool], ...]:
    """(pinned bytes of an fp32 copy, whether it is a routed expert's) of each tensor of a rank of a stage."""
    copies = []
    for tensor in _stage_share(model, role, cut, stage):
        is_expert = tensor.component is Component.EXPERTS
        number = tensor.shape[0] if is_expert and len(tensor.shape) == 3 else 1
        copies.append((number * pinned_bytes(4 * tensor.numel // number), is_expert))
    return tuple(copies)


@lru_cache(maxsize=4096)
def build_megatron_states(
    model: ModelSpec, role: Role, lora: LoraSpec | None, settings: MegatronSettings, stage: int
) -> FixedStates:
    """States of a Megatron-Core rank on one pipeline stage.

    Counts: `build_megatron_state`; moments appear in the first step. With `optimizer_cpu_offload` the host holds
    master weights and gradients of the updated elements (4 each, pinned tensor by tensor) and moments (8).
    Source: Megatron-Core 0.14, optimizer/cpu_offloading/hybrid_optimizer.py. Assumes: weights are loaded a layer at a
    time; passes gather nothing, because the rank holds all weights of its stage.
    """
    rank = build_megatron_rank(model, role, lora, settings, stage)
    rank_state = build_megatron_state(rank)
    adapters: tuple[Parameter, ...] = list_lora_parameters(model, lora.rank, lora.target_modules) if lora else ()
    offloaded: Bytes = {}
    if settings.offloads_optimizer:
        pinned = pinned_bytes(4 * rank.num_updated) if lora else _pinned_copies(model, role, settings, stage)
        moments = {MemoryKind.OPTIMIZER: 2 * (settings.moment_bytes or settings.master_bytes) * rank.num_updated}
        offloaded = dict.fromkeys((MemoryKind.MASTER_WEIGHTS, MemoryKind.GRADIENTS), pinned) | moments
    built: Bytes = {kind: size for kind, size in rank_state.resident.items() if kind is not MemoryKind.COMM_BUFFERS}
    return FixedStates(
        adapters,
        _build_states(built, has_moments=False),
        _build_states(rank_state.resident),
        _build_states(rank_state.resident),
        rank_state,
        0,
        settings.weight_bytes * (rank.dense + rank.experts + rank.frozen),
        0,
        offloaded,
        settings.weight_bytes * ceil_div(model.num_parameters, model.num_layers),
    )


def _build_states(sizes: Mapping[MemoryKind, int], *, has_moments: bool = True) -> States:
    late = MemoryKind.OPTIMIZER
    return States({kind: size for kind, size in sizes.items() if size and (has_moments or kind is not late)})
