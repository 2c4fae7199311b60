"""Calls to worker processes, each with a deadline. A failed call names the process and the reason.

In: Ray actors by process. Out: results in the order of the calls, or a RunError.
Left out: the actors (worker_group.py).
"""

import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlplan.errors import RlplanError, RunError
from rlplan.runtime.cluster.liveness import Liveness
from rlplan.runtime.fault_tolerance.supervision import TRAINERS, LostGroupError, LostProcessError
from rlplan.runtime.measure.memory_meter import Measurement
from rlplan.runtime.processes.machine_speed import wait_patiently
from rlplan.spec.resolved import ResolvedLimits

PULSE_S = 2.0
"""Seconds between two liveness checks of a busy process."""

FETCH_S = 1.0
"""Seconds that fetching a finished result may take; scaled."""

REPLACED = (*TRAINERS, "scorer")
"""Workers that count as lost when they miss a deadline: they cannot answer a ping while they work. Trainers first."""

CALLS_AT_ONCE = {"rollout_engine": 8}
"""Concurrent calls that a process accepts: an engine must answer pings and pauses while requests run."""


class Pulse:
    """Liveness of a process: its progress counter and the time of its last change. question: an unanswered ping."""

    def __init__(self) -> None:
        self.question: Any = None
        self.progress: float | None = None
        self.changed_s = time.monotonic()

    def hear(self, progress: float | None) -> None:
        """Take in an answer; None when the ping failed."""
        self.question = None
        if progress is not None and progress != self.progress:
            self.progress, self.changed_s = progress, time.monotonic()

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.changed_s


class Call(NamedTuple):
    """A call in progress. restart_count: restarts of its process at that time."""

    process: str
    method: str
    reference: Any
    restart_count: int


class Calls:
    """Submits calls and gathers their results. restart_counts: number of restarts by process."""

    def __init__(self, limits: ResolvedLimits, log_folder: Path) -> None:
        self.limits, self.log_folder = limits, log_folder
        self.actors: dict[str, Any] = {}
        self.restart_counts: Counter[str] = Counter()
        self._is_closed = False
        self._asked_s = 0.0

    def submit(self, process: str, method: str, *arguments: Any) -> Call:
        """Start an unmeasured call; pass it to `gather`."""
        reference = self.actors[process].call.remote(method, *arguments)
        return Call(process, method, reference, self.restart_counts[process])

    def perform(self, process: str, method: str, *arguments: Any) -> Call:
        """Start a measured call; pass it to `gather`, which returns (result, Measurement)."""
        reference = self.actors[process].perform.remote(method, *arguments)
        return Call(process, method, reference, self.restart_counts[process])

    def is_replaced(self, lost: LostProcessError) -> bool:
        """Whether a lost process was restarted after the call that reported the loss."""
        return lost.restart_count < self.restart_counts[lost.process]

    def pids_here(self, processes: Sequence[str]) -> dict[str, int]:
        """Process ids of those processes that run on this host."""
        return {}

    def dead_service(self) -> str | None:
        """Describe a service of Ray that has ended; None while all of them live."""
        return None

    def has_ended(self, call: Call, timeout_s: float) -> bool:
        import ray

        return bool(ray.wait([call.reference], timeout=timeout_s)[0])

    def gather(self, calls: Sequence[Call], timeout_s: float) -> list[Any]:
        """Wait for the results of calls, in order. Raises: RunError with the process that failed or was too slow."""
        restart_counts = {call.process: call.restart_count for call in calls}
        try:
            return self._gather(calls, timeout_s)
        except LostProcessError as error:
            error.restart_count = restart_counts.get(error.process, self.restart_counts[error.process])
            raise

    def _gather(self, calls: Sequence[Call], timeout_s: float) -> list[Any]:
        import ray

        deadline = time.monotonic() + timeout_s
        pending = {call.reference: call for call in calls}
        pulses, liveness = dict[str, Pulse](), Liveness(self.limits.stall_timeout_s)
        while pending or self._is_closed:
            if self._is_closed:  # threads that still wait when the run ends must not delay it
                raise RunError(
                    "the run has ended",
                    where="worker group",
                    rule="no calls after the run has ended",
                    way_out="start a new run",
                )
            self._check_services([call.process for call in pending.values()])
            left_s = max(0.0, deadline - time.monotonic())
            # short waits, so that a lost or hanging process is noticed long before the deadline
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=min(left_s, PULSE_S))
            if not ready and left_s > PULSE_S:
                self._check_alive(liveness, [call.process for call in pending.values()])
                self._check_pulses(pulses, [call.process for call in pending.values()])
                continue
            if not ready:
                raise self._build_timeout(list(pending.values()), timeout_s)
            for reference in ready:
                self._check(pending.pop(reference))
        left_s = max(FETCH_S, deadline - time.monotonic())
        results: list[Any] = ray.get([call.reference for call in calls], timeout=left_s)
        return results

    def _build_timeout(self, pending: Sequence[Call], timeout_s: float) -> RunError:
        names = ", ".join(f"{call.process}.{call.method}" for call in pending)
        parts = {
            "what": f"no answer from {names} within {timeout_s:.0f} s",
            "where": names,
            "rule": "every call has a deadline, from the plan's seconds or the job's limits",
            "way_out": f"read the logs in {self.log_folder}; raise limits.action_timeout_s if the call is only slow",
        }
        lost = [call.process for kind in REPLACED for call in pending if call.process.startswith(kind)]
        return LostProcessError(process=lost[0], **parts) if lost else RunError(**parts)

    def _check_services(self, processes: Sequence[str]) -> None:
        """Check every PULSE_S that Ray itself lives: calls can hang for a minute without it. Raises: LostGroupError."""
        if (now := time.monotonic()) < self._asked_s + PULSE_S:
            return
        self._asked_s = now
        if (ended := self.dead_service()) is not None:
            raise LostGroupError(
                ended,
                where=", ".join(dict.fromkeys(processes)),
                rule="Ray must live as long as the run; all processes restart from the last checkpoint, if any",
                way_out="read Ray's logs in the system's temporary folder; free memory",
            )

    def _check_alive(self, liveness: Liveness, processes: Sequence[str]) -> None:
        """Check the processes of this host through the system. Raises: LostProcessError."""
        if failure := liveness.check(self.pids_here(processes)):
            process, state = failure
            if state == "stopped":
                raise self._build_stall(process, self.limits.stall_timeout_s, " (it is stopped)")
            raise LostProcessError(
                f"{process} is gone",
                process=process,
                where=str(self._read_log(process)),
                rule="worker processes must live as long as the run",
                way_out="read the end of its log; if the system killed it for memory, plan with less memory",
            )

    def _build_stall(self, process: str, silent_s: float, detail: str = "") -> LostProcessError:
        return LostProcessError(
            f"{process} hangs: no progress for {silent_s:.0f} s{detail}",
            process=process,
            where=str(self._read_log(process)),
            rule="a process must make progress within limits.stall_timeout_s",
            way_out="read its log; raise limits.stall_timeout_s if one engine step really takes longer",
        )

    def _read_log(self, process: str) -> Path:
        return self.log_folder / f"{process.replace('/', '-')}.log"

    def gather_measured(self, calls: Sequence[Call], timeout_s: float) -> tuple[list[Any], list[Measurement]]:
        """Wait for (results, measurements) of calls started with `perform`."""
        answers = self.gather(calls, timeout_s)
        return [result for result, _ in answers], [measurement for _, measurement in answers]

    def _check_pulses(self, pulses: "dict[str, Pulse]", processes: Sequence[str]) -> None:
        """Ping the processes that can answer while busy. Raises: LostProcessError for one without progress."""
        import ray

        limit_s = self.limits.stall_timeout_s
        for process in dict.fromkeys(processes):
            if not process.startswith(tuple(CALLS_AT_ONCE)):
                continue
            pulse = pulses.setdefault(process, Pulse())
            if pulse.question is not None and ray.wait([pulse.question], timeout=0)[0]:
                pulse.hear(_answer(pulse.question))
            if pulse.question is None:
                pulse.question = self.actors[process].pulse.remote()
            if pulse.silent_s > limit_s:
                raise self._build_stall(process, limit_s)

    def _check(self, call: Call) -> None:
        """Turn a failed call into a RunError with the end of the process's log."""
        import ray

        log = self._read_log(call.process)
        try:
            _fetch(call.reference)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(getattr(error, "cause", None), BaseException) else error
            if isinstance(cause, RlplanError):
                raise cause from error
            text = str(cause).strip().splitlines()
            raise RunError(
                f"{call.process} failed in {call.method}: {text[0] if text else type(cause).__name__}",
                where=str(log),
                rule="every call succeeds",
                way_out="read the traceback in the log",
            ) from error
        except ray.exceptions.RayError as error:
            raise LostProcessError(
                f"{call.process} is gone, in {call.method}{_last_line(log)}",
                process=call.process,
                where=str(log),
                rule="worker processes must live as long as the run",
                way_out="read the end of its log; if the system killed it for memory, plan with less memory",
            ) from error


def _answer(reference: Any) -> float | None:
    import ray

    try:
        return float(_fetch(reference))
    except ray.exceptions.RayError:
        return None  # the pending call itself reports what happened


def _fetch(reference: Any) -> Any:
    import ray

    return wait_patiently(lambda seconds: ray.get(reference, timeout=seconds), FETCH_S, ray.exceptions.GetTimeoutError)


_PROGRESS = re.compile(r"\d+%\|")
"""Matches a progress bar of tqdm."""


def _last_line(log: Path) -> str:
    """The last meaningful line of a process's log, for the message; empty when there is none."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    last = next((line.strip() for line in reversed(lines) if line.strip() and not _PROGRESS.search(line)), "")
    return f": {last[:200]}" if last else ""
