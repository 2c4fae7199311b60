"""ExecutionSpec: the part of a plan that the runtime needs, and nothing that is still to be decided.

In: a Plan. Out: DeepSpeed configs, vLLM engine arguments, the Ray placement and the schedule, as one frozen value.
Left out: the ledger; a run compares itself with the plan that lies beside it.
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
    """What will run."""

    schema_version: Literal[1] = 1
    job: ResolvedJob
    schedule: Schedule
    deepspeed: dict[str, dict[str, Any]]
    """One config for each trained role, and for each frozen one whose ranks share its weights."""
    vllm: dict[str, dict[str, Any]]
    """Engine arguments of the policy's rollout engine; empty where nothing is generated."""
    ray: RayPlacement
    accepts_mismatch: bool = False
    """Whether the user's job names a correction: then engine and trainer may differ beyond the limits."""


def execution_spec(plan: Plan, where: str = "the plan") -> ExecutionSpec:
    """The executable part of a plan, and of nothing but a plan. where: it stands, for a message.

    Raises: SpecError where its schedule is none that its job gives, or where a run lacks something; EmitError where the
    runtime does not run it.
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
        # by the job as it was asked: a correction that `auto` chose is for rounding alone
        accepts_mismatch=plan.asked.algorithm.corrects_importance,
    )
