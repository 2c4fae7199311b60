"""Each case in a fresh process, with a deadline: running out of memory is a result, and nothing of it stays.

In: a case. Out: a Result. The processes are forked from a server that has torch and transformers loaded but has never
touched the device, so that a start costs a second.
Left out: what is measured.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import Case

MAX_REASON = 300
PR_SET_PDEATHSIG = 1
"""Source: Linux, include/uapi/linux/prctl.h."""
ENDING_S = 10.0
"""Seconds in which a process that has answered releases the device by itself."""


@dataclass(frozen=True)
class Result:
    """Result of a case. status: `measured`, `out_of_memory`, `skipped`, `failed`, `timed_out` or `not_reached`.

    measured: numbers whose names end in their unit (`_bytes`, `_bytes_per_s`, `_flops_per_s`, `_s`, `_tokens`).
    """

    status: str
    reason: str = ""
    measured: dict[str, float] = field(default_factory=dict)


def start_server() -> None:
    """Say what the server of fresh processes loads. CUDA must not start in it: nothing here asks for a device."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    multiprocessing.set_forkserver_preload(
        ["benchmarks.gpu.exchange", "benchmarks.gpu.training", "transformers.models.auto"]
    )


def run_case(case: Case, device: str, used_before: int | None, timeout_s: float, log: Path) -> Result:
    """Measure a case. Whatever happens in its process, this returns. log: gets all that the process prints."""
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(case, device, used_before, sender, str(log)))
    process.start()
    sender.close()
    grace_s = 0.0
    try:
        if not receiver.poll(timeout_s):
            return Result("timed_out", f"no answer in {timeout_s:.0f} s")
        grace_s = ENDING_S
        result: Result = receiver.recv()
        return result
    except EOFError:
        process.join(ENDING_S)
        return Result("failed", f"its process ended with {process.exitcode}; see {log.name}")
    finally:
        _end(process, grace_s)


def _end(process: Any, grace_s: float) -> None:
    """End a process that this module started, with all that it started."""
    process.join(grace_s)
    if process.is_alive():
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()
        process.join(timeout=30)
    process.close()


def _work(case: Case, device: str, used_before: int | None, answer: Connection, log: str) -> None:
    """The fresh process: a group of its own, its output in a file, one answer."""
    os.setsid()
    _end_with_parent()
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(target, stream)
    answer.send(_measure(case, device, used_before))
    answer.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # engines leave threads behind that would hold up a tidy exit


def _end_with_parent() -> None:
    """Let Linux end this process when the server does, which ends with whoever started it, however that ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # too late: the server had gone before
        os._exit(1)


def _measure(case: Case, device: str, used_before: int | None) -> Result:
    import traceback

    import torch

    from benchmarks.gpu.device import NeedsCudaError

    try:
        torch.manual_seed(0)
        return Result("measured", measured=_action(case)(case, torch.device(device), used_before))
    except NeedsCudaError as error:
        return Result("skipped", str(error))
    except ModuleNotFoundError as error:  # torch alone is here: another time, when it is installed
        return Result("not_reached", f"needs {error.name}")
    except torch.OutOfMemoryError as error:
        return Result("out_of_memory", _short(error))
    except Exception as error:
        traceback.print_exc()
        return Result("out_of_memory" if _is_out_of_memory(error) else "failed", _short(error))


def _action(case: Case) -> Callable[..., dict[str, float]]:
    """The function that measures the case."""
    from benchmarks.gpu import device, exchange, kernels, serving, training

    if case.action.startswith("score-"):
        return training.score
    return {
        "train": training.train,
        "attention": kernels.measure_attention,
        "head": kernels.measure_head,
        "packed-step": kernels.measure_packed_step,
        "checksums": kernels.measure_checksums,
        "sync": exchange.measure_sync,
        "offload": exchange.measure_offload,
        "memory": device.measure_memory,
        "matmul": device.measure_matmul,
        "copy": device.measure_copy,
        "host-link": device.measure_host_link,
        "engine": serving.measure_engine,
        "sleep": serving.measure_sleep,
        "hand-over": serving.measure_handover,
    }[case.action]


def _is_out_of_memory(error: Exception) -> bool:
    """Memory that ran out elsewhere than in torch's CUDA allocator: cuBLAS, NCCL, vLLM's start, the host."""
    text = str(error).lower()
    return any(words in text for words in ("out of memory", "can't allocate memory", "cublas_status_alloc_failed"))


def _short(error: Exception) -> str:
    """Type and first line of an error."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:MAX_REASON]
