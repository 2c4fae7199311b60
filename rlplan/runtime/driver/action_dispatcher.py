"""ActionDispatcher: one action on all of its processes, and how long it may take.

In: an action, and what each of its processes is asked. Out: answers and measurements.
"""

from typing import Any

from rlplan.dataflow.schedule import Action
from rlplan.runtime.cluster.worker_group import WorkerGroup
from rlplan.runtime.measure.memory_meter import Measurement
from rlplan.spec.resolved import ResolvedLimits


class ActionDispatcher:
    def __init__(self, worker_group: WorkerGroup, limits: ResolvedLimits) -> None:
        self.worker_group, self.limits = worker_group, limits

    def deadline_s(self, action: Action) -> float:
        return self.limits.start_timeout_s if action.kind.value.startswith("start") else self.limits.action_timeout_s

    def everywhere(self, action: Action, call: Any) -> tuple[list[Any], list[Measurement]]:
        """Call every process of an action at once; `call(rank)` gives the method and its arguments."""
        calls = [self.worker_group.perform(process, *call(rank)) for rank, process in enumerate(action.processes)]
        return self.worker_group.measured(calls, self.deadline_s(action))

    def rendezvous(self, action: Action, port: int) -> tuple[str, int]:
        """Where the ranks of an action's processes meet: at the first one's, on a free port where none is given."""
        first = action.processes[0]
        address = self.worker_group.addresses[first]
        listening = self.worker_group.submit(first, "open_rendezvous", address, port)
        return address, int(self.worker_group.gather([listening], self.deadline_s(action))[0])
