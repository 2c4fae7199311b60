"""The host's memory and disk: pinned copies of offloaded tensors, rollouts of a step, checkpoints.

In: bytes of tensors, rollouts, parameters. Out: bytes of one host, or on disk. Left out: downloads from the hub,
and the kernel's page cache, which it gives up first and which Ray does not count.
"""

from collections.abc import Mapping

from rlplan.spec.model import ModelSpec
from rlplan.spec.resolved import SettledJob
from rlplan.units import GIB
from rlplan.vocabulary import Role

WORKER_HOST_BYTES = 4 * GIB
"""Bytes of a worker process with CUDA's and torch's libraries, before it allocates anything. Assumed: CPU builds of the
same workers measure 0.4 to 0.9 GiB (hardware_profiles/node/cpu-host.yaml); CUDA's libraries map some 3 GiB more."""
DRIVER_HOST_BYTES = 2 * GIB
"""Bytes of the driver and Ray's own processes. Measured without a GPU: about 1 GiB; assumed: twice that with more
workers."""
TOKEN_BYTES = 8 + 4 + 4 + 4 + 4
"""Bytes of a rollout's token: its id (int64), two log-probs, its advantage and its mask (fp32)."""
COPIES_OF_ROLLOUTS = 2
"""Copies of a step's rollouts: in Ray's object store, and as the driver's own tensors."""
OBJECT_STORE_SHARE, MAX_OBJECT_STORE_BYTES = 0.3, 200 * 10**9
"""Share of a host's memory that Ray's object store may fill, and its limit. Source: Ray 2, ray_constants.py
(DEFAULT_OBJECT_STORE_MEMORY_PROPORTION, DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES). Beside the actors of slime issue 1851
and vime issue 56, 181 and 200 GB were used on hosts of 1 TB."""
KILLED_ABOVE = 0.95
"""Share of a host's memory above which Ray ends workers. Source: Ray 2 documentation, "Out-Of-Memory Prevention"
(`RAY_memory_usage_threshold`); verl issue 4995 shows it."""
STATE_BYTES = 12
"""Bytes of an element's fp32 master weight and two moments, which a checkpoint stores in addition to the weights."""


def pinned_bytes(num_bytes: int) -> int:
    """Bytes that one pinned tensor takes: the next power of two.

    Source: torch 2.13, ATen/core/CachingHostAllocator.h (`c10::llvm::PowerOf2Ceil`): pages are locked in such sizes.
    Differs: up to twice the tensor's own bytes; the usual estimate is 1.5 times.

    >>> pinned_bytes(5 << 30) >> 30, pinned_bytes(4096), pinned_bytes(0)
    (8, 4096, 0)
    """
    return 0 if num_bytes <= 0 else 1 << (num_bytes - 1).bit_length()


def choices_bytes(job: SettledJob, model: ModelSpec) -> int:
    """Bytes on the driver's host of a teacher's distributions (`algorithm.teacher_top_k`) and of recorded experts
    (`rollout.replays_experts`) of a step; 0 without them.

    Counts: n x (response x k x (log-prob + id) + sequence x layers x experts of a token x 2), without ids for the whole
    vocabulary; in four copies: the worker's answer, Ray's object store, the driver, and the trainers' samples.
    Source: runtime/rollout/experience.py. Assumes: every layer has experts, every sequence the longest length.

    >>> from types import SimpleNamespace as Some
    >>> from rlplan.spec.parts.algorithm import AlgorithmSpec
    >>> work, rollout = Some(num_rollouts_per_step=2, max_response_len=5, max_seq_len=9), Some(replays_experts=False)
    >>> jobs = [Some(algorithm=AlgorithmSpec(teacher_top_k=k), workload=work, rollout=rollout) for k in (0, 64, "all")]
    >>> [choices_bytes(job, Some(vocab_size=1000, experts=None, num_layers=2)) for job in jobs]
    [0, 20480, 160000]
    """
    work, kept = job.workload, job.algorithm.count_teacher_tokens(model.vocab_size)
    teacher = kept * (4 if kept == model.vocab_size else 8)
    routing = 2 * model.num_layers * model.experts.num_active if job.rollout.replays_experts and model.experts else 0
    return 4 * work.num_rollouts_per_step * (work.max_response_len * teacher + work.max_seq_len * routing)


def rollout_buffer_bytes(num_rollouts: int, seq_len: int) -> int:
    """Bytes of the rollouts of a step on the host that runs the driver.

    Counts: tokens times TOKEN_BYTES, twice. Assumes: every sequence has this length.

    >>> rollout_buffer_bytes(1024, 4096)
    201326592
    """
    return COPIES_OF_ROLLOUTS * num_rollouts * seq_len * TOKEN_BYTES


def object_store_bytes(host_bytes: int) -> int:
    """Most bytes of Ray's object store on a host with `host_bytes` of memory.

    >>> object_store_bytes(100 * 10**9), object_store_bytes(2000 * 10**9)
    (30000000000, 200000000000)
    """
    return min(int(OBJECT_STORE_SHARE * host_bytes), MAX_OBJECT_STORE_BYTES)


def checkpoint_bytes(num_trained: int, weight_bytes: int) -> int:
    """Bytes on disk of one checkpoint to resume from: trained weights with their states. Frozen weights are not saved.

    >>> checkpoint_bytes(1000, 2)
    14000
    """
    return num_trained * (weight_bytes + STATE_BYTES)


def job_checkpoint_bytes(job: SettledJob, models: Mapping[Role, ModelSpec]) -> int:
    """Bytes on disk of one checkpoint of all trained roles. models: by role; the policy's for roles without one."""
    trained = 0
    for role in job.trained_roles:
        parameters, _ = job.trained_parameters(role, models.get(role, models[Role.POLICY]))
        trained += sum(parameter.numel for parameter in parameters)
    return checkpoint_bytes(trained, job.training.dtype.num_bytes)
