"""Recorder: a predicted trace of a simulated run, and the busy time of every device group.

In: actions as they end. Out: spans and memory samples of the first steps, busy seconds of every group and phase.
Left out: memory changes within an action; samples are the ledger's values at its end.
"""

from collections import defaultdict
from collections.abc import Sequence

from rlplan.dataflow.schedule import DRIVER_PROCESS, HOST_DEVICE, Action
from rlplan.memory.ledger import LedgerRow
from rlplan.simulate.engine import Engine
from rlplan.simulate.setting import SimulationSetting
from rlplan.trace import MemorySample, Span, Trace
from rlplan.vocabulary import Phase

MAX_TRACED = 1024
"""Most processes of an action that go into the trace."""


class Recorder:
    """Collects spans, samples and busy seconds while a simulation runs."""

    def __init__(self, setting: SimulationSetting) -> None:
        self.setting = setting
        self.trace = Trace("predicted")
        self.busy_s: dict[str, float] = defaultdict(float)
        self.phase_s: dict[Phase, float] = defaultdict(float)
        self._devices = dict(setting.schedule.processes)
        self._rows: dict[tuple[str, str], list[LedgerRow]] = defaultdict(list)
        for row in setting.ledger.rows if setting.ledger else ():
            self._rows[(row.run_phase, row.action_id)].append(row)

    def add(self, action: Action, step: int, start_s: float, end_s: float) -> None:
        """Record an action that has ended."""
        self.phase_s[action.phase] += end_s - start_s
        for group in self.setting.find_groups(action):
            self.busy_s[group] += end_s - start_s
        if step <= self.setting.num_traced_steps:
            # actions of the driver have no processes of their own
            for process in action.processes[:MAX_TRACED] or (DRIVER_PROCESS,):
                device = self._devices.get(process, HOST_DEVICE)
                self.trace.spans.append(Span(action.id, step, process, device, start_s, end_s))
            self.sample(action, step, end_s)

    def sample(self, action: Action, step: int, at_s: float) -> None:
        """Record the resident and peak memory of an action's processes."""
        rows = self._rows.get(("first" if step == 1 else "steady", action.id))
        for row in rows or self._rows.get(("first", action.id)) or ():
            for statistic, num_bytes in (("resident", row.resident_bytes), ("peak", row.peak_bytes)):
                self.trace.samples.append(
                    MemorySample(
                        action.id,
                        step,
                        row.process,
                        row.device,
                        row.role.value,
                        row.kind.value,
                        statistic,
                        num_bytes,
                        at_s,
                    )
                )

    def add_engines(self, action: Action, engines: Sequence[Engine], step_ends: list[float]) -> float:
        """Record the engines' busy time: a span between two pauses, on the engine's first device.

        Returns: mean busy seconds of all engines, including those without prompts.
        """
        assert self.setting.rollouts is not None
        num_engines = self.setting.rollouts.num_engines
        group = self.setting.find_groups(action)[0]
        devices = next(layout.devices for layout in self.setting.schedule.groups if layout.name == group)
        ranks = max(1, len(devices) // num_engines)
        mean_s = sum(engine.busy_s for engine in engines) / num_engines
        self.busy_s[group] += mean_s
        until = step_ends[min(len(step_ends), self.setting.num_traced_steps) - 1]
        for index, engine in enumerate(engines):
            device = devices[min(index * ranks, len(devices) - 1)]
            for start_s, end_s in engine.intervals:
                if start_s < until:
                    step = 1 + sum(end <= start_s for end in step_ends)
                    span = Span(action.id, step, f"rollout_engine/{index}", device, start_s, end_s)
                    self.trace.spans.append(span)
        return mean_s
