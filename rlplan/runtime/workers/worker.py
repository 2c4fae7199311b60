"""Worker: the base class of every process that holds a model; it measures the time and memory of each call.

Ray starts a `WorkerProcess`, which imports the worker's class only in the new process. So the driver imports neither
torch nor an engine.

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
def disable_garbage_collection() -> Iterator[None]:
    """Context without garbage collection; objects created inside are frozen and never collected.

    Importing an engine creates millions of permanent objects. Collections that visit them took a quarter of the CPU
    time of the import.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class Worker:
    """A named process. Subclasses add methods and report the memory that they hold in `components`."""

    def __init__(self, process: str) -> None:
        self.process = process
        self._listener: socket.socket | None = None

    def import_libraries(self) -> None:
        """Import what `start` needs, so that the memory of the libraries can be measured alone."""
        raise NotImplementedError

    def open_rendezvous(self, address: str, port: int) -> int:
        """Listen at the rendezvous address of a group of ranks and return the port. port: 0 takes any free one.

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
        """Descriptor of the listening socket, which the caller now owns; None on ranks other than the first."""
        listener, self._listener = self._listener, None
        return None if listener is None else listener.detach()

    def invoke(self, method: str, *arguments: Any) -> Any:
        """Call a method by name; subclasses may run it in another thread."""
        return getattr(self, method)(*arguments)

    def call_measured(self, method: str, *arguments: Any) -> tuple[Any, Measurement]:
        """Call a method and measure it. Concurrent calls are allowed."""
        start = time.time()  # not a monotonic clock: the driver compares the times of all processes and hosts
        if device := begun():
            device.reset_peak()
        with peak_inside() as peak:
            result = self.invoke(method, *arguments)
        give_memory_back()  # before `resident_bytes`, which would count freed pages of the heap
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
        """A number that changes while this worker makes progress. This default changes with every call."""
        return time.monotonic()

    def components(self) -> dict[tuple[str, str], int]:
        """Bytes currently held, by (role, kind), read from live objects."""
        return {}

    def loaded_components(self) -> dict[tuple[str, str], int]:
        """Bytes by (role, kind) during the last call, before this process repacked its weights."""
        return {}


class WorkerProcess:
    """The Ray actor that holds one Worker. class_path: `package.module:ClassName`."""

    def __init__(self, class_path: str, process: str, log_folder: str, *arguments: Any) -> None:
        """Open the process's log, then import the class, so that its output during the import is logged too."""
        die_with_parent()  # die with Ray's node manager, so that no orphaned worker holds memory
        keep_path_in_children()
        self.address = join_network()
        _redirect_output(Path(log_folder) / f"{process.replace('/', '-')}.log")
        print(f"{process} is process {os.getpid()} on host {self.address}", flush=True)
        module, _, name = class_path.partition(":")
        self.log_folder = Path(log_folder)
        with _make_errors_portable(self.log_folder), disable_garbage_collection():
            self.worker: Worker = getattr(importlib.import_module(module), name)(process, *arguments)

    def hello(self, paths: list[str]) -> Hello:
        """Report that the process is up. paths: files and folders that it must be able to read."""
        return Hello(os.getpid(), self.address, tuple(path for path in paths if not Path(path).exists()))

    def pulse(self) -> float:
        return self.worker.pulse()

    def call(self, method: str, *arguments: Any) -> Any:
        with _make_errors_portable(self.log_folder):
            return self.worker.invoke(method, *arguments)

    def perform(self, method: str, *arguments: Any) -> tuple[Any, Measurement]:
        with _make_errors_portable(self.log_folder):
            return self.worker.call_measured(method, *arguments)


@contextmanager
def _make_errors_portable(log_folder: Path) -> Iterator[None]:
    """Re-raise rlplan's own errors and replace any other by its text, because not every exception can be pickled.

    Disk errors are explained here, because only this host can look at its disk.
    """
    try:
        yield
    except RlplanError:
        raise
    except Exception as error:
        with suppress(OSError):  # the disk of the log may be full
            traceback.print_exc()
        if failure := disk_error(error, log_folder):
            raise failure from None
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


def _redirect_output(path: Path) -> None:
    """Redirect this process's output to a file. On hosts other than the driver's its folder may not exist yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(log, 1)  # the descriptors and not `sys.stdout`, because C++ libraries write to them directly
    os.dup2(log, 2)
    os.close(log)
