"""The runtime's own workers on the device layer's stand-in, for whole runs of plans for GPUs where there is none.

A process takes the GPU that Ray shows it; all processes on one count its bytes together. Importing this module prepares
the process: DeepSpeed computes on the CPU, vLLM sleeps as on a GPU.
"""

import os
import threading
from pathlib import Path
from typing import Any

from rlplan.runtime.device.host import HostDevice
from rlplan.runtime.device.host_memory import SharedBytes
from rlplan.runtime.device.layer import _standing_in

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
    """What this thread makes counts from now on."""
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
        from rlplan.runtime.device.host_sleep import let_vllm_sleep

        super().import_libraries()
        let_vllm_sleep(DEVICE)

    def invoke(self, method: str, *arguments: Any) -> Any:
        self.thread.run(count_here)
        return super().invoke(method, *arguments)
