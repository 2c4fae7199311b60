"""The Ray placement: bundles, and one worker process a bundle slot with its environment.

In: a Plan. Out: frozen values for `ray.util.placement_group` and the actors. Source: Ray 2.60.0.
On GPUs a bundle is a GPU; processes that share it take equal parts of it, which tells Ray who sees which GPU and bounds
nothing. Not yet run on a GPU; reserved on Ray nodes whose GPUs are numbers (tests/runtime/cluster/test_fake_gpus.py).
"""

from collections import Counter
from typing import Any

from rlplan.dataflow.layouts import Worker
from rlplan.emit.vllm import NCCL_ALONE, TESTED_RUNNER
from rlplan.planner.plan import Plan
from rlplan.spec.base import Spec
from rlplan.spec.hardware.catalogue import find_profile
from rlplan.spec.hardware.profile import NodeProfile
from rlplan.spec.resolved import ResolvedJob
from rlplan.timing.cpu.eager import MMAP_THRESHOLD
from rlplan.units import MIB
from rlplan.vocabulary import Role

_RELEASED = {"MALLOC_MMAP_THRESHOLD_": str(MMAP_THRESHOLD), "MALLOC_TRIM_THRESHOLD_": str(2 * MMAP_THRESHOLD)}
"""A fixed mmap threshold makes glibc give every large tensor back to the system when it is freed, so that resident
memory follows live bytes; without it glibc raises the threshold to 32 MiB as a program runs and keeps the rest."""
_KEPT = {"MALLOC_MMAP_THRESHOLD_": str(32 * MIB), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Tensors below 32 MiB, the most that glibc accepts, come from a heap that is used again, warm, and is given back when
an action ends. Its top is never given back by freeing: it moves all the time, and each time would fault again."""

COMMON_ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_COMPILE_DISABLE": "1",
}
"""Of every worker on a CPU."""

_FEW_MATMULS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "LRU_CACHE_CAPACITY": "32"}
"""How many compiled bf16 matmuls oneDNN keeps, and torch's own cache above it: one for each shape and number of rows,
which differs from pass to pass. By default 1024 each, so that a trainer grows with every new number of rows; 32 hold
the shapes of one pass, and cost no time (docs/decisions.md, "Compiled matmuls in bf16 on a CPU"; torch 2.13)."""

WORKER_ENVIRONMENT = {
    "policy_trainer": {"DS_ACCELERATOR": "cpu", **_FEW_MATMULS},
    "value_trainer": {"DS_ACCELERATOR": "cpu", **_FEW_MATMULS},
    "scorer": _FEW_MATMULS,
    "rollout_engine": {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    },
}


WHOLE_ACTIVATIONS = {"VLLM_CPU_INT4_W4A8": "0"}
"""Of an engine whose weights are in 4 bits: activations stay in 16. On CPUs with AMX vLLM 0.32 would round them to 8,
so that rollouts depended on the CPU (kernels/linear/mixed_precision/cpu.py)."""

_ON_GPUS = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # a host's own setting would let every process see all GPUs, and all would take the first
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0",
}
_WORKER_ON_GPUS = {
    "policy_trainer": {"DS_ACCELERATOR": "cuda"},
    "value_trainer": {"DS_ACCELERATOR": "cuda"},
    "scorer": {"DS_ACCELERATOR": "cuda"},
    "rollout_engine": {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        **NCCL_ALONE,
        **TESTED_RUNNER,
    },
}
THREADS_A_GPU = 4
"""OpenMP threads of a process on a GPU whose node has no profile."""


class WorkerPlacement(Spec):
    """One worker process."""

    process: str
    worker: Worker
    role: Role
    device: str
    bundle: int
    """Index into the placement group."""
    num_cpus: float
    num_threads: int
    """Its OpenMP threads."""
    environment: dict[str, str]
    num_gpus: float = 0.0
    """Its share of the bundle's GPU."""


class RayPlacement(Spec):
    """Bundles, one a device, and the workers in them."""

    bundles: tuple[dict[str, float], ...]
    islands: tuple[tuple[int, ...], ...]
    """Bundles that lie on one host together; each island becomes one STRICT_PACK placement group."""
    spreads_islands: bool = True
    """No two islands on one host."""
    workers: tuple[WorkerPlacement, ...]
    object_store_memory: int = 128 * MIB
    """Bytes of Ray's shared store."""


def ray_placement(plan: Plan) -> RayPlacement:
    """One bundle a device; on a CPU host each worker takes one logical CPU of its device's bundle.

    Logical CPUs are slots, not cores: processes of a hybrid placement time-share a device. A process that is alone
    that runs while the others wait (engine, scorer) may use the threads of its whole group.
    """
    job = plan.job
    devices = [f"{job.device_kind}:{index}" for index in range(job.hardware.num_devices)]
    if job.device_kind == "cuda":
        return _on_gpus(plan, devices)
    group_sizes = {group.name: len(group.devices) for group in plan.schedule.groups}
    workers = []
    heap = _KEPT if plan.job.hardware.keeps_heap else _RELEASED
    for layout in plan.schedule.layouts:
        is_trainer = layout.worker.endswith("_trainer")
        threads = 1 if is_trainer else max(1, group_sizes[layout.group] // len(layout.devices))
        for process, device in layout.processes:
            environment = {**COMMON_ENVIRONMENT, **heap, **WORKER_ENVIRONMENT[layout.worker]}
            environment["OMP_NUM_THREADS"] = str(threads)
            if layout.worker == "rollout_engine" and job.rollout.shares_base:  # its matmuls are torch's, as a trainer's
                environment |= _FEW_MATMULS
            if layout.worker == "rollout_engine" and job.rollout.base_path is not None:
                environment |= WHOLE_ACTIVATIONS
            fields: dict[str, Any] = {"process": process, "worker": layout.worker, "role": layout.role}
            workers.append(
                WorkerPlacement(
                    **fields,
                    device=device,
                    bundle=devices.index(device),
                    num_cpus=1.0,
                    num_threads=threads,
                    environment=environment,
                )
            )
    bundles = tuple({"CPU": float(sum(worker.bundle == index for worker in workers))} for index in range(len(devices)))
    return RayPlacement(bundles=bundles, islands=_islands(job, bundles), workers=tuple(workers))


def _on_gpus(plan: Plan, devices: list[str]) -> RayPlacement:
    """One bundle a GPU; the processes on it share it in equal parts."""
    processes = [(layout, *pair) for layout in plan.schedule.layouts for pair in layout.processes]
    sharing = Counter(device for _, _, device in processes)
    threads = _threads_a_gpu(plan)
    workers = []
    for layout, process, device in processes:
        environment = {**_ON_GPUS, **_WORKER_ON_GPUS[layout.worker], "OMP_NUM_THREADS": str(threads)}
        part = int(PARTS / sharing[device]) / PARTS
        place: dict[str, Any] = {"device": device, "bundle": devices.index(device), "num_cpus": part, "num_gpus": part}
        named: dict[str, Any] = {"process": process, "worker": layout.worker, "role": layout.role}
        workers.append(WorkerPlacement(**named, **place, num_threads=threads, environment=environment))
    bundles = tuple({"GPU": float(device in sharing), "CPU": float(device in sharing)} for device in devices)
    return RayPlacement(bundles=bundles, islands=_islands(plan.job, bundles), workers=tuple(workers))


PARTS = 10_000
"""Ray counts resources in ten-thousandths."""


def _threads_a_gpu(plan: Plan) -> int:
    node = find_profile(plan.job.hardware.profile, where="hardware.profile")
    return max(1, node.num_cores.value // node.num_gpus) if isinstance(node, NodeProfile) else THREADS_A_GPU


def _islands(job: ResolvedJob, bundles: tuple[dict[str, float], ...]) -> tuple[tuple[int, ...], ...]:
    """The bundles of each host that hold anything."""
    hosts = [job.hardware.host_of(index) for index in range(len(bundles))]
    islands = (
        tuple(index for index, host in enumerate(hosts) if host == one and bundles[index]["CPU"])
        for one in dict.fromkeys(hosts)
    )
    return tuple(filter(None, islands))
