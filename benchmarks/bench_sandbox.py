"""How many fresh sandboxes a core starts and ends each second, how long one takes, and what they leave behind.

Usage: python benchmarks/bench_sandbox.py [--write]. With --write the table goes to reports/sandbox/README.md.
"""

import argparse
import os
import subprocess
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

from rlplan.runtime.sandbox.bubblewrap import INTERPRETER, Bubblewrap  # noqa: E402
from rlplan.runtime.sandbox.choice import (  # noqa: E402
    BACKENDS,
    Bare,
    open_sandbox,
)
from rlplan.runtime.sandbox.programs import Case, Program, Sandbox  # noqa: E402
from rlplan.runtime.sandbox.tree_limits import PREFIX  # noqa: E402
from rlplan.runtime.sandbox.uids import FIRST_UID, NUM_UIDS  # noqa: E402

ADDS = Program("print(sum(map(int, input().split())))", (Case(b"17 25\n"),))
BEGIN, END = "<!-- bench_sandbox: begin -->", "<!-- bench_sandbox: end -->"


def measure(
    sandbox: Sandbox, num_workers: int, *, seconds: float = 1e9, count: int = 100_000
) -> tuple[float, list[float]]:
    """(runs a second, seconds of each), every one of them right: so many, or as many as begin in the seconds."""
    begun, numbers = time.monotonic(), iter(range(count))
    taken: list[float] = []

    def work() -> None:
        while time.monotonic() - begun < seconds and next(numbers, None) is not None:
            start = time.monotonic()
            report = sandbox.run(ADDS)
            taken.append(time.monotonic() - start)
            assert report.status == "done", report
            assert report.cases[0].output == b"42\n", report

    with ThreadPoolExecutor(num_workers) as pool:
        for future in [pool.submit(work) for _ in range(num_workers)]:
            future.result()
    return len(taken) / (time.monotonic() - begun), taken


def parts(count: int = 100) -> list[str]:
    """Lines of a markdown table: what each program that a sandbox is made of takes by itself, ended too."""
    sandbox = Bubblewrap(1)
    runner = sandbox._runner
    joining = sandbox._groups[0].join_command if sandbox._groups else ()
    drop = tuple(sandbox._make_command(0, 0)[: sandbox._make_command(0, 0).index(sandbox._bwrap)])
    apart = ("--unshare-all", "--unshare-user", "--disable-userns", "--ro-bind", "/", "/", "--")
    python = (INTERPRETER, *runner.flags[:-1])
    commands = {
        "a process that does nothing": ("/bin/true",),
        "joining a control group (a shell)": (*joining, "/bin/true"),
        "another uid (setpriv)": (*drop, "/bin/true"),
        "namespaces (bwrap)": (sandbox._bwrap, *apart, "/bin/true"),
        "the interpreter": (*python, "import posix; posix._exit(0)"),
        "what the program's `import os` would add to it": (*python, "import os; os._exit(0)"),
    }
    lines = ["| part | ms (median) |", "| --- | --- |"]
    try:
        for name, command in commands.items():
            lines.append(f"| {name} | {1000 * _median_s(command, count):.1f} |")
            print(lines[-1], flush=True)
    finally:
        sandbox.close()
    return lines


def _median_s(command: tuple[str, ...], count: int) -> float:
    taken = []
    for _ in range(count):
        begun = time.monotonic()
        subprocess.run(command, env={}, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        taken.append(time.monotonic() - begun)
    return median(taken)


def count_leftovers() -> dict[str, int]:
    """Resources that a sandbox could leave: child processes, mounts, files of its uids, control groups, descriptors.

    Network namespaces are mounts of other work beside this: no sandbox of ours has one with a name.
    """
    places = (Path(tempfile.gettempdir()), Path("/var/tmp"), Path("/dev/shm"))
    owners = [path.lstat().st_uid for place in places for path in place.iterdir()]
    return {
        "processes": sum(map(_is_inside, psutil.Process().children(recursive=True))),
        "mounts": sum("/run/netns" not in line for line in Path("/proc/self/mountinfo").read_text().splitlines()),
        "files": sum(FIRST_UID <= owner < FIRST_UID + NUM_UIDS for owner in owners),
        "canaries": sum(len(list(place.glob(f"rlplan-canary-{os.getpid()}-*"))) for place in places),
        "control groups": len(list(Path("/sys/fs/cgroup").glob(f"**/{PREFIX}-{os.getpid()}-*"))),
        "descriptors": psutil.Process().num_fds(),
    }


def _is_inside(process: psutil.Process) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return process.name() == "bwrap" or FIRST_UID <= process.uids().real < FIRST_UID + NUM_UIDS
    except psutil.Error:
        return False


def table(open_: Callable[[str, int], Sandbox], names: list[str], seconds: float) -> list[str]:
    """Lines of a markdown table; so many seconds a line."""
    cores = len(os.sched_getaffinity(0))
    lines = [
        "| sandbox | at a time | runs/s | runs/s and core | p50 (ms) | p99 (ms) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in names:
        for num_workers in (1, cores, 2 * cores, 4 * cores):
            sandbox = open_(name, num_workers)
            try:
                rate, taken = measure(sandbox, num_workers, seconds=seconds)
            finally:
                sandbox.close()
            p99 = quantiles(taken, n=100)[98]
            lines.append(
                f"| {name} | {num_workers} | {rate:.0f} | {rate / cores:.0f} | {1000 * median(taken):.0f} "
                f"| {1000 * p99:.0f} |"
            )
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each line of the table")
    parser.add_argument("--count", type=int, default=1000, help="runs after which nothing may be left")
    options = parser.parse_args()
    names = [name for name in BACKENDS if name != "sandlock" or _is_there(name)]
    lines = table(
        lambda name, n: Bare(n) if name == "none" else open_sandbox(name, n), [*names, "none"], options.seconds
    )
    before = count_leftovers()
    resident = psutil.Process().memory_info().rss
    sandbox = open_sandbox("bubblewrap", 4)
    rate, _ = measure(sandbox, 4, count=options.count)
    sandbox.close()
    grown = psutil.Process().memory_info().rss - resident
    after = count_leftovers()
    left = ", ".join(f"{name} {after[name] - count}" for name, count in before.items())
    growth = f"the driver grew by {grown / 1024:.0f} KiB"
    lines += ["", f"{options.count:,} more runs, four at a time: {rate:.0f} a second; {growth}. Left behind: {left}."]
    print(lines[-1])
    lines += ["", "Where the time of one goes, each part by itself, begun and ended:", "", *parts()]
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
