"""Parallel layouts of trainers and engines: sequence, tensor, pipeline, context and expert parallel sizes.

In: a SettledJob, models, GPUs. Out: `Axes` of trainers, ZeRO stages, offload, engine sizes. Left out: whether a layout
fits (roles.py) and how fast it is (times.py).

rlplan's own runtime uses DeepSpeed: ZeRO, Ulysses, AutoTP. FSDP2 shards everything and adds tensor and context
parallelism. Megatron-Core has its distributed optimizer and tensor, pipeline, context and expert parallelism. Open
sizes are powers of two. Sizes that communicate in each layer (tp, ulysses, cp) stay within MAX_BESIDE.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from rlplan.dataflow.choice import choose_expert_tp
from rlplan.errors import SpecError
from rlplan.memory.serving.weights import build_engine_layout, engine_weight_bytes
from rlplan.spec.hardware.profile import ComputeDtype, GpuProfile
from rlplan.spec.job import JobSpec
from rlplan.spec.model import ModelSpec
from rlplan.spec.models.shards import has_even_stages
from rlplan.spec.parts.training import Combination, find_sharing_conflicts
from rlplan.spec.resolved import SettledJob, SettledTraining
from rlplan.vocabulary import Backend

ENGINE_TP = 32
"""Largest tensor-parallel size of an engine that `auto` tries."""
MAX_BESIDE = 8
"""GPUs of a host. Larger groups would communicate outside NVLink in each layer (arXiv:2104.04473, takeaway 1)."""
MAX_PP = 16
MAX_EP = 64
"""Largest expert-parallel size of trainers and engines."""
LEAST_TOKENS = 2048
"""Minimum tokens per rank of the longest sequence under `auto` (ulysses, cp). The activations of shorter pieces are
small compared with the communication."""


class Axes(NamedTuple):
    """Parallel sizes of a trainer."""

    ulysses: int = 1
    """Sequence-parallel size (Ulysses)."""
    tp: int = 1
    """Tensor-parallel size."""
    pp: int = 1
    """Pipeline-parallel size."""
    cp: int = 1
    """Context-parallel size."""
    ep: int = 1
    """Expert-parallel size."""
    etp: int = 0
    """Expert-tensor-parallel size as stated by the job; 0 if open."""

    @property
    def expert_ranks(self) -> int:
        """Ranks of a pipeline stage that share the experts."""
        return self.ep * (self.etp or choose_expert_tp(self.tp, self.ep))

    @property
    def ranks_per_sequence(self) -> int:
        """Ranks that work on the same micro-batch."""
        return self.ulysses * self.tp * self.pp * self.cp


@lru_cache(maxsize=256)
def list_powers(largest: int) -> tuple[int, ...]:
    """List 1, 2, 4 ... up to `largest`."""
    return tuple(2**power for power in range(largest.bit_length()))


def list_parallel_axes(job: SettledJob, models: Sequence[ModelSpec], training: int) -> tuple[Axes, ...]:
    """List every trainer layout on at most `training` GPUs that divides the policy, the first model.

    All roles are sharded alike, so an open tp divides every model's heads.
    """
    wanted = job.training
    etp = 0 if wanted.etp == "auto" or models[0].experts is None else int(wanted.etp)
    rank_counts = wanted.ulysses, wanted.tp, wanted.pp, wanted.cp, wanted.ep, etp
    has_adapters = wanted.trains_adapters
    most_parts = max(1, job.workload.max_seq_len // LEAST_TOKENS)
    layouts = _list_axes(models[0], job.backend, training, has_adapters, most_parts, rank_counts)
    if job.backend == "megatron" and models[0].experts and not wanted.sequence_parallel:
        layouts = [axes for axes in layouts if axes.tp == 1]  # Megatron-Core refuses it (moe/moe_layer.py)
    if wanted.tp != "auto":
        return tuple(layouts)
    return tuple(axes for axes in layouts if all(model.num_heads % axes.tp == 0 for model in models))


@lru_cache(maxsize=256)
def _list_axes(
    model: ModelSpec,
    backend: Backend,
    training: int,
    has_adapters: bool,
    most_parts: int,
    wanted: tuple[int | str, ...],
) -> list[Axes]:
    heads, beside = model.num_heads, list_powers(min(MAX_BESIDE, training))
    experts = model.experts.num_experts if model.experts else 1
    rank_counts = [size for size in beside if heads % size == 0]
    cut = [1] if model.experts else rank_counts  # AutoTP shards linear layers only; stacked experts would stay whole
    contexts = list_powers(min(MAX_BESIDE, training, most_parts))
    pipelines = list_powers(min(MAX_PP, training)) if backend == "megatron" else ()
    has = {
        "deepspeed": ([size for size in rank_counts if size <= most_parts], cut, [1], [1], [1]),
        "fsdp2": ([size for size in rank_counts if size <= most_parts], rank_counts, [1], contexts, [1]),
        "megatron": (
            [1],
            rank_counts,
            [size for size in pipelines if size <= model.num_layers and has_even_stages(model, size)],
            contexts,
            [size for size in list_powers(min(MAX_EP, training)) if experts % size == 0],
        ),
    }[backend] + ([0],)
    sizes = (open_ones if size == "auto" else [int(size)] for size, open_ones in zip(wanted, has, strict=True))
    layouts = _keep_divisible(product(*sizes), heads, training)
    return [axes for axes in layouts if backend != "deepspeed" or _can_share(model, axes, has_adapters=has_adapters)]


def _can_share(model: ModelSpec, axes: Axes, *, has_adapters: bool) -> bool:
    """Whether DeepSpeed supports this combination of Ulysses and tensor parallelism at some ZeRO stage."""
    asked = Combination(None, trains_adapters=has_adapters, ulysses=axes.ulysses, tp=axes.tp)
    return not any((*find_sharing_conflicts(model, axes.ulysses, axes.tp), *asked.contradictions()))


def _keep_divisible(sizes: Iterator[tuple[int, ...]], heads: int, training: int) -> Iterator[Axes]:
    for combination in sizes:
        axes = Axes(*combination)
        if heads % (axes.ulysses * axes.tp) or axes.ranks_per_sequence > training:
            continue
        if _can_spread_experts(training, axes):
            yield axes


def _can_spread_experts(num_ranks: int, axes: Axes) -> bool:
    """Whether a pipeline stage's experts spread evenly over its ranks.

    Expert ranks may differ from tensor-parallel ranks (Megatron's expert data parallelism), so tp need not divide them.
    """
    return (axes.ep == 1 and not axes.etp) or num_ranks % (axes.pp * axes.expert_ranks) == 0


def can_cut(num_ranks: int, axes: Axes) -> bool:
    """Whether a group of ranks can hold a model in a layout.

    >>> can_cut(2, Axes(cp=2)), can_cut(1, Axes(cp=2)), can_cut(3, Axes(ep=2))
    (True, False, False)
    """
    return num_ranks % axes.ranks_per_sequence == 0 and _can_spread_experts(num_ranks, axes)


def list_zero_stages(job: JobSpec, training: int) -> tuple[int, ...]:
    """List ZeRO stages to try: FSDP2 shards everything, Megatron only optimizer states.

    A single rank shards nothing; stage 3 is tried because only it can offload parameters.
    """
    wanted = job.training.zero_stage
    usual = {"deepspeed": (0, 1, 2, 3) if training > 1 else (0, 3), "fsdp2": (3,), "megatron": (1,)}[job.backend]
    return usual if wanted == "auto" else (int(wanted),)


def can_train(
    wanted: SettledTraining, backend: Backend, stage: int, axes: Axes, *, optimizer: bool, parameters: bool
) -> bool:
    """Whether the backend supports this combination of ZeRO stage, parallel sizes and offload."""
    if backend == "fsdp2":
        return optimizer == parameters  # CPUOffloadPolicy moves both
    if backend == "megatron":
        return not parameters
    if optimizer and wanted.offload_device == "nvme" and stage < 3:
        return False
    return not any(wanted.combination(stage, (axes.ulysses, axes.tp), (optimizer, parameters)).contradictions())


class EngineAxes(NamedTuple):
    """Parallel sizes of an engine."""

    tp: int
    """Tensor-parallel size."""
    attention_dp: int
    """Data-parallel attention size: groups of tp ranks share the experts, each with its own sequences."""
    has_experts: bool
    """Whether the engine uses expert parallelism."""


def list_engine_axes(job: SettledJob, model: ModelSpec) -> tuple[EngineAxes, ...]:
    """List engine sizes by which vLLM can divide the model."""
    rollout = job.rollout
    open_sizes = (1,) if rollout.generates_in_trainer else list_powers(ENGINE_TP)
    sizes = open_sizes if rollout.tp == "auto" else (int(rollout.tp),)
    experts = (False, True) if rollout.has_expert_parallel == "auto" else (rollout.has_expert_parallel,)
    candidates = (
        EngineAxes(tp, dp, has_experts)
        for tp, has_experts in product(sizes, experts)
        for dp in (_list_attention_dp(job, tp) if has_experts and model.experts else (1,))
        if has_experts or rollout.attention_dp in ("auto", 1)
    )
    return tuple(axes for axes in candidates if _can_hold(model, axes))


def _list_attention_dp(job: SettledJob, tp: int) -> tuple[int, ...]:
    """List data-parallel attention sizes that divide the engine's batch limits."""
    rollout = job.rollout
    if rollout.attention_dp != "auto":
        return (int(rollout.attention_dp),)
    if job.is_for_rlplan or tp > MAX_BESIDE:
        return (1,)
    limits = rollout.max_num_batched_tokens, rollout.max_num_seqs
    return tuple(dp for dp in list_powers(MAX_EP // tp) if all(limit == "auto" or limit % dp == 0 for limit in limits))


@lru_cache(maxsize=1024)
def _can_hold(model: ModelSpec, axes: EngineAxes) -> bool:
    tp, dp, has_experts = axes
    if has_experts and (model.experts is None or tp * dp == 1):
        return False
    if model.num_heads % tp:
        return False
    try:
        engine_weight_bytes(model, build_engine_layout(tp, ep=tp * dp if has_experts else 1, attention_dp=dp), 2)
    except SpecError:
        return False
    return True


def list_quantizations(job: JobSpec, gpu: GpuProfile) -> tuple[str | None, ...]:
    """List weight formats of an engine. If open: as loaded, and fp8 on GPUs that multiply it."""
    wanted = job.rollout.quantization
    if job.rollout.base_path is not None:
        return (None,)  # the checkpoint determines the format
    if wanted != "auto":
        return (None if wanted == "none" else wanted,)
    return (None, "fp8") if ComputeDtype.FLOAT8 in gpu.dense_flops_per_s else (None,)
