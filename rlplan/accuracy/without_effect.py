"""Settings of points that change no prediction, with the reasons.

In: the kind of a point, a setting's name, all settings. Out: the reason why it has no effect; None where it may have
one. A row may hold only for some values: `attn: sdpa` stores no attention scores, `attn: eager` would.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TRAINING = r"train_peak|train_steady|throughput_train|max_model_size|logprob_\w+"
MEMORY_OF_TRAINING = r"train_peak|train_steady|logprob_\w+"
ASLEEP_OR_AWAKE = r"sleeping_engine_residual|rollout_peak"
TIME = r"throughput_train|rl_step_time|weight_sync_time"
ENGINE = r"vllm_\w+|kv_\w+|serving_\w+|throughput_infer"


@dataclass(frozen=True)
class WithoutEffect:
    """Settings that do not change a prediction. Patterns must match the whole text in lower case."""

    names: str
    why: str
    kinds: str = ""
    """Pattern of kinds of points; empty for every kind."""
    values: str = ""
    """Pattern of values; empty for every value."""
    beside: tuple[str, ...] = ()
    """Settings of which one must be stated; empty for none."""

    def holds(self, kind: str, name: str, settings: Mapping[str, Any]) -> bool:
        """Whether this row applies to a setting."""
        return (
            re.fullmatch(self.names, name.lower()) is not None
            and (not self.kinds or re.fullmatch(self.kinds, kind) is not None)
            and (not self.values or re.fullmatch(self.values, str(settings[name]).strip().lower()) is not None)
            and (not self.beside or any(settings.get(key) is not None for key in self.beside))
        )


def why_without_effect(kind: str, name: str, settings: Mapping[str, Any]) -> str | None:
    """The reason why a setting changes no prediction of a kind; None without one.

    >>> why_without_effect("train_peak", "attn", {"attn": "sdpa"})
    'no kernel of flash attention stores scores'
    >>> why_without_effect("train_peak", "attn", {"attn": "eager"}) is None
    True
    """
    return next((row.why for row in ROWS if row.holds(kind, name, settings)), None)


_SHARED_KERNELS = r"(torch)?sdpa|fa\W?\d?|flash\w*\W?\d?( attention)?|flash_attention_\d|mem\w*_efficient|xformers|te"
_WEIGHT_FORMATS = r"quant|quantization|weights|precision|dtype|(gemm|moe)_quant_mode"

ROWS = (
    WithoutEffect(
        r"notes?|remarks?|comments?|description|source|url|date|dataset|data|docker|container|commit|stat|derived|pending"
        r"|provenance|reliability|hardware_notes?|framework|trainer|recipe",
        "says where the number comes from",
    ),
    WithoutEffect(
        r"(\w+_)?tok(en)?s?_(per_)?s(ec)?(_\w+)?|[mh]fu(_pct)?|(\w+_)?tflops\w*|ms_per_iter|(\w+_)?(ms|s)|hours|steps_timed"
        r"|(peak|reserved|estimator)_\w*(gib|gb|bytes)|with_\w+_gb|simumax_\w+",
        "was measured or estimated beside this point",
    ),
    WithoutEffect(r"torch|transformers|cuda|driver|python|deepspeed|accelerate|trl|peft_version|bitsandbytes",
                  "the formulas follow one version of each library", TRAINING + "|rl_step_time"),
    WithoutEffect(r"version|backend_version", "the formulas follow one version",
                  TIME + "|kv_saturation|max_model_size"),
    WithoutEffect(r"versions", "the version that decides, if any, stands among the settings"),
    WithoutEffect(r"backend|engine", "only vLLM is modelled", "kv_saturation|serving_.*|throughput_infer", "vllm"),
    WithoutEffect(r"attn|attention|attn_implementation", "no kernel of flash attention stores scores",
                  MEMORY_OF_TRAINING, _SHARED_KERNELS),
    WithoutEffect(r"attn|attention|attn_implementation", "one efficiency stands for all kernels of flash attention",
                  "throughput_train", _SHARED_KERNELS),
    WithoutEffect(r"float8|fp8", "casts to 8 bits live inside a matmul; what is kept stays in the compute type",
                  MEMORY_OF_TRAINING),
    WithoutEffect(r"padding", "a mask for padded rows is not counted", "train_peak"),
    WithoutEffect(r"packed|packing", "every sequence is taken at its full length, packed or not", TRAINING),
    WithoutEffect(r"async_tp|tp_comm|overlap", "hides or cuts collectives; their buffers are not counted",
                  "train_peak|train_steady"),
    WithoutEffect(r"gbs|global_batch\w*|train_batch_size|(num_)?micro_?batches|steps?_per_batch",
                  "the peak is of one micro-batch", "train_peak"),
    WithoutEffect(r"micro_batch|mbs|per_device_\w*batch_size|batch\w*|local_batch\w*|lbs",
                  "the micro-batch that is really run is stated", TRAINING, beside=("micro_batch_effective",)),
    WithoutEffect(r"prompt\w*|completion\w*|group_size|n_prompts|num_prompts|num_generations",
                  "the micro-batch and the sequence length say what a pass has", "train_peak"),
    WithoutEffect(r"gpu_memory_utilization", "the engine sleeps, and what it keeps is stated", "train_peak",
                  beside=("sleeping_engine_residual_gib",)),
    WithoutEffect(r"sleeping_engine_residual_gib", "a plan says itself what its engine keeps", "train_peak"),
    WithoutEffect(r"algo|micro_batch\w*|lora_(targets|scope)|adapters|base_dtype|quant|gradient_checkpointing|attention"
                  r"|loss|optimizer|completion|torch|transformers",
                  "the trainer is offloaded while the engine works or sleeps", ASLEEP_OR_AWAKE),
    WithoutEffect(r"n_prompts|num_prompts", "an engine runs one group at a time", ASLEEP_OR_AWAKE),
    WithoutEffect(r"prompt\w*|gpu_memory_utilization|sleeping_engine_residual_gib",
                  "cache and prefill are gone when the engine sleeps", "sleeping_engine_residual"),
    WithoutEffect(r"sleeping_engine_residual_gib", "the engine is awake", "rollout_peak"),
    WithoutEffect(r"moe|routing|dispatcher", "experts are taken to be balanced", MEMORY_OF_TRAINING,
                  r".*(balanced|all-?to-?all|seq_aux_loss).*"),
    WithoutEffect(r"dispatcher", "rows that are kept are the same, whoever sends them; their buffers are not counted",
                  MEMORY_OF_TRAINING, r"(all-?to-?all|flex|hybrid-?ep|deep-?ep|allgather)( \+ ep overlap)?"),
    WithoutEffect(r"cuda_graphs", "buffers of graphs are not counted", MEMORY_OF_TRAINING),
    WithoutEffect(r"recompute_(num_layers|method)", "every layer is recomputed, or modules of every one", TRAINING,
                  r"1|uniform|block|none"),
    WithoutEffect(r"sequence_parallel", "ranks of tensor parallelism share what lies between their matmuls",
                  "throughput_train", "true|1"),
    WithoutEffect(r"overlap_(grad_reduce|param_gather)", "collectives of a step run beside the passes",
                  "throughput_train", "true|1"),
    WithoutEffect(r"overlap_(grad_reduce|param_gather)|tp_comm_overlap", "buffers of collectives are not counted",
                  MEMORY_OF_TRAINING),
    WithoutEffect(r"tp_comm_overlap", "no collective of tensor parallelism is hidden", "throughput_train", "false|0"),
    WithoutEffect(r"etp", "experts are whole on their ranks", "throughput_train", "1"),
    WithoutEffect(r"mtp(_num_layers)?|dp_replicate|hsdp|cpu_offload\w*|act\w*_offload\w*", "it is off", TRAINING,
                  "0|1|none|false|off"),
    WithoutEffect(r"(num_)?(nodes|hosts)", "the number of GPUs says it", TRAINING,
                  beside=("gpus", "num_gpus", "world_size", "devices", "n_gpus", "ngpus")),
    WithoutEffect(r"cp_comm", "ranks of context parallelism share the tokens, whoever sends what", "train_peak"),
    WithoutEffect(r"layers|num_layers|dense_layers", "the model's name says it", TRAINING),
    WithoutEffect(r"params|num_params|num_parameters", "the model's shape says it", TRAINING),
    WithoutEffect(r"trainable_params", "the trained tensors are those of the method", MEMORY_OF_TRAINING,
                  beside=("method", "lora_rank", "rank", "r", "lora_r", "peft")),
    WithoutEffect(r"target", "the trained tensors are those of the method", MEMORY_OF_TRAINING, "see config"),
    WithoutEffect(r"(lora_)?alpha", "scales what adapters give; no bytes", TRAINING + "|param_count"),
    WithoutEffect(r"learning_rate|lr|weight_decay|warmup\w*|seed|epochs|betas?|eps|clip\w*|max_grad_norm|temperature",
                  "changes values, not bytes or seconds", TRAINING),
    WithoutEffect(r"micro_batch\w*|mbs|batch\w*|seq\w*|max_seq\w*|longest_tokens|act_ckpt|ac|recompute|grad\w*_ckpt"
                  r"|gradient_checkpointing|activation_checkpointing|compile|loss|attn|total_gpu_memory_gib|global_batch"
                  r"|grad\w*_accum\w*", "activations are gone between two steps", "train_steady|logprob_steady"),
    WithoutEffect(r"total_gpu_memory_gib\w*|gpu_total_gib|total_gib", "the peak does not depend on the GPU's size",
                  TRAINING),
    WithoutEffect(r"compile|act_ckpt|method", "a pass without gradient saves nothing that it could change",
                  "logprob_\\w+"),
    WithoutEffect(r"fsdp(_experts)?", "states are taken as shared by all ranks that are left", "throughput_train"),
    WithoutEffect(r"grad\w*_accum\w*|accumulation_steps|(num_)?micro_?batches|local_batch\w*|lbs",
                  "the global batch says it", "throughput_train",
                  beside=("global_batch", "gbs", "global_batch_size", "train_batch_size")),
    WithoutEffect(r"moe|routing|dispatcher", "experts are taken to be balanced", "throughput_train",
                  r".*(balanced|all-?to-?all|seq_aux_loss).*"),
    WithoutEffect(r"ce_fusion", "the loss is one kernel in either case", "throughput_train"),
    WithoutEffect(r"require_batches|(trigger_)?parameter_sync_step|steps",
                  "a step lasts from one weight sync to the next, in however many parts it is trained", "rl_step_time"),
    WithoutEffect(r"total_tokens", "queries and lengths say it", "rl_step_time"),
    WithoutEffect(r"optimizer|learning_rate|lr|kl_\w*", "no step's time depends on it", "rl_step_time"),
    WithoutEffect(r"non_torch_gib", "an estimate says itself what is not torch's", "vllm_kv"),
    WithoutEffect(_WEIGHT_FORMATS, "the checkpoint's name or config says its format", ENGINE),
    WithoutEffect(r"multimodal", "the model's own config says what it reads", ENGINE),
    WithoutEffect(r"gpus|num_gpus|dtype|total_gpu_memory_gib\w*|max_model_len|block|block_size|gpu_memory_utilization"
                  r"|max_num_seqs|max_num_batched_tokens|enforce_eager|total_gib|non_torch_gib|available_kv_gib"
                  r"|vllm|version|kv_dtype|chunked_prefill",
                  "this part of an engine's memory does not depend on it", "vllm_\\w+|kv_per_token"),
)  # fmt: skip
"""Rows in order; the first that holds gives the reason."""
