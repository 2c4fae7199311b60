"""Benchmark of collectives between processes of this host: gloo on the CPU, NCCL on GPUs.

Each rank runs this module as a program. The ranks meet through a file, so no port is needed. A rank exits when its
standard input closes, so none outlives the process that started it. Not yet run on GPUs.
In: a number of ranks and bytes. Out: seconds of each repetition on rank 0. Left out: other hosts.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from rlplan.errors import RunError
from rlplan.runtime.device.layer import device_of
from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.runtime.processes.safe_path import make_module_command

START_S = 90.0
"""Seconds that a rank gets to import torch and meet the others; scaled."""
ENDING_S = 5.0
"""Seconds that a rank gets to exit; scaled."""
SAMPLES = (3, 30)
"""Smallest and largest number of repetitions."""


def measure_collectives(device: str, num_ranks: int, num_bytes: int, seconds: float) -> dict[str, list[float]]:
    """Measure each repetition's seconds on rank 0, by collective. Raises: RunError when a rank fails or is too slow."""
    with tempfile.TemporaryDirectory(prefix="rlplan-collective-") as folder:
        arguments = {"device": device, "num_ranks": num_ranks, "num_bytes": num_bytes, "seconds": seconds}
        errors = Path(folder) / "errors"
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            with errors.open("wb") as log:
                for rank in range(num_ranks):
                    ranks.append(_start(arguments | {"rank": rank, "folder": folder}, log))
            _wait(ranks, scale_seconds(START_S + 20 * seconds), errors)
            answer: dict[str, list[float]] = json.loads((Path(folder) / "answer.json").read_text(encoding="utf-8"))
        finally:
            _end(ranks)
    return answer


def _start(arguments: dict[str, Any], log: Any) -> "subprocess.Popen[bytes]":
    command = make_module_command("rlplan.runtime.measure.microbench_ranks", json.dumps(arguments))
    # a rank must import this checkout, and the ranks share the cores
    root = str(Path(__file__).resolve().parents[3])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = str(max(1, (os.cpu_count() or 1) // arguments["num_ranks"]))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": threads}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment)


def _wait(ranks: list["subprocess.Popen[bytes]"], seconds: float, errors: Path) -> None:
    deadline = time.monotonic() + seconds
    while any(rank.poll() is None for rank in ranks):
        failed = next((rank for rank in ranks if rank.poll()), None)
        if failed is None and time.monotonic() < deadline:
            time.sleep(0.02)
            continue
        break
    if any(rank.poll() != 0 for rank in ranks):
        output = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        late = time.monotonic() >= deadline
        raise RunError(
            f"a process of the collective benchmark {'was not ready in time' if late else 'failed'}: "
            + (output[-1][:200] if output else "it printed nothing"),
            where="rlplan profiles measure",
            rule=f"all processes end within {seconds:.0f} s",
            way_out="check that the machine is idle; on GPUs, that NCCL works between them (`nvidia-smi topo -m`)",
        )


def _end(ranks: list["subprocess.Popen[bytes]"]) -> None:
    """Close each rank's input, which makes it exit; kill those that still run after ENDING_S."""
    for rank in ranks:
        with contextlib.suppress(OSError):
            if rank.stdin:
                rank.stdin.close()
    deadline = time.monotonic() + scale_seconds(ENDING_S)
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


def _end_with_input() -> None:
    with contextlib.suppress(OSError):
        os.read(0, 1)  # a thread that holds sys.stdin's lock would keep the interpreter from exiting
    os._exit(1)


def run_rank(device: str, num_ranks: int, num_bytes: int, seconds: float, rank: int, folder: str) -> None:
    """Meet the other ranks and repeat each collective; rank 0 writes the seconds."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    import torch
    import torch.distributed as dist

    place = torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")
    if accelerator := device_of(place):
        accelerator.begin()
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=num_ranks
    )
    # all_gather needs parts of equal size
    elements = num_bytes // 4 // num_ranks * num_ranks
    whole, part = torch.ones(elements, device=place), torch.ones(elements // num_ranks, device=place)
    small = torch.ones(1, device=place)
    calls = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "small_all_reduce": lambda: dist.all_reduce(small),
    }
    answer = {name: _repeat(call, seconds, small) for name, call in calls.items()}
    if rank == 0:
        (Path(folder) / "answer.json").write_text(json.dumps(answer), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _repeat(call: Any, seconds: float, flag: Any) -> list[float]:
    """Time each repetition. The first timed one on rank 0 decides how many all ranks make."""
    import torch
    import torch.distributed as dist

    def once() -> float:
        flag.zero_()
        dist.barrier()
        start = time.perf_counter()
        call()
        if accelerator := device_of(flag.device):
            accelerator.finish()
        return time.perf_counter() - start

    once()  # the first call of a collective also connects the ranks
    count = torch.tensor([min(SAMPLES[1], max(SAMPLES[0], int(seconds / max(once(), 1e-6))))], device=flag.device)
    dist.broadcast(count, 0)
    return [max(once(), 1e-9) for _ in range(int(count.item()))]


if __name__ == "__main__":
    run_rank(**json.loads(sys.argv[1]))
