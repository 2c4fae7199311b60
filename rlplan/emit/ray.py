"""The Ray placement: bundles, and a worker process with its environment for each slot of a bundle.

In: a Plan, environments (ray.toml). Out: frozen values for `ray.util.placement_group` and the actors (Ray 2.60.0).
On GPUs each GPU is a bundle. Processes on one GPU request equal parts of it, which tells Ray who sees which GPU and
limits nothing. Not yet run on a GPU; tested on Ray nodes with fake GPUs (tests/runtime/cluster/test_fake_gpus.py).
"""

import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

from rlplan.dataflow.schedule import Worker
from rlplan.planner.plan import Plan
from rlplan.spec.base import Spec
from rlplan.spec.hardware.catalogue import find_profile
from rlplan.spec.hardware.profile import NodeProfile
from rlplan.spec.resolved import ResolvedJob
from rlplan.timing.cpu.eager import MMAP_THRESHOLD
from rlplan.units import MIB
from rlplan.vocabulary import Role

_RELEASED = {"MALLOC_MMAP_THRESHOLD_": str(MMAP_THRESHOLD), "MALLOC_TRIM_THRESHOLD_": str(2 * MMAP_THRESHOLD)}
"""Settings of glibc that return memory. A fixed mmap threshold returns every large tensor to the system when it is
freed, so resident memory follows live bytes. Otherwise glibc raises the threshold to 32 MiB at run time and keeps
smaller blocks."""
_KEPT = {"MALLOC_MMAP_THRESHOLD_": str(32 * MIB), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Settings of glibc that keep memory. Tensors below 32 MiB, glibc's maximum, come from a warm heap, which is trimmed
when an action ends. Freeing never trims the top of the heap, because it moves often and each time would fault again."""

_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_ON_CPU, _ON_GPUS = _TABLE["cpu"], _TABLE["cuda"]
_FEW_MATMULS: dict[str, str] = _ON_CPU["few_matmuls"]
"""Settings that keep the caches of compiled matmuls small, for every process on a CPU except vLLM's."""
COMMON_ENVIRONMENT: dict[str, str] = _ON_CPU["all"]
"""Environment of every worker on a CPU."""
WORKER_ENVIRONMENT: dict[str, dict[str, str]] = {
    worker: own if worker == "rollout_engine" else own | _FEW_MATMULS for worker, own in _ON_CPU["workers"].items()
}
WHOLE_ACTIVATIONS: dict[str, str] = _ON_CPU["whole_activations"]
"""Environment of an engine with 4-bit weights on a CPU."""
THREADS_PER_GPU = 4
"""OpenMP threads of a process on a GPU whose node has no profile."""


class WorkerPlacement(Spec):
    """Placement and environment of one worker process."""

    process: str
    worker: Worker
    role: Role
    device: str
    bundle: int
    """Index into the placement group."""
    num_cpus: float
    num_threads: int
    """OpenMP threads."""
    environment: dict[str, str]
    num_gpus: float = 0.0
    """Share of the bundle's GPU."""


class RayPlacement(Spec):
    """One bundle per device, and the workers in them."""

    bundles: tuple[dict[str, float], ...]
    islands: tuple[tuple[int, ...], ...]
    """Bundles on the same host; each island becomes one STRICT_PACK placement group."""
    spreads_islands: bool = True
    """Whether islands must be on different hosts."""
    workers: tuple[WorkerPlacement, ...]
    object_store_memory: int = 128 * MIB
    """Bytes of Ray's object store."""


def ray_placement(plan: Plan) -> RayPlacement:
    """Place workers with one bundle per device; on a CPU host each worker takes one logical CPU of its bundle.

    Logical CPUs are slots, not cores: processes of a hybrid placement time-share a device. Engines and scorers, which
    run while the others wait, may use the threads of their whole device group.
    """
    job = plan.job
    devices = [f"{job.device_kind}:{index}" for index in range(job.hardware.num_devices)]
    if job.device_kind == "cuda":
        return _place_on_gpus(plan, devices)
    group_sizes = {group.name: len(group.devices) for group in plan.schedule.groups}
    workers = []
    heap = _KEPT if plan.job.hardware.keeps_heap else _RELEASED
    for layout in plan.schedule.layouts:
        is_trainer = layout.worker.endswith("_trainer")
        threads = 1 if is_trainer else max(1, group_sizes[layout.group] // len(layout.devices))
        for process, device in layout.processes:
            environment = {**COMMON_ENVIRONMENT, **heap, **WORKER_ENVIRONMENT[layout.worker]}
            environment["OMP_NUM_THREADS"] = str(threads)
            if layout.worker == "rollout_engine" and job.rollout.shares_base:  # it uses torch's matmuls, as a trainer
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


def _place_on_gpus(plan: Plan, devices: list[str]) -> RayPlacement:
    """Place workers with one bundle per GPU; the processes on a GPU get equal parts of its bundle."""
    processes = [(layout, *pair) for layout in plan.schedule.layouts for pair in layout.processes]
    sharing = Counter(device for _, _, device in processes)
    threads = _count_threads_per_gpu(plan)
    workers = []
    for layout, process, device in processes:
        environment = {**_ON_GPUS["all"], **_ON_GPUS["workers"][layout.worker], "OMP_NUM_THREADS": str(threads)}
        # rounded down, so that the parts never exceed the GPU
        part = int(PARTS / sharing[device]) / PARTS
        share: dict[str, Any] = {"device": device, "bundle": devices.index(device), "num_cpus": part, "num_gpus": part}
        names: dict[str, Any] = {"process": process, "worker": layout.worker, "role": layout.role}
        workers.append(WorkerPlacement(**names, **share, num_threads=threads, environment=environment))
    bundles = tuple({"GPU": float(device in sharing), "CPU": float(device in sharing)} for device in devices)
    return RayPlacement(bundles=bundles, islands=_islands(plan.job, bundles), workers=tuple(workers))


PARTS = 10_000
"""Ray counts resources in units of 1/10,000."""


def _count_threads_per_gpu(plan: Plan) -> int:
    node = find_profile(plan.job.hardware.profile, where="hardware.profile")
    return max(1, node.num_cores.value // node.num_gpus) if isinstance(node, NodeProfile) else THREADS_PER_GPU


def _islands(job: ResolvedJob, bundles: tuple[dict[str, float], ...]) -> tuple[tuple[int, ...], ...]:
    """Group the bundles that hold anything by their host."""
    hosts = [job.hardware.find_host(index) for index in range(len(bundles))]
    islands = (
        tuple(index for index, bundle_host in enumerate(hosts) if bundle_host == host and bundles[index]["CPU"])
        for host in dict.fromkeys(hosts)
    )
    return tuple(filter(None, islands))
