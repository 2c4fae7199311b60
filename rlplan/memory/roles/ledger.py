"""Assembles the processes of a schedule into a MemoryLedger: every process on a CPU host, representatives on GPUs.

A vision tower adds to a process whose prompts have images. It is frozen and encodes one image at a time, before the
decoder's pass begins.

In: a schedule; on a CPU host a job, its models and profile; on GPUs forecasts at three lengths, capacities.
Out: a MemoryLedger. Left out: its rows (memory/predict.py); pixels in the driver.

Symbols: P patches of the largest image, v the tower's width, w width of its MLP, p pixel values of a patch, e bytes of
an element.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlplan.dataflow.schedule import (
    DRIVER_PROCESS,
    HOST_DEVICE,
    SINK_PROCESS,
    VERIFIER_PROCESS,
    Action,
    RoleLayout,
    Schedule,
    Worker,
)
from rlplan.memory.ledger import LedgerRow, MemoryLedger, RunPhase
from rlplan.memory.machine.beside import environment_bytes, sink_bytes, verifier_bytes
from rlplan.memory.machine.host import DRIVER_HOST_BYTES, WORKER_HOST_BYTES
from rlplan.memory.predict import Bytes, Forecast, Process, build_constant_row, predict_ledger
from rlplan.memory.roles.cpu_engine import EngineForecast
from rlplan.memory.roles.cpu_trainer import TrainerForecast, ValueForecast
from rlplan.memory.roles.scorer import ScorerForecast
from rlplan.spec.hardware.profile import HardwareProfile, SourcedBytes
from rlplan.spec.model import ModelSpec, load_with_tower
from rlplan.spec.models.families.image_sizes import read_image_rule
from rlplan.spec.resolved import ResolvedJob
from rlplan.vocabulary import ActionKind, MemoryKind, Provenance, Role

WITH_PASSES = (ActionKind.TRAIN_FORWARD_BACKWARD, ActionKind.SCORE, ActionKind.GENERATE, ActionKind.EVALUATE)
COPIES = 2
"""Copies of the pixel values: the image processor's array, and the tower's input."""


def tower_bytes(model: ModelSpec, element_bytes: int) -> int:
    """Bytes of the tower's weights in one process. model: the model with its tower."""
    return element_bytes * sum(tensor.numel for tensor in model.parameters if tensor.name.startswith("model.visual."))


def image_pass_bytes(model: ModelSpec, num_patches: int, element_bytes: int) -> int:
    """Bytes in flight while the tower encodes one image of P patches, without gradients.

    Counts: e P (2w + 5v + 2p): the MLP's gate and up; hidden state, residual, norm, queries with keys and values; the
    pixels twice. Assumes: attention keeps no scores of P squared.
    """
    if model.vision is None:
        return 0
    sizes = model.vision.sizes
    numbers = sizes["c"] * sizes["t"] * sizes["s"] ** 2 if "c" in sizes else sizes.get("p", 3 * 14**2)
    return element_bytes * num_patches * (2 * sizes["w"] + 5 * sizes["v"] + COPIES * numbers)


@dataclass(frozen=True)
class WithTower(Forecast):
    """The forecast of a process with a tower and a decoder. See `predict.Forecast`."""

    decoder: Forecast
    weights: int
    """Bytes of the tower's weights."""
    in_flight: int
    """Bytes of one image's pass."""
    cache: int = 0
    """Bytes of image embeddings that an engine caches."""

    def predict_resident(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Bytes after the action."""
        return self._add_weights(self.decoder.predict_resident(action, run_phase))

    def predict_peak(self, action: Action, run_phase: RunPhase) -> Bytes:
        """Bytes at the process's peak inside the action."""
        sizes = self._add_weights(self.decoder.predict_peak(action, run_phase))
        if action.kind in WITH_PASSES:
            own = sizes.get(MemoryKind.ACTIVATIONS, 0)
            sizes[MemoryKind.ACTIVATIONS] = max(own, self.in_flight) + self.cache
        return sizes

    def predict_loaded(self, action: Action) -> Bytes:
        """Bytes inside the action before the process repacks its weights."""
        return self._add_weights(self.decoder.predict_loaded(action))

    def _add_weights(self, sizes: Bytes) -> dict[MemoryKind, int]:
        """Add the tower's weights wherever the decoder's are in memory."""
        more = self.weights if MemoryKind.WEIGHTS in sizes else 0
        return {kind: size + more if kind is MemoryKind.WEIGHTS else size for kind, size in sizes.items()}


_ON_GPUS = dict.fromkeys(
    (MemoryKind.CONTEXT, MemoryKind.COMM_BUFFERS, MemoryKind.CUDA_GRAPHS, MemoryKind.FRAGMENTATION), Provenance.ASSUMED
)


def build_gpu_process(
    layout: RoleLayout,
    host: str,
    num_alike: int,
    forecasts: tuple[Forecast, Forecast, Forecast],
    measured_factor: float,
) -> Process:
    """The first process of a layout. forecasts: at the shortest, expected and longest sequence lengths.

    measured_factor: as Process.measured_factor.
    """
    (name, device), (short, usual, longest) = layout.processes[0], forecasts
    return Process(
        name,
        device,
        layout.role,
        usual,
        between=(short, longest),
        measured_factor=measured_factor,
        host=host,
        host_libraries=WORKER_HOST_BYTES,
        num_alike=num_alike,
        provenances=_ON_GPUS,
    )


def predict_gpu_ledger(
    schedule: Schedule, processes: Iterable[Process], empty: MemoryLedger, num_steps: int, rollout_buffer: int = 0
) -> MemoryLedger:
    """Predict the ledger of a schedule on GPUs.

    empty: a ledger with the capacities and without rows. rollout_buffer: bytes of a step's rollouts on the driver.
    """
    size = DRIVER_HOST_BYTES + rollout_buffer
    driver = SourcedBytes(value=size, provenance=Provenance.ASSUMED, source="memory.host")
    return predict_ledger(schedule, processes, [build_constant_row(schedule, DRIVER_PROCESS, driver)], empty, num_steps)


def predict_cpu_ledger(
    job: ResolvedJob,
    model: ModelSpec,
    profile: HardwareProfile,
    schedule: Schedule,
    role_models: Mapping[Role, ModelSpec] | None = None,
) -> MemoryLedger:
    """Predict the ledger of a schedule on CPU hosts. role_models: models of roles that do not use the policy's."""
    models = {Role.POLICY: model, **(role_models or {})}
    capacity = profile.memory.value if job.hardware.memory is None else job.hardware.memory
    empty = MemoryLedger(
        rows=(),
        device_capacity=capacity,
        host_capacity=capacity,
        shares_host_memory=profile.kind == "cpu",
        order=(),
        host_of_device=_hosts_of_devices(job, schedule),
    )
    processes = _list_host_processes(job, models, profile, schedule)
    return predict_ledger(schedule, processes, _list_other_rows(job, profile, schedule), empty, job.workload.num_steps)


def _hosts_of_devices(job: ResolvedJob, schedule: Schedule) -> tuple[tuple[str, str], ...]:
    """(device, host) whose memory the device shares; empty where there is one host."""
    if job.hardware.num_hosts == 1:
        return ()
    devices = dict.fromkeys(device for _, device in schedule.processes)
    pairs = [(device, f"host:{job.hardware.find_host(int(device.partition(':')[2]))}") for device in devices]
    return (*pairs, *((f"host:{host}", f"host:{host}") for host in range(job.hardware.num_hosts)))


def _list_host_processes(
    job: ResolvedJob, models: Mapping[Role, ModelSpec], profile: HardwareProfile, schedule: Schedule
) -> Iterator[Process]:
    kinds = {action.kind for action in schedule.step}
    sends_weights = bool(kinds & {ActionKind.SYNC_WEIGHTS, ActionKind.SAVE_WEIGHTS})
    has_arena, stages_states = ActionKind.SYNC_WEIGHTS in kinds, ActionKind.SAVE_STATES in kinds
    for layout in schedule.layouts:
        model = models.get(layout.role, models[Role.POLICY])
        for rank, (name, device) in enumerate(layout.processes):
            if layout.worker in ("policy_trainer", "value_trainer"):
                sends = layout.worker == "policy_trainer" and sends_weights
                trainer = (TrainerForecast if sends else ValueForecast)(job, model, profile, layout, rank)
                trainer.has_arena, trainer.stages_states = has_arena, stages_states
                forecast: Forecast = trainer
            elif layout.worker == "rollout_engine":
                forecast = EngineForecast(job, model, profile, has_arena=has_arena)
            else:
                forecast = ScorerForecast(job, model, profile, len(layout.devices), shares=layout.shares_frozen_weights)
            yield Process(
                name,
                device,
                layout.role,
                _add_tower(job, forecast, is_engine=layout.worker == "rollout_engine"),
                keeps_heap=job.hardware.keeps_heap,
                provenances=_find_provenances(profile, layout.worker),
            )


def _add_tower(job: ResolvedJob, forecast: Forecast, *, is_engine: bool) -> Forecast:
    """Add the policy's vision tower to a decoder's forecast where prompts have images."""
    if not job.takes_images or job.data is None:
        return forecast
    folder = Path(job.policy.path)
    full_model, rule = load_with_tower(folder), read_image_rule(folder, job.data.max_image_pixels)
    element_bytes = (job.rollout if is_engine else job.training).dtype.num_bytes
    # vLLM's encoder cache has room for the embeddings of one batch of tokens.
    cache = job.rollout.max_num_batched_tokens * full_model.hidden_size * element_bytes if is_engine else 0
    in_flight = image_pass_bytes(full_model, rule.max_patches, element_bytes)
    return WithTower(forecast, tower_bytes(full_model, element_bytes), in_flight, cache)


def _find_provenances(profile: HardwareProfile, worker: Worker) -> dict[MemoryKind, Provenance]:
    """Provenance of the kinds whose bytes come from the profile; every other kind is derived from the job."""
    measured_as = "policy_trainer" if worker == "value_trainer" else worker  # both import the same libraries
    return {
        MemoryKind.PROCESS: getattr(profile.process_overheads, measured_as).provenance,
        MemoryKind.FRAGMENTATION: getattr(profile.process_slack, measured_as).provenance,
    }


def _list_other_rows(job: ResolvedJob, profile: HardwareProfile, schedule: Schedule) -> Iterator[LedgerRow]:
    """Rows of processes that are no workers: driver, rewards and environments on the first host, Ray on each host.

    Imports of the job's own environment function are not counted.
    """
    overheads = profile.process_overheads
    yield build_constant_row(schedule, DRIVER_PROCESS, overheads.driver)
    for host in range(job.hardware.num_hosts):
        ray, where = (f"ray_system/{host}", f"host:{host}") if host else ("ray_system", HOST_DEVICE)
        yield build_constant_row(schedule, ray, overheads.ray_system, where)
    if job.has_reward_processes:
        bound = SourcedBytes(value=verifier_bytes(job), provenance=Provenance.DERIVED, source="memory.verifiers")
        yield build_constant_row(schedule, VERIFIER_PROCESS, bound)
    if job.has_turns and (worker := overheads.environment) is not None:
        size = worker.model_copy(update={"value": environment_bytes(job, worker.value)})
        yield build_constant_row(schedule, "environment", size)
    if job.metrics.sinks:
        size = SourcedBytes(value=sink_bytes(job), provenance=Provenance.ASSUMED, source="memory.sinks")
        yield build_constant_row(schedule, SINK_PROCESS, size)
