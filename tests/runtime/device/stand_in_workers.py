"""The runtime's own workers on the device layer's stand-in, for whole runs of plans for GPUs where there is none.

A process takes the GPU that Ray shows it; all processes on one count its bytes together. Importing this module prepares
the process: DeepSpeed computes on the CPU, vLLM sleeps as on a GPU.
"""

import os
import threading
from pathlib import Path
from typing import Any

from rlplan.runtime.device.layer import _standing_in
from tests.runtime.device.host_device import HostDevice
from tests.runtime.device.host_memory import SharedBytes
from tests.runtime.device.host_sleep import HostAllocator

FOLDER, NUM_BYTES = "STAND_IN_FOLDER", "STAND_IN_NUM_BYTES"
"""Environment variables: where the GPUs' files lie, and the bytes of each."""

os.environ.update(DS_ACCELERATOR="cpu", VLLM_CPU_OMP_THREADS_BIND="nobind", TORCH_COMPILE_DISABLE="1")
_number = int(os.environ["CUDA_VISIBLE_DEVICES"].split(",")[0])
DEVICE = HostDevice(int(os.environ[NUM_BYTES]), _number, SharedBytes(Path(os.environ[FOLDER], f"gpu-{_number}")))
_standing_in.append(DEVICE)

from rlplan.runtime.workers.engine.rollout_engine import RolloutEngine  # noqa: E402
from rlplan.runtime.workers.scorer import Scorer  # noqa: E402
from rlplan.runtime.workers.trainer.policy_trainer import PolicyTrainer  # noqa: E402
from rlplan.runtime.workers.trainer.value_trainer import ValueTrainer  # noqa: E402

_counting = threading.local()


def count_here() -> None:
    """Count the tensors that this thread creates from now on."""
    if not getattr(_counting, "is_on", False):
        _counting.is_on = True
        DEVICE.memory.__enter__()


class Counted:
    """A worker whose tensors count, in whichever thread they are made."""

    def invoke(self, method: str, *arguments: Any) -> Any:
        count_here()
        return super().invoke(method, *arguments)  # type: ignore[misc]


class CountedPolicyTrainer(Counted, PolicyTrainer):
    pass


class CountedValueTrainer(Counted, ValueTrainer):
    pass


class CountedScorer(Counted, Scorer):
    pass


class SleepingRolloutEngine(RolloutEngine):
    def import_libraries(self) -> None:
        super().import_libraries()
        let_vllm_sleep()

    def invoke(self, method: str, *arguments: Any) -> Any:
        self.thread.run(count_here)
        return super().invoke(method, *arguments)


def let_vllm_sleep() -> None:
    """Give vLLM's worker on a CPU the sleep of its worker on a GPU, for this process.

    oneDNN's packed weights are off: they are no tensors, and a GPU has none.
    """
    import torch
    import vllm.device_allocator as allocators
    from vllm import _custom_ops as kernels
    from vllm.model_executor.layers import utils as layers
    from vllm.platforms import current_platform
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    allocator = HostAllocator(DEVICE)
    patches: list[tuple[Any, str, Any]] = [
        (allocators, "get_mem_allocator_instance", lambda: allocator),
        (type(current_platform), "is_sleep_mode_available", lambda _: True),
        (torch.accelerator, "synchronize", lambda *_: None),
        (torch.accelerator, "get_memory_info", lambda *_: (DEVICE.free_bytes(), DEVICE.num_bytes)),
        (kernels, "_supports_onednn", False),
        (layers, "check_cpu_sgl_kernel", lambda *_: False),
        (CPUWorker, "_maybe_get_memory_pool_context", lambda _, tag: allocator.use_memory_pool(tag)),
        *((CPUWorker, name, getattr(Worker, name)) for name in ("sleep", "wake_up", "discard")),
    ]
    for owner, name, value in patches:
        setattr(owner, name, value)
