"""The device of a worker process: its GPU, the only one that Ray lets it see, or the CPU.

In: a job. Out: a torch device, and blocks inside which new tensors lie on it. Not yet run on a GPU.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from rlplan.errors import HostError
from rlplan.runtime.device.layer import device_of, present
from rlplan.spec.resolved import ResolvedJob


def worker_device(job: ResolvedJob) -> torch.device:
    """Where this process computes. Raises: HostError where the job is for GPUs and this process sees none."""
    if job.device_kind == "cpu":
        return torch.device("cpu")
    device = present()
    if device is None:
        raise HostError(
            "this process sees no CUDA device",
            where="torch.cuda.is_available()",
            rule="a job on GPUs has a torch that was built for CUDA, and a GPU for each process",
            way_out="install torch's CUDA build; `nvidia-smi` says whether the driver answers",
        )
    device.begin()
    return device.place


def inside(device: torch.device) -> AbstractContextManager[Any]:
    return nullcontext() if device.type == "cpu" else device


def forget_cache(device: torch.device) -> None:
    """Give what torch's allocator keeps of freed memory back to the GPU, for others on it; nothing on a CPU."""
    if there := device_of(device):
        there.empty_cache()
