"""The trainer of a job: data types, ZeRO, offloading, adapters, kernels, ranks that share a micro-batch.

In: the `training:` part of a job. Out: frozen values. Left out: bytes (memory/trainers/training.py), seconds, what
algorithms train.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field

from rlplan.errors import SpecError
from rlplan.spec.base import Auto, Spec
from rlplan.spec.model import ModelSpec
from rlplan.spec.parts.workload import MAX_COUNT, Count
from rlplan.vocabulary import Backend, Dtype


class KernelsSpec(Spec):
    """Kernels of the trainer. rlplan's own runtime has fixed kernels, so that these keys serve plans for other
    frameworks.
    """

    attention: Literal["auto", "unfused", "flash_1", "flash_2", "flash_3", "flex"] = "auto"
    """Attention kernel. `flash_3`: any kernel written for the GPU generation (also cuDNN's); `unfused`: scores are
    stored."""
    is_compiled: bool = False
    """Whether layers are compiled with torch.compile, which fuses norms, rotary embeddings and activations."""
    matmuls: Literal["auto", "fp8", "fp8_rowwise", "mxfp8", "fp4"] = "auto"
    """Number format of the layers' matmuls; stored weights keep training.dtype. `auto`: training.dtype."""
    logit_rows: Count | None = Field(default=None)
    """Rows of logits that a row-chunked loss materializes at a time; None: 1,024."""
    overlaps_step: bool = True
    """Whether gradient reduction overlaps with the backward pass (Megatron's `overlap_grad_reduce`)."""
    overlaps_tp: bool = False
    """Whether tensor-parallel collectives overlap with matmuls (async TP)."""
    has_cuda_graphs: bool | Literal["router", "attention"] | Auto = "auto"
    """Whether expert layers run as CUDA graphs: all that can be captured, or one part of them; `auto`: no."""
    fuses_router: bool | Auto = "auto"
    """Whether the router runs in fused kernels (Megatron's `moe_router_fusion`); `auto`: no."""
    expert_dispatcher: Literal["auto", "alltoall", "deepep", "hybridep"] = "auto"
    """How tokens are dispatched to experts. `alltoall` (and `auto`) sends a row per expert, the others one per host."""
    host_waits: Literal["auto", "none", "layers", "tokens"] = "auto"
    """GPU work that the host waits for: each layer, or also each token (prime-rl before 0.6). `auto`: as in the
    framework's release; `tokens` only where there are rollouts."""
    overlaps_experts: bool = False
    """Whether token dispatch overlaps with the matmuls of another micro-batch (Megatron's expert overlap)."""
    expert_imbalance: float = Field(default=1.0, ge=1.0, le=64.0)
    """Rows of the busiest expert-parallel rank relative to the mean. Qwen3-30B-A3B on 16 ranks has about 1.5 in early
    pre-training (30.3 s a step; 24.7 s with forced balance), Moonlight on 8 hardly more than 1."""


class Contradiction(NamedTuple):
    """Two settings that DeepSpeed does not combine."""

    what: str
    """Both settings."""
    where: str
    """Key of the first setting."""
    rule: str
    """The reason."""
    way_out: str
    """An override that avoids it."""

    @property
    def reason(self) -> str:
        """The contradiction in one line."""
        return f"{self.what}: {self.rule} ({self.way_out})"


class Combination(NamedTuple):
    """Trainer settings that may exclude each other. Jobs, candidates and the search on GPUs share this check."""

    zero_stage: int | None
    """ZeRO stage; None: not chosen yet."""
    optimizer: str = "adamw"
    trains_adapters: bool = False
    has_packed_base: bool = False
    """Whether the frozen base is in nf4."""
    offloads_optimizer: bool = False
    offloads_parameters: bool = False
    ulysses: int = 1
    tp: int = 1

    def contradictions(self) -> Iterator[Contradiction]:
        """Settings that exclude each other, each with the rule and an override that avoids it."""
        stage = f"training.zero_stage {self.zero_stage}"
        key = "training.offloads_optimizer"
        if self.offloads_optimizer and self.optimizer != "adamw":
            rule = "DeepSpeed's CPU Adam only supports fp32 moments"
            yield Contradiction(f"{key} with training.optimizer {self.optimizer}", key, rule, f"{key}=false")
        if self.offloads_optimizer and self.zero_stage in (0, 1):
            rule = "an offloaded optimizer needs partitions, that is, ZeRO stage 2 or 3"
            yield Contradiction(f"{key} with {stage}", key, rule, "training.zero_stage=2")
        key = "training.offloads_parameters"
        if self.offloads_parameters and self.zero_stage in (0, 1, 2):
            yield Contradiction(f"{key} with {stage}", key, "only ZeRO-3 offloads parameters", "training.zero_stage=3")
        if self.has_packed_base and self.zero_stage == 3:
            rule = "4-bit weights are not sharded: training.zero_stage 0 to 2"
            yield Contradiction(f"a base in nf4 with {stage}", "training.zero_stage", rule, "training.zero_stage=2")
        if self.tp > 1:
            yield from self._find_tensor_parallel_conflicts(stage)

    def _find_tensor_parallel_conflicts(self, stage: str) -> Iterator[Contradiction]:
        conflicts = (
            (
                self.ulysses > 1,
                f"training.ulysses {self.ulysses}",
                "DeepSpeed supports one group besides data parallelism",
            ),
            (self.zero_stage == 3, stage, "AutoTP goes with ZeRO 0 to 2"),
            (self.trains_adapters, "training.lora", "AutoTP shards plain linear layers, not those wrapped by PEFT"),
            (self.offloads_optimizer, "training.offloads_optimizer", "AutoTP was never tried with it"),
        )
        for holds, what, rule in conflicts:
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
"""Modules of a layer that can be recomputed, by Megatron's names (`recompute_modules`)."""


class LoraSpec(Spec):
    """LoRA adapters on the policy's linear layers, trained in place of the policy."""

    EXAMPLE: ClassVar[str] = "{rank: 16}"
    """Override that an error message suggests."""
    rank: int = Field(ge=1, le=65536)
    """Rank of each adapter's two matrices."""
    alpha: float = Field(default=16.0, gt=0)
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Names of the adapted layers, such as `q_proj`, or `all-linear`. The name `experts` stands for all routed
    experts."""
    base_dtype: Literal["auto", "nf4", "bfloat16", "float32"] = "auto"
    """Data type of the frozen base: `auto` keeps training.dtype, `nf4` quantizes it to 4 bits (QLoRA)."""
    unquantized_dtype: Literal["auto", "float32"] = "auto"
    """Data type of an nf4 base's unquantized tensors and of the residual stream. `auto`: the compute type; `float32`:
    as after PEFT's `prepare_model_for_kbit_training`."""
    dtype: Literal["auto", "float32"] = "auto"
    """Data type of the adapters; `auto`: the compute type. PEFT keeps them in `float32` with a 16-bit base, where each
    adapter reads a copy of its input."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapters' inputs; with dropout each adapter reads a copy of its input."""
    path: str | None = None
    """Folder of a PEFT adapter to start from; None: new adapters that change nothing at first."""

    def unquantized_bytes(self, element_bytes: int) -> int:
        """Bytes per element of an nf4 base's unquantized tensors. element_bytes: those of the compute type."""
        return 4 if self.base_dtype == "nf4" and self.unquantized_dtype == "float32" else element_bytes


Ranks = Annotated[int, Field(ge=1, le=1024)] | Auto


def count_ranks(ranks: int | str) -> int:
    """A number of ranks; 1 for `auto`."""
    return 1 if ranks == "auto" else int(ranks)


class TrainingSpec(Spec):
    """Settings of the trainer. `auto` is decided by the planner, or by a rule in resolved.py."""

    dtype: Dtype | Auto = "auto"
    """Compute type of weights and activations. With 16 bits, master weights and moments are fp32 by default."""
    backend: Backend | Auto = "auto"
    """Trainer backend; `auto`: the framework's default. A framework with several takes Megatron-Core for
    mixture-of-experts models."""
    zero_stage: Literal["auto", 0, 1, 2, 3] = "auto"
    """DeepSpeed's ZeRO stage. FSDP2 corresponds to 3, Megatron to 1 (distributed optimizer) or 0."""
    max_tokens_per_micro_batch: Count | Auto = "auto"
    """Tokens packed into one micro-batch; `auto` follows workload.micro_batch_size_per_gpu if that is set."""
    gradient_checkpointing: bool | Auto = "auto"
    """Whether activations are recomputed in the backward pass."""
    logits: LossName | Auto = "auto"
    """How the loss is computed from hidden states (memory/model/logits.py); `auto`: the framework's default."""
    optimizer: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """Optimizer. `adamw_8bit` keeps both moments in one byte each (bitsandbytes)."""
    offloads_optimizer: bool | Auto = "auto"
    """Whether optimizer states stay off the GPU permanently (ZeRO-Offload)."""
    offloads_parameters: bool | Auto = False
    """Whether parameters also stay off the GPU and are fetched layer by layer (ZeRO-3)."""
    offload_device: Literal["cpu", "nvme"] = "cpu"
    """Destination of offloaded states: host memory (ZeRO-Offload) or NVMe (ZeRO-Infinity)."""
    offloads_activations: bool = False
    """Whether the inputs kept by gradient checkpointing are offloaded to the host."""
    master_dtype: Literal[Dtype.FLOAT32, Dtype.BFLOAT16] = Dtype.FLOAT32
    """Data type of master weights and moments, if weights have 16 bits."""
    ulysses: Ranks = "auto"
    """Ulysses sequence-parallel size: ranks that split the tokens of a micro-batch."""
    tp: Ranks = "auto"
    """Tensor-parallel size: ranks that split every layer (DeepSpeed's AutoTP)."""
    pp: Ranks = "auto"
    """Pipeline-parallel size (Megatron)."""
    cp: Ranks = "auto"
    """Context-parallel size: ranks that split each sequence's attention (Megatron, FSDP2)."""
    ep: Ranks = "auto"
    """Expert-parallel size: ranks that split the experts of a layer (Megatron)."""
    etp: Ranks = "auto"
    """Expert tensor-parallel size: ranks that split each expert (Megatron's `expert_tensor_parallel_size`). `auto`: tp,
    or 1 with expert parallelism."""
    sequence_parallel: bool = True
    """Whether tensor-parallel ranks also split norms and the residual stream by rows (Megatron, FSDP2)."""
    fsdp_size: int | None = Field(default=None, ge=1, le=1 << 20)
    """Ranks over which one copy of the states is sharded (FSDP2's hybrid sharding replicates it per group); None:
    all."""
    reduce_bucket_size: Annotated[int, Field(ge=1_000, le=MAX_COUNT)] | Auto = "auto"
    """Size of DeepSpeed's gradient reduction bucket in elements."""
    persistence_threshold: int = Field(default=100_000, ge=0)
    """Size in elements up to which ZeRO-3 keeps a tensor whole on every rank."""
    recomputed: Literal["layers", "every_other_layer", "selective"] | tuple[RecomputedModule, ...] = "layers"
    """Scope of gradient checkpointing: whole layers, every other layer, all but every second matmul
    (torchtitan's `selective`), or modules of a layer by Megatron's names."""
    reduce_dtype: Literal["auto", Dtype.FLOAT32, Dtype.BFLOAT16] = "auto"
    """Data type in which gradients are accumulated and reduced (FSDP2, Megatron); `auto`: the trainer's default."""
    moment_dtype: Literal["auto", Dtype.FLOAT32, Dtype.BFLOAT16] = "auto"
    """Data type of the optimizer's moments (Megatron's precision-aware optimizer); `auto`: training.master_dtype."""
    virtual_stages: int = Field(default=1, ge=1, le=64)
    """Model chunks per pipeline stage (Megatron's interleaved schedule)."""
    predicts_ahead: int = Field(default=0, ge=0, le=8)
    """Depth of multi-token prediction: extra tokens that training predicts beyond the next one."""
    kernels: KernelsSpec = KernelsSpec.create_default()
    """Kernels that differ from the framework's defaults."""
    lora: LoraSpec | None = None
    """LoRA adapters trained in place of the policy; None: full fine-tuning."""

    @property
    def trains_adapters(self) -> bool:
        """Whether the policy's base is frozen and adapters are trained."""
        return self.lora is not None

    @property
    def quantization(self) -> Literal["none", "nf4"]:
        """Number format of the frozen base."""
        return "nf4" if self.has_packed_base else "none"

    @property
    def has_packed_base(self) -> bool:
        """Whether the frozen base is in 4 bits."""
        return self.lora is not None and self.lora.base_dtype == "nf4"

    @property
    def needs_bitsandbytes(self) -> bool:
        """Whether the base or the optimizer is quantized by bitsandbytes."""
        return self.has_packed_base or self.optimizer == "adamw_8bit"

    @property
    def num_ranks_per_pass(self) -> int:
        """Ranks that compute one micro-batch together; sizes that are still `auto` count as 1."""
        return count_ranks(self.ulysses) * count_ranks(self.tp)

    def combination(
        self,
        zero_stage: int | None = None,
        ranks: tuple[int, int] | None = None,
        offloads: tuple[bool, bool] | None = None,
    ) -> "Combination":
        """The trainer's settings to check for conflicts. Arguments replace the values of the job.

        ranks: ulysses and tp. offloads: of the optimizer and of parameters.
        """
        stated_stage = None if self.zero_stage == "auto" else self.zero_stage
        return Combination(
            stated_stage if zero_stage is None else zero_stage,
            self.optimizer,
            self.trains_adapters,
            self.has_packed_base,
            *(offloads or (self.offloads_optimizer is True, self.offloads_parameters is True)),
            *(ranks or (count_ranks(self.ulysses), count_ranks(self.tp))),
        )


def check_sharing(training: TrainingSpec, model: ModelSpec, where: str) -> None:
    """Raises: SpecError where ranks cannot share a micro-batch of this model."""
    for refusal in find_sharing_conflicts(model, count_ranks(training.ulysses), count_ranks(training.tp)):
        raise SpecError(refusal.what, where=f"{refusal.where}, {where}", rule=refusal.rule, way_out=refusal.way_out)


_CUT = frozenset(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))


@lru_cache(maxsize=64)
def _is_cut_whole(model: ModelSpec) -> bool:
    """Whether AutoTP gives each rank exactly its own heads and columns of every layer. Packed projections, experts and
    a norm over all heads rule that out.
    """
    names = [tensor.name for tensor in model.parameters if tensor.is_linear]
    has_uncut = bool({name.split(".")[-2] for name in names} - _CUT) or model.experts is not None
    norms = {tensor.numel for tensor in model.parameters if tensor.name.endswith(("q_norm.weight", "k_norm.weight"))}
    return not has_uncut and norms <= {model.head_dim}


def find_sharing_conflicts(model: ModelSpec, ulysses: int, tp: int) -> Iterator[Contradiction]:
    """Why ranks cannot share a micro-batch of this model.

    Ulysses: each rank computes whole heads. With fewer key heads than ranks, several ranks compute the same one. Tensor
    parallelism: each rank has whole query and key heads and an equal part of the MLP, and no other layers.
    """
    heads, keys = model.num_heads, model.num_kv_heads
    problems = (
        (
            heads % ulysses > 0,
            "ulysses",
            f"{heads} attention heads",
            "every rank computes the same number of whole heads",
        ),
        (
            keys % ulysses > 0 and ulysses % keys > 0,
            "ulysses",
            f"{keys} key heads",
            "a multiple of the ranks, or a divisor",
        ),
        (keys % tp > 0, "tp", f"{keys} key heads", "every rank has the same number of whole key heads"),
        (tp > 1 and not _is_cut_whole(model), "tp", "layers that AutoTP does not cut", "q, k, v, o, gate, up and down"),
        (
            model.intermediate_size % tp > 0,
            "tp",
            f"an MLP {model.intermediate_size} wide",
            "every rank has an equal part",
        ),
    )
    for holds, key, what, rule in problems:
        if holds:
            size = ulysses if key == "ulysses" else tp
            words = f"training.{key} is {size}, the model has {what}"
            yield Contradiction(words, f"training.{key}", rule, f"training.{key}=1, or a number that divides them")
