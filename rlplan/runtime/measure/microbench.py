"""Microbenchmarks of this machine: matmuls, memory, copies, launches, collectives and disk.

Each benchmark warms up, then repeats until it has enough samples or its time is over. A size above a quarter of the
free memory is skipped. The CUDA paths have not yet been run on a GPU.
In: a device and the time for each benchmark. Out: Rates with median and spread.
Left out: networks between hosts, clocks and power, and other load on the machine.
"""

import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from rlplan.errors import InterruptedRunError
from rlplan.runtime.device.cuda import num_devices
from rlplan.runtime.device.layer import device_of, present
from rlplan.runtime.host.detect import read_host
from rlplan.runtime.measure.microbench_ranks import measure_collectives
from rlplan.runtime.processes.interrupts import handle_signals
from rlplan.spec.hardware.profile import ComputeDtype
from rlplan.units import MIB

SHARE_OF_MEMORY = 0.25
MIN_SAMPLES, MAX_SAMPLES = 3, 50
LAUNCHES = 200
"""Small operations in one sample of the launch benchmark."""
DISK_BLOCK = 16 * MIB
FRESH_BYTES = 4 * MIB
_M_MMAP_THRESHOLD = -3
"""Value of M_MMAP_THRESHOLD in glibc's malloc.h."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Sizes and time of the benchmarks."""

    seconds: float
    """Seconds of one benchmark, without its warm-up and the last sample."""

    cpu_matrices: tuple[int, ...]
    """Rows of the square matrices that a CPU multiplies."""

    gpu_matrices: tuple[int, ...]
    """Rows of the square matrices that a GPU multiplies."""

    copy_bytes: int
    """Bytes of one copy in memory, or between host and GPU."""

    disk_bytes: int
    """Bytes of the written file."""

    collective_bytes: int
    """Bytes of the tensor in an all-reduce or all-gather."""


@dataclass(frozen=True, slots=True)
class Rate:
    name: str
    """Name of the benchmark, such as `memory_copy`."""

    value: float
    """The median, in `unit`."""

    low: float
    """The lower quartile of the samples; the smallest of fewer than four."""

    high: float
    """The upper quartile of the samples; the largest of fewer than four."""

    unit: str
    """`FLOP/s`, `B/s` or `s`."""

    num_samples: int
    what: str
    """Size of the benchmark, for people."""

    @property
    def spread(self) -> float:
        return (self.high - self.low) / self.value


@dataclass(frozen=True)
class Measured:
    device: str
    """`cpu` or `cuda`."""

    processor: str
    num_cores: int
    """CPU cores that this process may use."""

    memory_bytes: int
    """Host memory that this process may use."""

    torch_version: str
    measurements: tuple[Rate, ...]
    remarks: tuple[str, ...] = ()
    """Benchmarks that were skipped, with the reason."""

    def find(self, name: str) -> Rate | None:
        """Find the measurement with that name; None if it was skipped."""
        return next((measurement for measurement in self.measurements if measurement.name == name), None)

    def as_json(self) -> dict[str, Any]:
        return {"schema_version": 1} | asdict(self)


QUICK = Effort(0.4, (512, 1024), (4096,), 256 * MIB, 128 * MIB, 16 * MIB)
WHOLE = Effort(3.0, (512, 1024, 2048, 4096), (2048, 4096, 8192, 16384), 1024 * MIB, 2048 * MIB, 128 * MIB)


def measure(effort: Effort, folder: Path, progress: Callable[[str], None] = lambda name: None) -> Measured:
    """Run all benchmarks, one after the other. folder: a folder on the disk to measure.

    Raises: RunError when a rank of a collective fails or hangs.
    """
    accelerator = present()
    device = "cpu" if accelerator is None else accelerator.place.type
    remarks: list[str] = []
    rates: list[Rate] = []
    for name, benchmark in _benchmarks(device, effort, folder, remarks):
        progress(name)
        rates += benchmark()
    host = read_host()
    processor, version = processor_name(), torch.__version__
    return Measured(device, processor, host.num_cores, host.memory_bytes, version, tuple(rates), tuple(remarks))


@contextmanager
def stoppable() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP stop the benchmarks and their processes. Raises: InterruptedRunError."""
    try:
        with handle_signals():
            yield
    except InterruptedRunError as error:
        stopped = InterruptedRunError(
            error.what,
            where="rlplan profiles measure",
            rule="a profile is written after all benchmarks",
            way_out="measure again: nothing was written, and no process is left",
        )
        stopped.exit_code = error.exit_code
        raise stopped from None


def _benchmarks(
    device: str, effort: Effort, folder: Path, remarks: list[str]
) -> Iterator[tuple[str, Callable[[], list[Rate]]]]:
    sizes = effort.gpu_matrices if device == "cuda" else effort.cpu_matrices
    for dtype in (ComputeDtype.FLOAT32, ComputeDtype.BFLOAT16):
        yield f"matmuls, {dtype}", partial(measure_matmul, device, dtype, sizes, effort, remarks)
    yield "copies in memory", lambda: measure_copy(device, effort, remarks)
    yield "launches", lambda: measure_launch(device, effort)
    if device == "cpu":
        yield "fresh memory", lambda: measure_fresh_memory(effort)
    if device == "cuda":
        yield "copies from and to the host", lambda: measure_host_link(effort)
    ranks = num_devices() if device == "cuda" else 2
    if ranks > 1:
        yield f"collectives of {ranks} processes", lambda: _collectives(device, ranks, effort)
    else:
        remarks.append("no collective was measured: this machine has one GPU")
    yield "disk", lambda: measure_disk(folder, effort, remarks)


def measure_matmul(
    device: str, dtype: ComputeDtype, sizes: tuple[int, ...], effort: Effort, remarks: list[str]
) -> list[Rate]:
    """Square matmuls of 2 n^3 FLOP each. The fastest size counts, because small ones do not fill the machine."""
    kind = getattr(torch, dtype.value)
    rates = []
    for size in sizes:
        # both factors and the product
        if 3 * size * size * kind.itemsize > SHARE_OF_MEMORY * _free_bytes(device):
            remarks.append(f"no matmul of {size} x {size}: too little free memory")
            continue
        left, right = (torch.randn(size, size, device=device, dtype=torch.float32).to(kind) for _ in range(2))
        out = torch.empty(size, size, device=device, dtype=kind)
        seconds = sample(partial(torch.mm, left, right, out=out), effort.seconds, device=device)
        rates.append(rate(f"matmul_{dtype}", 2.0 * size**3, seconds, "FLOP/s", f"{size} x {size} x {size}"))
    return [max(rates, key=lambda result: result.value)] if rates else []


def measure_copy(device: str, effort: Effort, remarks: list[str]) -> list[Rate]:
    """A copy within memory. Each byte counts twice because it is read and written."""
    num_bytes = _fitting(effort.copy_bytes, 2, device)
    if num_bytes < effort.copy_bytes:
        remarks.append(f"copies of {num_bytes // MIB} MiB instead of {effort.copy_bytes // MIB}: little free memory")
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source).fill_(1)  # written once, so that no page faults are timed
    seconds = sample(lambda: target.copy_(source), effort.seconds, device=device)
    return [rate("memory_copy", 2.0 * num_bytes, seconds, "B/s", f"{num_bytes // MIB} MiB")]


def measure_launch(device: str, effort: Effort) -> list[Rate]:
    """Time per small operation in a long row, as in a decode step without CUDA graphs."""
    value = torch.zeros(1, device=device)

    def launch() -> None:
        for _ in range(LAUNCHES):
            value.add_(1)

    seconds = [row_s / LAUNCHES for row_s in sample(launch, effort.seconds, device=device)]
    return [duration("launch", seconds, "an in-place addition to one element")]


def measure_fresh_memory(effort: Effort) -> list[Rate]:
    """One thread's results in fresh memory: glibc maps and unmaps it each time, as for tensors of 32 MiB and more.

    The allocator's setting stays changed afterwards; no later benchmark allocates while it is timed.
    """
    import ctypes

    # a threshold that is set stays: otherwise glibc raises it to the size of each freed block, up to 32 MiB
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, FRESH_BYTES // 32)
    left, right = torch.ones(FRESH_BYTES // 4), torch.ones(FRESH_BYTES // 4)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = sample(lambda: left * right, effort.seconds)
    finally:
        torch.set_num_threads(threads)
    return [rate("fresh_memory", float(FRESH_BYTES), seconds, "B/s", f"{FRESH_BYTES // MIB} MiB, mapped anew")]


def measure_host_link(effort: Effort) -> list[Rate]:
    """Copies between pinned host memory and a GPU, each direction by itself."""
    num_bytes = _fitting(effort.copy_bytes, 1, "cpu")
    accelerator = present()
    assert accelerator is not None, "a GPU is measured"
    host = accelerator.pinned(num_bytes)
    device = torch.zeros(num_bytes, dtype=torch.uint8, device=accelerator.place)
    rates = []
    for name, target, source in (("host_to_device", device, host), ("device_to_host", host, device)):

        def copy(target: Any = target, source: Any = source) -> None:
            target.copy_(source, non_blocking=True)
            accelerator.finish()

        seconds = sample(copy, effort.seconds)
        rates.append(rate(name, float(num_bytes), seconds, "B/s", f"{num_bytes // MIB} MiB pinned"))
    return rates


def measure_disk(folder: Path, effort: Effort, remarks: list[str]) -> list[Rate]:
    """Writes in blocks, flushed to the device (fsync). The file has no name, so it cannot stay behind."""
    if shutil.disk_usage(folder).free < 2 * effort.disk_bytes:
        remarks.append(f"no disk was measured: less than {2 * effort.disk_bytes // MIB} MiB are free in {folder}")
        return []
    block = os.urandom(DISK_BLOCK)

    def write() -> None:
        with tempfile.TemporaryFile(dir=folder) as file:
            for _ in range(effort.disk_bytes // DISK_BLOCK):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())

    seconds = sample(write, effort.seconds, warm_ups=0)  # a disk needs no warm-up, which would take as long as a sample
    return [rate("disk_write", float(effort.disk_bytes), seconds, "B/s", f"{effort.disk_bytes // MIB} MiB and fsync")]


def _collectives(device: str, num_ranks: int, effort: Effort) -> list[Rate]:
    times = measure_collectives(device, num_ranks, effort.collective_bytes, effort.seconds)
    size, sent = f"{effort.collective_bytes // MIB} MiB, {num_ranks} processes", (num_ranks - 1) / num_ranks
    return [
        rate("all_reduce", 2 * sent * effort.collective_bytes, times["all_reduce"], "B/s", f"{size}; bytes each sends"),
        rate("all_gather", sent * effort.collective_bytes, times["all_gather"], "B/s", f"{size}; bytes each sends"),
        duration("small_all_reduce", times["small_all_reduce"], f"4 bytes, {num_ranks} processes"),
    ]


def processor_name() -> str:
    """The CPU's name from the kernel, else its architecture."""
    try:
        match = re.search(r"(?m)^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        match = None
    return match.group(1).strip() if match else platform.machine()


def _free_bytes(device: str) -> int:
    if accelerator := device_of(torch.device(device)):
        return accelerator.free_bytes()
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(free, read_host().memory_bytes)


def _fitting(num_bytes: int, copies: int, device: str) -> int:
    """Reduce `num_bytes` to the allowed share of free memory, at least 16 MiB."""
    allowed = int(SHARE_OF_MEMORY * _free_bytes(device) / copies)
    return max(16 * MIB, min(num_bytes, allowed // MIB * MIB))


def sample(call: Callable[[], object], seconds: float, *, warm_ups: int = 1, device: str = "cpu") -> list[float]:
    """Time several calls, each until the GPU is done: at least MIN_SAMPLES, then until `seconds` are over."""

    def finish() -> None:
        call()
        if accelerator := device_of(torch.device(device)):
            accelerator.finish()

    for _ in range(warm_ups):
        finish()
    taken: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(taken) < MIN_SAMPLES or (len(taken) < MAX_SAMPLES and time.perf_counter() < deadline):
        start = time.perf_counter()
        finish()
        taken.append(max(time.perf_counter() - start, 1e-9))  # never 0, because rates divide by it
    return taken


def rate(name: str, amount: float, seconds: list[float], unit: str, what: str) -> Rate:
    """Divide `amount` by the median of the seconds.

    >>> rate("copy", 8.0, [1.0, 2.0, 4.0], "B/s", "").value
    4.0
    """
    low, high = quartiles(seconds)
    return Rate(name, amount / median(seconds), amount / high, amount / low, unit, len(seconds), what)


def duration(name: str, seconds: list[float], what: str) -> Rate:
    """Take the median of the seconds themselves."""
    return Rate(name, median(seconds), *quartiles(seconds), "s", len(seconds), what)


def quartiles(values: list[float]) -> tuple[float, float]:
    """Compute the lower and upper quartile; of fewer than four values, the smallest and the largest.

    >>> quartiles([5.0, 1.0, 2.0, 3.0, 4.0])
    (2.0, 4.0)
    """
    ordered = sorted(values)
    cut = len(ordered) // 4
    return ordered[cut], ordered[-1 - cut]
