"""Crew: the worker processes of a run as Ray actors in one placement group.

In: the bundle's Ray placement. Out: calls on processes by name, each with a deadline, each measured.
Left out: what the calls mean (steps.py). An actor is never restarted: a lost trainer rank cannot rejoin its group.
"""

import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlplan.emit.execution import ExecutionSpec
from rlplan.emit.ray import RayPlacement, WorkerPlacement
from rlplan.errors import HostError, RlplanError, RunError
from rlplan.runtime.workers.memory_meter import Measurement

STOP_S = 5.0
"""How long processes get to go by themselves before they are killed."""


_WORKER_CLASSES = {
    "policy_trainer": "rlplan.runtime.workers.policy_trainer:PolicyTrainer",
    "value_trainer": "rlplan.runtime.workers.value_trainer:ValueTrainer",
    "rollout_engine": "rlplan.runtime.workers.rollout_engine:RolloutEngine",
    "scorer": "rlplan.runtime.workers.scorer:Scorer",
}

_CALLS_AT_ONCE = {"rollout_engine": 8}
"""How many calls a process hears at the same time: an engine is paused and asked while others wait for completions."""


class Crew:
    """The workers of a run. `close` always works, also half-way through the start."""

    def __init__(self, spec: ExecutionSpec, log_folder: Path) -> None:
        self.spec, self.log_folder = spec, log_folder
        self.actors: dict[str, Any] = {}
        self.placement_group: Any = None
        self.pids: dict[str, int] = {}
        self._children: list[Any] = []
        self._strangers = {child.pid for child in _children()}
        self._is_closed = False

    def start(self) -> None:
        """Start Ray, reserve the placement group and bring the processes up. Raises: HostError, RunError."""
        _start_ray(self.spec.ray)
        self.placement_group = _reserve(self.spec.ray, self.spec.job.limits.start_timeout_s)
        for worker in self.spec.ray.workers:
            self.actors[worker.process] = self._make_actor(worker)
        calls = [(process, "ready", actor.ready.remote()) for process, actor in self.actors.items()]
        self.pids = dict(zip(self.actors, self.gather(calls, self.spec.job.limits.start_timeout_s), strict=True))

    def submit(self, process: str, method: str, *arguments: Any) -> tuple[str, str, Any]:
        """Begin an unmeasured call; hand the result to `gather`."""
        return process, method, self.actors[process].call.remote(method, *arguments)

    def perform(self, process: str, method: str, *arguments: Any) -> tuple[str, str, Any]:
        """Begin a measured call; hand the result to `gather`, which gives (result, Measurement)."""
        return process, method, self.actors[process].perform.remote(method, *arguments)

    def gather(self, calls: Sequence[tuple[str, str, Any]], timeout_s: float) -> list[Any]:
        """Results of calls in order. Raises: RunError naming the process that failed or did not answer in time."""
        import ray

        if self._is_closed:
            raise RunError("the run has ended", where="crew", rule="no calls after the end", way_out="start a new run")
        deadline = time.monotonic() + timeout_s
        pending = {reference: (process, method) for process, method, reference in calls}
        while pending:
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                names = ", ".join(f"{process}.{method}" for process, method in pending.values())
                raise RunError(
                    f"no answer from {names} within {timeout_s:.0f} s",
                    where=names,
                    rule="every call has a deadline (limits)",
                    way_out=f"read the logs in {self.log_folder}",
                )
            for reference in ready:
                process, method = pending.pop(reference)
                self._check(process, method, reference)
        return ray.get([reference for _, _, reference in calls], timeout=max(1.0, deadline - time.monotonic()))

    def measured(self, calls: Sequence[tuple[str, str, Any]], timeout_s: float) -> tuple[list[Any], list[Measurement]]:
        """(results, measurements) of calls begun with `perform`."""
        answers = self.gather(calls, timeout_s)
        return [result for result, _ in answers], [measurement for _, measurement in answers]

    def system_bytes(self) -> int:
        """Resident memory of Ray's own processes on this host."""
        import psutil

        mine = set(self.pids.values())
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
        # In a thread of its own, for Ray's own end has no deadline.
        ending = threading.Thread(target=_shut_ray_down, daemon=True)
        ending.start()
        ending.join(STOP_S)
        _, alive = psutil.wait_procs(self._children, timeout=STOP_S / 2)
        for child in alive:
            _signal(child, signal.SIGKILL)
        psutil.wait_procs(alive, timeout=STOP_S / 2)
        self.actors.clear()

    def _make_actor(self, worker: WorkerPlacement) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from rlplan.runtime.workers.worker import WorkerProcess

        actor = ray.remote(WorkerProcess).options(
            num_cpus=worker.num_cpus,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=_CALLS_AT_ONCE.get(worker.worker, 1),
            runtime_env={"env_vars": worker.environment},
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self.placement_group, placement_group_bundle_index=worker.bundle
            ),
        )
        extra: dict[str, Callable[[], Any]] = {
            "policy_trainer": lambda: self.spec.deepspeed[worker.role],
            "value_trainer": lambda: self.spec.deepspeed[worker.role],
            "scorer": lambda: worker.role.value,
            "rollout_engine": lambda: self.spec.vllm[worker.role],
        }
        return actor.remote(
            _WORKER_CLASSES[worker.worker],
            worker.process,
            str(self.log_folder.resolve()),
            self.spec.job,
            extra[worker.worker](),
            worker.num_threads,
        )

    def _check(self, process: str, method: str, reference: Any) -> None:
        """Turn a failed call into a RunError with the end of the process's log."""
        import ray

        log = self.log_folder / f"{process.replace('/', '-')}.log"
        try:
            ray.get(reference, timeout=1.0)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(getattr(error, "cause", None), BaseException) else error
            if isinstance(cause, RlplanError):
                raise cause from error
            text = str(cause).strip().splitlines()
            raise RunError(
                f"{process} failed in {method}: {text[0] if text else type(cause).__name__}",
                where=str(log),
                rule="every call succeeds",
                way_out="the log has the whole story",
            ) from error
        except ray.exceptions.RayError as error:
            raise RunError(
                f"{process} is gone, in {method}{_last_line(log)}",
                where=str(log),
                rule="a process lives as long as the run",
                way_out="look at the end of its log; if the system killed it for memory, plan for less",
            ) from error

    def _remember_children(self) -> list[Any]:
        """All processes that this run started, kept so that those whose parent died are still known."""
        known = self._strangers | {child.pid for child in self._children}
        self._children += [child for child in _children() if child.pid not in known]
        return self._children


def _start_ray(placement: RayPlacement) -> None:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A thread that outlives the run must not start another Ray by asking the one that is gone.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    # Ray listens on every interface; a token that only this run knows keeps others out.
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    import ray

    try:
        ray.init(
            address="local",
            num_cpus=int(sum(bundle.get("CPU", 0) for bundle in placement.bundles)),
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=placement.object_store_memory,
            log_to_driver=False,
            logging_level="ERROR",
            _node_ip_address="127.0.0.1",
        )
    except Exception as error:  # Ray raises bare exceptions too
        raise HostError(
            f"Ray did not start: {(str(error).splitlines() or [type(error).__name__])[0]}",
            where="ray.init",
            rule="a local Ray node on 127.0.0.1",
            way_out="end other Ray nodes on this host (`ray stop`); `rlplan doctor` looks at memory and /dev/shm",
        ) from error


def _reserve(placement: RayPlacement, timeout_s: float) -> Any:
    import ray
    from ray.util.placement_group import placement_group

    group = placement_group(list(placement.bundles), strategy=placement.strategy)
    if not group.wait(timeout_seconds=min(timeout_s, 60)):
        raise HostError(
            f"the placement group {list(placement.bundles)} is not satisfied",
            where="ray.json",
            rule=f"the cluster offers {ray.cluster_resources()}",
            way_out="plan for the resources that are there",
        )
    return group


def _children() -> list[Any]:
    """All processes below this one."""
    import psutil

    return list(psutil.Process().children(recursive=True))


def _shut_ray_down() -> None:
    import ray

    if ray.is_initialized():
        ray.shutdown()


def _last_line(log: Path) -> str:
    """The last line that says something in a process's log, for the message; nothing where there is none."""
    try:
        lines = [
            line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()
        ]
    except OSError:
        return ""
    return f": {lines[-1][:200]}" if lines else ""


def _signal(process: Any, number: signal.Signals) -> None:
    import psutil

    try:
        process.send_signal(number)
    except psutil.Error:
        return
