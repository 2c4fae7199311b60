"""The Ray placement: bundles, and one worker process a bundle slot with its environment.

In: a Plan. Out: frozen values for `ray.util.placement_group` and the actors. Source: Ray 2.60.0.
"""

from typing import Any

from rlplan.dataflow.layouts import Worker
from rlplan.planner.gpu.candidates import GpuCandidate
from rlplan.planner.plan import Plan
from rlplan.spec.base import Spec
from rlplan.timing.eager import MMAP_THRESHOLD
from rlplan.units import MIB
from rlplan.vocabulary import Role

_RELEASED = {"MALLOC_MMAP_THRESHOLD_": str(MMAP_THRESHOLD), "MALLOC_TRIM_THRESHOLD_": str(2 * MMAP_THRESHOLD)}
"""A fixed mmap threshold makes glibc give every large tensor back to the system when it is freed, so that resident
memory follows live bytes; without it glibc raises the threshold to 32 MiB as a program runs and keeps the rest."""
_KEPT = {"MALLOC_MMAP_THRESHOLD_": str(32 * MIB), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Tensors below 32 MiB, the most that glibc accepts, come from a heap that is used again, warm, and is given back when
an action ends. Its top is never given back by freeing: it moves all the time, and each time would fault again."""

_COMMON_ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_COMPILE_DISABLE": "1",
}

_WORKER_ENVIRONMENT = {
    "policy_trainer": {"DS_ACCELERATOR": "cpu"},
    "value_trainer": {"DS_ACCELERATOR": "cpu"},
    "scorer": {},
    "rollout_engine": {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    },
}


class WorkerPlacement(Spec):
    """One worker process. bundle: index into the placement group; num_threads: its OpenMP threads."""

    process: str
    worker: Worker
    role: Role
    device: str
    bundle: int
    num_cpus: float
    num_threads: int
    environment: dict[str, str]


class RayPlacement(Spec):
    """Bundles, one a device, and the workers in them. object_store_memory: bytes of Ray's shared store.

    islands: bundles that lie on one host together; each island becomes one STRICT_PACK placement group.
    spreads_islands: no two islands on one host.
    """

    bundles: tuple[dict[str, float], ...]
    islands: tuple[tuple[int, ...], ...]
    spreads_islands: bool = True
    workers: tuple[WorkerPlacement, ...]
    object_store_memory: int = 128 * MIB


def ray_placement(plan: Plan) -> RayPlacement:
    """One bundle a device; each worker takes one logical CPU of its device's bundle.

    Logical CPUs are slots, not cores: processes of a hybrid placement share a device in turn. A process that is alone
    at work while the others wait (engine, scorer) may use the threads of its whole group.
    """
    devices = [f"cpu:{index}" for index in range(plan.job.hardware.num_devices)]
    group_sizes = {group.name: len(group.devices) for group in plan.schedule.groups}
    workers = []
    heap = _KEPT if plan.job.hardware.keeps_heap else _RELEASED
    for layout in plan.schedule.layouts:
        is_trainer = layout.worker.endswith("_trainer")
        threads = 1 if is_trainer else max(1, group_sizes[layout.group] // len(layout.devices))
        for process, device in layout.processes:
            environment = {**_COMMON_ENVIRONMENT, **heap, **_WORKER_ENVIRONMENT[layout.worker]}
            environment["OMP_NUM_THREADS"] = str(threads)
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
    hosts = [plan.job.hardware.host_of(index) for index in range(len(devices))]
    islands = tuple(
        tuple(index for index, host in enumerate(hosts) if host == one and bundles[index]["CPU"])
        for one in dict.fromkeys(hosts)
    )
    return RayPlacement(bundles=bundles, islands=tuple(filter(None, islands)), workers=tuple(workers))


def gpu_placement(candidate: GpuCandidate, gpus_per_host: int) -> RayPlacement:
    """What a plan for GPUs reserves: one bundle a GPU. Its workers are not placed yet: jobs do not run on GPUs.

    An engine's tensor-parallel ranks lie together. Trainers, scorers and shared devices fill hosts one after another.
    """
    step = candidate.step
    if step.shares_devices:
        sizes = _blocks(step.num_training, gpus_per_host)
    else:
        sizes = [*_blocks(step.num_training, gpus_per_host), *_blocks(step.num_scoring, gpus_per_host)]
        engines = step.num_generation // candidate.engine.tp
        sizes += _blocks(candidate.engine.tp, gpus_per_host) * engines
    first, islands = 0, []
    for size in sizes:
        islands.append(tuple(range(first, first + size)))
        first += size
    bundles = tuple({"GPU": 1.0, "CPU": 1.0} for _ in range(first))
    return RayPlacement(bundles=bundles, islands=tuple(islands), spreads_islands=False, workers=())


def _blocks(num_gpus: int, gpus_per_host: int) -> list[int]:
    """Whole hosts, and what is left over.

    >>> _blocks(20, 8)
    [8, 8, 4]
    """
    whole, rest = divmod(num_gpus, gpus_per_host)
    return [gpus_per_host] * whole + [rest] * bool(rest)
