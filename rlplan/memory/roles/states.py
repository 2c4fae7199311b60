"""Memory of a trained role that does not depend on the tokens, under DeepSpeed, on the GPU and on the host.

In: a model, a role, adapters, ZeRO's settings. Out: FixedStates, computed once per choice.
Left out: passes (rank.py), other trainers' states (exported.py).
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

from rlplan.dataflow.choice import TrainerChoice
from rlplan.memory.machine.host import pinned_bytes
from rlplan.memory.model.frozen import Frozen, describe_adapters
from rlplan.memory.model.quantization import BASE_FORMATS, dequantized_numel, frozen_bytes
from rlplan.memory.roles.process import Bytes, add
from rlplan.memory.trainers.optimizers import Optimizer, swap_buffer_bytes
from rlplan.memory.trainers.sharding import Sizes, build_zero_state, measure_sizes
from rlplan.memory.trainers.step_peak import RankState
from rlplan.memory.trainers.training import cut_autotp_parameters
from rlplan.memory.trainers.zero import States, ZeroSettings, ZeroStates
from rlplan.spec.model import Component, ModelSpec, Parameter
from rlplan.spec.models.adapters import list_lora_parameters
from rlplan.spec.parts.adapter_files import list_frozen_adapters
from rlplan.spec.parts.training import LoraSpec
from rlplan.spec.resolved import SettledTraining
from rlplan.vocabulary import MemoryKind, Role


@dataclass(frozen=True)
class FixedStates:
    """Memory of one rank that does not depend on the tokens."""

    adapters: tuple[Parameter, ...]
    after_build: States
    after_backward: States
    after_step: States
    rank_state: RankState
    gathered: int
    """Bytes of weights that a forward-only pass gathers at a time."""

    share_bytes: int
    """Bytes of the rank's own weights."""

    swap_buffers: int
    """Bytes of the buffers of NVMe offload."""

    offloaded: Bytes
    """Offloaded states in the host's memory."""

    loading: int
    """Bytes in the host's memory while weights are loaded."""

    dequantised: int = 0
    """Elements of the largest 4-bit weight, which a matmul dequantizes."""

    reserved_state: RankState | None = None
    """The states that torch keeps reserved where streams have pools of their own; None: no more than in use."""

    @cached_property
    def _frozen(self) -> dict[int, Frozen]:
        return {}

    def find_adapters(self, element_bytes: int) -> Frozen:
        """The adapters beside frozen weights; cached, because a model has thousands of adapter tensors."""
        if element_bytes not in self._frozen:
            self._frozen[element_bytes] = describe_adapters(self.adapters, element_bytes)
        return self._frozen[element_bytes]


@lru_cache(maxsize=1024)
def build_fixed_states(
    model: ModelSpec,
    role: Role,
    lora: LoraSpec | None,
    settings: ZeroSettings,
    tp: int = 1,
    beside: tuple[LoraSpec, ...] = (),
) -> FixedStates:
    """States of a DeepSpeed rank for all token counts.

    tp: AutoTP size. beside: frozen adapters of other roles on the same base.
    """
    parameters, adapters, sizes = measure_trained_sizes(model, role, lora, settings.weight_bytes, tp)
    others = list_frozen_adapters(model, {str(index): adapter for index, adapter in enumerate(beside)})
    frozen = (*parameters, *others) if adapters else ()
    base = BASE_FORMATS.get(lora.base_dtype) if lora else None
    states = ZeroStates(
        settings,
        adapters or parameters,
        frozen,
        frozen_bytes=frozen_bytes(frozen, lora.unquantized_bytes(settings.weight_bytes) if lora else 0, base),
    )
    rank_state = build_zero_state(states, reduces_in_step=True)
    backward = states.after_backward()
    if settings.stage == 1:
        # Stage 1 allocates its bucket in the backward pass and keeps it until the step (`setup_buckets`).
        backward = States(add(dict(backward.device), {MemoryKind.COMM_BUFFERS: states.bucket_bytes()}), backward.host)
    return FixedStates(
        adapters,
        states.after_build(),
        backward,
        states.after_step(),
        rank_state,
        states.gathered_bytes(sizes.layer_weights),
        settings.weight_bytes * states.partition_numel,
        swap_buffer_bytes(
            min(settings.sub_group_size, states.partition_numel),
            swaps_parameters=settings.offloads_parameters,
            element_bytes=settings.weight_bytes,
        ),
        sum_offloaded_states(states),
        settings.weight_bytes
        * (max(sizes.layer_weights, sizes.table) if settings.stage == 3 else model.num_parameters),
        dequantized_numel(frozen, base),
    )


def replace_head(parameters: tuple[Parameter, ...], role: Role, hidden: int) -> tuple[Parameter, ...]:
    """Replace the language head by one with a single output for value and reward models."""
    if role not in (Role.VALUE, Role.REWARD):
        return parameters
    body = tuple(parameter for parameter in parameters if parameter.component is not Component.HEAD)
    return (*body, Parameter("score.weight", (1, hidden), Component.HEAD))


@lru_cache(maxsize=256)
def measure_trained_sizes(
    model: ModelSpec, role: Role, lora: LoraSpec | None, element_bytes: int, tp: int = 1
) -> tuple[tuple[Parameter, ...], tuple[Parameter, ...], Sizes]:
    """(parameters of a rank, adapters, sizes) of a trained role."""
    parameters = replace_head(cut_autotp_parameters(model, tp), role, model.hidden_size)
    adapters = list_lora_parameters(model, lora.rank, lora.target_modules) if lora else ()
    sizes = measure_sizes(
        parameters,
        model.num_layers,
        is_tied=model.has_tied_embeddings,
        adapters=adapters,
        frozen_bytes=element_bytes * model.num_parameters if adapters else 0,
    )
    return parameters, adapters, sizes


def sum_offloaded_states(states: ZeroStates) -> Bytes:
    """Bytes that ZeRO's offloaded states take on the host. Pinned tensors are rounded up to powers of two.

    Counts: gradients are pinned, and in stages 1 and 2 master weights and the 16-bit copy. In stage 3 the 16-bit
    gradients are one tensor, the fp32 ones a tensor per sub-group. Moments and stage 3's master weights are pageable.
    Source: DeepSpeed 0.19.8, stage_1_and_2.py and stage3.py (`pin_memory`), ops/adam/cpu_adam.py.
    """
    settings, host = states.settings, states.after_step().host
    pageable = {MemoryKind.OPTIMIZER} | ({MemoryKind.MASTER_WEIGHTS} if settings.stage == 3 else set())
    sizes = {kind: size if kind in pageable else pinned_bytes(size) for kind, size in host.items()}
    if settings.stage == 3 and MemoryKind.GRADIENTS in sizes:
        num_full, last = divmod(states.partition_numel, settings.sub_group_size)
        groups = num_full * pinned_bytes(settings.master_bytes * settings.sub_group_size)
        groups += pinned_bytes(settings.master_bytes * last)
        sizes[MemoryKind.GRADIENTS] = groups + pinned_bytes(settings.gradient_bytes * states.partition_numel)
    return sizes


def build_zero_settings(training: SettledTraining, choice: TrainerChoice, num_ranks: int) -> ZeroSettings:
    """DeepSpeed's settings for a choice. Tensor parallel ranks do not shard each other's states."""
    element_bytes = training.dtype.num_bytes
    return ZeroSettings(
        stage=choice.zero_stage,
        num_ranks=max(1, num_ranks // choice.tp),
        weight_bytes=element_bytes,
        gradient_bytes=element_bytes,
        master_bytes=training.master_dtype.num_bytes,
        moment_bytes=training.moment_bytes,
        optimizer=Optimizer(training.optimizer),
        reduce_bucket_size=training.reduce_bucket_size,
        offloads_optimizer=choice.offloads_optimizer,
        offloads_parameters=choice.offloads_parameters,
    )
