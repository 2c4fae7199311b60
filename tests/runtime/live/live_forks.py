"""Processes with DeepSpeed or vLLM for tests: forks of one that has imported it, which takes ten seconds.

As a program it is that one. Each input line has a fork's task and the file for its answer; it answers
with the fork's process id.
"""

import atexit
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from rlplan.emit.ray import COMMON_ENVIRONMENT
from rlplan.runtime.processes.child_processes import die_with_parent
from rlplan.runtime.workers.worker import disable_garbage_collection
from tests.waiting import Patience

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {
    **COMMON_ENVIRONMENT,
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(128 * 1024),
    "MALLOC_TRIM_THRESHOLD_": str(256 * 1024),
}
VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
TRAINING = ("deepspeed", "transformers", "peft", "rlplan.runtime.workers.trainer.policy_trainer")
SERVING = ("vllm.v1.worker.cpu_worker", "vllm.entrypoints.llm", "rlplan.runtime.workers.engine.rollout_engine")
"""Modules that a process imports before it forks."""


@dataclass(frozen=True)
class LiveProcess:
    """One that was started here. log: what it says."""

    process: psutil.Process
    log: Path

    @property
    def is_running(self) -> bool:
        with suppress(psutil.Error):
            return self.process.is_running() and self.process.status() != psutil.STATUS_ZOMBIE
        return False

    def close(self) -> None:
        with suppress(psutil.Error):
            self.process.kill()


def start(
    target: str,
    *arguments: Any,
    log: Path,
    environment: dict[str, str],
    libraries: tuple[str, ...] = TRAINING,
    is_alone: bool = False,
) -> LiveProcess:
    """Begin `package.module:function` on JSON arguments in a process of its own.

    is_alone: it shares no memory with others, which counts where its memory is measured; it imports everything anew.
    """
    line = json.dumps([target, arguments, str(log), environment])
    if is_alone:
        pid = subprocess.Popen(
            [*_COMMAND, "become", line], cwd=ROOT, env=_make_environment(), stdin=subprocess.DEVNULL
        ).pid
    else:
        server = _server(libraries)
        assert server.stdin is not None
        assert server.stdout is not None, "pipes"
        server.stdin.write(line + "\n")
        server.stdin.flush()
        pid = int(server.stdout.readline())
    return LiveProcess(psutil.Process(pid), log)


def read_answers(processes: Sequence[LiveProcess], paths: Sequence[Path], deadline_s: float) -> list[Any]:
    """The answer in each process's file. A process that ends without one ends all: the others would wait for it."""
    patience = Patience(deadline_s)
    while not all(path.exists() for path in paths):
        failed = [
            process for process, path in zip(processes, paths, strict=True) if not (process.is_running or path.exists())
        ]
        if failed or patience.left_s() == 0:
            logs = [process.log.read_text(errors="replace")[-4000:] for process in failed or processes]
            raise AssertionError("\n".join(logs))
        time.sleep(0.02)
    return [json.loads(path.read_text()) for path in paths]


def answer(path: Path, message: Any) -> None:
    """Write an answer, which is read as soon as it is there."""
    draft = path.with_name(f"{path.name}.draft")
    draft.write_text(json.dumps(message))
    draft.rename(path)


_COMMAND = [sys.executable, "-m", "tests.runtime.live.live_forks"]


def _make_environment() -> dict[str, str]:
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return os.environ | ENVIRONMENT | VLLM_ENVIRONMENT | path


@cache
def _server(libraries: tuple[str, ...]) -> "subprocess.Popen[str]":
    """The process that forks, until the tests end; forks end with it."""
    pipe = subprocess.PIPE
    server = subprocess.Popen(
        [*_COMMAND, "serve", *libraries], cwd=ROOT, env=_make_environment(), stdin=pipe, stdout=pipe, text=True
    )
    atexit.register(server.kill)
    return server


def serve(*libraries: str) -> None:
    """Import them, then fork until nobody asks any more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries say while they are imported is no answer
    with disable_garbage_collection():
        for name in libraries:
            importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that have ended leave nothing
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            become(line)
        print(pid, file=answers, flush=True)


def become(line: str) -> None:
    """Do what was asked for, and end."""
    die_with_parent()
    target, arguments, log, environment = json.loads(line)
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(written, 1)
    os.dup2(written, 2)
    os.environ.update(environment)
    module, _, name = target.partition(":")
    code = 1
    try:
        getattr(importlib.import_module(module), name)(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    {"become": become, "serve": serve}[sys.argv[1]](*sys.argv[2:])
