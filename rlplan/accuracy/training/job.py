"""A published training run as a job with a forced layout.

In: a point of any trainer. Out: the job as a mapping. Raises CannotPredict for missing settings, and for runs that no
job can express. Left out: bytes and seconds (predict.py).
"""

import re
from typing import Any, cast

from rlplan.accuracy.named_models import find_point_model, make_policy
from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.predictions import CannotPredict
from rlplan.accuracy.settings import KEYS, WORDS, find_gpu
from rlplan.accuracy.training.adapters import read_lora
from rlplan.accuracy.training.settings import (
    NONE,
    RunSettings,
    Tokens,
    check_data_parallel,
    num_ranks,
    read_optimizer,
    read_precision,
    read_recompute,
    read_tokens,
)
from rlplan.accuracy.training.trainers import (
    AUTOMODEL,
    MEGATRON,
    PRIME_RL,
    TORCHTITAN,
    TORCHTUNE,
    Trainer,
    find_trainer,
)
from rlplan.accuracy.training.zero import read_stage, zero_keys
from rlplan.spec.model import ModelSpec
from rlplan.units import ceil_div
from rlplan.vocabulary import Dtype

USUAL_GPU = "h100-sxm"
"""GPU of a job whose point names none: bytes of tensors do not depend on the GPU."""
LIMITED_WATTS = 700
"""Power limit of a B200 that is described as limited, without a number.

It is that of a B100, which the only source of such points first names (torchao, prototype/mx_formats/README.md).
"""
FULL_PIPELINE = 4
"""Micro-batches per step and pipeline stage where a point does not state their number: enough to fill the pipeline."""


class Layout:
    """Degrees of parallelism that a point states."""

    def __init__(self, settings: RunSettings) -> None:
        self.num_ranks = num_ranks(settings)
        check_data_parallel(settings, self.num_ranks)
        self.tp = settings.degree("tp", "tensor_parallel")
        self.pp = settings.degree("pp", "pipeline_parallel")
        self.cp = settings.degree("cp", "context_parallel")
        self.ep = settings.degree("ep", "expert_parallel")
        self.ulysses = settings.degree(*KEYS["ulysses"])
        stated = settings.first(("etp", "expert_tensor_parallel"))
        self.etp = settings.read_count(stated) if stated else None

    @property
    def groups(self) -> int:
        """Groups of ranks that each compute their own micro-batches. Raises: CannotPredict."""
        ranks = self.tp * self.pp * self.cp * self.ulysses
        if self.num_ranks % ranks:
            raise CannotPredict(f"{ranks} ranks that share a micro-batch do not divide {self.num_ranks} GPUs")
        return self.num_ranks // ranks

    def keys(self, backend: str) -> dict[str, Any]:
        """The layout as keys of `training`."""
        axes: dict[str, Any] = {"tp": self.tp, "pp": self.pp, "cp": self.cp, "ep": self.ep, "ulysses": self.ulysses}
        if self.etp is not None and backend == "megatron":
            axes["etp"] = self.etp
        return axes


def training_job(point: MeasuredPoint, *, has_passes: bool = True) -> dict[str, Any]:
    """The job of a training run. Raises: CannotPredict.

    has_passes: whether passes were measured, so that tokens and recomputation matter, and not only states.
    """
    settings, trainer, model = RunSettings(point), find_trainer(point), find_point_model(point)
    _check_attention(settings, trainer, model)
    layout = Layout(settings)
    tokens, recomputed = Tokens(1, 2), cast("str | tuple[str, ...]", NONE)
    if has_passes:
        tokens = _cut_micro_batch(read_tokens(settings), settings, trainer, layout.pp)
        recomputed = _read_recomputed(settings, trainer, model)
    backend = _choose_backend(settings, trainer, layout)
    training: dict[str, Any] = layout.keys(backend) | _read_types(point, settings, trainer, model, backend)
    training |= {
        "backend": backend,
        "optimizer": read_optimizer(settings),
        "logits": _choose_logits(settings, trainer, layout, backend),
        "gradient_checkpointing": recomputed != NONE,
        "offloads_activations": _offloads_activations(settings),
        "sequence_parallel": _shares_rows(settings, trainer, layout),
    }
    if recomputed not in (NONE, "layers"):
        training["recomputed"] = recomputed
    offloads = _offloads_states(settings)
    training |= {"offloads_optimizer": offloads, "offloads_parameters": offloads and backend == "fsdp2"}
    if backend == "deepspeed" and read_stage(settings) is not None:
        training |= zero_keys(settings)
    kernels = _choose_kernels(settings, trainer, model, tokens)
    if kernels:
        training["kernels"] = kernels
    if (virtual := settings.degree(*KEYS["virtual_stages"])) > 1 and layout.pp > 1:
        training["virtual_stages"] = virtual
    return {
        "policy": make_policy(point, longest=tokens.length),
        "algorithm": "sft",
        "framework": "rlplan" if backend == "deepspeed" else trainer.framework,
        "hardware": make_hardware(point, layout.num_ranks),
        "workload": _make_workload(settings, trainer, layout, tokens),
        "training": training,
    }


def make_hardware(point: MeasuredPoint, count: int) -> dict[str, Any]:
    """The `hardware` of the point's job, with its stated power limit and hosts."""
    gpu, settings, text = find_gpu(point), RunSettings(point), (point.gpu or "").lower()
    if gpu is None:
        settings.assume("gpu", USUAL_GPU)
    hardware: dict[str, Any] = {"profile": gpu.name if gpu else USUAL_GPU, "num_devices": count}
    watts = re.search(r"(?<![\d.])(\d{2,4})\s*w(atts?)?\b", text)
    if watts or "power limited" in text:
        hardware["power_limit"] = int(watts.group(1)) if watts else LIMITED_WATTS
    if key := settings.first(("gpus_per_host", "gpus_per_node")):
        hardware["num_hosts"] = ceil_div(count, settings.read_count(key))
    return hardware


def _make_workload(settings: RunSettings, trainer: Trainer, layout: Layout, tokens: Tokens) -> dict[str, Any]:
    return {
        "num_prompts_per_step": _count_sequences(settings, trainer, layout, tokens.sequences),
        "num_samples_per_prompt": 1,
        "micro_batch_size_per_gpu": tokens.sequences,
        "max_prompt_len": 1,
        "max_response_len": max(1, tokens.length - 1),
    }


def _count_sequences(settings: RunSettings, trainer: Trainer, layout: Layout, micro_batch: int) -> int:
    """Sequences per optimizer step: the global batch, else micro-batch times ranks times accumulation."""
    groups, key = layout.groups, settings.first(KEYS["global_batch"])
    if key and settings.read_count(key) % (groups * micro_batch) == 0:
        return settings.read_count(key)
    stated = settings.first((*KEYS["accumulation"], *KEYS["micro_batches"]))
    usual = FULL_PIPELINE * layout.pp if layout.pp > 1 else trainer.micro_batches
    return micro_batch * groups * (settings.read_count(stated) if stated else usual)


def _choose_backend(settings: RunSettings, trainer: Trainer, layout: Layout) -> str:
    """The backend: DeepSpeed where a ZeRO stage is stated, else the trainer's. Raises: CannotPredict."""
    if read_stage(settings) is not None:
        return "deepspeed"
    if trainer.backend == "fsdp2":
        if layout.pp > 1 or layout.ep > 1:
            raise CannotPredict(
                f"{trainer.name} with pipeline or expert parallel ranks: a job cannot express that with FSDP2"
            )
        is_replicated = _is_replicated(settings)
        if layout.num_ranks > 1 and not (is_replicated or trainer.is_sharded or "fsdp" in settings):
            raise CannotPredict(f"how {layout.num_ranks} ranks share the model is not stated")
    return trainer.backend


def _is_replicated(settings: RunSettings) -> bool:
    """Whether the run uses DDP, which shards nothing."""
    return "ddp" in settings.text or ("ddp" in settings and "fsdp" not in settings)


def _read_types(
    point: MeasuredPoint, settings: RunSettings, trainer: Trainer, model: ModelSpec, backend: str
) -> dict[str, Any]:
    """Data types of weights, gradients and states, and adapters, as keys of `training`. Raises: CannotPredict."""
    precision = read_precision(settings, has_master=trainer.has_master)
    types: dict[str, Any] = {"dtype": precision.compute.value}
    if backend == "fsdp2":
        types |= {
            "master_dtype": precision.stored.value,
            "reduce_dtype": "float32" if trainer.has_master else "bfloat16",
        }
        if precision.stored is Dtype.FLOAT16:
            raise CannotPredict("weights and states in fp16: a job cannot express that with FSDP2")
        if _is_replicated(settings):
            types["fsdp_size"] = 1
        stated = settings.raw("fsdp")
        if type(stated) is int and 0 < stated < num_ranks(settings):
            types["fsdp_size"] = stated * settings.degree("cp", "context_parallel")
    if backend == "megatron" and is_bridge(settings):
        types["reduce_dtype"] = "bfloat16"
        if model.architecture in WORDS["bf16_moments"]:
            types["moment_dtype"] = "bfloat16"
    if backend == "megatron" and settings.word("exp_avg_dtype") == "bf16":  # with the precision-aware optimizer
        types["moment_dtype"] = "bfloat16"
    base = _read_base_format(settings, trainer)
    lora = read_lora(point, model, trainer)
    if lora is not None:
        if base:
            lora |= {"base_dtype": base} | ({"unquantized_dtype": "float32"} if trainer.upcasts_rest else {})
        elif backend == "fsdp2" and trainer is not PRIME_RL:
            lora["base_dtype"] = precision.compute.value
        types["lora"] = lora
    elif base:
        raise CannotPredict("weights in 4 bits without adapters are not trained")
    return types


def _read_base_format(settings: RunSettings, trainer: Trainer) -> str | None:
    """The quantization of frozen weights; None where they have the compute dtype. Raises: CannotPredict."""
    text = settings.text
    if trainer in (TORCHTITAN, AUTOMODEL, MEGATRON):
        return None  # formats concern matmuls in these trainers, and weights keep their dtype
    if any(name in text for name in ("hqq", "int8", "8bit", "gptq", "awq", "fp8")):
        raise CannotPredict("NF4 is the only 4-bit format of a frozen base that a job can express")
    return "nf4" if any(name in text for name in ("nf4", "fp4", "qlora", "4bit", "4-bit", "qdora")) else None


def _choose_logits(settings: RunSettings, trainer: Trainer, layout: Layout, backend: str) -> str:
    """The loss implementation: stated, else a named fused kernel (Liger, cut cross-entropy), else the trainer's."""
    if "loss" in settings and (stated := stated_loss(settings.word("loss"))):
        return stated
    if settings.says("liger", "liger_kernel", "fused_ce", "cut_cross_entropy"):
        return "fused"
    if trainer is TORCHTUNE:
        chunked = settings.says("chunked_ce")
        return "plain" if chunked is False else "compiled_chunked" if is_compiled(settings, trainer) else "chunked"
    if trainer is MEGATRON:
        fuses = settings.says("ce_fusion", "cross_entropy_fusion", "cross_entropy_loss_fusion")
        # Megatron-Core's own fusion (`cross_entropy_fusion_impl: native`, ms-swift's default) compiles the unfused
        # functions. Its gradient is scattered into a copy of the fp32 softmax, as torch 2.13's inductor allocates it.
        is_native = "swift" in settings.word("framework").lower() and settings.word("ce_fusion_impl") != "te"
        return "in_place" if not is_native and (is_bridge(settings) if fuses is None else fuses) else "megatron"
    if trainer is PRIME_RL and "sft" in settings.text:
        return "shifted"
    return "auto" if trainer is TORCHTITAN and layout.tp > 1 else trainer.logits


def stated_loss(word: str) -> str | None:
    """The implementation that a setting `loss` names; None for the name of an objective such as `cross_entropy`.

    >>> stated_loss("in_place"), stated_loss("Chunked CE"), stated_loss("cross_entropy")
    ('in_place', 'chunked', None)
    """
    text = re.sub(r"[\s\-]+", "_", word.strip().lower())
    if text in WORDS["losses"]:
        return text
    if "fused" in text and "chunk" in text:
        return "compiled_rows"
    if any(name in text for name in ("liger", "cut_cross", "fused")):
        return "fused"
    return "chunked" if "chunk" in text else None


def _choose_kernels(settings: RunSettings, trainer: Trainer, model: ModelSpec, tokens: Tokens) -> dict[str, Any]:
    kernels: dict[str, Any] = {}
    if is_compiled(settings, trainer):
        kernels["is_compiled"] = True
    if trainer.vocab_chunk:
        kernels["logit_rows"] = ceil_div(tokens.num * trainer.vocab_chunk, model.vocab_size)
    elif trainer.logit_tile:
        kernels["logit_rows"] = min(max(trainer.logit_tile // (4 * model.vocab_size), 128), 4096)
    return kernels


def is_compiled(settings: RunSettings, trainer: Trainer) -> bool:
    """Whether torch.compile is used."""
    stated = settings.says("compile")
    return trainer.is_compiled if stated is None else stated


def is_bridge(settings: RunSettings) -> bool:
    """Whether the run uses Megatron-Bridge's recipes, whose defaults differ from Megatron-LM's."""
    return "bridge" in settings.word("framework").lower()


def _read_recomputed(settings: RunSettings, trainer: Trainer, model: ModelSpec) -> str | tuple[str, ...]:
    if settings.first(KEYS["recompute"]) is None and is_bridge(settings):
        run = f"{model.architecture} {settings.gpu} {settings.raw('precision')}".lower()
        recipes: dict[str, list[str]] = WORDS["recipe_modules"]
        return next((tuple(modules) for pattern, modules in recipes.items() if re.search(pattern, run)), NONE)
    return read_recompute(settings, trainer.recompute, trainer.selective)


def _check_attention(settings: RunSettings, trainer: Trainer, model: ModelSpec) -> None:
    """Raises: CannotPredict for gpt-oss in transformers' own modules, unless a kernel with sinks is named."""
    if model.architecture != "GptOssForCausalLM" or trainer in (MEGATRON, TORCHTITAN, PRIME_RL, AUTOMODEL):
        return
    key = settings.first(("attn", "attention", "attn_implementation"))
    if key is None or re.search(r"eager|sdpa", str(settings.raw(key)).lower()):
        raise CannotPredict(
            "gpt-oss in transformers needs an attention kernel with sinks (flash attention 3); setting 'attn' names "
            "none, and stored attention scores are not modelled"
        )


def _offloads_activations(settings: RunSettings) -> bool:
    """Whether activations are offloaded to the host: a technique, or a word of the recomputation setting."""
    key = settings.first(KEYS["recompute"])
    says = key is not None and re.search(r"(?<!no )(?<!without )offload", str(settings.raw(key)).lower()) is not None
    return says or bool(settings.says("act_offload", "activation_offloading"))


def _offloads_states(settings: RunSettings) -> bool:
    if settings.says("optimizer_in_bwd", "optim_in_bwd", "fused_optimizer_backward"):
        raise CannotPredict("an optimizer step within the backward pass: a job cannot express that")
    text = re.search(r"(?<!no )(?<!no_)(?<!no-)(cpu.?)?offload", settings.text) is not None
    return text or bool(settings.says("cpu_offload", "fsdp_cpu_offload"))


def _shares_rows(settings: RunSettings, trainer: Trainer, layout: Layout) -> bool:
    """Whether the run uses sequence parallelism: stated, else by default in torchtitan and Megatron.

    Megatron's GPT papers predate it, unless the mode of the run names it (SP, arXiv 2205.05198, table 5).
    """
    is_gpt = "gpt" in str(settings.raw("mode") or "").lower()
    does = trainer in (TORCHTITAN, MEGATRON) and not is_gpt
    does = does or re.search(r"\bSP\b", str(settings.raw("mode"))) is not None
    stated = settings.says("sequence_parallel")
    return layout.tp > 1 and (does if stated is None else stated)


def _cut_micro_batch(tokens: Tokens, settings: RunSettings, trainer: Trainer, pp: int) -> Tokens:
    """The micro-batch; torchtitan splits the local batch into one per pipeline stage, or as many as stated."""
    if trainer is not TORCHTITAN or pp == 1:
        return tokens
    key = settings.first(KEYS["micro_batches"])
    return Tokens(max(1, tokens.sequences // (settings.read_count(key) if key else pp)), tokens.length)
