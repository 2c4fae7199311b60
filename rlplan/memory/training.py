"""Training on the CPU runtime: what a job's `training` part means for a rank's states.

In: a job's training part, a model, a ZeRO stage and a rank. Out: that rank's ZeroStates and how it computes.
Left out: the bytes themselves (zero.py), activations (activations.py), the walk through the passes (backward.py).
"""

from dataclasses import dataclass

from rlplan.memory.zero import ZeroSettings, ZeroStates
from rlplan.spec.model import ModelSpec, Parameter
from rlplan.spec.training import TrainingSpec


@dataclass(frozen=True)
class TrainedRank:
    """A data-parallel rank: its model and states, and whether it computes each layer anew in the backward pass.

    adapters: what is trained beside a frozen model; empty where the model itself is. ulysses: ranks that share a pass,
    each with a part of its tokens.
    """

    model: ModelSpec
    states: ZeroStates
    recomputes_layers: bool = False
    adapters: tuple[Parameter, ...] = ()
    ulysses: int = 1

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of weights, gradients and activations."""
        return self.states.settings.weight_bytes


def trained_rank(
    training: TrainingSpec,
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
        offloads_optimizer=training.offloads_optimizer,
    )
    trained, frozen = parameters or (model.parameters, ())
    states = ZeroStates(settings, trained, frozen, rank)
    adapters = trained if frozen else ()
    return TrainedRank(model, states, training.gradient_checkpointing, adapters, training.ulysses)


def merging_bytes(rank: TrainedRank) -> int:
    """Bytes of one weight while its adapters are added to it, in the weight sync and in a checkpoint.

    Counts: for the largest adapted weight the product B A, its scaled copy and their sum, 3 * 4 bytes an element.
    Source: `rlplan.runtime.adapters`. Assumes: one weight at a time.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> from rlplan.spec.models.adapters import lora_parameters
    >>> from rlplan.spec.training import TrainingSpec
    >>> model = find_model("Qwen/Qwen3-0.6B")
    >>> parts = (lora_parameters(model, 8, ["q_proj"]), model.parameters)
    >>> merging_bytes(trained_rank(TrainingSpec(), model, 2, 1, 0, parts))  # 12 * 2048 * 1024
    25165824
    """
    adapted = {parameter.name.split(".lora_")[0] + ".weight" for parameter in rank.adapters}
    return 3 * 4 * max((parameter.numel for parameter in rank.states.frozen if parameter.name in adapted), default=0)
