"""Placements: which device groups there are, which role lies on which, and who waits for whom because of it.

In: a job and a placement. Out: device groups and role layouts; a StepGraph arranged for the placement.
"""

from rlplan.dataflow.graph import StepGraph
from rlplan.dataflow.layouts import DeviceGroup, RoleLayout, Worker
from rlplan.dataflow.running_ahead import run_ahead
from rlplan.dataflow.taking_turns import Turns, park, take_turns
from rlplan.spec.job import JobSpec
from rlplan.vocabulary import Placement, Role


def arrange(graph: StepGraph, job: JobSpec, placement: Placement) -> StepGraph:
    """What the placement makes of a step.

    hybrid: as it is. colocated: engine and trainer take turns. disaggregated: as it is, or, where rollouts may be some
    versions old, with generation that runs ahead. Frozen roles are parked where the job says so.
    """
    if placement is Placement.COLOCATED:
        stages = job.checkpoints.writes == "beside"
        return take_turns(graph, Turns(job.device_kind == "cuda", parked_roles(job), stages))
    if job.placement.parks_only_frozen:
        graph = park(graph, parked_roles(job))
    if job.placement.max_staleness:
        return run_ahead(graph, job.placement.max_staleness, interrupts=job.placement.partial_rollouts)
    return graph


def parked_roles(job: JobSpec) -> tuple[Role, ...]:
    """Roles that are moved away while they wait, where devices are shared in turns.

    Frozen roles are read from their own files again. Trained states go to disk, or from a GPU to its host: on a host
    without one, memory for memory would free nothing, so that they stay.
    """
    if job.placement.parks == "none":
        return ()
    moves_states = job.placement.parks == "disk" or job.device_kind == "cuda"
    moves_states = moves_states and not job.placement.parks_only_frozen
    return (*(job.trained_roles if moves_states else ()), *job.frozen_roles)


def place(
    job: JobSpec, placement: Placement, zero_stage: int
) -> tuple[tuple[DeviceGroup, ...], tuple[RoleLayout, ...]]:
    """Groups and layouts for a placement.

    hybrid, colocated: every role on the same devices; the trainer has a rank on each, a scorer one process (or one on
    each too), engines a process on each of the last. disaggregated: the last devices generate, those before them score
    (with num_scoring_devices 0: those that train do), the others train.
    """
    devices = tuple(f"{job.device_kind}:{index}" for index in range(job.hardware.num_devices))
    if placement is Placement.DISAGGREGATED:
        groups = _own_groups(job, devices)
        training, scoring, generation = groups[0], groups[-2], groups[-1]
    else:
        groups = (DeviceGroup("shared", devices),)
        training = scoring = generation = groups[0]
    layouts = [
        _trainer(job, Role.POLICY, "policy_trainer", training, zero_stage),
        RoleLayout(
            Role.POLICY,
            "rollout_engine",
            generation.name,
            generation.devices[-job.rollout.num_processes :],
            dp=job.rollout.num_engines,
            tp=job.rollout.tp,
        ),
    ]
    for role in job.trained_roles[1:]:
        layouts.append(_trainer(job, role, "value_trainer", training, zero_stage))
    on = scoring.devices if job.placement.spreads_scoring else scoring.devices[:1]
    shared = zero_stage if zero_stage == 3 and len(on) > 1 else 0
    for role in job.frozen_roles:
        layouts.append(RoleLayout(role, "scorer", scoring.name, on, dp=len(on), zero_stage=shared))
    return groups, tuple(layouts)


def _trainer(job: JobSpec, role: Role, worker: Worker, group: DeviceGroup, zero_stage: int) -> RoleLayout:
    """A rank on each device; some of them compute a pass together."""
    replicas = len(group.devices) // job.training.num_ranks_per_pass
    return RoleLayout(role, worker, group.name, group.devices, replicas, job.training.tp, zero_stage)


def num_training_devices(job: JobSpec, placement: Placement) -> int:
    """Devices that train."""
    generating = max(job.placement.num_generation_devices, job.rollout.num_processes)
    apart = generating + job.placement.num_scoring_devices
    return job.hardware.num_devices - (apart if placement is Placement.DISAGGREGATED else 0)


def _own_groups(job: JobSpec, devices: tuple[str, ...]) -> tuple[DeviceGroup, ...]:
    """Training, scoring where it has devices of its own, generation."""
    first = num_training_devices(job, Placement.DISAGGREGATED)
    last = first + job.placement.num_scoring_devices
    groups = [DeviceGroup("training", devices[:first])]
    if last > first:
        groups.append(DeviceGroup("scoring", devices[first:last]))
    return (*groups, DeviceGroup("generation", devices[last:]))
