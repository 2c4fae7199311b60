"""The device of a worker process: its GPU, the only one that Ray makes visible to it, or the CPU.

In: a job. Out: a torch device, and contexts in which new tensors are created on it. Not yet run on a GPU.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from rlplan.errors import HostError
from rlplan.runtime.device.layer import device_of, present
from rlplan.spec.resolved import ResolvedJob


def worker_device(job: ResolvedJob) -> torch.device:
    """The device of this process. Raises: HostError where the job needs GPUs and this process sees none."""
    if job.device_kind == "cpu":
        return torch.device("cpu")
    device = present()
    if device is None:
        raise HostError(
            "this process sees no CUDA device",
            where="torch.cuda.is_available()",
            rule="a job on GPUs needs a CUDA build of torch, and a GPU for each process",
            way_out="install torch's CUDA build; `nvidia-smi` shows whether the driver answers",
        )
    device.begin()
    return device.place


def use_device(device: torch.device) -> AbstractContextManager[Any]:
    return nullcontext() if device.type == "cpu" else device


def empty_device_cache(device: torch.device) -> None:
    """Release cached memory of torch's allocator to other processes on the GPU; no effect on a CPU."""
    if gpu := device_of(device):
        gpu.empty_cache()
