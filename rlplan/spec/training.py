"""How a job's trained roles are held: types, ZeRO, adapters, and ranks that share a micro-batch.

In: the `training:` part of a job. Out: frozen values. Left out: bytes (memory/training.py), what algorithms train.
"""

from typing import Literal

from pydantic import Field, model_validator

from rlplan.errors import SpecError
from rlplan.spec.base import Spec
from rlplan.spec.model import ModelSpec
from rlplan.spec.workload import MAX_COUNT
from rlplan.vocabulary import Dtype


class LoraSpec(Spec):
    """Adapters beside the policy's linear layers, trained in its place. Without a rank there are none.

    alpha: what they add is scaled by alpha / rank. target_modules: such as `q_proj`, or all linear layers.
    """

    rank: int | None = Field(default=None, ge=1)
    alpha: float = Field(default=16.0, gt=0)
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"


class TrainingSpec(Spec):
    """How trained roles are held. reduce_bucket_size: elements of DeepSpeed's gradient reduction bucket.

    persistence_threshold: elements up to which a tensor stays whole on every rank under ZeRO-3. quantization: of the
    policy's frozen base beside adapters; `nf4` is QLoRA. max_tokens_per_micro_batch: tokens that are packed into one
    pass; null takes what workload.micro_batch_size_per_gpu of the longest sequences have.
    optimizer: `adamw_8bit` keeps both moments in a byte each (bitsandbytes).
    ulysses: ranks that share a pass, each with a part of its tokens. tp: ranks that share a pass, each with a part of
    every layer (DeepSpeed's AutoTP). offloads_parameters: weights lie on the host too, and come layer by layer (ZeRO-3
    on GPUs).
    """

    dtype: Dtype = Dtype.FLOAT32
    zero_stage: Literal["auto", 0, 1, 2, 3] = "auto"
    reduce_bucket_size: int = Field(default=25_000_000, ge=1_000)
    max_tokens_per_micro_batch: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    persistence_threshold: int = Field(default=100_000, ge=0)
    gradient_checkpointing: bool = False
    offloads_optimizer: bool = False
    offloads_parameters: bool = False
    ulysses: int = Field(default=1, ge=1, le=64)
    tp: int = Field(default=1, ge=1, le=64)
    lora: LoraSpec = LoraSpec()
    quantization: Literal["none", "nf4"] = "none"
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"

    @property
    def trains_adapters(self) -> bool:
        """Whether the policy's base is frozen and adapters are trained."""
        return self.lora.rank is not None

    @property
    def needs_bitsandbytes(self) -> bool:
        """Whether something has 4 or 8 bits."""
        return self.quantization != "none" or self.optimizer != "adamw"

    @property
    def num_ranks_per_pass(self) -> int:
        """Ranks that compute one pass together."""
        return self.ulysses * self.tp

    @model_validator(mode="after")
    def _only_a_frozen_base_is_quantised(self) -> "TrainingSpec":
        if self.quantization != "none" and not self.trains_adapters:
            raise ValueError(f"training.quantization {self.quantization} is of a frozen base: give training.lora.rank")
        if self.quantization != "none" and self.zero_stage == 3:
            raise ValueError(
                f"training.quantization {self.quantization} lies whole on every rank: training.zero_stage 0 to 2"
            )
        return self

    @model_validator(mode="after")
    def _the_host_steps_in_full(self) -> "TrainingSpec":
        if self.optimizer != "adamw" and self.offloads_optimizer:
            raise ValueError(
                f"training.optimizer {self.optimizer} does not go with training.offloads_optimizer: "
                f"DeepSpeed's Adam on the host has fp32 moments"
            )
        return self

    @model_validator(mode="after")
    def _offload_needs_partitions(self) -> "TrainingSpec":
        if self.offloads_optimizer and self.zero_stage in (0, 1):
            raise ValueError(
                f"training.offloads_optimizer needs training.zero_stage 2 or 3 (or auto), not {self.zero_stage}"
            )
        return self

    @model_validator(mode="after")
    def _shares_a_pass_in_one_way(self) -> "TrainingSpec":
        if self.tp == 1:
            return self
        contradictions = (
            (self.ulysses > 1, f"training.ulysses {self.ulysses}: DeepSpeed has one group beside data parallelism"),
            (self.zero_stage == 3, "training.zero_stage 3: AutoTP goes with ZeRO 0 to 2"),
            (self.trains_adapters, "training.lora.rank: AutoTP cuts plain linear layers, none that PEFT has wrapped"),
            (self.offloads_optimizer, "training.offloads_optimizer, which was never tried with it"),
        )
        for holds, reason in contradictions:
            if holds:
                raise ValueError(f"training.tp {self.tp} does not go with {reason}")
        return self


def check_sharing(training: TrainingSpec, model: ModelSpec, where: str) -> None:
    """Raises: SpecError where ranks cannot share a pass through this model.

    Ulysses: each rank takes whole heads in turn; where there are fewer key heads than ranks, each is taken by several.
    Tensor parallelism: each rank has whole query and key heads and an equal part of the MLP.
    """
    heads, keys, ulysses, tp = model.num_heads, model.num_kv_heads, training.ulysses, training.tp
    problems = (
        (heads % ulysses > 0, "ulysses", f"{heads} attention heads", "every rank takes as many whole heads"),
        (keys % ulysses > 0 and ulysses % keys > 0, "ulysses", f"{keys} key heads", "as many for each rank, or ranks"),
        (keys % tp > 0, "tp", f"{keys} key heads", "every rank has as many whole key heads"),
        (model.intermediate_size % tp > 0, "tp", f"an MLP {model.intermediate_size} wide", "every rank has as much"),
    )
    for holds, key, what, rule in problems:
        if holds:
            raise SpecError(
                f"training.{key} is {getattr(training, key)}, the model has {what}",
                where=f"training.{key}, {where}",
                rule=rule,
                way_out=f"training.{key}=1, or a number that divides them",
            )
