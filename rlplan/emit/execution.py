"""ExecutionSpec: the part of a plan that the runtime needs, with every decision made.

In: a Plan. Out: DeepSpeed configs, vLLM engine arguments, the Ray placement and the schedule, as one frozen value.
Left out: the ledger; a run compares itself with the plan next to it.
"""

from typing import Any, Literal

from rlplan.dataflow.schedule import Schedule
from rlplan.emit.deepspeed import deepspeed_config, frozen_config
from rlplan.emit.ray import RayPlacement, ray_placement
from rlplan.emit.vllm import engine_arguments
from rlplan.planner.executable import check_executable
from rlplan.planner.plan import Plan
from rlplan.planner.search import check_schedule
from rlplan.spec.base import Spec
from rlplan.spec.resolved import ResolvedJob


class ExecutionSpec(Spec):
    """Everything that the runtime needs for a run."""

    schema_version: Literal[1] = 1
    job: ResolvedJob
    schedule: Schedule
    deepspeed: dict[str, dict[str, Any]]
    """One config for each trained role, and for each frozen role whose ranks shard its weights."""
    vllm: dict[str, dict[str, Any]]
    """Engine arguments of the policy's rollout engine; empty for jobs that generate nothing."""
    ray: RayPlacement
    accepts_mismatch: bool = False
    """Whether the job asks for an importance correction; then engine and trainer may differ beyond the limits."""


def execution_spec(plan: Plan, where: str = "the plan") -> ExecutionSpec:
    """Extract the executable part of a plan. where: the plan's file, for messages.

    Raises: SpecError where the schedule does not follow from the job, or where a run lacks something; EmitError where
    the runtime does not support it.
    """
    check_executable(plan.job, where)
    check_schedule(plan, where)
    return ExecutionSpec(
        job=plan.job,
        schedule=plan.schedule,
        deepspeed={role: deepspeed_config(plan.job, plan.schedule, role) for role in plan.job.trained_roles}
        | {layout.role: frozen_config(plan.job) for layout in plan.schedule.layouts if layout.shares_frozen_weights},
        vllm={
            layout.role: engine_arguments(plan.job, plan.schedule.placement)
            for layout in plan.schedule.layouts
            if layout.worker == "rollout_engine"
        },
        ray=ray_placement(plan),
        # the user's own job decides: a correction that `auto` chose only covers rounding
        accepts_mismatch=plan.asked.algorithm.corrects_importance,
    )
