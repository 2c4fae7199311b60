"""What a trained role holds whatever the tokens: DeepSpeed's states on the GPU and on the host, counted once a choice.

In: a model, a role, adapters, ZeRO's settings. Out: FixedStates. Left out: passes (rank.py), other trainers' states
(exported.py).
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from rlplan.dataflow.choice import TrainerChoice
from rlplan.memory.machine.host import pinned_bytes
from rlplan.memory.model.frozen import Frozen
from rlplan.memory.model.quantization import NF4_DOUBLE, Quantization, weight_bytes
from rlplan.memory.roles.gpu.process import Bytes
from rlplan.memory.trainers.nvme import swap_buffer_bytes
from rlplan.memory.trainers.optimizers import Optimizer
from rlplan.memory.trainers.sharding import Sizes, rank_state_under_zero, sizes_of
from rlplan.memory.trainers.step_peak import RankState
from rlplan.memory.trainers.zero import States, ZeroSettings, ZeroStates
from rlplan.spec.model import Component, Layout, ModelSpec, Parameter
from rlplan.spec.models.adapters import lora_parameters
from rlplan.spec.parts.training import LoraSpec
from rlplan.spec.resolved import SettledTraining
from rlplan.vocabulary import MemoryKind, Role


@dataclass(frozen=True)
class FixedStates:
    """What does not depend on the tokens. gathered: weights at most at a time.

    share_bytes: the rank's own weights. swap_buffers: of NVMe offload. offloaded: what ZeRO keeps on the host.
    loading: on the host while weights are loaded.
    """

    adapters: tuple[Parameter, ...]
    after_build: States
    after_backward: States
    after_step: States
    rank_state: RankState
    gathered: int
    share_bytes: int
    swap_buffers: int
    offloaded: Bytes
    loading: int


@lru_cache(maxsize=1024)
def fixed_states(
    model: ModelSpec, role: Role, lora: LoraSpec | None, settings: ZeroSettings, tp: int = 1
) -> FixedStates:
    """States of a DeepSpeed rank, counted once for all token counts. tp: ranks of AutoTP."""
    parameters, adapters, sizes = trained_sizes(model, role, lora, settings.weight_bytes, tp)
    states = ZeroStates(settings, adapters or parameters, frozen=parameters if adapters else ())
    saved = _quantized_saving(parameters, settings.weight_bytes) if lora and lora.base_dtype == "nf4" else 0
    rank_state = rank_state_under_zero(states, sizes)
    return FixedStates(
        adapters,
        _lighter(states.after_build(), saved),
        _lighter(states.after_backward(), saved),
        _lighter(states.after_step(), saved),
        replace(rank_state, resident=_lighter(States(rank_state.resident), saved).device),
        states.gathered_bytes(sizes.layer_weights),
        settings.weight_bytes * states.partition_numel,
        swap_buffer_bytes(
            min(settings.sub_group_size, states.partition_numel),
            swaps_parameters=settings.offloads_parameters,
            element_bytes=settings.weight_bytes,
        ),
        offloaded_states(states),
        settings.weight_bytes
        * (max(sizes.layer_weights, sizes.table) if settings.stage == 3 else model.num_parameters),
    )


def _quantized_saving(parameters: tuple[Parameter, ...], element_bytes: int) -> int:
    """Bytes that a frozen base of 4-bit normal floats (double quantisation) saves, but for one dequantised matrix."""
    whole = element_bytes * sum(parameter.numel for parameter in parameters)
    largest = element_bytes * max(parameter.numel for parameter in parameters if parameter.is_linear)
    return whole - weight_bytes(parameters, element_bytes, Quantization(NF4_DOUBLE)) - largest


def _lighter(states: States, saved: int) -> States:
    """The same with lighter weights."""
    if not saved:
        return states
    return States({**states.device, MemoryKind.WEIGHTS: states.device[MemoryKind.WEIGHTS] - saved}, states.host)


def autotp_parameters(model: ModelSpec, tp: int) -> tuple[Parameter, ...]:
    """What one rank holds of a model under DeepSpeed's AutoTP: decoder projections cut, embeddings and head whole.

    Counts: a share of each decoder projection; norms whole.
    Source: DeepSpeed 0.19.8, module_inject/auto_tp.py, as `emit.deepspeed.tensor_parallel_section` has it cut.
    Differs: the plans of transformers 5.19 cut an untied head too (`colwise_gather_output`).
    Assumes: tp divides the key heads; dense models, for stacked experts are no linear layers and would stay whole.
    Raises: SpecError for sizes that do not divide.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> model = find_model("Qwen/Qwen2.5-0.5B")  # table 136,134,656, norms 49 * 896, halves of 357,854,208
    >>> sum(tensor.numel for tensor in autotp_parameters(model, 2))
    315105664
    """
    if tp == 1:
        return model.parameters
    share = (tensor for tensor in model.held_tensors(Layout(tp=tp)) if not tensor.is_buffer)
    pairs = zip(model.parameters, share, strict=True)
    kept = (Component.EMBEDDINGS, Component.HEAD)
    return tuple(whole if whole.component in kept else part for whole, part in pairs)


def with_role_head(parameters: tuple[Parameter, ...], role: Role, hidden: int) -> tuple[Parameter, ...]:
    """The same with one output instead of the language head, where the role gives one number a token."""
    if role not in (Role.VALUE, Role.REWARD):
        return parameters
    kept = tuple(parameter for parameter in parameters if parameter.component is not Component.HEAD)
    return (*kept, Parameter("score.weight", (1, hidden), Component.HEAD))


@lru_cache(maxsize=256)
def trained_sizes(
    model: ModelSpec, role: Role, lora: LoraSpec | None, element_bytes: int, tp: int = 1
) -> tuple[tuple[Parameter, ...], tuple[Parameter, ...], Sizes]:
    """What a rank holds of the model's parameters, the adapters beside them, and their sizes."""
    parameters = with_role_head(autotp_parameters(model, tp), role, model.hidden_size)
    adapters = lora_parameters(model, lora.rank, lora.target_modules) if lora else ()
    sizes = sizes_of(
        parameters,
        model.num_layers,
        is_tied=model.has_tied_embeddings,
        adapters=adapters,
        frozen_bytes=element_bytes * model.num_parameters if adapters else 0,
    )
    return parameters, adapters, sizes


def offloaded_states(states: ZeroStates) -> Bytes:
    """What ZeRO keeps on the host, as memory is taken: pinned tensors in powers of two, others as they are.

    Counts: pinned are gradients and, in stages 1 and 2, master weights and the 16-bit copy; in stage 3 the 16-bit
    gradients are one tensor, the fp32 ones a tensor a sub-group. Moments (and stage 3's master weights) are pageable.
    Source: DeepSpeed 0.19.8, stage_1_and_2.py and stage3.py (`pin_memory`), ops/adam/cpu_adam.py.
    """
    settings, host = states.settings, states.after_step().host
    pageable = {MemoryKind.OPTIMIZER} | ({MemoryKind.MASTER_WEIGHTS} if settings.stage == 3 else set())
    held = {kind: size if kind in pageable else pinned_bytes(size) for kind, size in host.items()}
    if settings.stage == 3 and MemoryKind.GRADIENTS in held:
        whole, rest = divmod(states.partition_numel, settings.sub_group_size)
        groups = whole * pinned_bytes(settings.master_bytes * settings.sub_group_size)
        groups += pinned_bytes(settings.master_bytes * rest)
        held[MemoryKind.GRADIENTS] = groups + pinned_bytes(settings.gradient_bytes * states.partition_numel)
    return held


def zero_settings(training: SettledTraining, choice: TrainerChoice, num_ranks: int) -> ZeroSettings:
    """DeepSpeed's settings for a choice. Ranks that share layers (tp) do not share states."""
    element_bytes = training.dtype.num_bytes
    return ZeroSettings(
        stage=choice.zero_stage,
        num_ranks=max(1, num_ranks // choice.tp),
        weight_bytes=element_bytes,
        gradient_bytes=element_bytes,
        master_bytes=training.master_dtype.num_bytes,
        moment_bytes=training.master_dtype.num_bytes,
        optimizer=Optimizer(training.optimizer),
        reduce_bucket_size=training.reduce_bucket_size,
        allgather_bucket_size=training.reduce_bucket_size,
        offloads_optimizer=choice.offloads_optimizer,
        offloads_parameters=choice.offloads_parameters,
    )


def frozen_of(adapters: tuple[Parameter, ...]) -> Frozen:
    """What is trained beside a layer's frozen weights, from the names of its adapters."""
    names = {adapter.name.split(".lora_")[0].rpartition(".")[2]: adapter.component for adapter in adapters}
    last = {name for name in names if name.startswith(_LAST_OF_A_BLOCK)}
    attention = {name for name, component in names.items() if component is Component.ATTENTION}
    return Frozen(
        attention_inputs=len(attention - last),
        adapts_output=bool(attention & last),
        mlp_inputs=len(set(names) - attention - last),
        adapts_down=bool(last - attention),
        adapter_bytes=2,
    )


_LAST_OF_A_BLOCK = ("o_proj", "out_proj", "dense", "c_proj", "wo", "down_proj", "fc2", "fc_out")
"""Projections that end attention or the MLP, in the names of transformers 5.19."""
