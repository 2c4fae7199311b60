"""A plan played: a budget's step, many times over, with lengths that are drawn instead of their mean.

In: a GpuPlan, a number of steps, a seed. Out: what simulate/ makes of it. Left out: how it plays (simulate/).
"""

from dataclasses import replace

from rlplan.dataflow.placements import GENERATION
from rlplan.errors import SpecError
from rlplan.planner.gpu.times import engine_speed
from rlplan.planner.gpu_plan import GpuPlan
from rlplan.planner.played_job import without_evaluation
from rlplan.simulate.engine import EngineLimits
from rlplan.simulate.result import SimulationResult
from rlplan.simulate.run import simulate
from rlplan.simulate.setting import Asynchrony, RolloutWork, SimulationSetting
from rlplan.simulate.speed import Speed
from rlplan.vocabulary import ActionKind

MAX_STEPS = 10_000


def play(budget: GpuPlan, *, num_steps: int = 20, seed: int = 0) -> SimulationResult:
    """Play a plan's steps; the same seed gives the same result. Raises: SpecError."""
    if not 1 <= num_steps <= MAX_STEPS:
        raise SpecError(
            f"{num_steps} steps are to be simulated",
            where="command line: --steps",
            rule=f"from 1 to {MAX_STEPS:,}",
            way_out="--steps 20",
        )
    return simulate(setting_of(budget, num_steps), seed)


def setting_of(budget: GpuPlan, num_steps: int) -> SimulationSetting:
    """Everything that the simulation of a plan is told."""
    lead, has_rollouts = budget.schedule.lead, budget.job.has_rollouts
    return SimulationSetting(
        schedule=without_evaluation(budget.schedule),
        costs={name: cost for name, cost in budget.costs.items() if name not in _generating(budget)},
        rollouts=_rollouts(budget) if has_rollouts else None,
        speed=_speed(budget) if has_rollouts else None,
        num_steps=num_steps,
        asynchrony=Asynchrony(float(lead.max_staleness), streams=True, interrupts=lead.interrupts, is_bound=True)
        if lead
        else None,
        reward_latency_s=budget.job.workload.reward_latency_s,
        ledger=budget.ledger,
    )


def _generating(budget: GpuPlan) -> set[str]:
    """What engines play instead of taking the time that a formula gives."""
    return {action.id for action in budget.schedule.step if action.kind is ActionKind.GENERATE}


def _rollouts(budget: GpuPlan) -> RolloutWork:
    workload, kv = budget.job.workload, budget.kv
    assert kv is not None, "where there are rollouts there is a KV cache"
    size = budget.job.rollout.block_size
    return RolloutWork(
        num_prompts=workload.num_prompts_per_step,
        num_samples=budget.job.num_generated_per_prompt,
        prompt_len=workload.usual_prompt_len,
        lengths=workload.lengths,
        num_engines=max(1, budget.choice.arrangement.num_generation // budget.choice.engine.tp),
        limits=EngineLimits(kv.max_num_seqs, max(1, kv.num_tokens // size), size),
    )


def _speed(budget: GpuPlan) -> Speed:
    """The engines on the GPUs that generate."""
    step, whole = budget.choice.arrangement, budget.setting.cluster(GENERATION)
    size = step.num_generation
    cluster = replace(whole, num_gpus=size, gpus_per_host=min(size, whole.gpus_per_host))
    return engine_speed(budget.job, budget.setting.policy, budget.choice.engine, cluster)
