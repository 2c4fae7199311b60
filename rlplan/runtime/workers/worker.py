"""Worker: the base of every process that holds a model; it measures each thing that it does.

`WorkerProcess` is what Ray starts: it loads the worker's class only inside the new process, so that the driver needs
neither torch nor an engine.

In: the name of a method and its arguments. Out: the method's result and a Measurement.
"""

import gc
import importlib
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rlplan.errors import HostError, RlplanError
from rlplan.runtime.cluster.network import Hello, join_network
from rlplan.runtime.device.layer import begun
from rlplan.runtime.measure.memory_meter import Measurement, give_memory_back, peak_inside, resident_bytes
from rlplan.runtime.processes.child_processes import die_with_parent
from rlplan.runtime.processes.safe_path import keep_path_in_children
from rlplan.runtime.run_folder.disk_errors import disk_error


@contextmanager
def no_collections() -> Iterator[None]:
    """No garbage collection inside, and none ever of what was made: a quarter of the CPU time of importing an engine.

    Modules make millions of objects that stay, and each full collection visits all of them.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class Worker:
    """A process with a name. Subclasses add methods and say what they hold in `components`."""

    def __init__(self, process: str) -> None:
        self.process = process
        self._listener: socket.socket | None = None

    def open_rendezvous(self, address: str, port: int) -> int:
        """Listen where the ranks of a group will meet; gives the port. 0 takes any free one.

        The socket stays open until `take_listener`, so that no other process gets the port. Raises: HostError when
        the port is taken.
        """
        listener = socket.socket()
        try:
            listener.bind((address, port))
        except OSError as error:
            listener.close()
            raise HostError(
                f"port {port} cannot be used: {error.strerror}",
                where="hardware.rendezvous_port",
                rule="a free port, or 0 for any",
                way_out="set it to 0, or end what listens there",
            ) from None
        listener.listen()
        self._listener = listener
        return int(listener.getsockname()[1])

    def take_listener(self) -> int | None:
        """The rendezvous' descriptor, which is the taker's from now on; None on the other ranks."""
        listener, self._listener = self._listener, None
        return None if listener is None else listener.detach()

    def invoke(self, method: str, *arguments: Any) -> Any:
        """Call a method; a worker with a thread of its own does it there."""
        return getattr(self, method)(*arguments)

    def perform(self, method: str, *arguments: Any) -> tuple[Any, Measurement]:
        """Call a method and measure it. Several may be measured at the same time."""
        start = time.time()
        if device := begun():
            device.reset_peak()
        with peak_inside() as peak:
            result = self.invoke(method, *arguments)
        give_memory_back()
        measurement = Measurement(
            process=self.process,
            start_s=start,
            end_s=time.time(),
            peak_bytes=peak.num_bytes,
            resident_bytes=resident_bytes(),
            components=self.components(),
            loaded_components=self.loaded_components(),
            device=device.held() if (device := begun()) else None,
        )
        return result, measurement

    def pulse(self) -> float:
        """A number that changes while this worker gets on: here, as long as it can be asked at all."""
        return time.monotonic()

    def components(self) -> dict[tuple[str, str], int]:
        """Bytes now held by (role, kind), read from live objects."""
        return {}

    def loaded_components(self) -> dict[tuple[str, str], int]:
        """Components as they were inside the last call, before this process repacked them."""
        return {}


class WorkerProcess:
    """An actor that holds one Worker. class_path: `package.module:ClassName`."""

    def __init__(self, class_path: str, process: str, log_folder: str, *arguments: Any) -> None:
        """Open the process's log, then load the class: what it says while it is imported belongs there too."""
        die_with_parent()  # killed with Ray's node manager, so that no worker is left holding memory
        keep_path_in_children()
        self.address = join_network()
        _write_output_to(Path(log_folder) / f"{process.replace('/', '-')}.log")
        print(f"{process} is process {os.getpid()} on host {self.address}", flush=True)
        module, _, name = class_path.partition(":")
        self.log_folder = Path(log_folder)
        with _failures_that_travel(self.log_folder), no_collections():
            self.worker: Worker = getattr(importlib.import_module(module), name)(process, *arguments)

    def hello(self, paths: list[str]) -> Hello:
        """Proves that the process is up. paths: what it must be able to read."""
        return Hello(os.getpid(), self.address, tuple(path for path in paths if not Path(path).exists()))

    def pulse(self) -> float:
        return self.worker.pulse()

    def call(self, method: str, *arguments: Any) -> Any:
        with _failures_that_travel(self.log_folder):
            return self.worker.invoke(method, *arguments)

    def perform(self, method: str, *arguments: Any) -> tuple[Any, Measurement]:
        with _failures_that_travel(self.log_folder):
            return self.worker.perform(method, *arguments)


@contextmanager
def _failures_that_travel(log_folder: Path) -> Iterator[None]:
    """Let our own errors through; turn any other into text, for not every exception can leave its process.

    What a disk did is said here, on the host that has it.
    """
    try:
        yield
    except RlplanError:
        raise
    except Exception as error:
        with suppress(OSError):  # the log's disk may be the one that is full
            traceback.print_exc()
        if failure := disk_error(error, log_folder):
            raise failure from None
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


def _write_output_to(path: Path) -> None:
    """Send this process's output to a file; on another host than the driver's its folder may have to be made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
