"""Calls: one action on all of its processes, and how long it may take.

In: an action, and what each of its processes is asked. Out: answers and measurements.
"""

from typing import Any

from rlplan.dataflow.schedule import Action
from rlplan.runtime.cluster.crew import Crew
from rlplan.runtime.measure.memory_meter import Measurement
from rlplan.spec.parts.conduct import LimitsSpec


class Calls:
    """See the module docstring."""

    def __init__(self, crew: Crew, limits: LimitsSpec) -> None:
        self.crew, self.limits = crew, limits

    def deadline_s(self, action: Action) -> float:
        """Seconds that an action may take."""
        return self.limits.start_timeout_s if action.kind.value.startswith("start") else self.limits.action_timeout_s

    def everywhere(self, action: Action, call: Any) -> tuple[list[Any], list[Measurement]]:
        """Call every process of an action at once; `call(rank)` gives the method and its arguments."""
        calls = [self.crew.perform(process, *call(rank)) for rank, process in enumerate(action.processes)]
        return self.crew.measured(calls, self.deadline_s(action))

    def rendezvous(self, action: Action, port: int) -> tuple[str, int]:
        """Where the ranks of an action's processes meet: at the first one's, on a free port where none is given."""
        first = action.processes[0]
        address = self.crew.addresses[first]
        listening = self.crew.submit(first, "open_rendezvous", address, port)
        return address, int(self.crew.gather([listening], self.deadline_s(action))[0])
