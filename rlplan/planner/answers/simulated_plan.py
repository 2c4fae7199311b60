"""Simulation of a plan: many steps with sampled response lengths instead of the mean.

In: a Plan with seconds, a number of steps, a seed. Out: the result of simulate/. Left out: evaluation, start and
finish; longer training for batches that happen to be longer; the simulation itself (simulate/).
"""

from dataclasses import dataclass, replace

from rlplan.dataflow.placements import GENERATION
from rlplan.dataflow.schedule import Schedule
from rlplan.errors import SpecError
from rlplan.planner.measured_errors import find_step_error
from rlplan.planner.plan import Plan
from rlplan.simulate.engine import EngineLimits, Speed
from rlplan.simulate.result import SimulationResult
from rlplan.simulate.run import simulate_sampled
from rlplan.simulate.setting import Asynchrony, SimulationSetting, StepRollouts
from rlplan.timing.cpu.engine import CpuEngine
from rlplan.timing.serving.generation import EngineSpeed, time_prefill
from rlplan.timing.serving.step import StepLoad
from rlplan.vocabulary import ActionKind

MAX_STEPS = 10_000
_APART = (ActionKind.EVALUATE,)


@dataclass(frozen=True, slots=True)
class CpuSpeed:
    """Speed of a rollout engine on a CPU host (`simulate.engine.Speed`)."""

    engine: CpuEngine

    def decode_step_s(self, num_seqs: float, context_tokens: float) -> float:
        """Predict one decode step of `num_seqs` sequences with `context_tokens` tokens in total."""
        return self.engine.step_cost(num_seqs, num_seqs, context_tokens / max(1.0, num_seqs)).seconds

    def prefill_s(self, num_tokens: float, context_tokens: float = 0.0) -> float:
        """Predict the prefill of `num_tokens` of one prompt after `context_tokens` that are already cached.

        Counts: a step with these tokens minus an empty step, because prefill runs together with decoding sequences.
        """
        step = self.engine.step_cost(num_tokens, 1.0, context_tokens + num_tokens / 2)
        return step.seconds - self.engine.step_cost(0.0, 0.0, 0.0).seconds


@dataclass(frozen=True, slots=True)
class DataParallelSpeed:
    """Speed of an engine with data-parallel attention on GPUs (`simulate.engine.Speed`)."""

    engine: EngineSpeed
    num_places: float
    """Sequences that start together; 0 if finished sequences are replaced."""
    prompt_len: float
    num_copies: int
    """Ranks that prefill the same prompt, each for some of its samples."""

    def decode_step_s(self, num_seqs: float, context_tokens: float) -> float:
        """Predict one decode step of `num_seqs` sequences with `context_tokens` tokens in total."""
        left_of = self.num_places if num_seqs < self.num_places else 0.0
        return self.engine.rates.seconds(StepLoad(num_seqs, context_tokens, num_places=left_of))

    def prefill_s(self, num_tokens: float, context_tokens: float = 0.0) -> float:
        """Predict the prefill of `num_tokens` prompt tokens spread over the ranks."""
        return sum(time_prefill(self.engine, self.num_copies * num_tokens, self.prompt_len))


def simulate_plan(plan: Plan, *, num_steps: int = 20, seed: int = 0) -> SimulationResult:
    """Simulate a plan's steps, sampling from very large batches. Equal seeds give equal results. Raises: SpecError."""
    result = simulate_sampled(build_setting(plan, num_steps), seed)
    first = {group.name: group.devices[0] for group in plan.schedule.groups}
    groups = (replace(use, capacity_bytes=plan.ledger.get_device_capacity(first[use.name])) for use in result.groups)
    return replace(result, interval_s=find_step_error(plan).interval(result.mean_step_s), groups=tuple(groups))


def build_setting(plan: Plan, num_steps: int) -> SimulationSetting:
    """Build the simulation's input. Raises: SpecError if the profile has no rates."""
    if not 1 <= num_steps <= MAX_STEPS:
        raise SpecError(
            f"{num_steps} steps are to be simulated",
            where="command line: --steps",
            rule=f"from 1 to {MAX_STEPS:,}",
            way_out="--steps 20",
        )
    if plan.timing is None:
        raise SpecError(
            f"profile '{plan.job.hardware.profile}' has no rates",
            where="hardware.profile",
            rule="a simulation needs the seconds of each action",
            way_out="rlplan profiles measure makes a profile of this host",
        )
    schedule, generates = drop_evaluation(plan.schedule), plan.job.has_rollouts
    played = {action.id for action in schedule.step if action.kind is ActionKind.GENERATE}
    async_rollouts = schedule.async_rollouts
    return SimulationSetting(
        schedule=schedule,
        costs={name: cost for name, cost in plan.costs.items() if name not in played},
        rollouts=_build_rollouts(plan) if generates else None,
        speed=_build_speed(plan) if generates else None,
        num_steps=num_steps,
        asynchrony=Asynchrony(
            float(async_rollouts.max_staleness),
            interrupts=async_rollouts.interrupts,
            keeps_versions=plan.choice.engine.keeps_versions,
            is_bound=True,
        )
        if async_rollouts
        else None,
        reward_latency_s=0.0 if plan.is_on_host else plan.job.workload.reward_latency_s,
        ledger=plan.ledger,
    )


def _build_rollouts(plan: Plan) -> StepRollouts:
    """Build a step's rollouts. On a CPU host, all engines' threads count as one engine, as in timing/cpu/actions.py."""
    workload, kv, size = plan.job.workload, plan.kv, plan.job.rollout.block_size
    assert kv is not None, "where there are rollouts there is a KV cache"
    if plan.is_on_host:
        # one block less: vLLM keeps a null block
        num_engines, limits = 1, EngineLimits(plan.job.rollout.max_num_seqs, kv.num_blocks - 1, size)
    else:
        num_engines = plan.choice.engines
        limits = EngineLimits(kv.max_num_seqs, max(1, kv.num_tokens // size), size)
    return StepRollouts(
        num_prompts=plan.job.num_generated_per_step // plan.job.num_generated_per_prompt,
        num_samples=plan.job.num_generated_per_prompt,
        prompt_len=workload.usual_prompt_len,
        lengths=workload.lengths,
        num_engines=num_engines,
        limits=limits,
        splits_groups=plan.job.splits_groups,
    )


def _build_speed(plan: Plan) -> Speed:
    """Build the speed model of one engine."""
    if plan.is_on_host:
        from rlplan.timing.cpu.actions import CpuTimes
        from rlplan.timing.cpu.host import read_host

        host = read_host(plan.job.load_profile())
        assert host is not None, "a plan with seconds is of a profile with rates"
        return CpuSpeed(CpuTimes(plan.job, plan.job.load_model(), host, plan.schedule).engine)
    from rlplan.planner.setting import read_setting
    from rlplan.timing.serving.generation import EngineSpeed

    setting = read_setting(plan.job)
    group, size = setting.get_cluster(GENERATION), plan.choice.arrangement.num_generation
    cluster = replace(group, num_gpus=size, gpus_per_host=min(size, group.gpus_per_host))
    choice, work = plan.choice.engine, plan.job.workload
    speed = EngineSpeed.from_job(plan.job, setting.policy, choice, cluster)
    if choice.attention_dp == 1:
        return speed
    assert plan.kv is not None, "where there is an engine there is a KV cache"
    # async engines refill freed places at once
    together = 0.0 if plan.choice.arrangement.is_async else float(plan.kv.max_num_seqs)
    copies = min(work.num_samples_per_prompt, choice.attention_dp)
    return DataParallelSpeed(speed, together, float(work.usual_prompt_len), copies)


def drop_evaluation(schedule: Schedule) -> Schedule:
    """The schedule without evaluation, which some steps run on engines that generate in the others."""
    return replace(schedule, step=tuple(action for action in schedule.step if action.kind not in _APART))
