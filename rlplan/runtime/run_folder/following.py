"""Following: how a run stands, read from its folder while it grows, by a process that is no part of it.

In: a run folder. Out: its state, its steps' numbers and what each process holds. Only what is new is read.
Needs neither torch nor the packages of a run. Left out: drawing it (rlplan_cli), waiting, what happened (report/).
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
from rlplan.reading import MAX_INTEGER, check_numbers, opened, read_number

LOCK_NAME = ".running"
"""The file that a run holds locked for as long as it goes on (run_lock.py)."""
GOING_ON = ("running", "starting")
KEPT_STEPS, KEPT_ALARMS = 64, 8
MAX_EXIT_CODE = 255
MAX_TOLD = 1 << 16
"""Bytes of status.json."""
PART_BYTES = 1 << 24
"""Read of one file at once; the rest at the next look."""


@dataclass
class Standing:
    """How a run stands."""

    state: str = "starting"
    """`starting`, `running`, `finished`, `interrupted`, `failed`; `gone` where no process is left and none said so."""
    exit_code: int | None = None
    """Of `rlplan run`; None while it goes on."""
    message: str = ""
    seconds: float = 0.0
    """Since its start, by what it wrote last."""
    step: int = 0
    """The last one that ended."""
    doing: str = ""
    """The action that ended last."""
    steps: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    """Numbers of the last steps, by name: what was learned and how long it took."""
    peaks: dict[str, int] = field(default_factory=dict)
    """Bytes that each process held at most, of its GPU's where it has one."""
    held: dict[str, int] = field(default_factory=dict)
    """Bytes that each process held last."""
    alarms: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_ALARMS))

    @property
    def is_going_on(self) -> bool:
        """Whether more may come."""
        return self.state in GOING_ON

    def as_json(self) -> dict[str, Any]:
        """For `rlplan watch --json`: sizes in bytes."""
        return {"schema_version": 1, **vars(self), "steps": [*self.steps], "alarms": [*self.alarms]}


class Follower:
    """Reads a run folder again and again; `plan` is what it does. Raises: SpecError where it is none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan: Plan = read_run_plan(folder)
        self._places: dict[str, tuple[int, int]] = {}
        self.standing = Standing()

    def look(self) -> Standing:
        """What is new since the last look, added to what was known. Raises: SpecError where a file cannot be read."""
        status = self._status()
        if any(self._is_new(name) for name in ("metrics.jsonl", "timings.jsonl", "trace.jsonl")):
            self._places, self.standing = {}, Standing()  # the run began again, or went back
        now = self.standing
        for name in ("metrics.jsonl", "timings.jsonl"):
            for row in self._rows(name):
                self._take_numbers(row)
        for row in self._rows("trace.jsonl"):
            self._take_record(row)
        for row in self._rows("alarms.jsonl"):
            now.alarms.append(f"step {row.get('step', 0)}: {row.get('text', '')}")
        now.state = str(status.get("state", now.state))
        now.exit_code, now.message = _read_exit_code(status), str(status.get("message", ""))
        now.seconds = max(now.seconds, read_number(status.get("seconds")))
        if now.is_going_on and not is_going_on(self.folder):
            # it may have ended between the two looks
            status = self._status()
            now.state = str(status["state"]) if status.get("state", "running") not in GOING_ON else "gone"
            now.exit_code, now.message = _read_exit_code(status), str(status.get("message", ""))
        return now

    def _status(self) -> dict[str, Any]:
        try:
            with opened(self.folder / "status.json", "the run's status") as file:
                found = json.loads(file.read(MAX_TOLD))
        except (SpecError, ValueError, RecursionError):
            return {}  # not written yet
        return found if isinstance(found, dict) else {}

    def _is_new(self, name: str) -> bool:
        """Whether a file is another one than at the last look, or shorter."""
        known = self._places.get(name)
        try:
            found = (self.folder / name).stat()
        except OSError:
            return known is not None
        return known is not None and (found.st_ino != known[0] or found.st_size < known[1])

    def _rows(self, name: str) -> Iterator[dict[str, Any]]:
        """The whole lines that were added to a file; one that cannot be read is left out."""
        try:
            with opened(self.folder / name, name) as file:
                at = self._places.get(name, (0, 0))[1]
                file.seek(at)
                lines, _, rest = file.read(PART_BYTES).rpartition(b"\n")
                end = file.tell() - len(rest)
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
        """A step's row of metrics or timings, both of which become one."""
        try:
            row = check_numbers(row)
        except (ValueError, KeyError):
            return  # `rlplan report` says what is wrong with it
        now, step = self.standing, row["step"]
        known = next((one for one in now.steps if one["step"] == step), None)
        if known is None:
            known = {"step": step}
            now.steps.append(known)
        known |= {name: value for name, value in row.items() if isinstance(value, int | float)}
        now.step = max(now.step, step)

    def _take_record(self, row: dict[str, Any]) -> None:
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
    """The exit code that a run has written; None where it wrote none."""
    code = status.get("exit_code")
    return code if type(code) is int and 0 <= code <= MAX_EXIT_CODE else None


def is_going_on(folder: Path) -> bool:
    """Whether a process holds the run folder: one that lives on this host, or one that has its file locked."""
    try:
        with (folder / LOCK_NAME).open("rb") as file:
            if _lives(int(file.read(20)), os.fstat(file.fileno()).st_mtime):
                return True
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except ValueError:
        return True  # just made
    except OSError:
        return False


def _lives(pid: int, noted_s: float) -> bool:
    """Whether a process is there that had its id when that was noted: ids are given out again, in a container soon."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        up_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except OSError:
        return False
    age_s = up_s - int(words[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s <= noted_s + 1


def check_ended_well(standing: Standing, folder: Path) -> None:
    """Raises: RunError where the run ended otherwise, with the exit code that it had."""
    if standing.state == "finished":
        return
    is_gone = standing.state == "gone"
    error = RunError(
        "the run is gone: no process holds its folder, and none said how it ended"
        if is_gone
        else f"the run has ended: {(standing.message.splitlines() or ['no reason was written'])[0]}",
        where=str(folder / "status.json"),
        rule="a run that ends well is `finished`" + (f"; this one is `{standing.state}`" * (not is_gone)),
        way_out=f"rlplan run --resume {folder} continues from its checkpoint; rlplan report {folder} shows it",
    )
    error.exit_code = standing.exit_code or (RunError.exit_code if is_gone else EXIT_BUG)
    raise error


def newest_run(root: Path) -> Path:
    """The run below a folder of runs that began last. Raises: SpecError when there is none."""
    plans = [*root.glob("*/*/plan.json"), *root.glob("*/plan.json"), *root.glob(f"*/*/{LOCK_NAME}")]
    if not plans:
        raise SpecError(
            f"there is no run below {root}",
            where="command line",
            rule="a run's folder is runs/NAME/TIME, unless `rlplan run --out` named another",
            way_out="name the folder that `rlplan run` printed",
        )
    return max(plans, key=lambda path: path.stat().st_mtime_ns).parent
