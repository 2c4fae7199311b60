"""From a job and a schedule to the ledger: what every process holds after and at the peak inside each action.

In: ResolvedJob, ModelSpec, HardwareProfile, Schedule. Out: a MemoryLedger. Pure: it starts nothing.
Left out: overlap of actions other than those that the schedule lets run side by side.

Each process has a forecaster that says, for one action at one moment, the bytes by kind: resident after it, and at the
moment of the process's own peak inside it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from rlplan.dataflow.layouts import Worker
from rlplan.dataflow.schedule import DRIVER_PROCESS, HOST_DEVICE, SINK_PROCESS, VERIFIER_PROCESS, Action, Schedule
from rlplan.memory.ledger import LedgerRow, MemoryLedger, RunPhase
from rlplan.memory.machine.beside import environment_bytes, sink_bytes, verifier_bytes
from rlplan.memory.machine.overheads import heap_bytes
from rlplan.memory.roles.cpu.engine import EngineForecast
from rlplan.memory.roles.cpu.scorer import ScorerForecast
from rlplan.memory.roles.cpu.trainer import TrainerForecast, ValueForecast
from rlplan.spec.hardware.profile import HardwareProfile, SourcedBytes
from rlplan.spec.model import ModelSpec
from rlplan.spec.resolved import ResolvedJob
from rlplan.vocabulary import ActionKind, MemoryKind, Phase, Provenance, Role

Bytes = Mapping[MemoryKind, int]


class Forecast(Protocol):
    """Bytes of one process by kind."""

    def resident(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Held when the action has ended."""
        ...

    def peak(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Held at the moment of the process's peak inside the action."""
        ...

    def loaded(self, action: Action) -> Bytes:
        """Held inside the action before the process repacked it, where it does."""
        ...


@dataclass(frozen=True)
class _Process:
    name: str
    device: str
    role: Role
    forecast: Forecast
    provenances: Mapping[MemoryKind, Provenance]


def predict_ledger(
    job: ResolvedJob,
    model: ModelSpec,
    profile: HardwareProfile,
    schedule: Schedule,
    role_models: Mapping[Role, ModelSpec] | None = None,
) -> MemoryLedger:
    """The whole ledger of a schedule. role_models: of roles whose model is not the policy's."""
    models = {Role.POLICY: model, **(role_models or {})}
    processes = list(_processes(job, models, profile, schedule))
    order: list[tuple[RunPhase, str]] = []
    rows: list[LedgerRow] = _host_rows(job, profile, schedule)
    for run_phase, actions in _run_phases(job, schedule):
        for action in actions:
            order.append((run_phase, action.id))
            for process in processes:
                if process.name in action.processes:
                    rows += _rows(action, run_phase, process, keeps_heap=job.hardware.keeps_heap)
    capacity = profile.memory.value if job.hardware.memory is None else job.hardware.memory
    return MemoryLedger(
        rows=tuple(rows),
        device_capacity=capacity,
        host_capacity=capacity,
        shares_host_memory=profile.kind == "cpu",
        order=tuple(order),
        concurrent=schedule.concurrent,
        host_of_device=_hosts_of_devices(job, schedule),
    )


def _hosts_of_devices(job: ResolvedJob, schedule: Schedule) -> tuple[tuple[str, str], ...]:
    """Which host's memory a device shares; nothing to say where there is one host."""
    if job.hardware.num_hosts == 1:
        return ()
    devices = dict.fromkeys(device for _, device in schedule.processes)
    pairs = [(device, f"host:{job.hardware.host_of(int(device.partition(':')[2]))}") for device in devices]
    return (*pairs, *((f"host:{host}", f"host:{host}") for host in range(job.hardware.num_hosts)))


def _run_phases(job: ResolvedJob, schedule: Schedule) -> Iterator[tuple[RunPhase, tuple[Action, ...]]]:
    yield "start", schedule.start
    yield "first", tuple(action for action in schedule.step if action.happens_in(1))
    if job.workload.num_steps > 1:
        yield "steady", schedule.step
    yield "finish", schedule.finish


def _processes(
    job: ResolvedJob, models: Mapping[Role, ModelSpec], profile: HardwareProfile, schedule: Schedule
) -> Iterator[_Process]:
    kinds = {action.kind for action in schedule.step}
    hands_over = bool(kinds & {ActionKind.SYNC_WEIGHTS, ActionKind.SAVE_WEIGHTS})
    has_arena, stages_states = ActionKind.SYNC_WEIGHTS in kinds, ActionKind.SAVE_STATES in kinds
    for layout in schedule.layouts:
        model = models.get(layout.role, models[Role.POLICY])
        for rank, (name, device) in enumerate(layout.processes):
            if layout.worker in ("policy_trainer", "value_trainer"):
                hands_on = layout.worker == "policy_trainer" and hands_over
                trainer = (TrainerForecast if hands_on else ValueForecast)(job, model, profile, layout, rank)
                trainer.has_arena, trainer.stages_states = has_arena, stages_states
                forecast: Forecast = trainer
            elif layout.worker == "rollout_engine":
                forecast = EngineForecast(job, model, profile, has_arena=has_arena)
            else:
                forecast = ScorerForecast(job, model, profile, len(layout.devices), shares=layout.shares_frozen_weights)
            yield _Process(name, device, layout.role, forecast, _provenances(profile, layout.worker))


def _provenances(profile: HardwareProfile, worker: Worker) -> dict[MemoryKind, Provenance]:
    """Kinds whose bytes rest on the profile, with its provenance; every other kind is derived from the job."""
    measured_as = "policy_trainer" if worker == "value_trainer" else worker  # the same libraries
    return {
        MemoryKind.PROCESS: getattr(profile.process_overheads, measured_as).provenance,
        MemoryKind.FRAGMENTATION: getattr(profile.process_slack, measured_as).provenance,
    }


def _rows(action: Action, run_phase: RunPhase, process: _Process, *, keeps_heap: bool) -> Iterator[LedgerRow]:
    resident, peak = process.forecast.resident(action, run_phase), dict(process.forecast.peak(action, run_phase))
    if keeps_heap:
        kinds = set(peak) - {MemoryKind.PROCESS, MemoryKind.FRAGMENTATION}
        passing = sum(max(0, peak[kind] - resident.get(kind, 0)) for kind in kinds)
        peak[MemoryKind.FRAGMENTATION] = peak.get(MemoryKind.FRAGMENTATION, 0) + heap_bytes(passing)
    loaded = process.forecast.loaded(action)
    for kind in MemoryKind:
        if resident.get(kind, 0) or peak.get(kind, 0):
            yield LedgerRow(
                run_phase=run_phase,
                action_id=action.id,
                phase=action.phase,
                process=process.name,
                device=process.device,
                role=process.role,
                kind=kind,
                space="device",
                resident_bytes=resident.get(kind, 0),
                peak_bytes=peak.get(kind, 0),
                provenance=process.provenances.get(kind, Provenance.DERIVED),
                source=f"memory.{type(process.forecast).__name__}",
                loaded_bytes=loaded.get(kind, 0),
            )


def _host_rows(job: ResolvedJob, profile: HardwareProfile, schedule: Schedule) -> list[LedgerRow]:
    """What runs beside the workers all the time: the driver and the rewards' own processes on the first host, Ray's own
    processes on each.

    Beside the driver the environment's processes, without what the job's own function imports.
    """
    overheads, num_hosts = profile.process_overheads, job.hardware.num_hosts
    first = schedule.start[0]

    def row(process: str, size: SourcedBytes, host: int = 0) -> LedgerRow:
        return LedgerRow(
            run_phase="start",
            action_id=first.id,
            phase=Phase.START,
            process=process,
            device=f"host:{host}" if host else HOST_DEVICE,
            role=Role.VERIFIER,
            kind=MemoryKind.PROCESS,
            space="host",
            resident_bytes=size.value,
            peak_bytes=size.value,
            provenance=size.provenance,
            source=size.source,
        )

    others = [
        row(f"ray_system/{host}" if host else "ray_system", overheads.ray_system, host) for host in range(num_hosts)
    ]
    if job.has_reward_processes:
        bound = SourcedBytes(value=verifier_bytes(job), provenance=Provenance.DERIVED, source="memory.verifiers")
        others.append(row(VERIFIER_PROCESS, bound))
    if job.has_turns and (each := overheads.environment) is not None:
        size = each.model_copy(update={"value": environment_bytes(job, each.value)})
        others.append(row("environment", size))
    if job.metrics.sinks:
        size = SourcedBytes(value=sink_bytes(job), provenance=Provenance.ASSUMED, source="memory.sinks")
        others.append(row(SINK_PROCESS, size))
    return [row(DRIVER_PROCESS, overheads.driver), *others]
