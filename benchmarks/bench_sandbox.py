"""How many fresh sandboxes a core starts and ends each second, how long one takes, and what they leave behind.

Usage: python benchmarks/bench_sandbox.py [--write]. With --write the table goes to reports/sandbox/README.md.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402

from rlplan.runtime.sandbox.bare import Bare  # noqa: E402
from rlplan.runtime.sandbox.choice import BACKENDS, open_sandbox  # noqa: E402
from rlplan.runtime.sandbox.memory_groups import PREFIX  # noqa: E402
from rlplan.runtime.sandbox.programs import Case, Program, Sandbox  # noqa: E402

ADDS = Program("print(sum(map(int, input().split())))", (Case(b"17 25\n"),))
BEGIN, END = "<!-- bench_sandbox: begin -->", "<!-- bench_sandbox: end -->"


def measure(sandbox: Sandbox, count: int, num_workers: int) -> tuple[float, list[float]]:
    """(runs a second, seconds of each), every one of them right."""

    def once(_: int) -> float:
        begun = time.monotonic()
        report = sandbox.run(ADDS)
        assert report.status == "done", report
        assert report.cases[0].output == b"42\n", report
        return time.monotonic() - begun

    begun = time.monotonic()
    with ThreadPoolExecutor(num_workers) as pool:
        seconds = list(pool.map(once, range(count)))
    return count / (time.monotonic() - begun), seconds


def left_behind() -> dict[str, int]:
    """What could be left: processes, temporary files, shared memory, control groups, descriptors."""
    return {
        "processes": sum("bwrap" in name for name in (p.info["name"] or "" for p in psutil.process_iter(["name"]))),
        "temporary files": len(list(Path(tempfile.gettempdir()).glob("rlplan-canary*"))),
        "shared memory": len(list(Path("/dev/shm").iterdir())),
        "control groups": len(list(Path("/sys/fs/cgroup").glob(f"**/{PREFIX}-{os.getpid()}-*"))),
        "descriptors": psutil.Process().num_fds(),
    }


def table(open_: Callable[[str, int], Sandbox], names: list[str], count: int) -> list[str]:
    """Lines of a markdown table."""
    cores = len(os.sched_getaffinity(0))
    lines = [
        "| sandbox | at a time | runs/s | runs/s and core | p50 (ms) | p99 (ms) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in names:
        for num_workers in (1, cores, 2 * cores, 4 * cores):
            sandbox = open_(name, num_workers)
            try:
                rate, seconds = measure(sandbox, count, num_workers)
            finally:
                sandbox.close()
            p99 = quantiles(seconds, n=100)[98]
            lines.append(
                f"| {name} | {num_workers} | {rate:.0f} | {rate / cores:.0f} | {1000 * median(seconds):.0f} "
                f"| {1000 * p99:.0f} |"
            )
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--count", type=int, default=250)
    options = parser.parse_args()
    names = [name for name in BACKENDS if name != "sandlock" or _is_there(name)]
    lines = table(lambda name, n: Bare(n) if name == "none" else open_sandbox(name, n), [*names, "none"], options.count)
    before = left_behind()
    resident = psutil.Process().memory_info().rss
    sandbox = open_sandbox("bubblewrap", 4)
    rate, _ = measure(sandbox, 1000, 4)
    sandbox.close()
    grown = psutil.Process().memory_info().rss - resident
    after = left_behind()
    left = ", ".join(f"{name} {after[name] - count}" for name, count in before.items())
    growth = f"the driver grew by {grown / 1024:.0f} KiB"
    lines += ["", f"1,000 more runs, four at a time: {rate:.0f} a second; {growth}. Left behind: {left}."]
    print(lines[-1])
    if options.write:
        page = ROOT / "reports" / "sandbox" / "README.md"
        text = page.read_text(encoding="utf-8")
        head, tail = text.split(BEGIN)[0], text.split(END)[1]
        page.write_text(head + BEGIN + "\n" + "\n".join(lines) + "\n" + END + tail, encoding="utf-8")


def _is_there(name: str) -> bool:
    try:
        open_sandbox(name, 1).close()
    except Exception as error:
        print(f"{name}: {error}", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    main()
