"""Live workers in processes of their own, without Ray: the same classes, called the same way, for many cases.

As a program it is one worker: it takes calls from a pipe and answers them, one after the other.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from rlplan.emit.execution import ExecutionSpec
from rlplan.errors import RunError
from rlplan.runtime.processes.child_processes import die_with_parent
from rlplan.runtime.processes.machine_speed import scale_seconds

ROOT = Path(__file__).resolve().parents[3]
START_S = 200.0


class LiveWorkerGroup:
    """A stand-in for `cluster.worker_group.WorkerGroup` with its calls: `perform`, `gather`, `measured`,
    `addresses`.
    """

    def __init__(self, folder: Path) -> None:
        self.log_folder = folder / "logs"
        self.log_folder.mkdir()
        self.addresses: dict[str, str] = {}
        self._pipes: dict[str, Connection] = {}
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def begin(self, process: str, class_path: str, environment: dict[str, str], *arguments: Any) -> None:
        """Start a worker."""
        self.begin_alike([process], class_path, environment, *arguments)

    def begin_alike(
        self, processes: Sequence[str], class_path: str, environment: dict[str, str], *arguments: Any
    ) -> None:
        """Start workers of the same arguments: the first imports the libraries, the others are forks of it."""
        pipes = [Pipe() for _ in processes]
        descriptors = [theirs.fileno() for _, theirs in pipes]
        with self._log(processes[0]).open("wb") as log:
            self._children[processes[0]] = subprocess.Popen(
                [sys.executable, "-m", "tests.runtime.live.live_workers", *map(str, descriptors)],
                cwd=ROOT,
                env=os.environ | environment | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
                pass_fds=descriptors,
                stdout=log,
                stderr=log,
            )
        for process, (own_end, theirs) in zip(processes, pipes, strict=True):
            theirs.close()
            self._log(process).touch()
            self._pipes[process], self.addresses[process] = own_end, "127.0.0.1"
            own_end.send((class_path, (process, *arguments)))

    def submit(self, process: str, method: str, *arguments: Any) -> tuple[str, str, Any]:
        """Begin a call."""
        self._pipes[process].send((method, arguments))
        return process, method, None

    def perform(self, process: str, method: str, *arguments: Any) -> tuple[str, str, Any]:
        """Begin a call that is to be measured."""
        return self.submit(process, "call_measured", method, *arguments)

    def gather(self, calls: Sequence[tuple[str, str, Any]], timeout_s: float) -> list[Any]:
        """Results in order. Raises: what a worker raised, when all have answered."""
        deadline = time.monotonic() + scale_seconds(timeout_s)
        answers = [self._answer(process, method, deadline) for process, method, _ in calls]
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def gather_measured(self, calls: Sequence[tuple[str, str, Any]], timeout_s: float) -> tuple[list[Any], list[Any]]:
        """(results, measurements)."""
        answers = self.gather(calls, timeout_s)
        return [result for result, _ in answers], [measurement for _, measurement in answers]

    def call(self, process: str, method: str, *arguments: Any) -> Any:
        """One call of one worker."""
        return self.gather([self.submit(process, "invoke", method, *arguments)], START_S)[0]

    def apply(self, process: str, function: Callable[[Any], Any]) -> Any:
        """The result of a module's function, called with the worker in its process."""
        return self.gather([self.submit(process, "apply", function)], START_S)[0]

    def kill(self, process: str) -> None:
        """End a worker at once, as a crash would."""
        self._children[process].kill()

    def close(self) -> None:
        """End all workers."""
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            child.wait(scale_seconds(10))

    def _answer(self, process: str, method: str, deadline: float) -> Any:
        pipe = self._pipes[process]
        try:
            if pipe.poll(max(0.0, deadline - time.monotonic())):
                return pipe.recv()
        except (EOFError, OSError):
            pass
        return RunError(f"no answer from {process}.{method}: {self._log(process).read_text(errors='replace')[-3000:]}")

    def _log(self, process: str) -> Path:
        return self.log_folder / f"{process.replace('/', '-')}.log"


def start_trainers(worker_group: LiveWorkerGroup, spec: ExecutionSpec) -> list[str]:
    """Begin the trainer's processes; their calls of `join` make them a group."""
    trainers = [worker for worker in spec.ray.workers if worker.worker == "policy_trainer"]
    names = [worker.process for worker in trainers]
    worker_group.begin_alike(
        names,
        "rlplan.runtime.workers.trainer.policy_trainer:PolicyTrainer",
        trainers[0].environment,
        spec.job,
        spec.deepspeed[trainers[0].role],
        1,
    )
    return names


def serve(pipe: Connection, others: Sequence[Connection] = ()) -> None:
    """Make the worker, then answer calls until the pipe is closed. others: of workers alike, which are forked."""
    import importlib
    import traceback

    class_path, arguments = pipe.recv()
    module, _, name = class_path.partition(":")
    worker = getattr(importlib.import_module(module), name)(*arguments)
    if others:
        worker.import_libraries()
    for other in others:
        if os.fork() == 0:
            die_with_parent()
            serve(other)
            os._exit(0)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(arguments[0](worker) if method == "apply" else getattr(worker, method)(*arguments))
        except BaseException as error:
            traceback.print_exc()
            pipe.send(error if isinstance(error, RunError) else RuntimeError(f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    first, *rest = (Connection(int(descriptor)) for descriptor in sys.argv[1:])
    serve(first, rest)
