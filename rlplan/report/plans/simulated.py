"""The report of a simulation, made from its trace without a plan.

In: the JSON that `rlplan simulate -o` wrote. Out: a TracedSchedule and a Page.
Left out: capacities, provenances and intervals, which a trace lacks. A process is drawn from its first sample on.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from rlplan.dataflow.schedule import HOST_GROUP, Action, DeviceGroup, RoleLayout, Schedule, Worker
from rlplan.errors import SpecError
from rlplan.memory.ledger import LedgerRow, MemoryLedger, RunPhase
from rlplan.report import style, timeline
from rlplan.report.dataframes import run_phase_of_step
from rlplan.report.plans.page import Page, PhaseRow, Tile
from rlplan.simulate.result import SimulationResult
from rlplan.trace import MemorySample, Trace
from rlplan.units import format_rate, format_seconds
from rlplan.vocabulary import ActionKind, MemoryKind, Phase, Placement, Provenance, Role, Stream

PHASES = {
    ActionKind.GENERATE: Phase.ROLLOUT,
    ActionKind.SCORE: Phase.SCORE,
    ActionKind.VERIFY: Phase.SCORE,
    ActionKind.COMPUTE_ADVANTAGES: Phase.TRAIN,
    ActionKind.TRAIN_FORWARD_BACKWARD: Phase.TRAIN,
    ActionKind.OPTIMIZER_STEP: Phase.TRAIN,
    ActionKind.SYNC_WEIGHTS: Phase.SYNC,
    ActionKind.EVALUATE: Phase.EVALUATE,
    ActionKind.CHECKPOINT: Phase.CHECKPOINT,
}
"""Phase of an action by the kind at the beginning of its id; all other kinds are switches."""


@dataclass(frozen=True)
class SimulatedPlan:
    """A simulated plan, as a TracedSchedule."""

    name: str
    result: SimulationResult
    schedule: Schedule
    ledger: MemoryLedger

    @property
    def trace(self) -> Trace:
        """Spans of the first steps. Samples are in the ledger instead, so that they do not look measured."""
        return Trace(self.result.trace.origin, self.result.trace.spans)

    @property
    def windows(self) -> tuple[timeline.Window, ...]:
        """Windows of all traced steps. The first begins with the trace, because rollouts can run ahead of any step."""
        chosen = timeline.choose_windows(timeline.phase_blocks(self))
        return (
            *(replace(window, start_s=min(span.start_s for span in self.trace.spans)) for window in chosen[:1]),
            *chosen[1:],
        )

    @property
    def steady_windows(self) -> tuple[timeline.Window, ...]:
        """Windows from the second step on, because the first lacks processes that have not acted yet."""
        blocks = [block for block in timeline.phase_blocks(self) if block.step > 1]
        return timeline.choose_windows(tuple(blocks)) or self.windows


def is_simulation(data: Any) -> bool:
    """Whether JSON data looks like the result of a simulation."""
    return isinstance(data, dict) and {"step_s", "groups", "trace", "token_staleness"} <= set(data)


def read_simulated_plan(data: dict[str, Any], path: Path) -> SimulatedPlan:
    """Convert the data of a result file. Raises: SpecError where it is damaged or of another version."""
    try:
        result = SimulationResult.parse(data)
    except (ValueError, KeyError, TypeError) as error:
        raise SpecError(
            f"the simulation is damaged or of another version ({error})",
            where=str(path),
            rule="a file from `rlplan simulate -o` of this version",
            way_out="simulate the plan again with `rlplan simulate`",
        ) from None
    schedule = _schedule(result)
    pools = zip(schedule.groups, result.groups, strict=True)
    capacities = tuple((device, use.capacity_bytes or 0) for group, use in pools for device in group.devices)
    return SimulatedPlan(path.name, result, schedule, replace(_ledger(result.trace.samples), capacities=capacities))


def find_phase(action: str) -> Phase:
    """Find the phase of an action by its id.

    >>> [find_phase(name).value for name in ("train_forward_backward/value/0", "score/reference", "wake_kv_cache")]
    ['train', 'score', 'switch']
    """
    kind = ActionKind(action.partition("/")[0])
    return PHASES.get(kind, Phase.SWITCH)


def _schedule(result: SimulationResult) -> Schedule:
    """Rebuild groups, processes and actions from a trace; devices are numbered consecutively over the groups."""
    spans = result.trace.spans
    where = {span.process: span.device for span in spans}
    kind = next((device.partition(":")[0] for device in where.values() if not device.startswith("host")), "cuda")
    # result.groups has only sizes; this order gives the device names of the trace
    groups, first = [], 0
    for use in result.groups:
        groups.append(DeviceGroup(use.name, tuple(f"{kind}:{first + rank}" for rank in range(use.num_devices))))
        first += use.num_devices
    ranks: dict[str, dict[int, str]] = defaultdict(dict)
    for process, device in where.items():
        worker, _, rank = process.rpartition("/")
        ranks[worker][int(rank)] = device
    layouts = [
        _layout(worker, group.name, tuple(devices[rank] for rank in sorted(devices)))
        for worker, devices in ranks.items()
        for group in groups
        if devices[min(devices)] in group.devices
    ]
    actions = tuple(
        Action(name, ActionKind(name.partition("/")[0]), Role.POLICY, find_phase(name), HOST_GROUP, Stream.TRAINING, ())
        for name in dict.fromkeys(span.action_id for span in spans)
    )
    placement = Placement.COLOCATED if len(groups) == 1 else Placement.DISAGGREGATED
    return Schedule(placement, tuple(groups), tuple(layouts), (), actions, ())


def _layout(worker: str, group: str, devices: tuple[str, ...]) -> RoleLayout:
    """Make the layout that yields these process names, such as policy_trainer/0 and scorer/reference/0."""
    kind, _, role = worker.partition("/")
    return RoleLayout(Role(role or Role.POLICY), cast(Worker, kind), group, devices)  # processes are named after these


def _ledger(samples: list[MemorySample]) -> MemoryLedger:
    """Convert samples of devices to rows: those of the first step, and those of the second for all later steps.

    Hosts are left out, because a sample does not say how many processes of a host it represents.
    """
    sizes: dict[tuple[Any, ...], dict[str, int]] = defaultdict(dict)
    for sample in samples:
        if sample.device.startswith("host"):
            continue
        at = (run_phase_of_step(sample.step), sample.action_id, sample.process, sample.device, sample.role, sample.kind)
        sizes[at][sample.statistic] = sample.num_bytes
    rows, order = [], dict[tuple[RunPhase, str], None]()
    for (run_phase, action, process, device, role, kind), num_bytes in sizes.items():
        order[(run_phase, action)] = None
        rows.append(
            LedgerRow(
                run_phase, action, find_phase(action), process, device, Role(role), MemoryKind(kind),
                "device",
                num_bytes.get("resident", 0), num_bytes.get("peak", 0), Provenance.DERIVED, "simulation",
            )
        )  # fmt: skip
    return MemoryLedger(tuple(rows), 0, 0, False, tuple(order))


def simulation_page(simulated: SimulatedPlan) -> Page:
    """Build the page of a simulation."""
    result = simulated.result
    total = sum(result.phase_s.values())
    steps = len(result.step_s)
    middle, late = (format_seconds(result.step_quantile_s(share)) for share in (0.5, 0.95))
    tiles = [
        Tile("Mean step", format_seconds(result.mean_step_s), f"{middle} at the median, {late} at P95"),
        Tile("Generated", format_rate(result.num_tokens / result.seconds), f"{result.num_tokens:,} tokens"),
        *(
            Tile(f"Busy: {use.name}", style.format_percent(use.utilisation), f"{use.num_devices} GPUs; idle otherwise")
            for use in result.groups
        ),
        Tile("GPU-hours", f"{result.gpu_hours:.3g}", f"for {steps} steps"),
        Tile("Staleness of trained tokens", f"{result.mean_staleness:.2f} versions", "mean"),
    ]
    facts = [
        ("Preemptions", f"{result.num_preemptions:,}; largest KV cache usage {style.format_percent(result.kv_use)}"),
        ("Trained", f"{result.num_trained_tokens:,} of {result.num_tokens:,} generated tokens"),
        ("Simulated events", f"{result.num_events:,}"),
    ]
    return Page(
        title=f"Simulation: {steps} steps",
        subtitle=f"Seed {result.seed}, {format_seconds(result.seconds)} of simulated time on {result.num_gpus} "
        "GPUs. Simulated, not measured.",
        state=("good", "All steps were simulated."),
        tiles=tuple(tiles),
        choices=(),
        phases=tuple(
            PhaseRow(str(phase), seconds / steps, seconds / total, "", {}) for phase, seconds in result.phase_s.items()
        ),
        actions=(),
        places=(),
        facts_title="Events",
        facts=tuple(facts),
    )
