"""WorkerGroup: the worker processes of a run, as Ray actors in placement groups.

A lost trainer rank cannot rejoin its process group: then all workers end, and a new group starts on the same cluster.
In: the bundle's Ray placement, and the run's cluster. Out: calls to processes by name, with deadlines and measurements.
Left out: Ray itself (ray_cluster.py), the meaning of calls (steps.py).
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlplan.dataflow.schedule import Action
from rlplan.emit.execution import ExecutionSpec
from rlplan.emit.ray import WorkerPlacement
from rlplan.errors import HostError
from rlplan.runtime.cluster.calls import CALLS_AT_ONCE, Call, Calls
from rlplan.runtime.cluster.liveness import describe_state
from rlplan.runtime.cluster.network import Hello
from rlplan.runtime.cluster.ray_cluster import STOP_S, Cluster, is_ray_up, kill
from rlplan.runtime.measure.memory_meter import Measurement
from rlplan.runtime.processes.child_processes import add_descendants, find_process, is_copy
from rlplan.runtime.processes.machine_speed import scale_seconds

_WORKER_CLASSES = {
    "policy_trainer": "rlplan.runtime.workers.trainer.policy_trainer:PolicyTrainer",
    "reward_trainer": "rlplan.runtime.workers.trainer.reward_trainer:RewardTrainer",
    "value_trainer": "rlplan.runtime.workers.trainer.value_trainer:ValueTrainer",
    "rollout_engine": "rlplan.runtime.workers.engine.rollout_engine:RolloutEngine",
    "scorer": "rlplan.runtime.workers.scorer:Scorer",
}


class WorkerGroup(Calls):
    """The workers of a run. `close` always works, also during an unfinished start.

    pids_outside_ray: lists the driver's children that are neither workers nor Ray's.
    """

    def __init__(self, spec: ExecutionSpec, log_folder: Path, cluster: Cluster) -> None:
        """Prepare a group without processes. cluster: the run's cluster, which outlives its workers."""
        super().__init__(spec.job.limits, log_folder)
        self.spec, self.cluster = spec, cluster
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
        """List this host's processes that are gone. When one rank dies, the failures of others may arrive first."""
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
        """Stop every worker, on this host by its pid, and wait until they are gone. The cluster stays.

        If a service of Ray has died, the workers are left: the cluster's end takes them with it.
        """
        import psutil

        self._is_closed = True
        if is_ray_up() and self.dead_service() is None:
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
        from rlplan.runtime.cluster.network import own_addresses

        local = own_addresses()
        return [pid for process, pid in self.pids.items() if pid and self.addresses[process] in local]

    def pids_here(self, processes: Sequence[str]) -> dict[str, int]:
        here = self._here()
        return {process: pid for process in processes if (pid := self.pids.get(process, 0)) in here}

    def dead_service(self) -> str | None:
        return self.cluster.dead_service()


def _unreadable(process: str, hello: Hello) -> HostError:
    return HostError(
        f"{hello.missing[0]} does not exist on host {hello.address}, where {process} runs",
        where="policy.path, rollout.base_path",
        rule="every host of a cluster reads the model at the same path",
        way_out="put it on a shared file system, or copy it to the same path on each host",
    )
