"""Trainers of published runs, with their defaults as values of job keys.

In: a point. Out: the Trainer of its run. Left out: stated settings (settings.py), kernels that no job key names.
Every field follows the trainer's source or the default recipe of the table; none is fitted. Only DeepSpeed and
transformers were installed here; the sources of the other trainers are cited from knowledge of them.
"""

import re
from dataclasses import dataclass

from rlplan.accuracy.points import MeasuredPoint, Statistic

QV = ("q_proj", "v_proj")
ALL_BUT_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
FULL, NONE = "layers", "none"


@dataclass(frozen=True)
class Trainer:
    """One trainer, with its defaults."""

    name: str
    words: tuple[str, ...]
    """Words in its addresses and names."""
    framework: str = "verl"
    """Framework of its jobs; the one with the nearest backends, where the trainer has no profile."""
    backend: str = "fsdp2"
    """Backend of its jobs where no ZeRO stage is stated."""
    logits: str = "plain"
    recompute: str | None = None
    """Default recomputation; None where a point must state it."""
    selective: str | None = None
    """Meaning of `selective` alone."""
    has_master: bool = False
    """Whether weights are stored in fp32 and cast to bf16 for the passes."""
    targets: tuple[str, ...] = QV
    """Default layers of LoRA."""
    rank: int = 8
    """Default rank of LoRA."""
    adapts_experts: bool = False
    """Whether LoRA adapts every routed expert where a point names no layers."""
    has_expert_modules: bool = False
    """Whether routed experts are linear modules, which `all-linear` adapts."""
    dropout: float = 0.0
    """Dropout on LoRA's input."""
    has_fp32_adapters: bool = False
    """Whether adapters are fp32 with 16-bit weights, as in PEFT."""
    upcasts_rest: bool = False
    """Whether all other weights are fp32 with a 4-bit base (`prepare_model_for_kbit_training`)."""
    is_sharded: bool = False
    """Whether several GPUs imply FSDP."""
    logit_tile: int = 0
    """Bytes of fp32 logits per chunk, of 128 to 4,096 rows; 0 without a limit in bytes."""
    vocab_chunk: int = 0
    """Words per chunk, where the vocabulary is chunked instead of the tokens; 0 otherwise."""
    is_compiled: bool = False
    """Whether its recipes use torch.compile by default."""
    micro_batches: int = 1
    """Micro-batches per step in its own tables."""
    length: int = 0
    """Tokens of a sequence in its own recipes; 0 where a point must state it."""
    reports: Statistic = Statistic.UNSTATED
    """Statistic that its own log calls the peak."""


TORCHTUNE = Trainer(
    "torchtune",
    ("torchtune",),
    logits="chunked",
    recompute=FULL,
    targets=("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    is_sharded=True,
)
"""Source: torchtune 0.5 modules/loss, recipes/configs/llama3_1."""
TORCHTITAN = Trainer(
    "torchtitan", ("torchtitan",), selective="selective", has_master=True, is_sharded=True, length=8192
)
"""Source: torchtitan 2024-12 parallelisms/parallelize_llama.py, optimizer.py."""
LITGPT = Trainer(
    "litgpt",
    ("litgpt", "lit-gpt"),
    logits="uncast_chunked",
    recompute=NONE,
    dropout=0.05,
    is_sharded=True,
)
"""Source: litgpt 0.4 finetune/lora.py (`lora_dropout` 0.05, `lm_head_chunk_size` 128)."""
FSDP_QLORA = Trainer(
    "fsdp_qlora",
    ("fsdp_qlora", "fsdp-qlora"),
    logits="shifted",
    recompute=FULL,
    targets=ALL_BUT_OUTPUT,
    rank=64,
    dropout=0.1,
    is_sharded=True,
)
"""Source: fsdp_qlora train.py (`lora_rank` 64, `lora_dropout` 0.1, target modules), transformers 4.38."""
PEFT = Trainer("peft", ("huggingface/peft", "method_comparison"), recompute=NONE, has_fp32_adapters=True)
"""Source: PEFT method_comparison/MetaMathQA/run.py, tuners/lora/layer.py (`autocast_adapter_dtype`)."""
FOUNDRY = Trainer("llm-foundry", ("llm-foundry", "llmfoundry", "mosaicml"), has_master=True, is_sharded=True)
"""Source: llm-foundry scripts/train/benchmarking (FSDP FULL_SHARD, `amp_bf16`, mixed precision PURE)."""
MEGATRON = Trainer(
    "megatron",
    ("megatron", "mbridge", "nemo"),
    backend="megatron",
    logits="megatron",
    recompute=NONE,
    has_expert_modules=True,
)
"""Source: Megatron-LM arguments.py (`recompute_granularity` None); Megatron-Core 0.14
tensor_parallel/cross_entropy.py; ms-swift's Megatron adapters stand beside `TEGroupedLinear` too."""
HUGGING_FACE = Trainer("transformers", ("transformers", "trl", "llamafactory", "llama-factory", "unsloth", "axolotl"))
"""Source: transformers 5.19 trainer.py."""
DEEPSPEED = Trainer("deepspeed", ("deepspeed",))
"""Source: DeepSpeed 0.19.8."""
AGILERL = Trainer(
    "agilerl",
    ("agilerl",),
    framework="rlplan",
    backend="deepspeed",
    logits="compiled_rows",
    recompute=FULL,
    has_fp32_adapters=True,
    upcasts_rest=True,
    logit_tile=256 << 20,
    micro_batches=2,
)
"""Source: AgileRL 2.8.2 algorithms/core/base.py (bf16 autocast, PEFT's fp32 adapters, `_resolve_fused_chunk_rows`)."""
PRIME_RL = Trainer(
    "prime-rl",
    ("prime-rl", "primerl", "prime_rl"),
    framework="prime_rl",
    logits="compiled_rows",
    has_master=True,
    targets=(*QV, "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    rank=16,
    adapts_experts=True,
    has_fp32_adapters=True,
    is_sharded=True,
    vocab_chunk=2048,
    is_compiled=True,
    micro_batches=2,
    reports=Statistic.RESERVED,
)
"""Source: prime-rl 2026-02 src/prime_rl/trainer/models/layers/lm_head.py (`FusedOutputLinear` over chunks of 2,048
words in RL; `VanillaOutputLinear` in fp32 in SFT), trainer/model.py (fp32 parameters, bf16 under FSDP2),
trainer/sft/train.py (`peak_memory` is torch's `max_memory_reserved`); benchmarks/scripts/run_single_benchmark.py
(`micro_batches` 2)."""
AUTOMODEL = Trainer("automodel", ("automodel",), has_master=True, is_sharded=True, recompute=NONE)
"""Source: NeMo AutoModel docs/performance-summary.mdx (FSDP2, expert parallelism, Transformer Engine's modules)."""
TORCH = Trainer("torch", ())
"""A plain loop around torch 2.13, and any trainer that is not named."""
TRAINERS = (
    AUTOMODEL,
    TORCHTUNE,
    TORCHTITAN,
    LITGPT,
    FSDP_QLORA,
    PEFT,
    FOUNDRY,
    MEGATRON,
    HUGGING_FACE,
    DEEPSPEED,
    AGILERL,
    PRIME_RL,
)


def find_trainer(point: MeasuredPoint) -> Trainer:
    """The trainer that a point names, in its settings, else in its model, source or id.

    >>> measured = {"value": 1, "unit": "GiB"}
    >>> find_trainer(MeasuredPoint(id="a", kind="train_peak", source="https://github.com/pytorch/torchtune",
    ...     measured=measured)).name
    'torchtune'
    """
    stated = " ".join(str(point.settings.get(key, "")) for key in ("framework", "trainer", "recipe"))
    for text in (stated, str(point.model), point.source, point.id):
        for trainer in TRAINERS:
            if any(re.search(rf"(^|[^a-z]){re.escape(word)}", text.lower()) for word in trainer.words):
                return trainer
    return TORCH
