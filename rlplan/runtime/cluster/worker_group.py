"""WorkerGroup: the worker processes of a run as Ray actors in one placement group.

In: the bundle's Ray placement. Out: calls on processes by name, each with a deadline, each measured.
Left out: what the calls mean (steps.py). An actor is never restarted: a lost trainer rank cannot rejoin its process
group.
"""

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplan.emit.execution import ExecutionSpec
from rlplan.emit.ray import WorkerPlacement
from rlplan.errors import HostError, RlplanError, RunError
from rlplan.runtime.cluster.network import Hello
from rlplan.runtime.cluster.ray_cluster import Cluster
from rlplan.runtime.fault_tolerance.supervision import TRAINERS, LostProcessError
from rlplan.runtime.measure.memory_meter import Measurement
from rlplan.runtime.processes.child_processes import child_processes, find_process, send_signal, with_their_children
from rlplan.runtime.processes.machine_speed import patiently, scaled

if TYPE_CHECKING:
    import psutil

PULSE_S = 2.0
"""Seconds between two liveness checks of a busy process."""

STOP_S, FETCH_S = 5.0, 1.0
"""How long processes get to go by themselves before they are killed, and an answer that is there, to come; scaled."""

_WORKER_CLASSES = {
    "policy_trainer": "rlplan.runtime.workers.trainer.policy_trainer:PolicyTrainer",
    "value_trainer": "rlplan.runtime.workers.trainer.value_trainer:ValueTrainer",
    "rollout_engine": "rlplan.runtime.workers.engine.rollout_engine:RolloutEngine",
    "scorer": "rlplan.runtime.workers.scorer:Scorer",
}

_CALLS_AT_ONCE = {"rollout_engine": 8}
"""How many calls a process hears at the same time: an engine is paused and asked while others wait for completions."""


class Pulse:
    """Liveness of a process: its progress counter and when it last changed. question: a ping not answered yet."""

    def __init__(self) -> None:
        self.question: Any = None
        self.progress: float | None = None
        self.changed_s = time.monotonic()

    def hear(self, progress: float | None) -> None:
        """An answer; None where there was none."""
        self.question = None
        if progress is not None and progress != self.progress:
            self.progress, self.changed_s = progress, time.monotonic()

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.changed_s


class WorkerGroup:
    """The workers of a run. `close` always works, also half-way through the start.

    restart_counts: restarts of each process. pids_outside_ray: asks for the driver's children that are neither workers
    nor Ray's.
    """

    def __init__(self, spec: ExecutionSpec, log_folder: Path, address: str | None = None) -> None:
        """address: of a running Ray cluster to join; None starts Ray on this host."""
        self.spec, self.log_folder = spec, log_folder
        self.cluster = Cluster(spec.ray, address)
        self.actors: dict[str, Any] = {}
        self.pids: dict[str, int] = {}
        self.addresses: dict[str, str] = {}
        self.restart_counts: Counter[str] = Counter()
        self._restart_count_of_call: dict[Any, int] = {}
        self.pids_outside_ray: Callable[[], list[int]] = list
        self._children: list[psutil.Process] = []
        self._foreign_pids = {child.pid for child in child_processes()}
        self._is_closed = False

    def start(self) -> None:
        """Start Ray, reserve the placement group and bring the processes up. Raises: HostError, RunError."""
        timeout_s = self.spec.job.limits.start_timeout_s
        self.cluster.start(timeout_s)
        for worker in self.spec.ray.workers:
            self.actors[worker.process] = self._make_actor(worker)
        self._greet(list(self.actors))

    def submit(self, process: str, method: str, *arguments: Any) -> tuple[str, str, Any]:
        """Begin an unmeasured call; hand the result to `gather`."""
        return self._begun(process, method, self.actors[process].call.remote(method, *arguments))

    def perform(self, process: str, method: str, *arguments: Any) -> tuple[str, str, Any]:
        """Begin a measured call; hand the result to `gather`, which gives (result, Measurement)."""
        return self._begun(process, method, self.actors[process].perform.remote(method, *arguments))

    def _begun(self, process: str, method: str, reference: Any) -> tuple[str, str, Any]:
        self._restart_count_of_call[reference] = self.restart_counts[process]
        return process, method, reference

    def is_replaced(self, lost: LostProcessError) -> bool:
        """Whether a process that was lost has been restarted since the call that found it lost."""
        return lost.restart_count < self.restart_counts[lost.process]

    def has_ended(self, call: tuple[str, str, Any], timeout_s: float) -> bool:
        import ray

        return bool(ray.wait([call[2]], timeout=timeout_s)[0])

    def gather(self, calls: Sequence[tuple[str, str, Any]], timeout_s: float) -> list[Any]:
        """Results of calls in order. Raises: RunError naming the process that failed or did not answer in time."""
        restart_counts = {
            process: self._restart_count_of_call.pop(reference, self.restart_counts[process])
            for process, _, reference in calls
        }
        try:
            return self._gather(calls, timeout_s)
        except LostProcessError as error:
            error.restart_count = restart_counts.get(error.process, self.restart_counts[error.process])
            raise

    def _gather(self, calls: Sequence[tuple[str, str, Any]], timeout_s: float) -> list[Any]:
        import ray

        deadline = time.monotonic() + timeout_s
        pending = {reference: (process, method) for process, method, reference in calls}
        pulses: dict[str, Pulse] = {}
        while pending or self._is_closed:
            if self._is_closed:  # also for threads that were waiting when the run ended: they must not hold it up
                raise RunError(
                    "the run has ended",
                    where="worker group",
                    rule="no calls after the run has ended",
                    way_out="start a new run",
                )
            left_s = max(0.0, deadline - time.monotonic())
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=min(left_s, PULSE_S))
            if not ready and left_s > PULSE_S:
                self._check_pulses(pulses, [process for process, _ in pending.values()])
                continue
            if not ready:
                names = ", ".join(f"{process}.{method}" for process, method in pending.values())
                trainers = [process for process, _ in pending.values() if process.startswith(TRAINERS)]
                raise (partial(LostProcessError, process=trainers[0]) if trainers else RunError)(
                    f"no answer from {names} within {timeout_s:.0f} s",
                    where=names,
                    rule="every call has a deadline, of the plan's seconds or of the job (limits)",
                    way_out=f"read the logs in {self.log_folder}; of what is only slow raise limits.action_timeout_s",
                )
            for reference in ready:
                process, method = pending.pop(reference)
                self._check(process, method, reference)
        left_s = max(FETCH_S, deadline - time.monotonic())
        results: list[Any] = ray.get([reference for _, _, reference in calls], timeout=left_s)
        return results

    def restart(self, process: str) -> None:
        """Kill a process, wherever it is, and start it anew in the same place, empty. Raises: HostError, RunError."""
        import psutil
        import ray

        ray.kill(self.actors[process], no_restart=True)
        if self.pids[process] in self._here() and psutil.pid_exists(self.pids[process]):
            old = psutil.Process(self.pids[process])
            send_signal(old, signal.SIGKILL)  # one that hangs does not hear Ray
            psutil.wait_procs([old], timeout=scaled(STOP_S))
        (worker,) = [worker for worker in self.spec.ray.workers if worker.process == process]
        self.actors[process] = self._make_actor(worker)
        self.restart_counts[process] += 1
        self._greet([process])

    def _greet(self, processes: Sequence[str]) -> None:
        """Wait until processes are up, and note where."""
        paths = [self.spec.job.policy.path]
        calls = [(process, "hello", self.actors[process].hello.remote(paths)) for process in processes]
        for process, hello in zip(processes, self.gather(calls, self.spec.job.limits.start_timeout_s), strict=True):
            self.pids[process], self.addresses[process] = hello.pid, hello.address
            if hello.missing:
                raise _unreadable(process, hello)

    def _check_pulses(self, pulses: "dict[str, Pulse]", processes: Sequence[str]) -> None:
        """Of processes that answer while busy. Raises: LostProcessError for one that does not."""
        import ray

        limit_s = self.spec.job.limits.stall_timeout_s
        for process in dict.fromkeys(processes):
            if not process.startswith(tuple(_CALLS_AT_ONCE)):
                continue
            pulse = pulses.setdefault(process, Pulse())
            if pulse.question is not None and ray.wait([pulse.question], timeout=0)[0]:
                pulse.hear(_answer(pulse.question))
            if pulse.question is None:
                pulse.question = self.actors[process].pulse.remote()
            if pulse.silent_s > limit_s:
                raise LostProcessError(
                    f"{process} hangs: no sign of progress for {limit_s:.0f} s",
                    process=process,
                    where=str(self.log_folder / f"{process.replace('/', '-')}.log"),
                    rule="a process must make progress within limits.stall_timeout_s",
                    way_out="read its log; raise limits.stall_timeout_s if one step of the engine really takes longer",
                )

    def measured(self, calls: Sequence[tuple[str, str, Any]], timeout_s: float) -> tuple[list[Any], list[Measurement]]:
        """(results, measurements) of calls begun with `perform`."""
        answers = self.gather(calls, timeout_s)
        return [result for result, _ in answers], [measurement for _, measurement in answers]

    def lost(self) -> list[str]:
        """Processes on this host that are gone: when one rank dies the others fail, and may be heard first."""
        import psutil

        here = self._here()
        return [
            process
            for process, pid in self.pids.items()
            if pid in here and not (psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
        ]

    def system_bytes(self) -> int | None:
        """Resident memory of Ray's own processes on this host; None where Ray is not this run's."""
        import psutil

        if self.cluster.address is not None:
            return None
        mine = {*self.pids.values(), *with_their_children({*self.pids_outside_ray(), *self._foreign_pids})}
        total = 0
        for child in self._remember_children():
            try:
                if child.pid not in mine:
                    total += child.memory_info().rss
            except psutil.Error:
                continue
        return total

    def close(self) -> None:
        """End every process that this run started, by its id, and wait until they are gone."""
        import psutil

        self._is_closed = True
        self._remember_children()
        self._children += [process for process in map(find_process, self._here()) if process is not None]
        # In a thread of its own, for Ray's own end has no deadline.
        ending = threading.Thread(target=self._leave, daemon=True)
        ending.start()
        ending.join(scaled(STOP_S))
        _, alive = psutil.wait_procs(self._children, timeout=scaled(STOP_S / 2))
        for child in alive:
            send_signal(child, signal.SIGKILL)
        psutil.wait_procs(alive, timeout=scaled(STOP_S / 2))
        self.actors.clear()

    def _leave(self) -> None:
        """End the processes on every host, then leave or end Ray."""
        import ray

        if ray.is_initialized() and self.cluster.address is not None:
            for actor in self.actors.values():
                ray.kill(actor)
        self.cluster.release()

    def _make_actor(self, worker: WorkerPlacement) -> Any:
        import ray

        from rlplan.runtime.workers.worker import WorkerProcess

        actor = ray.remote(WorkerProcess).options(
            num_cpus=worker.num_cpus,
            num_gpus=worker.num_gpus,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=_CALLS_AT_ONCE.get(worker.worker, 1),
            runtime_env={"env_vars": worker.environment},
            scheduling_strategy=self.cluster.strategy(worker.bundle),
        )
        if worker.worker == "scorer":
            extra: Any = worker.role.value
        else:
            extra = (self.spec.vllm if worker.worker == "rollout_engine" else self.spec.deepspeed)[worker.role]
        return actor.remote(
            _WORKER_CLASSES[worker.worker],
            worker.process,
            str(self.log_folder.resolve()),
            self.spec.job,
            extra,
            worker.num_threads,
        )

    def _check(self, process: str, method: str, reference: Any) -> None:
        """Turn a failed call into a RunError with the end of the process's log."""
        import ray

        log = self.log_folder / f"{process.replace('/', '-')}.log"
        try:
            _fetch(reference)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(getattr(error, "cause", None), BaseException) else error
            if isinstance(cause, RlplanError):
                raise cause from error
            text = str(cause).strip().splitlines()
            raise RunError(
                f"{process} failed in {method}: {text[0] if text else type(cause).__name__}",
                where=str(log),
                rule="every call succeeds",
                way_out="read the whole traceback in the log",
            ) from error
        except ray.exceptions.RayError as error:
            raise LostProcessError(
                f"{process} is gone, in {method}{_last_line(log)}",
                process=process,
                where=str(log),
                rule="worker processes must live as long as the run",
                way_out="look at the end of its log; if the system killed it for memory, plan for less",
            ) from error

    def _here(self) -> list[int]:
        """Process ids of the workers on this host; on a cluster that runs already they are not our children."""
        from rlplan.runtime.cluster.network import own_addresses

        mine = own_addresses()
        return [pid for process, pid in self.pids.items() if self.addresses[process] in mine]

    def _remember_children(self) -> "list[psutil.Process]":
        """All processes that this run started, kept so that those whose parent died are still known."""
        known = self._foreign_pids | {child.pid for child in self._children}
        self._children += [child for child in child_processes() if child.pid not in known]
        return self._children


def _answer(reference: Any) -> float | None:
    import ray

    try:
        return float(_fetch(reference))
    except ray.exceptions.RayError:
        return None  # the call that waits says what happened


def _fetch(reference: Any) -> Any:
    import ray

    return patiently(lambda seconds: ray.get(reference, timeout=seconds), FETCH_S, ray.exceptions.GetTimeoutError)


def _unreadable(process: str, hello: Hello) -> HostError:
    return HostError(
        f"{hello.missing[0]} is not there on host {hello.address}, where {process} runs",
        where="policy.path",
        rule="every host of a cluster reads the model at the same path",
        way_out="put it on a file system that the hosts share, or copy it to the same path on each host",
    )


def _last_line(log: Path) -> str:
    """The last line that says something in a process's log, for the message; nothing where there is none."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f": {last[:200]}" if last else ""
