"""A plan played: a budget's step, many times over, with lengths that are drawn instead of their mean.

In: a Budget, a number of steps, a seed. Out: what simulate/ makes of it. Left out: how it plays (simulate/).
"""

from dataclasses import replace

from rlplan.dataflow.gpu_step import GENERATION
from rlplan.errors import SpecError
from rlplan.planner.budget import Budget
from rlplan.simulate.engine import EngineLimits
from rlplan.simulate.result import SimulationResult
from rlplan.simulate.run import simulate
from rlplan.simulate.setting import Asynchrony, RolloutWork, SimulationSetting
from rlplan.simulate.speed import Speed
from rlplan.timing.generation import EngineSpeed
from rlplan.vocabulary import ActionKind, Stream

MAX_STEPS = 10_000


def play(budget: Budget, *, num_steps: int = 20, seed: int = 0) -> SimulationResult:
    """Play a plan's steps; the same seed gives the same result. Raises: SpecError."""
    if not 1 <= num_steps <= MAX_STEPS:
        raise SpecError(
            f"{num_steps} steps are to be simulated",
            where="command line: --steps",
            rule=f"from 1 to {MAX_STEPS:,}",
            way_out="--steps 20",
        )
    return simulate(setting_of(budget, num_steps), seed)


def setting_of(budget: Budget, num_steps: int) -> SimulationSetting:
    """Everything that the simulation of a plan is told."""
    step, placement = budget.candidate.step, budget.spec.placement
    is_asynchronous = any(action.stream is Stream.GENERATION for action in budget.schedule.step) and step.max_staleness
    return SimulationSetting(
        schedule=budget.schedule,
        costs={name: cost for name, cost in budget.costs.items() if name not in _generating(budget)},
        rollouts=_rollouts(budget) if step.has_rollouts else None,
        speed=_speed(budget) if step.has_rollouts else None,
        num_steps=num_steps,
        asynchrony=Asynchrony(float(step.max_staleness)) if is_asynchronous else None,
        reward_latency_s=placement.reward_latency_s,
        ledger=budget.ledger,
    )


def _generating(budget: Budget) -> set[str]:
    """What engines play instead of taking the time that a formula gives."""
    return {action.id for action in budget.schedule.step if action.kind is ActionKind.GENERATE}


def _rollouts(budget: Budget) -> RolloutWork:
    workload, kv = budget.spec.workload, budget.kv
    assert kv is not None, "where there are rollouts there is a KV cache"
    size = budget.spec.rollout.block_size
    return RolloutWork(
        num_prompts=workload.num_prompts_per_step,
        num_samples=budget.spec.num_generated_per_step // workload.num_prompts_per_step,
        prompt_len=workload.prompt_len,
        lengths=workload.lengths,
        num_engines=max(1, budget.candidate.step.num_generation // budget.candidate.engine.tp),
        limits=EngineLimits(kv.max_num_seqs, max(1, kv.num_tokens // size), size),
    )


def _speed(budget: Budget) -> Speed:
    """The engines on the GPUs that generate."""
    step, whole = budget.candidate.step, budget.setting.cluster(GENERATION)
    size = step.num_generation
    cluster = replace(whole, num_gpus=size, gpus_per_host=min(size, whole.gpus_per_host))
    return EngineSpeed(budget.setting.policy, budget.spec.rollout, budget.candidate.engine, cluster)
