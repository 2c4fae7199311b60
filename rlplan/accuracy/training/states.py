"""What one rank of a published run holds: weights, gradients, states and gathers, as `RankState`.

In: a Run. Out: RankState. Left out: activations and logits (step_peak.py).
"""

import re
from dataclasses import replace

from rlplan.accuracy.registry import CannotPredict
from rlplan.accuracy.training.run import Run, is_bridge
from rlplan.accuracy.training.trainers import MEGATRON
from rlplan.accuracy.training.zero import has_own_adam, read_stage, read_zero
from rlplan.memory.model.quantization import Quantization, weight_bytes
from rlplan.memory.trainers.optimizers import Optimizer
from rlplan.memory.trainers.sharding import (
    FsdpSettings,
    Sizes,
    megatron_sizes,
    rank_state_of_megatron_rank,
    rank_state_under_fsdp,
    rank_state_under_torch,
    rank_state_under_zero,
    sizes_of,
)
from rlplan.memory.trainers.step_peak import RankState
from rlplan.memory.trainers.zero import ZeroStates
from rlplan.spec.model import Component, Layout, ModelSpec, Parameter
from rlplan.units import ceil_div
from rlplan.vocabulary import Loss, MemoryKind

COMPUTE_BYTES = 2
"""Bytes of a weight in the passes: every table of these sources trains in bf16 or fp16."""


ETP = ("etp", "expert_tensor_parallel")
"""Keys of Megatron's expert tensor parallelism."""


BF16_MOMENTS = ("DeepseekV3ForCausalLM", "KimiK2ForCausalLM")
"""Architectures whose recipes in Megatron-Bridge keep moments in bf16 (`use_precision_aware_optimizer`). Gradients are
reduced in bf16 by all of its recipes that are measured (`grad_reduce_in_fp32` False). Source: Megatron-Bridge 2026-08,
src/megatron/bridge/perf_recipes/_common.py, deepseek/common.py, recipes/moonlight/moonlight_16b.py."""


def rank_state_of(run: Run) -> RankState:
    """What the rank holds, by who shards it. Raises: CannotPredict."""
    rank_state = _sharded(run)
    resident = dict(rank_state.resident)
    if run.adapters:
        resident[MemoryKind.WEIGHTS] = resident.get(MemoryKind.WEIGHTS, 0) + run.adapters.reference_bytes
    accumulates = rank_state.accumulates or run.accumulates or run.trainer.accumulates
    return replace(rank_state, resident=resident, accumulates=accumulates)


def _sharded(run: Run) -> RankState:
    if read_stage(run.settings) is not None:
        return _by_zero(run)
    if run.trainer is MEGATRON:
        return _by_megatron(run)
    sizes = rank_sizes(run)
    if (run.num_ranks == 1 and not run.trainer.is_fsdp_alone) or run.replicates:
        return _by_torch(run, sizes)
    if run.trainer.is_sharded or "fsdp" in run.settings:
        return _by_fsdp(run, sizes)
    raise CannotPredict(f"how {run.num_ranks} ranks share the model is not stated")


def rank_sizes(run: Run) -> Sizes:
    """Sizes of the whole model as it is stored for training."""
    adapters = run.adapters.parameters if run.adapters else ()
    frozen = frozen_bytes(run) if run.adapters else 0
    model = run.model
    return sizes_of(
        model.parameters,
        model.num_layers,
        is_tied=model.has_tied_embeddings,
        adapters=adapters,
        frozen_bytes=frozen,
    )


def frozen_bytes(run: Run) -> int:
    """Bytes of the frozen weights, quantised where the run does so."""
    parameters = run.model.parameters
    if run.quantization is None:
        return weight_bytes(parameters, run.precision.stored if run.trainer.is_fsdp_alone else run.precision.compute)
    if run.trainer.upcasts_rest:
        return weight_bytes(parameters, 4, Quantization(run.quantization))
    head = tuple(p for p in parameters if p.component is Component.HEAD and len(p.shape) == 2)
    if not run.trainer.quantizes_head or not head:
        return weight_bytes(parameters, run.precision.compute, Quantization(run.quantization))
    others = tuple(p for p in parameters if p not in head)
    return weight_bytes(others, run.precision.compute, Quantization(run.quantization)) + sum(
        run.quantization.num_bytes(p.shape) for p in head
    )


def scale_bytes(run: Run) -> int:
    """Bytes of the scales of quantised weights, where every rank holds them whole."""
    if run.quantization is None or not run.trainer.replicates_scales:
        return 0
    scheme = Quantization(run.quantization)
    covered = [p for p in run.model.parameters if scheme.covers(p)]
    return sum(run.quantization.num_bytes(p.shape) - ceil_div(p.numel, 2) for p in covered)


def _dequantized_bytes(run: Run) -> int:
    """One quantised weight as it is multiplied: the largest in the compute type."""
    if run.quantization is None:
        return 0
    scheme = Quantization(run.quantization)
    return COMPUTE_BYTES * max(p.numel for p in run.model.parameters if scheme.covers(p))


def _by_torch(run: Run, sizes: Sizes) -> RankState:
    rank_state = rank_state_under_torch(
        sizes,
        weight_bytes=run.adapters.element_bytes if run.adapters else run.precision.stored,
        casts_weights=run.precision.stored > run.precision.compute and run.adapters is None,
        optimizer=run.optimizer,
        steps_in_backward=run.steps_in_backward,
        has_fused_step=run.has_fused_step,
        keeps_states_on_host=run.optimizer is Optimizer.PAGED_ADAMW_8BIT,
    )
    table = COMPUTE_BYTES * sizes.largest_table if run.adapters and run.adapters.copies_table else 0
    return replace(rank_state, layer_passing=rank_state.layer_passing + _dequantized_bytes(run), head_passing=table)


def _by_fsdp(run: Run, sizes: Sizes) -> RankState:
    if run.ep > 1:
        raise CannotPredict("expert parallelism under FSDP is not modelled")
    counts = run.statistic.value in ("reserved", "process")
    master = run.adapters.element_bytes if run.adapters else run.precision.stored
    scales = scale_bytes(run)
    layer = None
    if run.quantization is not None:
        layer = (sizes.frozen_bytes - scales - COMPUTE_BYTES * sizes.root) // run.model.num_layers
    fsdp = FsdpSettings(
        run.data_ranks,
        master_bytes=master,
        reduce_bytes=4 if run.trainer.has_master else 2,
        tp_size=run.tp * run.pp,
        frozen_layer_bytes=layer,
        is_on_host=run.offloads_states,
        gathers_tables_apart=not run.trainer.gathers_root,
        counts_every_stream=counts and run.trainer.has_master,
        has_fused_step=run.has_fused_step,
    )
    rank_state = rank_state_under_fsdp(replace(sizes, frozen_bytes=sizes.frozen_bytes - scales), fsdp)
    resident = dict(rank_state.resident)
    resident[MemoryKind.WEIGHTS] = resident.get(MemoryKind.WEIGHTS, 0) + scales
    rank_state = replace(
        rank_state, resident=resident, layer_passing=rank_state.layer_passing + _dequantized_bytes(run)
    )
    if run.trainer.is_fsdp_alone and run.loss is Loss.SHIFTED:  # the head multiplies in fp32
        rank_state = replace(rank_state, head_passing=rank_state.head_passing + 4 * sizes.largest_table)
    return rank_state if run.pp == 1 else _with_whole_stage(run, rank_state, sizes)


def _with_whole_stage(run: Run, rank_state: RankState, sizes: Sizes) -> RankState:
    """FSDP inside a pipeline: the stage stays gathered, and its gradients are accumulated whole in fp32.

    Source: torchtitan 2024-12 parallelize_llama.py (`reshard_after_forward` is off), torch 2.13 pipelining/stage.py
    (`set_requires_gradient_sync` for the last micro-batch only), _fsdp_param.py (`unsharded_accumulated_grad`).
    """
    stage = ceil_div(sizes.num_trainable, run.tp * run.pp)
    return replace(
        rank_state,
        gradients=rank_state.gradients + 4 * stage,
        kept_gradients=rank_state.kept_gradients + 4 * stage,
        passing=run.precision.compute * stage,
        layer_passing=0,
        accumulates=True,
    )


def expert_shards(run: Run) -> int:
    """Ranks that share an expert's matrices."""
    if run.trainer is not MEGATRON:
        return run.tp
    stated = run.settings.degree(*ETP) if run.settings.first(ETP) else run.tp
    return stated if stated * run.ep <= run.data_ranks * run.tp else 1  # more would not fit the stage's ranks


def layer_matrices(model: ModelSpec) -> list[int]:
    """Elements of the matrices of each layer, of experts one."""
    sizes = [0] * model.num_layers
    for parameter in model.parameters:
        layer = re.search(r"layers\.(\d+)\.", parameter.name)
        if layer is None or len(parameter.shape) < 2 or parameter.is_buffer:
            continue
        is_expert = parameter.component is Component.EXPERTS and model.experts is not None
        sizes[int(layer.group(1))] += parameter.numel // (
            model.experts.num_experts if is_expert and model.experts else 1
        )
    return sizes


def _by_megatron(run: Run) -> RankState:
    """A rank of Megatron-Core; adapters are cut like the layers beside them, whose weights are frozen.

    Raises: CannotPredict where frozen weights are quantised.
    """
    if run.quantization is not None:
        raise CannotPredict("quantised weights under Megatron are not modelled")
    sizes = rank_sizes(run)
    experts = run.model.numel_by_component.get(Component.EXPERTS, 0)
    trained_experts, frozen = experts, (0, 0)
    if run.adapters:
        adapters = run.adapters.parameters
        trained_experts = sum(tensor.numel for tensor in adapters if tensor.component is Component.EXPERTS)
        frozen = run.model.num_parameters - experts, experts
    has_recipe = is_bridge(run.settings)
    has_lean_moments = has_recipe and run.model.architecture in BF16_MOMENTS
    rank = megatron_sizes(
        sizes,
        tp=run.tp,
        pp=run.pp,
        dp=run.data_ranks,
        ep=run.ep,
        etp=expert_shards(run),
        expert_numel=trained_experts,
        frozen=frozen,
    )
    is_whole = run.adapters is None  # beside frozen matrices there is no gradient that another tensor stands for
    rank = replace(
        rank,
        gradient_bytes=2 if has_recipe else 4,
        moment_bytes=2 if has_lean_moments else 4,
        layer_matrices=max(layer_matrices(run.model)) // run.tp * is_whole,
        head=run.model.vocab_size * run.model.hidden_size // run.tp * is_whole,
    )
    return rank_state_of_megatron_rank(rank)


def _by_zero(run: Run) -> RankState:
    """A DeepSpeed rank; tensor parallelism cuts the model first. Raises: CannotPredict."""
    if run.quantization is not None:
        raise CannotPredict("quantised weights under DeepSpeed are not modelled")
    share: tuple[Parameter, ...] = tuple(p for p in run.model.held_tensors(Layout(tp=run.tp)) if not p.is_buffer)
    trained = run.adapters.parameters if run.adapters else share
    zero = read_zero(run.settings, run.data_ranks, run.optimizer, run.precision.compute)
    states = ZeroStates(zero, trained, share if run.adapters else ())
    return rank_state_under_zero(states, has_fused_step=has_own_adam(run.settings))
