"""Recorder: writes the run folder during the run, so that the records survive a crash.

    trace.jsonl     spans and memory samples
    metrics.jsonl   learning metrics only: two seeded runs agree bit for bit
    timings.jsonl   seconds, tokens/s and memory of each step
    rollouts/       the rollouts of each step (rollout_files.py)
    prompts.jsonl   the prompts that each step was trained on
    failures.jsonl  rollouts without a reward, and why
    alarms.jsonl    problems that the run survived: leaks, restarts, changes after a rehearsal
    status.json     state of the run; written atomically

In: measurements and metrics. Out: files, and the latest values for a display.
"""

import calendar
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlplan.dataflow.schedule import DRIVER_PROCESS, HOST_DEVICE, Action
from rlplan.errors import RunError
from rlplan.runtime.device.layer import DeviceBytes
from rlplan.runtime.measure.memory_meter import Measurement, merge_measurements, resident_bytes
from rlplan.runtime.run_folder.disk_errors import writing_file
from rlplan.runtime.run_folder.rollout_files import RolloutFiles
from rlplan.runtime.run_folder.run_files import overwrite_status, replace_atomically, write_json
from rlplan.trace import MemorySample, Span, Trace, record_line
from rlplan.vocabulary import Role

LINES = ("trace.jsonl", "metrics.jsonl", "timings.jsonl", "prompts.jsonl", "failures.jsonl")
"""Files whose lines each belong to a step."""


class Recorder:
    """Writer of one run folder. Methods are thread-safe; every line is flushed.

    rollouts: writer of the rollouts. show_alarm: called with step and text of each alarm. resident, on_device: last
    known bytes of each process, in host memory and on its GPU. Raises: RunError where the disk refuses a write.
    """

    def __init__(self, folder: Path, devices: dict[str, str], after_step: int | None = None) -> None:
        """devices: device of each process. after_step: the last step of an earlier run in this folder, if any."""
        self.folder, self.devices = folder, devices
        self.origin_s, run_id = (time.time(), "") if after_step is None else _read_start(folder)
        self.num_starts = 0
        self.resident: dict[str, int] = {}
        self.on_device: dict[str, int] = {}
        self.show_alarm: Callable[[int, str], None] = lambda step, text: None
        self.rollouts = RolloutFiles(folder)
        self._lock = threading.Lock()
        self.facts = {"run_id": run_id or secrets.token_hex(8)}
        self._files: dict[str, Any] = {}
        mode = "w" if after_step is None else "a"
        self._open_file("alarms.jsonl", mode)
        if after_step is None:
            self.restart()
        else:
            self.truncate_after(after_step)

    def restart(self) -> None:
        """Discard all lines and rollouts, because the processes start again under another plan."""
        self.resident.clear()
        self.rollouts.truncate_after(0)
        for name in LINES:
            self._open_file(name)
        self._begin_trace()

    def _begin_trace(self) -> None:
        for line in Trace(origin="measured").lines():
            self._write("trace.jsonl", line)

    def truncate_after(self, step: int) -> None:
        """Keep only lines and rollouts up to a step; the run that resumes from there writes the later ones again."""
        self.resident.clear()
        self.rollouts.truncate_after(step)
        for name in LINES:
            _truncate_lines(self.folder / name, step)
            self._open_file(name, "a")
        self.num_starts = _find_last_start(self.folder / "trace.jsonl")
        if not (self.folder / "trace.jsonl").stat().st_size:
            self._begin_trace()

    def sync(self) -> None:
        with self._lock:
            for name, file in self._files.items():
                with writing_file(self.folder / name):
                    if not file.closed:
                        file.flush()
                        os.fsync(file.fileno())

    def _open_file(self, name: str, mode: str = "w") -> None:
        with writing_file(self.folder / name):
            if name in self._files:
                self._files[name].close()
            # Line buffering: a killed run loses at most the line being written.
            self._files[name] = (self.folder / name).open(mode, encoding="utf-8", buffering=1)

    def memory_by_process(self) -> dict[str, int]:
        """Bytes of each process on the device of its models: its GPU, or host memory without one."""
        return self.resident | self.on_device

    def record(self, action: Action, step: int, measurements: list[Measurement], attempt: int = 1) -> None:
        """Record the successful attempt of an action.

        Several calls on one process are merged into one span and one sample per kind.
        """
        if step == 0:
            attempt += self.num_starts  # a resumed run has recorded earlier starts
        for measurement in merge_measurements(measurements):
            self._record_process(action, step, measurement, attempt)

    def _record_process(self, action: Action, step: int, measurement: Measurement, attempt: int) -> None:
        """Write one span, and samples of a process's components and totals."""
        process, device = measurement.process, self.devices.get(measurement.process, HOST_DEVICE)
        start, end = round(measurement.start_s - self.origin_s, 6), round(measurement.end_s - self.origin_s, 6)
        self._write("trace.jsonl", record_line(Span(action.id, step, process, device, start, end, attempt)))
        self.resident[process] = measurement.resident_bytes
        totals = [("resident", measurement.resident_bytes), ("peak", measurement.peak_bytes)]
        samples = [(role, kind, "resident", size) for (role, kind), size in measurement.components.items()]
        samples += [(role, kind, "loaded", size) for (role, kind), size in measurement.loaded_components.items()]
        samples += [(action.role.value, "total", statistic, size) for statistic, size in totals]
        if measurement.device is not None:
            self.on_device[process] = measurement.device.held
            samples += _device_samples(action.role.value, measurement.device)
        for role, kind, statistic, size in samples:
            sample = MemorySample(action.id, step, process, device, role, kind, statistic, size, end, attempt)
            self._write("trace.jsonl", record_line(sample))

    def record_span(
        self, action: Action, step: int, start_s: float, end_s: float, process: str = DRIVER_PROCESS
    ) -> None:
        """Record an action of the driver, or of another process that is not a worker. Times: seconds since 1970."""
        start, end = round(start_s - self.origin_s, 6), round(end_s - self.origin_s, 6)
        self._write("trace.jsonl", record_line(Span(action.id, step, process, HOST_DEVICE, start, end)))

    def record_baseline(self, action_id: str, process: str, role: str, num_bytes: int) -> None:
        """Record a process's memory after importing its libraries and before loading a model."""
        at = round(time.time() - self.origin_s, 6)
        device = self.devices.get(process, HOST_DEVICE)
        sample = MemorySample(action_id, 0, process, device, role, "process", "resident", num_bytes, at)
        self._write("trace.jsonl", record_line(sample))

    def record_host(self, step: int, system_bytes: int | None) -> None:
        """Record, once per step, the memory of the driver, and of Ray's processes if this run started them."""
        for process, size in ((DRIVER_PROCESS, resident_bytes()), ("ray_system", system_bytes)):
            if size is not None:
                self.record_extra_process(process, step, size)

    def record_extra_process(self, process: str, step: int, num_bytes: int) -> None:
        """Record the memory of a process that is not a worker."""
        at = round(time.time() - self.origin_s, 6)
        self.resident[process] = num_bytes
        role = Role.VERIFIER.value
        sample = MemorySample("finish_step", step, process, HOST_DEVICE, role, "total", "resident", num_bytes, at)
        self._write("trace.jsonl", record_line(sample))

    def write_row(self, name: str, row: Mapping[str, Any]) -> None:
        self._write(name, json.dumps(row, ensure_ascii=False))

    def write_failures(self, rows: Sequence[Mapping[str, object]]) -> None:
        for row in rows:
            self._write("failures.jsonl", json.dumps(row))

    def write_alarm(self, step: int, kind: str, text: str, **values: float | str) -> None:
        """Show and record a problem that the run survives."""
        self.show_alarm(step, text)  # first, because the disk may refuse the line
        at = round(time.time() - self.origin_s, 3)
        self._write("alarms.jsonl", json.dumps({"step": step, "at_s": at, "kind": kind, "text": text, **values}))

    def write_file(self, name: str, value: Mapping[str, object]) -> None:
        write_json(self.folder / name, value)

    def write_status(self, state: str, exit_code: int | None, message: str = "") -> None:
        """Write the run's state: running, finished, interrupted or failed.

        The last two are also written on a full disk, by overwriting the existing file in place.
        """
        status = {
            "schema_version": 1,
            "state": state,
            "exit_code": exit_code,
            "message": message,
            **self.facts,
            "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.origin_s)),
            "seconds": round(time.time() - self.origin_s, 3),
        }
        try:
            write_json(self.folder / "status.json", status)
        except RunError:
            if state not in ("interrupted", "failed"):
                raise
            with suppress(OSError):  # the run's own error is reported anyway, even if the disk does not work at all
                overwrite_status(self.folder / "status.json", status)

    def close(self) -> None:
        self.rollouts.close()
        for file in self._files.values():
            with suppress(OSError):  # failed writes have been reported before
                file.close()

    def _write(self, name: str, line: str) -> None:
        with self._lock, writing_file(self.folder / name, len(line) + 1):
            self._files[name].write(line + "\n")


def _read_lines(path: Path) -> list[str]:
    """Complete lines of a file; none if it is missing. A killed run may have left an incomplete last line."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _truncate_lines(path: Path, last: int) -> None:
    """Remove the lines of later steps and of the finish; lines without a step stay."""
    lines = [line for line in _read_lines(path) if 0 <= _read_step(line) <= last]
    replace_atomically(path, "".join(lines).encode())


def _find_last_start(path: Path) -> int:
    """Highest recorded attempt of a start action, including those of a start that was killed."""
    rows = [json.loads(line) for line in _read_lines(path)]
    return max((row["attempt"] for row in rows if row["type"] == "span" and row["step"] == 0), default=0)


def _read_step(line: str) -> int:
    try:
        return int(json.loads(line).get("step", 0))
    except (ValueError, TypeError, AttributeError):
        return -1  # malformed line


def _read_start(folder: Path) -> tuple[float, str]:
    """(start in seconds since 1970, id of the run in loggers) of the earlier run in a folder; "" without an id."""
    try:
        status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
        started_s = float(calendar.timegm(time.strptime(status["started_at"], "%Y-%m-%dT%H:%M:%SZ")))
        return started_s, str(status.get("run_id", ""))[:64]
    except (OSError, ValueError, KeyError, TypeError):
        return time.time(), ""


def _device_samples(role: str, device: DeviceBytes) -> list[tuple[str, str, str, int]]:
    """Samples of a process's GPU memory: (role, kind, statistic, bytes)."""
    return [
        (role, "device_allocated", "resident", device.allocated),
        (role, "device_allocated", "peak", device.peak_allocated),
        (role, "device_reserved", "resident", device.reserved),
        (role, "device_process", "resident", device.process),
        (role, "device_total", "resident", device.total),
    ]
