"""Training on the CPU runtime: what a job's `training` part means for a rank's states.

In: a job's training part, a model, a ZeRO stage and a rank. Out: that rank's ZeroStates and how it computes.
Left out: the bytes themselves (zero.py), activations (activations.py), the walk through the passes (backward.py).
"""

from dataclasses import dataclass
from functools import cached_property

from rlplan.memory.model.quantization import NF4_DOUBLE, Quantization
from rlplan.memory.roles.gpu.states import autotp_parameters
from rlplan.memory.trainers.optimizers import Optimizer
from rlplan.memory.trainers.zero import ZeroSettings, ZeroStates
from rlplan.spec.model import ModelSpec, Parameter
from rlplan.spec.resolved import ResolvedTraining, SettledTraining

BASE_FORMATS = {"nf4": Quantization(NF4_DOUBLE)}
"""How `training.lora.base_dtype` keeps a frozen base. Source: `rlplan.runtime.models.quantized_base`."""
CODE_BYTES = 4 * 16 + 4 * 256
"""What each weight in 4 bits says by itself: its code of 16 values, and that of its scales, of 256.

Source: bitsandbytes 0.50, functional.py, `quantize_4bit`, `quantize_blockwise` (`code.to(copy=True)`)."""


@dataclass(frozen=True)
class TrainedRank:
    """A data-parallel rank: its model and states, and whether it computes each layer anew in the backward pass.

    adapters: what is trained beside a frozen model; empty where the model itself is. ulysses: ranks that share a pass,
    each with a part of its tokens; tp: each with a part of every layer. dequantised: elements of the largest weight
    that a matmul dequantises from 4 bits.
    """

    model: ModelSpec
    states: ZeroStates
    recomputes_layers: bool = False
    adapters: tuple[Parameter, ...] = ()
    ulysses: int = 1
    dequantised: int = 0
    tp: int = 1

    def held(self, parameter: Parameter) -> Parameter:
        """What this rank has of a parameter of the model."""
        return self._held.get(parameter.name, parameter)

    @cached_property
    def _held(self) -> dict[str, Parameter]:
        return {parameter.name: parameter for parameter in (*self.states.trainable, *self.states.frozen)}

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of weights, gradients and activations."""
        return self.states.settings.weight_bytes


def trained_rank(
    training: ResolvedTraining,
    model: ModelSpec,
    stage: int,
    num_ranks: int,
    rank: int,
    parameters: tuple[tuple[Parameter, ...], tuple[Parameter, ...]] | None = None,
) -> TrainedRank:
    """The rank that DeepSpeed makes of a job's `training` part. parameters: (trained, frozen), else all are trained.

    Counts: weights, gradients and their accumulation in the training type, master weights and moments in fp32; ZeRO-3
    gathers nothing ahead and keeps nothing for later. Source: `rlplan.emit.deepspeed`, which sets the same keys.
    """
    settings = ZeroSettings(
        stage=stage,
        num_ranks=num_ranks,
        weight_bytes=training.dtype.num_bytes,
        gradient_bytes=training.dtype.num_bytes,
        reduce_bucket_size=training.reduce_bucket_size,
        persistence_threshold=training.persistence_threshold,
        max_reuse_distance=0,
        prefetch_bucket_size=0,
        optimizer=Optimizer(training.optimizer),
        offloads_optimizer=training.offloads_optimizer,
    )
    trained, frozen = parameters or (model.parameters, ())
    states = ZeroStates(settings, trained, frozen, rank, frozen_bytes(training, frozen))
    return TrainedRank(
        model,
        states,
        training.gradient_checkpointing,
        adapters=trained if frozen else (),
        ulysses=training.ulysses,
        dequantised=max((p.numel for p in frozen if _is_quantised(training, p)), default=0),
        tp=training.tp,
    )


def frozen_bytes(training: SettledTraining, frozen: tuple[Parameter, ...]) -> int:
    """Bytes of a frozen base beside adapters, as it is held.

    Counts: its elements in the training type; in 4 bits `quantization.NF4_DOUBLE`, and the codes 4 * (16 + 256) of each
    weight. Source: `rlplan.runtime.models.quantized_base`; bitsandbytes 0.50, functional.py, `QuantState`.
    Assumes: everything but the decoder's linear layers stays as it is.

    >>> training = SettledTraining(dtype="float32", lora={"rank": 1, "base_dtype": "nf4"})
    >>> weights = (Parameter("model.layers.0.mlp.up_proj.weight", (64, 64)), Parameter("model.norm.weight", (64,)))
    >>> frozen_bytes(training, weights)  # 64*64/2 + 64 scales + 4 + 4 + 1088, and 4*64
    3464
    """
    e, form = training.dtype.num_bytes, BASE_FORMATS.get(training.quantization)
    if form is None:
        return e * sum(parameter.numel for parameter in frozen)
    codes = CODE_BYTES * sum(form.covers(parameter) for parameter in frozen)
    return codes + sum(form.num_bytes(parameter, e) for parameter in frozen)


def _is_quantised(training: SettledTraining, parameter: Parameter) -> bool:
    form = BASE_FORMATS.get(training.quantization)
    return form is not None and form.covers(parameter)


def frozen_states(training: SettledTraining, model: ModelSpec, num_ranks: int) -> ZeroStates:
    """What a rank holds of a frozen model whose weights all share. Source: `rlplan.emit.deepspeed.frozen_config`."""
    settings = ZeroSettings(
        stage=3,
        num_ranks=num_ranks,
        weight_bytes=training.dtype.num_bytes,
        persistence_threshold=training.persistence_threshold,
        max_reuse_distance=0,
        prefetch_bucket_size=0,
    )
    return ZeroStates(settings, (), frozen=model.parameters)


def held_parameters(
    model: ModelSpec, tp: int, parameters: tuple[tuple[Parameter, ...], tuple[Parameter, ...]]
) -> tuple[tuple[Parameter, ...], tuple[Parameter, ...]]:
    """(trained, frozen) as one of `tp` ranks holds them, of which each has a part of every layer. Raises: SpecError."""
    own = {parameter.name: parameter for parameter in autotp_parameters(model, tp)}
    trained, frozen = (tuple(own.get(parameter.name, parameter) for parameter in part) for part in parameters)
    return trained, frozen


def put_together_bytes(rank: TrainedRank) -> int:
    """Bytes of one weight while it is put together from the parts of ranks that share layers.

    Counts: the parts as they come and the whole, 2 * e * the largest weight that is cut.
    Source: `rlplan.runtime.models.tensor_parallel`. Assumes: one weight at a time.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> from rlplan.spec.resolved import ResolvedTraining, SettledTraining
    >>> model = find_model("Qwen/Qwen3-0.6B")
    >>> parts = held_parameters(model, 2, (model.parameters, ()))
    >>> training = SettledTraining(dtype="float32", tp=2)
    >>> put_together_bytes(trained_rank(training, model, 2, 1, 0, parts))  # 2 * 4 * 3072 * 1024
    25165824
    """
    held = {parameter.name: parameter.numel for parameter in rank.states.trainable}
    cut = [whole.numel for whole in rank.model.parameters if held.get(whole.name, whole.numel) < whole.numel]
    return 2 * rank.element_bytes * max(cut, default=0)


def merging_bytes(rank: TrainedRank) -> int:
    """Bytes of one weight while its adapters are added to it, in the weight sync and in a checkpoint.

    Counts: for the largest adapted weight the product B A, its scaled copy and the sum, 3 * 4 bytes an element; the
    weight in fp32, 4 more, where it is of another type; what its 4 bits stand for, e more.
    Source: `rlplan.runtime.models.adapters`. Assumes: one weight at a time.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> from rlplan.spec.models.adapters import lora_parameters
    >>> from rlplan.spec.resolved import ResolvedTraining, SettledTraining
    >>> model = find_model("Qwen/Qwen3-0.6B")
    >>> parts = (lora_parameters(model, 8, ["q_proj"]), model.parameters)
    >>> merging_bytes(trained_rank(SettledTraining(dtype="float32"), model, 2, 1, 0, parts))  # 12 * 2048 * 1024
    25165824
    """
    adapted = {parameter.name.split(".lora_")[0] + ".weight" for parameter in rank.adapters}
    largest = max((parameter.numel for parameter in rank.states.frozen if parameter.name in adapted), default=0)
    e = rank.element_bytes
    return (12 + (4 if e < 4 else 0)) * largest + e * rank.dequantised
