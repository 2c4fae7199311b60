"""What may be edited in a bundle by hand: one table. Everything else in it is what plan.json gives, or is refused.

In: nothing. Out: rows, each with the values that it takes, and for every other key the job's key that decides it.
A row is there only if its key is a number, a switch or a word of a short list that sets how much, how fast or how
talkative; none names a file, a class, a process, a device or what is loaded. docs/runtime/files.md has the same table.
"""

import math
import re
from typing import Any

from rlplan.records import dataclass

KeyPath = tuple[str, ...]
"""Keys from a file's top level down; the place in a list as a number."""


@dataclass(frozen=True, slots=True)
class Number:
    """Numbers from low to high."""

    kind: type
    """int, float (whole numbers too) or str (digits, as in an environment)."""
    low: float
    high: float

    def takes(self, value: Any) -> bool:
        """Whether a value is one of them; `true` is no number, NaN in no range."""
        if self.kind is str:
            return isinstance(value, str) and bool(re.fullmatch(r"[0-9]{1,18}", value)) and self._holds(int(value))
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and (self.kind is float or isinstance(value, int)) and self._holds(value)

    def _holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        word = {int: "an integer", float: "a number", str: "digits in quotes,"}[self.kind]
        return f"{word} from {_short(self.low)} to {_short(self.high)}"


@dataclass(frozen=True, slots=True)
class OneOf:
    """The values that are listed, of their own type."""

    values: tuple[bool | str, ...]

    def takes(self, value: Any) -> bool:
        """Whether a value is one of them."""
        return any(type(value) is type(one) and value == one for one in self.values)

    def __str__(self) -> str:
        return " or ".join(str(one).lower() if isinstance(one, bool) else one for one in self.values)


@dataclass(frozen=True, slots=True)
class Editable:
    """One row: a value of an emitted file that may be changed by hand."""

    file: str
    """Its folder, or its name."""
    key: str
    """Dotted, `*` for any one part."""
    takes: Number | OneOf
    why: str
    """Why the change is safe."""
    job_key: str = ""
    """The key of the job that sets it, where there is one."""
    may_be_added: bool = False
    """Where the plan gives no value."""


SWITCH = OneOf((True, False))
ELEMENTS = Number(int, 0, 1 << 40)
BYTES = Number(str, 0, 1 << 40)
THREADS = 1024
_ZERO, _OPTIMIZER, _ENVIRONMENT = "zero_optimization", "optimizer.params", "workers.*.environment"
_BUFFER, _STEP, _HEAP, _LOG = "how much is sent at once", "how far a step goes", "when memory is given back", "a log"

EDITABLE = (
    Editable("deepspeed", "gradient_clipping", Number(float, 0, 1e9), _STEP, "algorithm.gradient_clipping"),
    Editable("deepspeed", "steps_per_print", Number(int, 1, 1e9), _LOG),
    Editable("deepspeed", f"{_OPTIMIZER}.lr", Number(float, 0, 1), _STEP, "algorithm.learning_rate"),
    Editable("deepspeed", f"{_OPTIMIZER}.betas.0", Number(float, 0, 0.999999), _STEP, "algorithm.adam_beta1"),
    Editable("deepspeed", f"{_OPTIMIZER}.betas.1", Number(float, 0, 0.999999), _STEP, "algorithm.adam_beta2"),
    Editable("deepspeed", f"{_OPTIMIZER}.eps", Number(float, 1e-16, 1), _STEP),
    Editable("deepspeed", f"{_OPTIMIZER}.weight_decay", Number(float, 0, 10), _STEP, "algorithm.weight_decay"),
    Editable("deepspeed", "fp16.initial_scale_power", Number(int, 0, 32), "the loss scale at the start"),
    *(
        Editable("deepspeed", f"{_ZERO}.{key}", ELEMENTS, _BUFFER, job_key)
        for key, job_key in {
            "reduce_bucket_size": "training.reduce_bucket_size",
            "allgather_bucket_size": "training.reduce_bucket_size",
            "stage3_param_persistence_threshold": "training.persistence_threshold",
            "stage3_prefetch_bucket_size": "",
            "stage3_max_live_parameters": "",
            "stage3_max_reuse_distance": "",
            "sub_group_size": "",
        }.items()
    ),
    *(
        Editable("deepspeed", f"{_ZERO}.{key}", SWITCH, "how gradients are sent")
        for key in ("contiguous_gradients", "overlap_comm", "reduce_scatter")
    ),
    Editable("vllm", "max_num_seqs", Number(int, 1, 1 << 16), "how many run at once", "rollout.max_num_seqs"),
    Editable(
        "vllm",
        "max_num_batched_tokens",
        Number(int, 1, 1 << 24),
        "how much is computed at once",
        "rollout.max_num_batched_tokens",
    ),
    Editable(
        "vllm", "kv_cache_memory_bytes", Number(int, 1 << 20, 1 << 44), "an amount", "rollout.kv_cache_memory"
    ),
    Editable("ray.json", "object_store_memory", Number(int, 80 << 20, 1 << 44), "an amount"),
    Editable("ray.json", "workers.*.num_threads", Number(int, 1, THREADS), "how many cores"),
    Editable("ray.json", f"{_ENVIRONMENT}.OMP_NUM_THREADS", Number(str, 1, THREADS), "how many cores"),
    Editable("ray.json", f"{_ENVIRONMENT}.MALLOC_ARENA_MAX", Number(str, 1, THREADS), _HEAP),
    Editable("ray.json", f"{_ENVIRONMENT}.MALLOC_MMAP_THRESHOLD_", BYTES, _HEAP, "hardware.keeps_heap"),
    Editable("ray.json", f"{_ENVIRONMENT}.MALLOC_TRIM_THRESHOLD_", BYTES, _HEAP, "hardware.keeps_heap"),
    Editable("ray.json", f"{_ENVIRONMENT}.TOKENIZERS_PARALLELISM", OneOf(("false", "true")), "how many cores"),
    Editable(
        "ray.json", f"{_ENVIRONMENT}.VLLM_LOGGING_LEVEL", OneOf(("DEBUG", "INFO", "WARNING", "ERROR")), _LOG
    ),
    Editable(
        "ray.json",
        f"{_ENVIRONMENT}.NCCL_DEBUG",
        OneOf(("VERSION", "WARN", "INFO", "TRACE")),
        _LOG,
        may_be_added=True,
    ),
)  # fmt: skip

JOB_KEYS = {
    ("deepspeed", "train_micro_batch_size_per_gpu"): "workload.micro_batch_size_per_gpu",
    ("deepspeed", "train_batch_size"): "workload.mini_batch_size",
    ("deepspeed", "optimizer.type"): "training.optimizer",
    ("deepspeed", f"{_ZERO}.stage"): "training.zero_stage",
    ("deepspeed", f"{_ZERO}.offload_optimizer"): "training.offloads_optimizer",
    ("deepspeed", f"{_ZERO}.offload_param"): "training.offloads_parameters",
    ("deepspeed", "bf16"): "training.dtype",
    ("deepspeed", "fp16"): "training.dtype",
    ("deepspeed", "tensor_parallel"): "training.tp",
    ("vllm", "dtype"): "rollout.dtype",
    ("vllm", "seed"): "seed",
    ("vllm", "tensor_parallel_size"): "rollout.tp",
    ("vllm", "max_model_len"): "workload.max_response_len",
    ("vllm", "block_size"): "rollout.block_size",
    ("vllm", "enforce_eager"): "rollout.has_cuda_graphs",
    ("vllm", "quantization"): "rollout.quantization",
    ("vllm", "kv_cache_dtype"): "rollout.kv_dtype",
    ("vllm", "enable_expert_parallel"): "rollout.has_expert_parallel",
    ("vllm", "data_parallel_size"): "rollout.attention_dp",
    ("vllm", "enable_lora"): "placement.sync_content",
    ("vllm", "max_lora_rank"): "training.lora.rank",
    ("vllm", "speculative_config"): "rollout.speculative_tokens",
}
"""The job's key for others that people look for in these files: the way out where they are refused."""


def find_editable(file: str, key: KeyPath) -> Editable | None:
    """The row of a key, in a file by its path in the bundle."""
    return next((row for row in EDITABLE if _is_of(row.file, file) and _matches(row.key.split("."), key)), None)


def job_key_of(file: str, key: KeyPath) -> str:
    """The job's key that decides one of a bundle, or empty."""
    row = find_editable(file, key)
    if row is not None:
        return row.job_key
    if file == "execution.json" and key[:1] == ("job",) and len(key) > 1:
        return ".".join(key[1:])
    folder = file.partition("/")[0]
    return next((job_key for (of, name), job_key in JOB_KEYS.items() if of == folder and _begins(name, key)), "")


def _is_of(place: str, file: str) -> bool:
    return file == place or file.startswith(f"{place}/")


def _matches(pattern: list[str], key: KeyPath) -> bool:
    return len(pattern) == len(key) and all(one in ("*", part) for one, part in zip(pattern, key, strict=True))


def _begins(name: str, key: KeyPath) -> bool:
    parts = tuple(name.split("."))
    return key[: len(parts)] == parts


def _short(value: float) -> str:
    """A bound, powers of two as such.

    >>> _short(1 << 40), _short(1024), _short(1e-16)
    ('2^40', '1024', '1e-16')
    """
    is_power = value >= 1 << 16 and value == 2 ** round(math.log2(value))
    return f"2^{round(math.log2(value))}" if is_power else f"{value:g}"
