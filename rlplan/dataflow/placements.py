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

    hybrid: every role on the same devices; the trainer has a rank on each, engine and scorers one process each.
    disaggregated: the last device generates, the others train and score; needs at least two devices.
    """
    devices = tuple(f"cpu:{index}" for index in range(job.hardware.num_devices))
    if placement is Placement.HYBRID:
        groups: tuple[DeviceGroup, ...] = (DeviceGroup("shared", devices),)
        training, generation = groups[0], groups[0]
    else:
        training, generation = DeviceGroup("training", devices[:-1]), DeviceGroup("generation", devices[-1:])
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
        RoleLayout(Role.POLICY, "rollout_engine", generation.name, generation.devices[-1:]),
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
