"""How a job's trained roles are held: types, ZeRO, adapters, and ranks that share a micro-batch.

In: the `training:` part of a job. Out: frozen values. Left out: bytes (memory/trainers/training.py), what algorithms
train.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field

from rlplan.errors import SpecError
from rlplan.spec.base import Auto, Spec
from rlplan.spec.model import ModelSpec
from rlplan.spec.parts.kernels import KernelsSpec
from rlplan.spec.parts.workload import MAX_COUNT, Count
from rlplan.vocabulary import Backend, Dtype


class Contradiction(NamedTuple):
    """Two choices that DeepSpeed does not combine."""

    what: str
    """Both choices."""
    where: str
    """The key of the first."""
    rule: str
    way_out: str

    @property
    def reason(self) -> str:
        """What and why, in a line."""
        return f"{self.what}: {self.rule} ({self.way_out})"


class Combination(NamedTuple):
    """What a trainer is asked to combine. Jobs, their candidates and the search on GPUs all ask here what can run."""

    zero_stage: int | None
    """None where it is open."""
    optimizer: str = "adamw"
    trains_adapters: bool = False
    has_packed_base: bool = False
    """A frozen base in nf4."""
    offloads_optimizer: bool = False
    offloads_parameters: bool = False
    ulysses: int = 1
    tp: int = 1

    def contradictions(self) -> Iterator[Contradiction]:
        """What does not go together, with the rule and what can be typed instead."""
        stage = f"training.zero_stage {self.zero_stage}"
        key = "training.offloads_optimizer"
        if self.offloads_optimizer and self.optimizer != "adamw":
            rule = "on the host DeepSpeed steps with its own CPU Adam, which has fp32 moments"
            yield Contradiction(f"{key} with training.optimizer {self.optimizer}", key, rule, f"{key}=false")
        if self.offloads_optimizer and self.zero_stage in (0, 1):
            rule = "an offloaded optimizer needs partitions, which ZeRO has from stage 2 on"
            yield Contradiction(f"{key} with {stage}", key, rule, "training.zero_stage=2")
        key = "training.offloads_parameters"
        if self.offloads_parameters and self.zero_stage in (0, 1, 2):
            yield Contradiction(f"{key} with {stage}", key, "only ZeRO-3 offloads parameters", "training.zero_stage=3")
        if self.has_packed_base and self.zero_stage == 3:
            rule = "4-bit weights are not sharded: training.zero_stage 0 to 2"
            yield Contradiction(f"a base in nf4 with {stage}", "training.zero_stage", rule, "training.zero_stage=2")
        if self.tp > 1:
            yield from self._beside_tensor_parallel(stage)

    def _beside_tensor_parallel(self, stage: str) -> Iterator[Contradiction]:
        refused = (
            (self.ulysses > 1, f"training.ulysses {self.ulysses}", "DeepSpeed has one group beside data parallelism"),
            (self.zero_stage == 3, stage, "AutoTP goes with ZeRO 0 to 2"),
            (self.trains_adapters, "training.lora", "AutoTP cuts plain linear layers, none that PEFT has wrapped"),
            (self.offloads_optimizer, "training.offloads_optimizer", "AutoTP was never tried with it"),
        )
        for holds, what, rule in refused:
            if holds:
                yield Contradiction(f"training.tp {self.tp} with {what}", "training.tp", rule, "training.tp=1")


LossName = Literal[
    "plain",
    "chunked",
    "compiled_chunked",
    "uncast_chunked",
    "fused",
    "in_place",
    "uncast",
    "copied",
    "kept",
    "shifted",
    "megatron",
    "by_rows",
    "compiled_rows",
]
RecomputedModule = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]
"""Modules of a layer by Megatron's names (`recompute_modules`)."""


class LoraSpec(Spec):
    """Adapters beside the policy's linear layers, trained in its place."""

    EXAMPLE: ClassVar[str] = "{rank: 16}"
    rank: int = Field(ge=1, le=65536)
    """Of each adapter's two matrices."""
    alpha: float = Field(default=16.0, gt=0)
    """What adapters add is scaled by alpha / rank."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Such as `q_proj`, or all linear layers. `experts` among names stands for all routed experts."""
    base_dtype: Literal["auto", "nf4", "bfloat16", "float32"] = "auto"
    """What the frozen weights are kept in: `auto` as trained weights are, or `nf4` (QLoRA)."""
    unquantized_dtype: Literal["auto", "float32"] = "auto"
    """Type of what a base in nf4 leaves unquantized, and of the residual stream: `auto` as the passes have it,
    `float32` after PEFT's `prepare_model_for_kbit_training`."""
    dtype: Literal["auto", "float32"] = "auto"
    """Type of the adapters: `auto` as the passes have it. PEFT keeps them in `float32` beside 16-bit weights, where
    each reads a copy of its input."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of its input that each adapter drops; each then reads a copy of its own."""
    path: str | None = None
    """A folder in PEFT's layout with the adapter that training starts from; None for one that changes nothing yet."""

    def unquantized_bytes(self, element_bytes: int) -> int:
        """Bytes of an element that a base in nf4 leaves unquantized. element_bytes: as the passes have it."""
        return 4 if self.base_dtype == "nf4" and self.unquantized_dtype == "float32" else element_bytes


Ranks = Annotated[int, Field(ge=1, le=1024)] | Auto


def given_ranks(ranks: int | str) -> int:
    """A number of ranks as given; 1 where it is left open."""
    return 1 if ranks == "auto" else int(ranks)


class TrainingSpec(Spec):
    """How trained roles are held. What is `auto` is decided by the planner, or by a rule of resolved.py."""

    dtype: Dtype | Auto = "auto"
    """Of weights in the passes; master weights and moments are fp32 beside 16-bit weights."""
    backend: Backend | Auto = "auto"
    """The trainer; `auto`: the framework's own, of several Megatron-Core for a mixture of experts."""
    zero_stage: Literal["auto", 0, 1, 2, 3] = "auto"
    """Of DeepSpeed; of FSDP2 3, of Megatron 1 (its distributed optimizer) or 0."""
    max_tokens_per_micro_batch: Count | Auto = "auto"
    """Tokens that are packed into one pass; `auto` follows workload.micro_batch_size_per_gpu where that is given."""
    gradient_checkpointing: bool | Auto = "auto"
    """Whether activations are computed again in the backward pass."""
    logits: LossName | Auto = "auto"
    """How the loss is taken (memory/model/logits.py); `auto` as the framework does."""
    optimizer: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """`adamw_8bit` keeps both moments in a byte each (bitsandbytes)."""
    offloads_optimizer: bool | Auto = "auto"
    """Whether the optimizer's states lie off the device for good (ZeRO-Offload)."""
    offloads_parameters: bool | Auto = False
    """Whether weights lie there too and come layer by layer (ZeRO-3)."""
    offload_device: Literal["cpu", "nvme"] = "cpu"
    """Where they lie (ZeRO-Offload, ZeRO-Infinity)."""
    offloads_activations: bool = False
    """Whether what gradient checkpointing keeps lies on the host."""
    master_dtype: Literal[Dtype.FLOAT32, Dtype.BFLOAT16] = Dtype.FLOAT32
    """Of master weights and moments beside 16-bit weights."""
    ulysses: Ranks = "auto"
    """Ranks that share a pass, each with a part of its tokens."""
    tp: Ranks = "auto"
    """Ranks that share a pass, each with a part of every layer (DeepSpeed's AutoTP)."""
    pp: Ranks = "auto"
    """Pipeline stages (Megatron)."""
    cp: Ranks = "auto"
    """Ranks that share a sequence's attention (Megatron, FSDP2)."""
    ep: Ranks = "auto"
    """Ranks that share the experts of a layer (Megatron)."""
    etp: Ranks = "auto"
    """Ranks that share each expert's matrices (Megatron's `expert_tensor_parallel_size`); `auto`: tp, or 1 with ep."""
    sequence_parallel: bool = True
    """Whether tensor parallel ranks share the rows between their matmuls: norms, residual (Megatron, FSDP2)."""
    fsdp_size: int | None = Field(default=None, ge=1, le=1 << 20)
    """Ranks that share a copy of the states (FSDP2's hybrid sharding: every group of as many has one); None: all."""
    reduce_bucket_size: Annotated[int, Field(ge=1_000, le=MAX_COUNT)] | Auto = "auto"
    """Elements of DeepSpeed's gradient reduction bucket."""
    persistence_threshold: int = Field(default=100_000, ge=0)
    """Elements up to which a tensor stays whole on every rank under ZeRO-3."""
    recomputed: Literal["layers", "every_other_layer", "selective"] | tuple[RecomputedModule, ...] = "layers"
    """What gradient checkpointing computes again: whole layers, every other one, all but every second matmul
    (torchtitan's `selective`), or modules of a layer by Megatron's names."""
    reduce_dtype: Literal["auto", Dtype.FLOAT32, Dtype.BFLOAT16] = "auto"
    """Type in which gradients are added up and reduced (FSDP2, Megatron); `auto` as the trainer does."""
    moment_dtype: Literal["auto", Dtype.FLOAT32, Dtype.BFLOAT16] = "auto"
    """Type of the optimizer's moments; `auto` is training.master_dtype (Megatron's precision-aware optimizer)."""
    virtual_stages: int = Field(default=1, ge=1, le=64)
    """Parts of the layers that each pipeline stage has (Megatron's interleaved schedule)."""
    predicts_ahead: int = Field(default=0, ge=0, le=8)
    """Tokens that are trained to be predicted beyond the next one (multi-token prediction)."""
    kernels: KernelsSpec = KernelsSpec.by_default()
    """Kernels that are not those of the framework."""
    lora: LoraSpec | None = None
    """Adapters that are trained in the policy's place; None trains the policy itself."""

    @property
    def trains_adapters(self) -> bool:
        """Whether the policy's base is frozen and adapters are trained."""
        return self.lora is not None

    @property
    def quantization(self) -> Literal["none", "nf4"]:
        """How the frozen base is kept."""
        return "nf4" if self.has_packed_base else "none"

    @property
    def has_packed_base(self) -> bool:
        """Whether the frozen base has 4 bits."""
        return self.lora is not None and self.lora.base_dtype == "nf4"

    @property
    def needs_bitsandbytes(self) -> bool:
        """Whether something has 4 or 8 bits."""
        return self.has_packed_base or self.optimizer == "adamw_8bit"

    @property
    def num_ranks_per_pass(self) -> int:
        """Ranks that compute one pass together, as far as they are given."""
        return given_ranks(self.ulysses) * given_ranks(self.tp)

    def combination(
        self,
        zero_stage: int | None = None,
        ranks: tuple[int, int] | None = None,
        offloads: tuple[bool, bool] | None = None,
    ) -> "Combination":
        """What is combined here: what is given, and choices in place of what is open.

        ranks: ulysses and tp. offloads: of the optimizer and of parameters.
        """
        given = None if self.zero_stage == "auto" else self.zero_stage
        return Combination(
            given if zero_stage is None else zero_stage,
            self.optimizer,
            self.trains_adapters,
            self.has_packed_base,
            *(offloads or (self.offloads_optimizer is True, self.offloads_parameters is True)),
            *(ranks or (given_ranks(self.ulysses), given_ranks(self.tp))),
        )


def check_sharing(training: TrainingSpec, model: ModelSpec, where: str) -> None:
    """Raises: SpecError where ranks cannot share a pass through this model."""
    for one in sharing_refusals(model, given_ranks(training.ulysses), given_ranks(training.tp)):
        raise SpecError(one.what, where=f"{one.where}, {where}", rule=one.rule, way_out=one.way_out)


_CUT = frozenset(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))


@lru_cache(maxsize=64)
def _is_cut_whole(model: ModelSpec) -> bool:
    """Whether a rank's part of every layer is what its own heads and columns need: no packed projections or experts, no
    norm over all heads.
    """
    names = [tensor.name for tensor in model.parameters if tensor.is_linear]
    has_others = bool({name.split(".")[-2] for name in names} - _CUT) or model.experts is not None
    norms = {tensor.numel for tensor in model.parameters if tensor.name.endswith(("q_norm.weight", "k_norm.weight"))}
    return not has_others and norms <= {model.head_dim}


def sharing_refusals(model: ModelSpec, ulysses: int, tp: int) -> Iterator[Contradiction]:
    """Why ranks cannot share a pass through this model.

    Ulysses: each rank takes whole heads in turn; where there are fewer key heads than ranks, each is taken by several.
    Tensor parallelism: each rank has whole query and key heads and an equal part of the MLP, and no other layers.
    """
    heads, keys = model.num_heads, model.num_kv_heads
    problems = (
        (heads % ulysses > 0, "ulysses", f"{heads} attention heads", "every rank takes as many whole heads"),
        (keys % ulysses > 0 and ulysses % keys > 0, "ulysses", f"{keys} key heads", "as many for each rank, or ranks"),
        (keys % tp > 0, "tp", f"{keys} key heads", "every rank has as many whole key heads"),
        (tp > 1 and not _is_cut_whole(model), "tp", "layers that AutoTP does not cut", "q, k, v, o, gate, up and down"),
        (model.intermediate_size % tp > 0, "tp", f"an MLP {model.intermediate_size} wide", "every rank has as much"),
    )
    for holds, key, what, rule in problems:
        if holds:
            size = ulysses if key == "ulysses" else tp
            words = f"training.{key} is {size}, the model has {what}"
            yield Contradiction(words, f"training.{key}", rule, f"training.{key}=1, or a number that divides them")
