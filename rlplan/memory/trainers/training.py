"""Training on rlplan's CPU runtime: the DeepSpeed states of a rank, from a job's `training` part.

In: a job's training part, a model, a ZeRO stage and a rank. Out: that rank's ZeroStates and model.
Left out: the bytes themselves (zero.py), activations (activations.py), gradients in the passes (backward.py).
"""

from dataclasses import dataclass

from rlplan.memory.model.quantization import BASE_FORMATS, dequantized_numel, frozen_bytes
from rlplan.memory.trainers.optimizers import Optimizer
from rlplan.memory.trainers.zero import ZeroSettings, ZeroStates
from rlplan.spec.model import Component, Layout, ModelSpec, Parameter
from rlplan.spec.resolved import ResolvedTraining, SettledJob, SettledTraining
from rlplan.vocabulary import Role


@dataclass(frozen=True)
class TrainedRank:
    """A data-parallel rank: its model and states."""

    model: ModelSpec
    states: ZeroStates
    adapters: tuple[Parameter, ...] = ()
    """Adapters that are trained beside a frozen model; empty where the model itself is trained."""
    dequantised: int = 0
    """Elements of the largest 4-bit weight, which a matmul dequantizes."""

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of weights, gradients and activations."""
        return self.states.settings.weight_bytes


def build_trained_rank(
    training: ResolvedTraining,
    model: ModelSpec,
    stage: int,
    num_ranks: int,
    rank: int,
    parameters: tuple[tuple[Parameter, ...], tuple[Parameter, ...]] | None = None,
) -> TrainedRank:
    """A DeepSpeed rank of a job's `training` part. parameters: (trained, frozen); None: all are trained.

    Counts: weights, gradients and their accumulation in the training type, master weights and moments in fp32. ZeRO-3
    neither prefetches nor keeps gathered weights. Source: `rlplan.emit.deepspeed`, which sets the same keys.
    """
    settings = ZeroSettings(
        stage=stage,
        num_ranks=num_ranks,
        weight_bytes=training.dtype.num_bytes,
        gradient_bytes=training.dtype.num_bytes,
        reduce_bucket_size=training.reduce_bucket_size,
        overlaps_communication=False,
        persistence_threshold=training.persistence_threshold,
        max_reuse_distance=0,
        prefetch_bucket_size=0,
        optimizer=Optimizer(training.optimizer),
        offloads_optimizer=training.offloads_optimizer,
    )
    trained, frozen = parameters or (model.parameters, ())
    base = BASE_FORMATS.get(training.quantization)
    states = ZeroStates(settings, trained, frozen, rank, frozen_bytes(frozen, settings.weight_bytes, base))
    adapters = trained if frozen else ()
    return TrainedRank(model, states, adapters, dequantized_numel(frozen, base))


def build_role_rank(
    job: SettledJob, role: Role, model: ModelSpec, cut: tuple[int, int, int], shard: int, *, training: ResolvedTraining
) -> TrainedRank:
    """One rank of a trained role of a job. cut: tensor parallel size, ZeRO stage, ranks that shard the states."""
    tp, stage, num_shards = cut
    parameters = cut_parameters(model, tp, job.trained_parameters(role, model))
    return build_trained_rank(training, model, stage, num_shards, shard, parameters)


def build_frozen_states(training: SettledTraining, model: ModelSpec, num_ranks: int) -> ZeroStates:
    """A rank of a frozen model whose weights all ranks shard. Source: `rlplan.emit.deepspeed.frozen_config`."""
    settings = ZeroSettings(
        stage=3,
        num_ranks=num_ranks,
        weight_bytes=training.dtype.num_bytes,
        persistence_threshold=training.persistence_threshold,
        max_reuse_distance=0,
        prefetch_bucket_size=0,
    )
    return ZeroStates(settings, (), frozen=model.parameters)


def cut_autotp_parameters(model: ModelSpec, tp: int) -> tuple[Parameter, ...]:
    """Parameters of one rank under DeepSpeed's AutoTP: decoder projections cut, embeddings and head whole.

    Counts: a share of each decoder projection; norms whole.
    Source: DeepSpeed 0.19.8, module_inject/auto_tp.py, configured by `emit.deepspeed.tensor_parallel_section`.
    Differs: the plans of transformers 5.19 cut an untied head too (`colwise_gather_output`).
    Assumes: tp divides the key heads; dense models, because stacked experts are not linear layers and would stay whole.
    Raises: SpecError for sizes that do not divide.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> model = find_model("Qwen/Qwen2.5-0.5B")  # table 136,134,656, norms 49 * 896, halves of 357,854,208
    >>> sum(tensor.numel for tensor in cut_autotp_parameters(model, 2))
    315105664
    """
    if tp == 1:
        return model.parameters
    share = (tensor for tensor in model.list_rank_tensors(Layout(tp=tp)) if not tensor.is_buffer)
    pairs = zip(model.parameters, share, strict=True)
    uncut = (Component.EMBEDDINGS, Component.HEAD)
    return tuple(full if full.component in uncut else part for full, part in pairs)


def cut_parameters(
    model: ModelSpec, tp: int, parameters: tuple[tuple[Parameter, ...], tuple[Parameter, ...]]
) -> tuple[tuple[Parameter, ...], tuple[Parameter, ...]]:
    """(trained, frozen) parameters of one of `tp` tensor parallel ranks. Raises: SpecError."""
    own = {parameter.name: parameter for parameter in cut_autotp_parameters(model, tp)}
    trained, frozen = (tuple(own.get(parameter.name, parameter) for parameter in part) for part in parameters)
    return trained, frozen


def gathered_weight_bytes(rank: TrainedRank) -> int:
    """Bytes of one weight while it is gathered from the parts of tensor parallel ranks.

    Counts: the received parts and the whole weight, 2 * e * the largest weight that is cut.
    Source: `rlplan.runtime.models.tensor_parallel`. Assumes: one weight at a time.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> from rlplan.spec.resolved import ResolvedTraining, SettledTraining
    >>> model = find_model("Qwen/Qwen3-0.6B")
    >>> parts = cut_parameters(model, 2, (model.parameters, ()))
    >>> training = SettledTraining(dtype="float32", tp=2)
    >>> gathered_weight_bytes(build_trained_rank(training, model, 2, 1, 0, parts))  # 2 * 4 * 3072 * 1024
    25165824
    """
    own = {parameter.name: parameter.numel for parameter in rank.states.trainable}
    cut = [full.numel for full in rank.model.parameters if own.get(full.name, full.numel) < full.numel]
    return 2 * rank.element_bytes * max(cut, default=0)


def merging_bytes(rank: TrainedRank) -> int:
    """Bytes of one weight while its adapters are merged into it, in the weight sync and in a checkpoint.

    Counts: for the largest adapted weight the product B A, its scaled copy and the sum, 3 * 4 bytes an element; 4 more
    for the weight in fp32, where it has another type; e more for the dequantized weight of a 4-bit base.
    Source: `rlplan.runtime.models.adapters`. Assumes: one weight at a time.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> from rlplan.spec.models.adapters import list_lora_parameters
    >>> from rlplan.spec.resolved import ResolvedTraining, SettledTraining
    >>> model = find_model("Qwen/Qwen3-0.6B")
    >>> parts = (list_lora_parameters(model, 8, ["q_proj"]), model.parameters)
    >>> merging_bytes(build_trained_rank(SettledTraining(dtype="float32"), model, 2, 1, 0, parts))  # 12 * 2048 * 1024
    25165824
    """
    adapted = {parameter.name.split(".lora_")[0] + ".weight" for parameter in rank.adapters}
    largest = max((parameter.numel for parameter in rank.states.frozen if parameter.name in adapted), default=0)
    e = rank.element_bytes
    return (12 + (4 if e < 4 else 0)) * largest + e * rank.dequantised
