"""The project's terms as enums, with one spelling each, used by every layer.

Left out: anything with behaviour; these are only names.
"""

from enum import StrEnum
from typing import Literal

TOKEN_VARIABLE = "RLPLAN_ENVIRONMENT_TOKEN"
"""Environment variable with the token sent to the addresses of a job's environment, if it is set."""


Backend = Literal["deepspeed", "fsdp2", "megatron"]
"""Trainers: DeepSpeed, PyTorch's FSDP2, Megatron-Core."""


class Loss(StrEnum):
    """Implementation of the loss on hidden states, which decides the memory of the logits.

    PLAIN: logits, upcast to fp32, then cross-entropy (transformers).
    CHUNKED: whole logits, upcast to fp32 one chunk at a time.
    COMPILED_CHUNKED: as CHUNKED, in one compiled kernel per chunk, which saves logits in the model's type (torchtune
    with torch.compile).
    FUSED: head and loss in one kernel, logits one chunk at a time (Liger).
    IN_PLACE: the gradient overwrites whole logits.
    BY_ROWS: 1,024 rows of logits at a time, recomputed in the backward pass (rlplan's runtime on a GPU).
    COMPILED_ROWS: rows of logits and their upcast in one compiled kernel, recomputed in the backward pass (AgileRL).
    UNCAST_CHUNKED: chunks of logits in the model's type, never upcast (litgpt).
    SHIFTED: fp32 logits kept by the model's output, and a copy shifted by one token (transformers before 4.45).
    PARALLEL: a rank's share of the vocabulary, in torch's own operators (`loss_parallel`).
    MEGATRON: a rank's share of the vocabulary, with its gradient in place.
    UNCAST: logits and logits over the temperature, in the model's type, with the gradient in place (verl's FSDP).
    COPIED: fp32 logits and their softmax, which becomes the gradient (slime).
    KEPT: fp32 logits that the training loop keeps until the end of the backward pass, and their gradient (OpenRLHF).
    NONE: no vocabulary (a value or reward head).
    """

    PLAIN = "plain"
    CHUNKED = "chunked"
    COMPILED_CHUNKED = "compiled_chunked"
    FUSED = "fused"
    IN_PLACE = "in_place"
    BY_ROWS = "by_rows"
    COMPILED_ROWS = "compiled_rows"
    UNCAST_CHUNKED = "uncast_chunked"
    SHIFTED = "shifted"
    PARALLEL = "parallel"
    MEGATRON = "megatron"
    UNCAST = "uncast"
    COPIED = "copied"
    KEPT = "kept"
    NONE = "none"


class Role(StrEnum):
    """A model in a job, or the rule-based verifier in place of one."""

    POLICY = "policy"
    REFERENCE = "reference"
    REWARD = "reward"
    VALUE = "value"
    TEACHER = "teacher"
    VERIFIER = "verifier"


class Phase(StrEnum):
    """A part of an RL step."""

    START = "start"
    ROLLOUT = "rollout"
    SCORE = "score"
    TRAIN = "train"
    SYNC = "sync"
    SWITCH = "switch"
    EVALUATE = "evaluate"
    CHECKPOINT = "checkpoint"


class ActionKind(StrEnum):
    """A kind of event for one role on one device group."""

    START_TRAINER = "start_trainer"
    START_ENGINE = "start_engine"
    START_SCORER = "start_scorer"
    STOP_ENGINE = "stop_engine"
    GENERATE = "generate"
    TAKE_ROLLOUTS = "take_rollouts"
    SCORE = "score"
    VERIFY = "verify"
    COMPUTE_ADVANTAGES = "compute_advantages"
    TRAIN_FORWARD_BACKWARD = "train_forward_backward"
    OPTIMIZER_STEP = "optimizer_step"
    SYNC_WEIGHTS = "sync_weights"
    SAVE_WEIGHTS = "save_weights"
    EVALUATE = "evaluate"
    SAVE_STATES = "save_states"
    WRITE_STATES = "write_states"
    CHECKPOINT = "checkpoint"
    SLEEP_ENGINE = "sleep_engine"
    WAKE_WEIGHTS = "wake_weights"
    WAKE_KV_CACHE = "wake_kv_cache"
    OFFLOAD_ROLE = "offload_role"
    RELOAD_ROLE = "reload_role"


class Stream(StrEnum):
    """A stream of a device group; actions on different streams may overlap."""

    GENERATION = "generation"
    TRAINING = "training"
    TRANSFER = "transfer"
    HOST = "host"


class Placement(StrEnum):
    """How roles share devices."""

    COLOCATED = "colocated"
    HYBRID = "hybrid"
    DISAGGREGATED = "disaggregated"


class Transport(StrEnum):
    """How new weights reach the rollout engine."""

    SHARED_MEMORY = "shared_memory"
    GLOO = "gloo"
    DISK = "disk"
    CUDA_IPC = "cuda_ipc"
    NCCL = "nccl"


class SyncContent(StrEnum):
    """Weights that a sync sends: all, those that changed since the last sync, or only a LoRA adapter."""

    FULL = "full"
    DELTA = "delta"
    ADAPTER = "adapter"


class Provenance(StrEnum):
    """Source of a number, most reliable first; a total is as reliable as its weakest row."""

    MEASURED = "measured"
    DATASHEET = "datasheet"
    DERIVED = "derived"
    ASSUMED = "assumed"


class MemoryKind(StrEnum):
    """Purpose of bytes."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    MASTER_WEIGHTS = "master_weights"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    KV_CACHE = "kv_cache"
    PACKED_WEIGHTS = "packed_weights"
    COMM_BUFFERS = "comm_buffers"
    SYNC_STAGING = "sync_staging"
    CHECKPOINT_STAGING = "checkpoint_staging"
    CUDA_GRAPHS = "cuda_graphs"
    CONTEXT = "context"
    FRAGMENTATION = "fragmentation"
    PROCESS = "process"


class Dtype(StrEnum):
    """A tensor's element type."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def num_bytes(self) -> int:
        """Bytes of one element."""
        return 4 if self is Dtype.FLOAT32 else 2


def format_name(name: str) -> str:
    """A name of this file in words, for terminals, pages and charts.

    >>> format_name(MemoryKind.KV_CACHE), format_name("sync_weights"), format_name(MemoryKind.COMM_BUFFERS)
    ('KV cache', 'sync weights', 'comm buffers')
    """
    special = {"kv_cache": "KV cache", "cuda_graphs": "CUDA graphs"}
    return special.get(name, name.replace("_", " "))


PERSISTENT_KINDS = (
    MemoryKind.WEIGHTS,
    MemoryKind.GRADIENTS,
    MemoryKind.MASTER_WEIGHTS,
    MemoryKind.OPTIMIZER,
    MemoryKind.KV_CACHE,
    MemoryKind.CHECKPOINT_STAGING,
)
"""Kinds whose predicted bytes must equal the measured ones exactly (weights: before packing)."""
