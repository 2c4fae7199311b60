"""Bytes of the search's oracle at every moment of a schedule, added up process by process."""

from math import ceil
from typing import Any

from rlplan.dataflow.schedule import Action, Schedule
from rlplan.memory.machine.host import WORKER_HOST_BYTES
from rlplan.memory.machine.spread import spread
from rlplan.memory.predict import host_bytes
from rlplan.planner.setting import GpuSetting
from rlplan.vocabulary import ActionKind

PARTS = {"start": "start", "steady": "step", "finish": "finish"}
Bytes = tuple[list[int], list[int], list[int]]
"""Bytes at each run phase: expected and worst-case bytes of the device, and bytes of the host."""


PASSES = (ActionKind.TRAIN_FORWARD_BACKWARD, ActionKind.SCORE, ActionKind.OPTIMIZER_STEP)


class PhaseBytes:
    """Every moment of a schedule, walked as it happens: who is inside an action, and who waits after which."""

    def __init__(self, schedule: Schedule, setting: GpuSetting, factor: float) -> None:
        """factor: measured over predicted peaks of passes, at the high end."""
        self.factor = factor
        devices = dict(schedule.processes)
        self.names = list(devices)
        self.rows: list[tuple[str, str, dict[str, tuple[str, Action, bool]]]] = []
        groups = {device: (i, group) for i, group in enumerate(schedule.groups) for device in group.devices}
        self.home, self.alike = {}, {}
        for name, device in devices.items():
            index, group = groups[device]
            per_host = setting.get_pool(group.name).gpus_per_host
            self.home[name] = f"host:{index}" if setting.num_gpus > per_host else "host:0"
            self.alike[name] = min(len(group.devices), per_host)
        now: dict[str, tuple[str, Action, bool]] = {}
        parts = (("start", schedule.start), *(("steady", schedule.step),) * 2, ("finish", schedule.finish))
        for run_phase, actions in parts:
            for action in actions:
                inside = dict(now)
                for other in actions:
                    pairs = {frozenset((a, b)) for part, a, b in schedule.concurrent if part == PARTS[run_phase]}
                    if frozenset((action.id, other.id)) in pairs:
                        inside.update(dict.fromkeys(other.processes, (run_phase, other, True)))
                inside.update(dict.fromkeys(action.processes, (run_phase, action, True)))
                for device in {devices[name] for name in action.processes}:
                    for host in set(self.home.values()):
                        self.rows.append((device, host, dict(inside)))
                now.update(dict.fromkeys(action.processes, (run_phase, action, False)))
        self.devices, self.hosts = [device for device, _, _ in self.rows], [host for _, host, _ in self.rows]
        self.capacities = [setting.get_pool(groups[device][1].name).capacity for device in self.devices]
        self.on = devices

    def nothing(self) -> Bytes:
        """No bytes at any moment."""
        return [0] * len(self.rows), [0] * len(self.rows), [0] * len(self.rows)

    def add(self, total: Bytes, name: str, usual: Any, longest: Any) -> None:
        """Add a process where it is at each moment."""
        known: dict[tuple[str, str, bool], tuple[int, int, int, int]] = {}
        for index, (device, host, there) in enumerate(self.rows):
            if name not in there:
                continue
            run_phase, action, inside = there[name]
            key = run_phase, action.id, inside
            if key not in known:
                sizes = usual.predict_peak(action, run_phase) if inside else usual.predict_resident(action, run_phase)
                most = longest.predict_peak(action, run_phase) if inside else sizes
                high = sum(spread(kind, size)[1] for kind, size in most.items())
                if inside and action.kind in PASSES and not name.startswith("rollout"):
                    high = max(high, ceil(self.factor * sum(sizes.values())))
                lies_there = host_bytes(usual, action, run_phase, WORKER_HOST_BYTES)
                once = usual.predict_first_host(action, run_phase)
                known[key] = sum(sizes.values()), high, sum(lies_there.values()), sum(once.values())
            expected, high, on_host, of_first = known[key]
            if self.on[name] == device:
                total[0][index] += expected
                total[1][index] += high
            if self.home[name] == host:
                total[2][index] += on_host * self.alike[name] + of_first
