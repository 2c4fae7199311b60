"""The device itself: what it and its driver take, how fast it multiplies and copies.

In: a case and a device. Out: bytes, FLOP/s and bytes/s, by name; profile_yaml writes them as a hardware profile.
Left out: links between GPUs (one is measured), latencies.
"""

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

from benchmarks.gpu.cases import Case
from benchmarks.gpu.meters import used_by_driver
from rlplan.units import GIB, MIB

REPEATS = 5
SQUARES = (2048, 4096, 8192, 16_384)
LAYERS = ((8192, 3584, 18_944), (8192, 18_944, 3584), (8192, 4096, 14_336), (4096, 3584, 152_064))
"""Products of training: (tokens, inputs, outputs) of MLPs of 7B and 8B models, and of a head."""
DTYPES = ("bfloat16", "float16", "tfloat32", "float32", "float8")


class NeedsCudaError(Exception):
    """This measurement has no meaning without a CUDA device."""


def need_cuda(device: torch.device) -> None:
    """Raises: NeedsCudaError on a CPU."""
    if device.type != "cuda":
        raise NeedsCudaError("needs CUDA")


def measure_memory(case: Case, device: torch.device, used_before: int | None) -> dict[str, float]:
    """Total, context, what the allocator rounds to, cuBLAS's workspace."""
    need_cuda(device)
    measured: dict[str, float] = {"total_bytes": torch.cuda.mem_get_info()[1]}
    first_tensor = torch.zeros(1, device=device)
    measured["rounding_bytes"] = torch.cuda.memory_allocated()
    measured["small_segment_bytes"] = torch.cuda.memory_reserved()
    used = used_by_driver()
    if used is not None and used_before is not None:
        measured["context_bytes"] = used - used_before - torch.cuda.memory_reserved()
    measured["medium_segment_bytes"] = _measure_reserved(2 * MIB)
    measured["granularity_bytes"] = _measure_reserved(12 * MIB + 1) - _measure_reserved(10 * MIB + 1)
    matrix = torch.zeros(256, 256, device=device, dtype=torch.bfloat16)
    before = torch.cuda.memory_allocated()
    matrix @ matrix
    measured["cublas_workspace_bytes"] = torch.cuda.memory_allocated() - before
    if used is not None and used_before is not None:
        grown = (used_by_driver() or 0) - used_before - torch.cuda.memory_reserved()
        measured["context_with_cublas_bytes"] = grown
    del first_tensor
    return measured


def _measure_reserved(size: int) -> int:
    """Bytes that the allocator takes from the driver for a tensor of this size, when nothing is cached."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
    grown = torch.cuda.memory_reserved() - before
    del tensor
    torch.cuda.empty_cache()
    return int(grown)


def measure_matmul(case: Case, device: torch.device, used_before: int | None) -> dict[str, float]:
    """FLOP/s of a product by type and shape, and the best of each type. A type that the device lacks is left out."""
    shapes = [(64, 64, 64)] if case.is_tiny else [(size,) * 3 for size in SQUARES] + list(LAYERS)
    measured: dict[str, float] = {}
    for dtype in ("bfloat16", "float32") if device.type == "cpu" else DTYPES:
        rates = {}
        for m, k, n in shapes:
            try:
                product = _product(dtype, m, k, n, device)
                rates[f"{dtype}_{m}x{k}x{n}_flops_per_s"] = 2 * m * k * n / time_action(product, device)
            except (RuntimeError, ValueError, AttributeError):  # not on this chip, or no room
                continue
        if rates:
            measured |= rates | {f"{dtype}_best_flops_per_s": max(rates.values())}
    torch.backends.cuda.matmul.allow_tf32 = False
    return measured


def _product(dtype: str, m: int, k: int, n: int, device: torch.device) -> Callable[[], object]:
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tfloat32"
    element = torch.bfloat16 if dtype == "float8" else getattr(torch, dtype.replace("tfloat", "float"))
    left, right = (torch.randn(shape, device=device, dtype=element) for shape in ((m, k), (n, k)))
    if dtype != "float8":
        return lambda: left @ right.T
    eight = torch.float8_e4m3fn
    left, right, scale = left.to(eight), right.to(eight), torch.ones((), device=device)
    return lambda: torch._scaled_mm(left, right.T, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)


def measure_copy(case: Case, device: torch.device, used_before: int | None) -> dict[str, float]:
    """Bytes read and written in a second by a copy within the device's memory."""
    source = torch.ones(_copied_bytes(case), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return {"device_bytes_per_s": 2 * source.numel() / time_action(lambda: target.copy_(source), device)}


def measure_host_link(case: Case, device: torch.device, used_before: int | None) -> dict[str, float]:
    """Bytes a second between host and device, by direction, from pinned and pageable memory."""
    need_cuda(device)
    size = _copied_bytes(case)
    on_device = torch.ones(size, dtype=torch.uint8, device=device)
    measured = {}
    for kind in ("pinned", "pageable"):
        on_host = torch.ones(size, dtype=torch.uint8, pin_memory=kind == "pinned")
        directions = {"host_to_device": (on_device, on_host), "device_to_host": (on_host, on_device)}
        for direction, (target, source) in directions.items():
            seconds = time_action(lambda to=target, of=source: to.copy_(of, non_blocking=True), device)
            measured[f"{direction}_{kind}_bytes_per_s"] = size / seconds
    return measured


def _copied_bytes(case: Case) -> int:
    return MIB if case.is_tiny else GIB


def time_action(action: Callable[[], object], device: torch.device) -> float:
    """Seconds of an action: the median of several, after two that warm up."""
    times = []
    for _ in range(REPEATS + 2):
        finish(device)
        started = time.perf_counter()
        action()
        finish(device)
        times.append(time.perf_counter() - started)
    return median(times[2:])


def finish(device: torch.device) -> None:
    """Wait for what the device still has to do."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def profile_yaml(measured: Mapping[str, float], gpu: Mapping[str, str], date: str) -> str:
    """A hardware profile of what was measured. Rates are what was reached, where a datasheet gives peaks.

    gpu: `name`, `architecture` and `source` of the measurement.
    """
    words = "".join(letter if letter.isalnum() else " " for letter in gpu["name"].lower()).split()
    name = ("-".join(words).removeprefix("nvidia-")[:31] + "-measured").strip("-")
    end = f"provenance: measured, source: '{gpu['source']}', date: '{date}'}}"

    def row(key: str, field: str, unit: str = "") -> list[str]:
        return [f"{field}: {{value: {round(measured[key])}{unit}, {end}"] if key in measured else []

    lines = [
        "# Written by benchmarks/gpu. Rates are what was reached, not what the datasheet promises.",
        "schema_version: 1",
    ]
    lines += [f"name: {name}", "kind: cuda", f"description: '{gpu['name']}, as measured'"]
    lines += [f"driver_names: ['{gpu['name']}']", f"architecture: '{gpu['architecture']}'"]
    lines += row("total_bytes", "memory") + row("device_bytes_per_s", "memory_bytes_per_s")
    rates = [line for dtype in DTYPES for line in row(f"{dtype}_best_flops_per_s", f"  {dtype}")]
    lines += ["dense_flops_per_s:", *rates] if rates else []
    link = row("host_to_device_pinned_bytes_per_s", "  bytes_per_s")
    lines += ["host_link:", "  technology: pcie", *link] if link else []
    lines += ["supports_sleep: true", "supports_peer_access: false", "shares_host_memory: false", "overheads:"]
    lines += row("context_with_cublas_bytes", "  context") + row("granularity_bytes", "  allocator_granularity")
    unknown = "{value: 0, provenance: assumed, source: one GPU was measured}"
    lines += [f"  {field}: {unknown}" for field in ("communicator_of_two", "communicator_of_many")]
    return "\n".join(lines) + "\n"
