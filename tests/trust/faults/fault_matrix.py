"""The fault matrix: which cells a night tries, and a run that meets one fault after another.

In: a slice of the cells, a mode. Out: for each fault how long until it was noticed and until the next step had ended,
and how. A run recovers and goes on; where it ends (with its driver, or with an error) it is resumed. The job does
NUM_STEPS steps a fault, so what comes out can be compared with a run without faults.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from rlplan.runtime.processes.machine_speed import scale_seconds
from tests.runtime.conftest import ROOT, FinishedRun, alive, list_descendants
from tests.trust.faults.points import KINDS, MODES, NUM_SLICES, POINTS, VICTIMS

NUM_STEPS = 3
"""Steps from one fault to the next."""
FIRST_STEP = 4
"""Step of the first fault: the first checkpoint is complete by then, also on a slow disk."""
WRITTEN_S = 1.0
"""Longer than a driver that ends goes on writing LIST.waiting."""
STALL_S = 12.0
"""The job's limits.stall_timeout_s; scaled."""
PAUSE_S = 5.0
"""How long a stopped driver stands still: no other process is there to notice."""
HANG_S = 240.0
"""A fault after which no step has ended by then hangs the run; scaled."""


@dataclass(frozen=True)
class Fault:
    victim: str
    point: str
    kind: str
    mode: str
    step: int = 0


@dataclass(frozen=True)
class Outcome:
    """Outcome of a fault. noticed_s, recovered_s: from the fault; from then to the next end of a step."""

    fault: Fault
    ending: str
    """restarted (one process), went back (all, from the checkpoint), resumed (the run ended), unharmed, HANGS."""
    noticed_s: float | None
    recovered_s: float | None
    message: str = ""


def list_cells(number: int) -> list[Fault]:
    """One of NUM_SLICES parts of all cells, each cell in exactly one."""
    kinds, modes, faults = list(KINDS), list(MODES), []
    for at, victim in enumerate(VICTIMS):
        for where, point in enumerate(POINTS):
            index = (at + where + number) % NUM_SLICES
            faults.append(Fault(victim, point, kinds[index % len(kinds)], modes[index % len(modes)]))
    return faults


def assign_steps(faults: Sequence[Fault], every: int = NUM_STEPS) -> list[Fault]:
    """The same, each in a step of its own. every: steps from one to the next."""
    return [Fault(**asdict(fault) | {"step": FIRST_STEP + every * at}) for at, fault in enumerate(faults)]


def num_steps(faults: Sequence[Fault]) -> int:
    """Steps of the whole job."""
    return faults[-1].step + NUM_STEPS


class FaultyRun:
    """One run, from its start to its end, whatever happens in between."""

    def __init__(self, job: Sequence[str], faults: Sequence[Fault], folder: Path) -> None:
        """job: arguments of `rlplan`. folder: of the run."""
        self.job, self.faults, self.folder = tuple(job), list(faults), folder
        self.list = folder.parent / "faults.json"
        self.list.write_text(json.dumps([asdict(fault) for fault in faults]))
        self.list.with_suffix(".allowed").write_text("0")
        self.process: subprocess.Popen[str] | None = None
        self.errors: list[str] = []

    def play(self, note: Callable[[Outcome], None]) -> FinishedRun:
        """note: hears of each outcome. Raises: AssertionError where a fault never happens, or a run ends each time."""
        self._begin()
        for number in range(len(self.faults)):
            note(self._meet(number))
        return self._finish()

    def _begin(self) -> None:
        resumes = (self.folder / "checkpoints" / "latest.json").exists()
        arguments = ("run", "--resume", str(self.folder)) if resumes else (*self.job, "--out", str(self.folder))
        log = (self.folder.parent / "driver.log").open("a")
        command = [sys.executable, "-m", "tests.trust.faults.faulty_driver", str(self.list), *arguments]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, text=True, start_new_session=True)
        log.close()

    def _meet(self, number: int) -> Outcome:
        """Let one fault happen, and wait for what comes of it."""
        fault = self.faults[number]
        before = self._alarms()
        self.list.with_suffix(".allowed").write_text(str(number + 1))
        injected = self._wait(lambda: self._read_injected(number), 2 * HANG_S, f"{fault} did not happen")
        begun_s = injected["at_s"]
        ending = noticed_s = None
        resumed_by_hand = 0
        deadline = time.monotonic() + scale_seconds(HANG_S)
        rows = self._rows()
        while True:
            now = time.time()
            if time.monotonic() > deadline:
                return self._hangs(fault, noticed_s)
            if (
                self.process is not None
                and self.process.poll() is not None
                and self._last_step() < num_steps(self.faults)
            ):
                if noticed_s is None:
                    noticed_s = now - begun_s
                resumed_by_hand += 1
                assert resumed_by_hand < 4, f"{fault}: it ends each time"
                ending, rows = "resumed", self._rows()
                self._note(fault)
                self._begin()
            new_alarms = self._alarms()[len(before) :]
            if noticed_s is None and (heard := [row for row in new_alarms if row["kind"] == "restart"]):
                noticed_s, ending = now - begun_s, "restarted" if "process" in heard[0] else "went back"
                rows = self._rows()
            if fault.victim == "driver" and fault.kind == "SIGSTOP" and now - begun_s > PAUSE_S:
                with suppress(ProcessLookupError):
                    os.kill(injected["pid"], signal.SIGCONT)
            rows = min(rows, current := self._rows())  # going back may take a row away
            if noticed_s is not None and (current > rows or self._is_waiting(number + 1, begun_s + noticed_s)):
                ended = self.errors[-1] if resumed_by_hand and self.errors else ""
                text = next((row["text"] for row in reversed(new_alarms) if row["kind"] == "restart"), ended)
                return Outcome(fault, ending or "", noticed_s, now - begun_s - noticed_s, text[:200])
            if noticed_s is None and self._is_past(fault, injected, begun_s):
                return Outcome(fault, "unharmed", None, None)
            time.sleep(0.05)

    def _is_waiting(self, index: int, since_s: float) -> bool:
        """Whether the run waits at the point of a fault, and has come there since a time. index: in the list."""
        path = self.list.with_suffix(".waiting")
        words = path.read_text().split() if path.exists() else []
        return len(words) == 2 and int(words[0]) == index + 1 and float(words[1]) > since_s + WRITTEN_S

    def _is_past(self, fault: Fault, injected: dict[str, object], begun_s: float) -> bool:
        """Two steps have ended since, and the victim was not missed for longer than it takes to notice."""
        if self._last_step() < fault.step + NUM_STEPS - 1:
            return False
        if time.time() - begun_s < scale_seconds(STALL_S) + 20:
            return False
        with suppress(psutil.Error):
            if fault.kind == "SIGSTOP" and psutil.Process(injected["pid"]).status() == psutil.STATUS_STOPPED:
                os.kill(injected["pid"], signal.SIGCONT)
        return True

    def _hangs(self, fault: Fault, noticed_s: float | None) -> Outcome:
        """Start anew, so that the others can be tried."""
        assert self.process is not None
        end(self.process)
        self._begin()
        return Outcome(fault, "HANGS", noticed_s, None)

    def _note(self, fault: Fault) -> None:
        """Text that an ended run gave on its fault."""
        assert self.process is not None
        if fault.victim == "driver" or self.process.returncode < 0:
            return
        status = json.loads((self.folder / "status.json").read_text())
        assert status["state"] == "failed", status
        self.errors.append(f"{fault.victim} {fault.kind} at {fault.point}: {status['message'][:300]}")

    def _finish(self) -> FinishedRun:
        assert self.process is not None
        self._wait(lambda: self.process and self.process.poll() is not None, 2 * HANG_S, "the run does not end")
        log = (self.folder.parent / "driver.log").read_text()
        return FinishedRun(self.folder, self.process.returncode, "", log)

    def _read_injected(self, number: int) -> "dict[str, object] | None":
        done = self.list.with_suffix(".done")
        lines = done.read_text().splitlines() if done.exists() else []
        if len(lines) > number:
            row: dict[str, object] = json.loads(lines[number])
            return row
        assert self.process is not None
        if self.process.poll() is not None:  # of what came before
            self._note(self.faults[number - 1])
            self._begin()
        return None

    def _wait(self, what, seconds: float, otherwise: str):  # type: ignore[no-untyped-def]
        deadline = time.monotonic() + scale_seconds(seconds)
        while not (outcome := what()):
            if time.monotonic() > deadline:
                assert self.process is not None
                end(self.process)
                raise AssertionError(otherwise)
            time.sleep(0.05)
        return outcome

    def _alarms(self) -> list[dict[str, str]]:
        path = self.folder / "alarms.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def _rows(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def _last_step(self) -> int:
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return max((json.loads(line)["step"] for line in lines), default=-1)  # the last row is of no step


def end(process: "subprocess.Popen[str]") -> None:
    """Kill a driver, and wait until its workers are gone."""
    workers = list_descendants(process.pid) if process.poll() is None else []
    process.kill()
    process.communicate(timeout=scale_seconds(30))
    deadline = time.monotonic() + scale_seconds(20)
    while [pid for pid in alive(workers) if _is_worker(pid)] and time.monotonic() < deadline:
        time.sleep(0.1)


def _is_worker(pid: int) -> bool:
    with suppress(psutil.Error):
        return bool(re.match("ray::WorkerProcess", " ".join(psutil.Process(pid).cmdline())))
    return False
