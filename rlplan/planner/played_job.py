"""A job's plan played: its steps on a CPU host, many times over, with lengths that are drawn.

In: a Plan with its seconds, a number of steps, a seed. Out: what simulate/ makes of it.
Left out: evaluation, starting and finishing; training that takes longer where a batch happens to be longer.
"""

from dataclasses import dataclass, replace

from rlplan.dataflow.schedule import Schedule
from rlplan.errors import SpecError
from rlplan.memory.generation import num_kv_blocks
from rlplan.planner.plan import Plan
from rlplan.simulate.engine import EngineLimits
from rlplan.simulate.result import SimulationResult
from rlplan.simulate.run import simulate
from rlplan.simulate.setting import Asynchrony, RolloutWork, SimulationSetting
from rlplan.spec.lengths import cut_lengths
from rlplan.timing.cost import Cost
from rlplan.timing.cpu import CpuTimes
from rlplan.timing.cpu_engine import CpuEngine
from rlplan.timing.cpu_host import host_of
from rlplan.vocabulary import ActionKind

MAX_STEPS = 10_000
_APART = (ActionKind.EVALUATE,)


@dataclass(frozen=True, slots=True)
class CpuSpeed:
    """One rollout engine on a CPU host. See `simulate.speed.Speed`."""

    engine: CpuEngine

    def decode_step_s(self, num_seqs: float, context_tokens: float) -> float:
        """One token for each of `num_seqs` sequences that hold `context_tokens` together."""
        return self.engine.step_cost(num_seqs, num_seqs, context_tokens / max(1.0, num_seqs)).seconds

    def prefill_s(self, num_tokens: float, context_tokens: float = 0.0) -> float:
        """So many tokens of one prompt, behind `context_tokens` of it that are held already.

        Counts: a step with these tokens less an empty one, for prompts are computed beside the sequences that run.
        """
        step = self.engine.step_cost(num_tokens, 1.0, context_tokens + num_tokens / 2)
        return step.seconds - self.engine.step_cost(0.0, 0.0, 0.0).seconds


def play_job(plan: Plan, *, num_steps: int = 20, seed: int = 0) -> SimulationResult:
    """Play a plan's steps; the same seed gives the same result. Raises: SpecError where the profile has no rates."""
    return simulate(job_setting(plan, num_steps), seed)


def job_setting(plan: Plan, num_steps: int) -> SimulationSetting:
    """Everything that the simulation of a job's plan is told."""
    job, timing = plan.job, plan.timing
    profile, model = job.load_profile(), job.load_model()
    host = host_of(profile)
    if timing is None or host is None:
        raise SpecError(
            f"profile '{profile.name}' has no rates",
            where="hardware.profile",
            rule="a simulation needs the seconds of each action",
            way_out="rlplan profiles measure makes a profile of this host",
        )
    schedule, work, rollout = without_evaluation(plan.schedule), job.workload, job.rollout
    if not 1 <= num_steps <= MAX_STEPS:
        raise SpecError(
            f"{num_steps} steps are to be simulated",
            where="command line: --steps",
            rule=f"from 1 to {MAX_STEPS:,}",
            way_out="--steps 20",
        )
    engine: CpuEngine = CpuTimes(job, model, host, plan.schedule).engine
    blocks = num_kv_blocks(model, rollout.dtype.num_bytes, rollout.block_size, rollout.kv_cache_memory) - 1
    costs: dict[str, Cost] = {action.action_id: action.cost for action in timing.step.actions}
    lead = plan.schedule.lead
    generates = job.algorithm.declaration.has_rollouts
    return SimulationSetting(
        schedule=schedule,
        costs={name: cost for name, cost in costs.items() if name != "generate"},
        rollouts=RolloutWork(
            num_prompts=work.num_prompts_per_step,
            num_samples=job.num_generated_per_prompt,
            prompt_len=work.usual_prompt_len,
            lengths=cut_lengths(work.response_lengths, work.max_response_len),
            num_engines=1,
            limits=EngineLimits(rollout.max_num_seqs, blocks, rollout.block_size),
        )
        if generates
        else None,
        speed=CpuSpeed(engine) if generates else None,
        num_steps=num_steps,
        asynchrony=Asynchrony(float(lead.max_staleness), streams=True, interrupts=lead.interrupts, is_bound=True)
        if lead
        else None,
        ledger=plan.ledger,
    )


def without_evaluation(schedule: Schedule) -> Schedule:
    """The schedule without what happens in some steps only, on engines that are generating in the others."""
    return replace(schedule, step=tuple(action for action in schedule.step if action.kind not in _APART))
