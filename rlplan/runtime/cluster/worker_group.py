"""WorkerGroup: the worker processes of a run, as Ray actors in placement groups, and calls to them.

A lost trainer rank cannot rejoin its process group: then all workers end, and a new group starts on the same cluster.
Each call has a deadline. A failed call names the process and the reason.
In: the bundle's Ray placement, and the run's cluster. Out: results and measurements of calls to processes by name, in
the order of the calls, or a RunError. Left out: Ray itself (ray_cluster.py), the meaning of calls (steps.py).
"""

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlplan.dataflow.schedule import Action
from rlplan.emit.execution import ExecutionSpec
from rlplan.emit.ray import WorkerPlacement
from rlplan.errors import HostError, RlplanError, RunError
from rlplan.runtime.cluster.liveness import Liveness, describe_state
from rlplan.runtime.cluster.network import Hello, own_addresses
from rlplan.runtime.cluster.ray_cluster import STOP_S, Cluster, is_ray_up, kill
from rlplan.runtime.fault_tolerance.supervision import TRAINERS, LostGroupError, LostProcessError
from rlplan.runtime.measure.memory_meter import Measurement
from rlplan.runtime.processes.child_processes import add_descendants, find_process, is_copy
from rlplan.runtime.processes.machine_speed import scale_seconds, wait_patiently

_WORKER_CLASSES = {
    "policy_trainer": "rlplan.runtime.workers.trainer.policy_trainer:PolicyTrainer",
    "reward_trainer": "rlplan.runtime.workers.trainer.reward_trainer:RewardTrainer",
    "value_trainer": "rlplan.runtime.workers.trainer.value_trainer:ValueTrainer",
    "rollout_engine": "rlplan.runtime.workers.engine.rollout_engine:RolloutEngine",
    "scorer": "rlplan.runtime.workers.scorer:Scorer",
}

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
        """Record an answer. progress: None when the ping failed."""
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


class WorkerGroup:
    """The workers of a run. `close` always works, also during an unfinished start.

    restart_counts: number of restarts by process. pids_outside_ray: lists the driver's children that are neither
    workers nor Ray's.
    """

    def __init__(self, spec: ExecutionSpec, log_folder: Path, cluster: Cluster) -> None:
        """Prepare a group without processes. cluster: the run's cluster, which outlives its workers."""
        self.spec, self.cluster, self.limits, self.log_folder = spec, cluster, spec.job.limits, log_folder
        self.actors: dict[str, Any] = {}
        self.restart_counts: Counter[str] = Counter()
        self._is_closed = False
        self._asked_s = 0.0
        self.pids: dict[str, int] = {}
        self.addresses: dict[str, str] = {}
        self.pids_outside_ray: Callable[[], list[int]] = list

    def start(self) -> None:
        """Start Ray, reserve devices and start the processes. Raises: HostError, RunError."""
        self.cluster.reserve(self.spec.ray, self.limits.start_timeout_s)
        for worker in self.spec.ray.workers:
            self.actors[worker.process] = self._make_actor(worker)
        self._greet(list(self.actors))

    def restart(self, process: str) -> None:
        """Kill a process on any host, and start an empty one in its place. Raises: HostError, RunError."""
        import ray

        ray.kill(self.actors[process], no_restart=True)
        old = find_process(self.pids[process]) if self.pids[process] in self._here() else None
        if old is not None:
            kill([old])  # Ray cannot kill a process that hangs
        self.pids[process] = 0  # no process until the new one has greeted
        (worker,) = [worker for worker in self.spec.ray.workers if worker.process == process]
        self.actors[process] = self._make_actor(worker)
        self.restart_counts[process] += 1
        self._greet([process])

    def deadline_s(self, action: Action) -> float:
        return self.limits.start_timeout_s if action.kind.value.startswith("start") else self.limits.action_timeout_s

    def everywhere(self, action: Action, call: Callable[..., Sequence[Any]]) -> tuple[list[Any], list[Measurement]]:
        """Call every process of an action concurrently; `call(rank)` returns the method and its arguments."""
        calls = [self.perform(process, *call(rank)) for rank, process in enumerate(action.processes)]
        return self.gather_measured(calls, self.deadline_s(action))

    def rendezvous(self, action: Action, port: int) -> tuple[str, int]:
        """Open a rendezvous for an action's ranks at the first one's address. port: 0 takes a free one."""
        first = action.processes[0]
        listening = self.submit(first, "open_rendezvous", self.addresses[first], port)
        return self.addresses[first], int(self.gather([listening], self.deadline_s(action))[0])

    def _greet(self, processes: Sequence[str]) -> None:
        """Wait until processes are up, and note their pids and addresses. Raises: HostError, RunError."""
        job = self.spec.job
        paths = [path for path in (job.policy.path, job.rollout.base_path) if path is not None]
        greetings = [(name, "hello", self.actors[name].hello.remote(paths)) for name in processes]
        calls = [Call(*greeting, self.restart_counts[greeting[0]]) for greeting in greetings]
        for process, hello in zip(processes, self.gather(calls, self.limits.start_timeout_s), strict=True):
            self.pids[process], self.addresses[process] = hello.pid, hello.address
            if hello.missing:
                raise _unreadable(process, hello)

    def lost(self) -> list[str]:
        """List this host's processes that are gone: when one rank dies, failures of other ranks may arrive first."""
        here = self._here()
        return [process for process, pid in self.pids.items() if pid in here and describe_state(pid) == "gone"]

    def system_bytes(self) -> int | None:
        """Resident bytes of Ray's own processes on this host; None for a joined cluster."""
        import psutil

        if self.cluster.address is not None:
            return None
        not_ray = {*self.pids.values(), *add_descendants({*self.pids_outside_ray(), *self.cluster.foreign_pids})}
        total = 0
        for child in self.cluster.list_children():
            try:
                # the driver forks for each program that it judges; such a copy is not Ray's
                if child.pid not in not_ray and not is_copy(child):
                    total += child.memory_info().rss
            except psutil.Error:
                continue
        return total

    def close(self) -> None:
        """Stop every worker, and wait until those of this host are gone. The cluster stays.

        If a service of Ray has died, the workers are left running: `Cluster.close` kills them.
        """
        import psutil

        self._is_closed = True
        if is_ray_up() and self.cluster.dead_service() is None:
            workers = [process for process in map(find_process, add_descendants(self._here())) if process]
            # ray.kill has no deadline, so it runs in a thread.
            ending = threading.Thread(target=self._end_actors, daemon=True)
            ending.start()
            ending.join(scale_seconds(STOP_S))
            kill(psutil.wait_procs(workers, timeout=scale_seconds(STOP_S / 2))[1])
        self.actors.clear()

    def _end_actors(self) -> None:
        import ray

        for actor in list(self.actors.values()):
            ray.kill(actor)

    def _make_actor(self, worker: WorkerPlacement) -> Any:
        import ray

        from rlplan.runtime.workers.worker import WorkerProcess

        actor = ray.remote(WorkerProcess).options(
            num_cpus=worker.num_cpus,
            num_gpus=worker.num_gpus,
            max_restarts=0,  # a worker that Ray restarts by itself would have lost its states unnoticed
            max_task_retries=0,
            max_concurrency=CALLS_AT_ONCE.get(worker.worker, 1),
            runtime_env={"env_vars": worker.environment},
            scheduling_strategy=self.cluster.strategy(worker.bundle),
        )
        if worker.worker == "scorer":
            extra: Any = worker.role.value
        else:
            extra = (self.spec.vllm if worker.worker == "rollout_engine" else self.spec.deepspeed)[worker.role]
        is_scalar = worker.worker == "policy_trainer" and self.spec.job.algorithm.declaration.trains_scalar
        return actor.remote(
            _WORKER_CLASSES["reward_trainer" if is_scalar else worker.worker],
            worker.process,
            str(self.log_folder.resolve()),
            self.spec.job,
            extra,
            worker.num_threads,
        )

    def _here(self) -> list[int]:
        """Process ids of the workers on this host; on a joined cluster they are not the driver's children."""
        local = own_addresses()
        return [pid for process, pid in self.pids.items() if pid and self.addresses[process] in local]

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
        # every call has ended: the results only have to be fetched, even if the deadline has just passed
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
        if (ended := self.cluster.dead_service()) is not None:
            raise LostGroupError(
                ended,
                where=", ".join(dict.fromkeys(processes)),
                rule="Ray must live as long as the run; all processes restart from the last checkpoint, if any",
                way_out="read Ray's logs in the system's temporary folder; free memory",
            )

    def _check_alive(self, liveness: Liveness, processes: Sequence[str]) -> None:
        """Check the processes of this host through the system. Raises: LostProcessError."""
        here = self._here()
        pids = {process: pid for process in processes if (pid := self.pids.get(process, 0)) in here}
        if failure := liveness.check(pids):
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


def _unreadable(process: str, hello: Hello) -> HostError:
    return HostError(
        f"{hello.missing[0]} does not exist on host {hello.address}, where {process} runs",
        where="policy.path, rollout.base_path",
        rule="every host of a cluster reads the model at the same path",
        way_out="put it on a shared file system, or copy it to the same path on each host",
    )
