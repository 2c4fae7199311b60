"""Trainers: what each of them does where a table does not say it, and how its kernels save and copy.

In: a point. Out: the Trainer that made it. Left out: what is stated (settings.py), bytes (rlplan/memory).
Every field below follows the trainer's source or the default recipe of the table; none is fitted. Sources are from
knowledge of them: but for DeepSpeed and transformers none of these trainers was installed here.
"""

import re

from rlplan.accuracy.points import MeasuredPoint, Statistic
from rlplan.memory.trainers.shape import Recompute
from rlplan.records import dataclass
from rlplan.vocabulary import Loss

QV = ("q_proj", "v_proj")
ALL_BUT_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Trainer:
    """One trainer, with its defaults."""

    name: str
    words: tuple[str, ...]
    """What its addresses and names contain."""
    loss: Loss = Loss.PLAIN
    recompute: Recompute | None = None
    """None where a point must state it."""
    selective: Recompute | None = None
    """What `selective` alone means."""
    repeats_keys: bool = False
    """This and the next two: see `step_peak.MicroBatchShape`."""
    views_fused: bool = False
    held_logit_bytes: int = 0
    has_master: bool = False
    """Weights are kept in fp32 and cast to bf16 for the passes."""
    targets: tuple[str, ...] = QV
    """Layers with LoRA."""
    rank: int = 8
    """Of LoRA."""
    adapts_experts: bool = False
    """LoRA stands beside every routed expert too, where a point names no layers."""
    has_expert_modules: bool = False
    """Routed experts are linear modules, which `all-linear` adapts too."""
    dropout: bool = False
    """Of LoRA's input."""
    adapter_bytes: int = 2
    """Of an element of LoRA."""
    keeps_inputs: bool = False
    """Its bitsandbytes keeps the inputs of frozen linear layers."""
    quantizes_head: bool = False
    """4-bit loading takes the language head too."""
    replicates_scales: bool = False
    """Scales of 4-bit weights are whole on every rank."""
    is_sharded: bool = False
    """Several GPUs mean FSDP."""
    gathers_root: bool = True
    """Embeddings and head are gathered as one, and stay."""
    has_fused_step: bool = False
    """The optimizer makes no temporary copies."""
    has_double_scales: bool = False
    """4-bit weights have their scales in 8 bits, whatever the words say."""
    upcasts_rest: bool = False
    """Beside a 4-bit base all else is fp32, and so is the residual stream (`prepare_model_for_kbit_training`)."""
    logit_tile: int = 0
    """Bytes of fp32 logits in a chunk, of 128 to 4,096 rows."""
    vocab_chunk: int = 0
    """Words of a chunk, where the vocabulary is cut and not the tokens."""
    is_compiled: bool = False
    """By its own recipes, where a point does not say otherwise."""
    accumulates: bool = False
    """All gradients are there in the passes: a step has several micro-batches, or they split the free segments."""
    is_fsdp_alone: bool = False
    """FSDP2 on one GPU too; frozen weights are kept in fp32 like the others."""
    micro_batches: int = 1
    """Of a step in its own tables, where a point does not say."""
    length: int = 0
    """Tokens of a sequence in its own recipes, where a point does not say; 0 where it must."""
    reports: Statistic = Statistic.UNSTATED
    """What its own log calls the peak, where a point does not say."""
    publishes_weights: bool = False
    """Each step of RL writes the trained weights to a file, and its tables count that time."""
    holds_engine: bool = False
    """The rollout engine sleeps in the trainer's process, and an optimizer step follows every micro-batch."""


TORCHTUNE = Trainer(
    "torchtune",
    ("torchtune",),
    loss=Loss.CHUNKED,
    recompute=Recompute.FULL,
    repeats_keys=True,
    targets=("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    is_sharded=True,
    gathers_root=False,
    has_fused_step=True,
    has_double_scales=True,
)
"""Source: torchtune 0.5 modules/attention.py (`k.expand`), modules/loss, recipes/configs/llama3_1 (`fused: True`,
`custom_sharded_layers`)."""
TORCHTITAN = Trainer(
    "torchtitan",
    ("torchtitan",),
    selective=Recompute.SELECTIVE,
    repeats_keys=True,
    has_master=True,
    is_sharded=True,
    has_fused_step=True,
    length=8192,
)
"""Source: torchtitan 2024-12 models/llama/model.py (`repeat_kv`), parallelisms/parallelize_llama.py, optimizer.py."""
LITGPT = Trainer(
    "litgpt",
    ("litgpt", "lit-gpt"),
    loss=Loss.UNCAST_CHUNKED,
    recompute=Recompute.NONE,
    repeats_keys=True,
    views_fused=True,
    dropout=True,
    keeps_inputs=True,
    quantizes_head=True,
    is_sharded=True,
)
"""Source: litgpt 0.4 finetune/lora.py (`lora_dropout` 0.05, `lm_head_chunk_size` 128), model.py (one `attn` product for
queries, keys and values), lightning's BitsandbytesPrecision, which replaces every linear layer; bitsandbytes 0.42."""
FSDP_QLORA = Trainer(
    "fsdp_qlora",
    ("fsdp_qlora", "fsdp-qlora"),
    loss=Loss.SHIFTED,
    recompute=Recompute.FULL,
    targets=ALL_BUT_OUTPUT,
    rank=64,
    dropout=True,
    replicates_scales=True,
    is_sharded=True,
)
"""Source: fsdp_qlora train.py (`lora_rank` 64, `lora_dropout` 0.1, target modules), transformers 4.38, bitsandbytes
0.43 (`quant_state` is an attribute of the parameter, which FSDP does not shard)."""
PEFT = Trainer(
    "peft",
    ("huggingface/peft", "method_comparison"),
    recompute=Recompute.NONE,
    repeats_keys=True,
    held_logit_bytes=2,
    adapter_bytes=4,
)
"""Source: PEFT method_comparison/MetaMathQA/run.py (`outputs = model(...)` lives through the backward pass, padded
batches), tuners/lora/layer.py (`autocast_adapter_dtype`), transformers 5 integrations/sdpa_attention.py (`repeat_kv`
under a mask)."""
FOUNDRY = Trainer("llm-foundry", ("llm-foundry", "llmfoundry", "mosaicml"), has_master=True, is_sharded=True)
"""Source: llm-foundry scripts/train/benchmarking (FSDP FULL_SHARD, `amp_bf16`, mixed precision PURE)."""
MEGATRON = Trainer(
    "megatron",
    ("megatron", "mbridge", "nemo"),
    loss=Loss.MEGATRON,
    recompute=Recompute.NONE,
    has_expert_modules=True,
)
"""Source: Megatron-LM arguments.py (`recompute_granularity` None); Megatron-Core 0.14 tensor_parallel/cross_entropy.py,
fusions/fused_bias_gelu.py (one kernel for GELU); ms-swift's Megatron adapters stand beside `TEGroupedLinear` too.
Assumes: gate and up have an adapter each (Megatron's fused one is smaller)."""
HUGGING_FACE = Trainer(
    "transformers", ("transformers", "trl", "llamafactory", "llama-factory", "unsloth", "axolotl"), has_fused_step=True
)
"""Source: transformers 5.19 trainer.py, training_args.py (`default_optim` is `adamw_torch_fused`)."""
DEEPSPEED = Trainer("deepspeed", ("deepspeed",))
"""Source: DeepSpeed 0.19.8."""
AGILERL = Trainer(
    "agilerl",
    ("agilerl",),
    loss=Loss.COMPILED_ROWS,
    recompute=Recompute.FULL,
    adapter_bytes=4,
    has_double_scales=True,
    upcasts_rest=True,
    logit_tile=256 << 20,
    accumulates=True,
    holds_engine=True,
)
"""Source: AgileRL 2.8.2 algorithms/core/base.py (bf16 autocast, PEFT's fp32 adapters, `_resolve_fused_chunk_rows`),
core/llm_ops/fused_logprobs.py; torch's AdamW."""
PRIME_RL = Trainer(
    "prime-rl",
    ("prime-rl", "primerl", "prime_rl"),
    loss=Loss.COMPILED_ROWS,
    has_master=True,
    targets=(*QV, "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    rank=16,
    adapts_experts=True,
    adapter_bytes=4,
    is_sharded=True,
    has_fused_step=True,
    vocab_chunk=2048,
    is_compiled=True,
    accumulates=True,
    is_fsdp_alone=True,
    micro_batches=2,
    reports=Statistic.RESERVED,
    publishes_weights=True,
)
"""Source: prime-rl 2026-02 src/prime_rl/trainer/models/layers/lm_head.py (`FusedOutputLinear` over chunks of 2,048
words in RL; `VanillaOutputLinear` in fp32 in SFT), trainer/model.py (fp32 parameters, bf16 under FSDP2),
trainer/sft/train.py (`peak_memory` is torch's `max_memory_reserved`); benchmarks/scripts/run_single_benchmark.py
(`micro_batches` 2), trainer/rl/train.py (`broadcast_weights` in the window of tokens per second),
trainer/rl/broadcast/filesystem.py (rank 0 writes all weights, with LoRA the adapters)."""
AUTOMODEL = Trainer("automodel", ("automodel",), has_master=True, is_sharded=True, recompute=Recompute.NONE)
"""Source: NeMo AutoModel docs/performance-summary.mdx (FSDP2, expert parallelism, Transformer Engine's modules)."""
TORCH = Trainer("torch", ())
"""A loop of one's own around torch 2.13, and whatever else is not named."""
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


def trainer_of(point: MeasuredPoint) -> Trainer:
    """The trainer that a point names: in its settings first, then in its model, its source or its id.

    >>> measured = {"value": 1, "unit": "GiB"}
    >>> trainer_of(MeasuredPoint(id="a", kind="train_peak", source="https://github.com/pytorch/torchtune",
    ...     measured=measured)).name
    'torchtune'
    """
    stated = " ".join(str(point.settings.get(key, "")) for key in ("framework", "trainer", "recipe"))
    for text in (stated, str(point.model), point.source, point.id):
        for trainer in TRAINERS:
            if any(re.search(rf"(^|[^a-z]){re.escape(word)}", text.lower()) for word in trainer.words):
                return trainer
    return TORCH
