"""Training on the CPU runtime: what a job's `training` part means for a rank's states.

In: a job's training part, a model, a ZeRO stage and a rank. Out: that rank's ZeroStates and how it computes.
Left out: the bytes themselves (zero.py), activations (activations.py), the walk through the passes (backward.py).
"""

from dataclasses import dataclass

from rlplan.memory.zero import ZeroSettings, ZeroStates
from rlplan.spec.job import TrainingSpec
from rlplan.spec.model import ModelSpec


@dataclass(frozen=True)
class TrainedRank:
    """A data-parallel rank: its model and states, and whether it computes each layer anew in the backward pass."""

    model: ModelSpec
    states: ZeroStates
    recomputes_layers: bool = False

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of weights, gradients and activations."""
        return self.states.settings.weight_bytes


def trained_rank(training: TrainingSpec, model: ModelSpec, stage: int, num_ranks: int, rank: int) -> TrainedRank:
    """The rank that DeepSpeed makes of a job's `training` part.

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
    states = ZeroStates(settings, model.parameters, rank=rank)
    return TrainedRank(model, states, training.gradient_checkpointing)
