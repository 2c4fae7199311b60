"""A published training run, as far as its settings and its trainer's own defaults tell.

In: a point. Out: a Run. Raises CannotPredict for what is missing or not modelled.
Left out: bytes (states.py, points.py).
"""

import re
from dataclasses import replace

from rlplan.accuracy.named_models import model_of
from rlplan.accuracy.points import MeasuredPoint, Statistic
from rlplan.accuracy.registry import CannotPredict
from rlplan.accuracy.training.adapters import Adapters, read_adapters
from rlplan.accuracy.training.settings import (
    ACCUMULATION,
    MICRO_BATCHES,
    RECOMPUTE,
    ULYSSES,
    VIRTUAL_STAGES,
    Precision,
    RunSettings,
    Tokens,
    check_data_parallel,
    num_ranks,
    read_optimizer,
    read_precision,
    read_recompute,
    read_tokens,
    recomputed_modules,
)
from rlplan.accuracy.training.trainers import (
    AUTOMODEL,
    FOUNDRY,
    FSDP_QLORA,
    LITGPT,
    MEGATRON,
    PRIME_RL,
    TORCHTITAN,
    TORCHTUNE,
    Trainer,
    trainer_of,
)
from rlplan.memory.model.block import Block, Layers, Norm
from rlplan.memory.model.block_families import blocks_of
from rlplan.memory.model.quantization import HQQ, NF4, NF4_DOUBLE, WeightFormat
from rlplan.memory.trainers.optimizers import Optimizer
from rlplan.memory.trainers.shape import Recompute
from rlplan.records import dataclass
from rlplan.spec.model import ModelSpec
from rlplan.units import ceil_div
from rlplan.vocabulary import Loss

RECIPE_MODULES = (
    (r"deepseekv3.* h100", "mla_up_proj mlp"),
    (r"deepseekv3.* (b200|b300|gb200)", "mla_up_proj"),
    (r"gptoss.* (h100|b200|gb200)", "layernorm moe_act"),
    (r"nemotronh.* h100 .*bf16", "moe layernorm"),
    (r"nemotronh.* h100", "layernorm"),
    (r"nemotronh.* b200 .*mxfp8", "moe_act layernorm"),
)
"""What Megatron-Bridge's recipes recompute, by architecture, GPU and precision; others nothing. Source: Megatron-Bridge
2026-08, src/megatron/bridge/perf_recipes (`recompute_modules`). Assumes: earlier containers as these."""


@dataclass(frozen=True)
class Run:
    """One run."""

    settings: RunSettings
    trainer: Trainer
    model: ModelSpec
    layers: tuple[Layers, ...]
    tokens: Tokens
    recompute: Recompute
    loss: Loss
    optimizer: Optimizer
    precision: Precision
    """Of the weights."""
    statistic: Statistic
    quantization: WeightFormat | None
    adapters: Adapters | None
    num_ranks: int
    """GPUs."""
    tp: int = 1
    pp: int = 1
    cp: int = 1
    """Ranks that share a sequence, as `ulysses`."""
    ep: int = 1
    ulysses: int = 1
    is_compiled: bool = False
    offloads_activations: bool = False
    offloads_states: bool = False
    steps_in_backward: bool = False
    """An optimizer step for each gradient as it is made."""
    replicates: bool = False
    """DDP, nothing is sharded."""

    @property
    def modules(self) -> frozenset[str]:
        """Modules of a layer that its backward pass computes anew, by Megatron's names: stated, else of the recipe."""
        key = self.settings.first(RECOMPUTE)
        if key or not is_bridge(self.settings):
            return recomputed_modules(self.settings.raw(key)) if key else frozenset()
        run = f"{self.model.architecture} {self.settings.gpu} {self.settings.raw('precision')}".lower()
        return next(
            (frozenset(words.split()) for pattern, words in RECIPE_MODULES if re.search(pattern, run)), frozenset()
        )

    @property
    def has_fused_step(self) -> bool:
        """Whether the optimizer's step makes no copies: as its name says, else as the trainer has it."""
        word = str(self.settings.raw("optimizer")).lower()
        if "fused" in word or self.optimizer is not Optimizer.ADAMW:
            return True
        return self.trainer.has_fused_step and not re.search(r"adamw_torch|torch\.optim|foreach", word)

    @property
    def data_ranks(self) -> int:
        """Ranks over which states are sharded: as stated (and those that share a sequence), else all that are left."""
        stated = self.settings.raw("fsdp")
        if type(stated) is int and 0 < stated * self.cp * self.tp * self.pp <= self.num_ranks:
            return stated * self.cp
        return max(1, self.num_ranks // (self.tp * self.pp))

    @property
    def accumulates(self) -> bool:
        """Whether a step has several micro-batches, so that gradients are there before the last one's."""
        key = self.settings.first(ACCUMULATION)
        return key is not None and self.settings.count(key) > 1

    @property
    def splits_sequence(self) -> bool:
        """Whether tensor parallel ranks share the elementwise operators between matmuls: torchtitan, Megatron but for
        GPT, whose papers came before it, unless the mode of the run names it (SP, arXiv 2205.05198, table 5).
        """
        does = self.trainer is TORCHTITAN or (self.trainer is MEGATRON and not self.has_dropout)
        does = does or re.search(r"\bSP\b", str(self.settings.raw("mode"))) is not None
        said = self.settings.says("sequence_parallel")
        return self.tp > 1 and (does if said is None else said)

    @property
    def has_dropout(self) -> bool:
        """GPT under Megatron, whose `hidden_dropout` is 0.1 by default; every later family sets it to 0."""
        return self.trainer is MEGATRON and self.model.architecture == "GPT2LMHeadModel"

    @property
    def num_in_flight(self) -> int:
        """Micro-batches whose activations the first pipeline stage holds.

        Counts: p with 1F1B, all m with GPipe, p + (p-1)/v interleaved over v chunks, rounded up; never more than the m
        micro-batches that there are. torchtitan cuts a local batch into p where it is not said into how many.
        Source: Narayanan et al. 2021, section 2.2.
        """
        schedule = str(self.settings.raw("schedule") or self.settings.raw("pp_schedule") or "1f1b").lower()
        key = self.settings.first(MICRO_BATCHES)
        there = self.settings.count(key) if key else self.pp
        if "gpipe" in schedule:
            return max(self.pp, there)
        chunks = self.settings.degree(*VIRTUAL_STAGES) if "interleaved" not in schedule else 2
        held = self.pp + (ceil_div(self.pp - 1, chunks) if chunks > 1 else 0)
        return min(held, there) if key or self.trainer is TORCHTITAN else held


def read_run(point: MeasuredPoint, *, has_passes: bool = True) -> Run:
    """The run of a point. has_passes: tokens and recomputation are needed. Raises: CannotPredict."""
    settings, trainer, model = RunSettings(point), trainer_of(point), model_of(point)
    _check_attention(settings, trainer, model)
    pp = settings.degree("pp", "pipeline_parallel")
    tokens, recompute = Tokens(1, 1), Recompute.NONE
    if has_passes:
        tokens = _micro_batch(read_tokens(settings), settings, trainer, pp)
        recompute = read_recompute(settings, trainer.recompute, trainer.selective)
    said = settings.says("compile")
    compiled = trainer.is_compiled if said is None else said
    quantization = _quantization(settings, trainer)
    adapters = read_adapters(point, model, trainer, is_quantized=quantization is not None)
    if adapters:
        tokens = replace(tokens, length=tokens.length + adapters.num_virtual_tokens)
    layers, ranks = layers_of(model, trainer), num_ranks(settings)
    check_data_parallel(settings, ranks)
    return Run(
        settings=settings,
        trainer=trainer,
        model=model,
        layers=tuple(replace(kind, block=kind.block.fused()) for kind in layers) if compiled else layers,
        tokens=tokens,
        recompute=recompute,
        loss=_loss(settings, trainer, compiled),
        optimizer=read_optimizer(settings),
        precision=read_precision(settings, has_master=trainer.has_master),
        statistic=trainer.reports if point.measured.statistic is Statistic.UNSTATED else point.measured.statistic,
        quantization=quantization,
        adapters=adapters,
        num_ranks=ranks,
        tp=settings.degree("tp", "tensor_parallel"),
        pp=pp,
        cp=settings.degree("cp", "context_parallel"),
        ep=settings.degree("ep", "expert_parallel"),
        ulysses=settings.degree(*ULYSSES),
        is_compiled=compiled,
        offloads_activations=bool(settings.says("act_offload", "activation_offloading")) or _says_offload(settings),
        offloads_states=re.search(r"(?<!no )(?<!no_)(?<!no-)(cpu.?)?offload", settings.text) is not None
        or bool(settings.says("cpu_offload", "fsdp_cpu_offload")),
        steps_in_backward=bool(settings.says("optimizer_in_bwd", "optim_in_bwd", "fused_optimizer_backward")),
        replicates="ddp" in settings.text or ("ddp" in settings and "fsdp" not in settings),
    )


OWN_MODULES = (MEGATRON, TORCHTITAN, PRIME_RL, AUTOMODEL)
"""Trainers with modules of their own for mixtures, gpt-oss and hybrids."""


def _check_attention(settings: RunSettings, trainer: Trainer, model: ModelSpec) -> None:
    """Raises: CannotPredict for gpt-oss in transformers' own modules, unless a kernel with sinks is named."""
    if model.architecture != "GptOssForCausalLM" or trainer in OWN_MODULES:
        return
    key = settings.first(("attn", "attention", "attn_implementation"))
    if key is None or re.search(r"eager|sdpa", str(settings.raw(key)).lower()):
        raise CannotPredict(
            "gpt-oss has no fused attention in transformers but in kernels that know its sinks (flash attention 3); "
            "setting 'attn' names none, and scores of every pair of tokens are not modelled"
        )


def _says_offload(settings: RunSettings) -> bool:
    """Whether the words about recomputation add that what is kept goes to the host."""
    key = settings.first(RECOMPUTE)
    return key is not None and re.search(r"(?<!no )(?<!without )offload", str(settings.raw(key)).lower()) is not None


def _micro_batch(tokens: Tokens, settings: RunSettings, trainer: Trainer, pp: int) -> Tokens:
    """torchtitan cuts the local batch into one micro-batch a stage, or as many as it says."""
    if trainer is not TORCHTITAN or pp == 1:
        return tokens
    key = settings.first(MICRO_BATCHES)
    return replace(tokens, sequences=max(1, tokens.sequences // (settings.count(key) if key else pp)))


def _loss(settings: RunSettings, trainer: Trainer, compiled: bool) -> Loss:
    """How the loss is taken: as stated, a fused kernel where it is named (Liger, cut cross-entropy), the trainer's."""
    if "loss" in settings and (stated := stated_loss(settings.word("loss"))):
        return stated
    if settings.says("liger", "liger_kernel", "fused_ce", "cut_cross_entropy"):
        return Loss.FUSED
    loss = trainer.loss
    if trainer is TORCHTUNE:
        chunked = settings.says("chunked_ce")
        loss = Loss.PLAIN if chunked is False else Loss.COMPILED_CHUNKED if compiled else Loss.CHUNKED
    fuses = settings.says("ce_fusion", "cross_entropy_fusion", "cross_entropy_loss_fusion")
    if trainer is MEGATRON and (is_bridge(settings) if fuses is None else fuses):
        loss = Loss.IN_PLACE
    if trainer is PRIME_RL and "sft" in settings.text:
        loss = Loss.SHIFTED
    if trainer is TORCHTITAN and settings.degree("tp") > 1:
        loss = Loss.PARALLEL
    return loss


def is_bridge(settings: RunSettings) -> bool:
    """Whether Megatron-Bridge's recipes run, whose defaults differ from Megatron-LM's."""
    return "bridge" in settings.word("framework").lower()


def stated_loss(word: str) -> Loss | None:
    """The implementation that a setting `loss` names; None for the name of an objective such as `cross_entropy`.

    >>> stated_loss("in_place"), stated_loss("Chunked CE"), stated_loss("cross_entropy")
    (<Loss.IN_PLACE: 'in_place'>, <Loss.CHUNKED: 'chunked'>, None)
    """
    text = re.sub(r"[\s\-]+", "_", word.strip().lower())
    if text in [loss.value for loss in Loss]:
        return Loss(text)
    if "fused" in text and "chunk" in text:
        return Loss.COMPILED_ROWS
    if any(name in text for name in ("liger", "cut_cross", "fused")):
        return Loss.FUSED
    return Loss.CHUNKED if "chunk" in text else None


def _quantization(settings: RunSettings, trainer: Trainer) -> WeightFormat | None:
    """The format of frozen weights: torchtune's NF4 and `-dq` quantise the scales too."""
    text = settings.text
    if trainer in (TORCHTITAN, AUTOMODEL):
        return None  # a format is of matmuls there, and weights stay as they are
    if "hqq" in text:
        return HQQ
    if any(name in text for name in ("int8", "8bit", "gptq", "awq", "fp8")):
        raise CannotPredict("only 4-bit floats and HQQ are modelled as frozen weights")
    if not any(name in text for name in ("nf4", "fp4", "qlora", "4bit", "4-bit", "qdora")):
        return None
    double = "dq" in text or "double" in text or (trainer is not FSDP_QLORA and not re.search("nf4|fp4", text))
    return NF4_DOUBLE if double or trainer.has_double_scales else NF4


def layers_of(model: ModelSpec, trainer: Trainer) -> tuple[Layers, ...]:
    """The kinds of layers as the trainer's own modules run them: litgpt and Megatron have one kernel for every GELU,
    llm-foundry flash attention for MPT."""
    if model.architecture == "MPTForCausalLM" and trainer is FOUNDRY:
        return (Layers(model.num_layers, _mpt_block(model)),)
    kinds = blocks_of(model, has_own_modules=trainer in OWN_MODULES)
    if trainer is MEGATRON:
        kinds = tuple(replace(kind, block=kind.block.fused()) for kind in kinds)
    if trainer not in (LITGPT, MEGATRON):
        return kinds
    return tuple(
        replace(kind, block=replace(kind.block, packs_qkv=False, mlp_saved_widths=_with_kernel(kind.block)))
        for kind in kinds
    )


def _with_kernel(block: Block) -> int:
    """Widths that the MLP saves where GELU is one kernel."""
    return 2 if block.mlp_saved_widths == 5 else block.mlp_saved_widths


def _mpt_block(model: ModelSpec) -> Block:
    return Block(
        hidden=model.hidden_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        intermediate=model.intermediate_size,
        norm=Norm.LAYER,
        mlp_saved_widths=2,
        has_rotary=False,
        packs_qkv=True,
    )
