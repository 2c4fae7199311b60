"""Placements: which device groups there are and which role lies on which.

In: a placement, the devices and the roles. Out: device groups and role layouts.
Left out: `colocated` on a CPU host, where the engine cannot sleep and has to be destroyed and started again.
"""

from rlplan.dataflow.layouts import DeviceGroup, RoleLayout
from rlplan.spec.job import JobSpec
from rlplan.vocabulary import Placement, Role


def place(
    job: JobSpec, placement: Placement, zero_stage: int
) -> tuple[tuple[DeviceGroup, ...], tuple[RoleLayout, ...]]:
    """Groups and layouts for a placement.

    hybrid: every role on the same devices; the trainer has a rank on each, engines a process on each of the last.
    disaggregated: the last devices generate, the others train and score; needs at least one device more than engines.
    """
    num_generating = job.rollout.num_engines * job.rollout.tp
    devices = tuple(f"cpu:{index}" for index in range(job.hardware.num_devices))
    if placement is Placement.HYBRID:
        groups: tuple[DeviceGroup, ...] = (DeviceGroup("shared", devices),)
        training, generation = groups[0], groups[0]
    else:
        training = DeviceGroup("training", devices[:-num_generating])
        generation = DeviceGroup("generation", devices[-num_generating:])
        groups = (training, generation)
    layouts = [
        RoleLayout(
            Role.POLICY,
            "policy_trainer",
            training.name,
            training.devices,
            dp=len(training.devices),
            zero_stage=zero_stage,
        ),
        RoleLayout(
            Role.POLICY,
            "rollout_engine",
            generation.name,
            generation.devices[-num_generating:],
            dp=job.rollout.num_engines,
            tp=job.rollout.tp,
        ),
    ]
    for role in job.trained_roles[1:]:
        layouts.append(
            RoleLayout(
                role, "value_trainer", training.name, training.devices, dp=len(training.devices), zero_stage=zero_stage
            )
        )
    for role in job.frozen_roles:
        layouts.append(RoleLayout(role, "scorer", training.name, training.devices[:1]))
    return groups, tuple(layouts)
