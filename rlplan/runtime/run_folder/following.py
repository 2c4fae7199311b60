"""Following: reads a run's progress from its folder while it grows, from a process outside of the run.

In: a run folder. Out: the run's state, its steps' metrics and each process's memory. Only new lines are read.
Needs neither torch nor the packages of a run. Left out: display and polling (rlplan_cli), analysis (report/).
"""

import fcntl
import json
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlplan.errors import EXIT_BUG, RunError, SpecError
from rlplan.planner.plan import Plan, read_run_plan
from rlplan.reading import MAX_INTEGER, check_numbers, open_regular, read_number

LOCK_NAME = ".running"
"""The file that a run keeps locked while it runs (run_lock.py)."""
GOING_ON = ("running", "starting")
KEPT_STEPS, KEPT_ALARMS = 64, 8
MAX_ALARM = 500
"""Maximum number of characters shown of an alarm."""
MAX_EXIT_CODE = 255
MAX_TOLD = 1 << 16
"""Maximum number of bytes read of status.json."""
PART_BYTES = 1 << 24
"""Maximum number of bytes read of a file at a time."""


@dataclass
class Standing:
    """Progress of a run."""

    state: str = "starting"
    """`starting`, `running`, `finished`, `interrupted`, `failed`; `gone` if its process has ended without a status."""
    exit_code: int | None = None
    """Exit code of `rlplan run`; None while it runs."""
    message: str = ""
    """Message of the status: the error, or why the run stopped early."""
    seconds: float = 0.0
    """Seconds from the start to the newest record."""
    step: int = 0
    """Number of the last finished step."""
    doing: str = ""
    """Id of the last finished action."""
    steps: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    """Metrics and timings of the last steps, by name."""
    peaks: dict[str, int] = field(default_factory=dict)
    """Peak bytes of each process; of its GPU if it has one."""
    held: dict[str, int] = field(default_factory=dict)
    """Current bytes of each process; of its GPU if it has one."""
    alarms: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_ALARMS))
    """Texts of the last alarms."""

    @property
    def is_going_on(self) -> bool:
        """Whether the run has not ended yet."""
        return self.state in GOING_ON

    def as_json(self) -> dict[str, Any]:
        """Content for `rlplan watch --json`; sizes in bytes."""
        return {"schema_version": 1, **vars(self), "steps": [*self.steps], "alarms": [*self.alarms]}


class Follower:
    """Reads a run folder repeatedly. Raises: SpecError for a folder without a run's plan."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan: Plan = read_run_plan(folder)
        self._places: dict[str, tuple[int, int]] = {}
        self.standing = Standing()

    def read_new(self) -> Standing:
        """Read new lines and return the updated progress. Raises: SpecError where a file cannot be read."""
        status = self._status()
        if any(self._is_new(name) for name in ("metrics.jsonl", "timings.jsonl", "trace.jsonl")):
            self._places, self.standing = {}, Standing()  # the run has restarted, or returned to a checkpoint
        now = self.standing
        for name in ("metrics.jsonl", "timings.jsonl"):
            for row in self._rows(name):
                self._take_numbers(row)
        for row in self._rows("trace.jsonl"):
            self._take_record(row)
        for row in self._rows("alarms.jsonl"):
            now.alarms.append(f"step {row.get('step', 0)}: {row.get('text', '')}"[:MAX_ALARM])
        now.state = str(status.get("state", now.state))[:MAX_ALARM]
        now.exit_code, now.message = _read_exit_code(status), str(status.get("message", ""))
        now.seconds = max(now.seconds, read_number(status.get("seconds")))
        if now.is_going_on and not is_running(self.folder):
            # The run may have ended after its status was read: read it again.
            status = self._status()
            now.state = str(status["state"]) if status.get("state", "running") not in GOING_ON else "gone"
            now.exit_code, now.message = _read_exit_code(status), str(status.get("message", ""))
        return now

    def _status(self) -> dict[str, Any]:
        try:
            with open_regular(self.folder / "status.json", "the run's status") as file:
                status = json.loads(file.read(MAX_TOLD))
        except (SpecError, ValueError, RecursionError):
            return {}  # not written yet
        return status if isinstance(status, dict) else {}

    def _is_new(self, name: str) -> bool:
        """Whether a file was replaced or truncated since the last read."""
        known = self._places.get(name)
        try:
            status = (self.folder / name).stat()
        except OSError:
            return known is not None
        return known is not None and (status.st_ino != known[0] or status.st_size < known[1])

    def _rows(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the complete new lines of a file as rows; malformed lines are skipped."""
        try:
            with open_regular(self.folder / name, name) as file:
                at = self._places.get(name, (0, 0))[1]
                file.seek(at)
                lines, _, incomplete = file.read(PART_BYTES).rpartition(b"\n")
                end = file.tell() - len(incomplete)
                self._places[name] = (os.fstat(file.fileno()).st_ino, end)
        except SpecError:
            return  # not written yet
        for line in lines.splitlines():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                yield row

    def _take_numbers(self, row: dict[str, Any]) -> None:
        """Merge a row of metrics or timings into its step's numbers."""
        try:
            row = check_numbers(row)
        except (ValueError, KeyError):
            return  # `rlplan report` describes the error
        now, step = self.standing, row["step"]
        known = next((numbers for numbers in now.steps if numbers["step"] == step), None)
        if known is None:
            known = {"step": step}
            now.steps.append(known)
        known |= {name: value for name, value in row.items() if isinstance(value, int | float)}
        now.step = max(now.step, step)

    def _take_record(self, row: dict[str, Any]) -> None:
        """Take the time, the action and the memory from a record of the trace."""
        now, process, size = self.standing, str(row.get("process")), row.get("num_bytes")
        if row.get("type") == "span":
            now.doing = str(row.get("action_id", ""))
            now.seconds = max(now.seconds, read_number(row.get("end_s")))
        on_gpu = row.get("kind") == "device_allocated"
        if not isinstance(size, int) or not 0 <= size <= MAX_INTEGER:
            return
        if not (on_gpu or (row.get("kind") == "total" and not self._is_on_gpu(process))):
            return
        now.peaks[process] = max(now.peaks.get(process, 0), size)
        if row.get("statistic") == "resident":
            now.held[process] = size

    def _is_on_gpu(self, process: str) -> bool:
        return self.plan.job.is_on_gpus and process.split("/")[0] not in ("driver", "ray_system", "sinks")


def _read_exit_code(status: dict[str, Any]) -> int | None:
    """The exit code in a run's status; None without a valid one."""
    code = status.get("exit_code")
    return code if type(code) is int and 0 <= code <= MAX_EXIT_CODE else None


def is_running(folder: Path) -> bool:
    """Whether a run is active in a folder: its process lives on this host, or holds the lock from another one."""
    try:
        with (folder / LOCK_NAME).open("rb") as file:
            if _is_alive(int(file.read(20)), os.fstat(file.fileno()).st_mtime):
                return True
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except ValueError:
        return True  # just created, without a process id yet
    except OSError:
        return False


def _is_alive(pid: int, noted_s: float) -> bool:
    """Whether a process with this id has run since the id was noted: the system reuses ids, in a container soon."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        up_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except OSError:
        return False
    age_s = up_s - int(words[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s <= noted_s + 1


def check_success(standing: Standing, folder: Path) -> None:
    """Raises: RunError, with the run's exit code, unless it finished successfully."""
    if standing.state == "finished":
        return
    is_gone = standing.state == "gone"
    error = RunError(
        "the run is gone: its process has ended without writing a final status"
        if is_gone
        else f"the run has ended: {(standing.message.splitlines() or ['no reason was written'])[0]}",
        where=str(folder / "status.json"),
        rule="a successful run ends as `finished`" + (f"; this one is `{standing.state}`" * (not is_gone)),
        way_out=f"rlplan run --resume {folder} continues from its checkpoint; rlplan report {folder} shows it",
    )
    # A bug in the run is not a bug in the command that reads its folder.
    error.exit_code = RunError.exit_code if standing.exit_code in (None, 0, EXIT_BUG) else standing.exit_code
    raise error


def find_newest_run(root: Path) -> Path:
    """The newest run below a folder of runs. Raises: SpecError when there is none."""
    plans = [*root.glob("*/*/plan.json"), *root.glob("*/plan.json"), *root.glob(f"*/*/{LOCK_NAME}")]
    if not plans:
        raise SpecError(
            f"there is no run below {root}",
            where="command line",
            rule="a run's folder is runs/NAME/TIME, unless set with `rlplan run --out`",
            way_out="pass the folder that `rlplan run` printed",
        )
    return max(plans, key=lambda path: path.stat().st_mtime_ns).parent
