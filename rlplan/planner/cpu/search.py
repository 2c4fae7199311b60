"""Search on a CPU host: build and rate every choice that the runtime can execute, then take the fastest one that fits.

In: a ResolvedJob. Out: a Plan with the best choice, or the nearest that does not fit, and reasons for all other
choices. Left out: which choices exist (candidates.py).
"""

from collections.abc import Iterator
from functools import cached_property

from rlplan.dataflow.build import build_schedule
from rlplan.dataflow.choice import Choice
from rlplan.dataflow.schedule import Schedule
from rlplan.errors import SpecError
from rlplan.memory.machine.host import job_checkpoint_bytes
from rlplan.memory.roles.ledger import predict_cpu_ledger
from rlplan.memory.serving.generation import build_host_pool
from rlplan.memory.serving.kv import KvDemand
from rlplan.planner import plan_parts, rules
from rlplan.planner.cpu.candidates import list_choices
from rlplan.planner.margins import SAME_SPEED
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Verdict
from rlplan.planner.resolve import resolve, restore_job_spec
from rlplan.spec.hardware.profile import CpuProfile
from rlplan.spec.job import JobSpec
from rlplan.spec.model import ModelSpec
from rlplan.spec.parts.lengths import cut_lengths
from rlplan.spec.resolved import ResolvedJob
from rlplan.timing.cpu.actions import predict_job
from rlplan.timing.step import JobTiming
from rlplan.units import MIB, ceil_div, format_bytes, format_seconds
from rlplan.vocabulary import Placement, Role


class HostSearch:
    """Search of one job. Raises: SpecError if the job contradicts its model, or if the KV cache is too small."""

    def __init__(self, job: ResolvedJob, asked: JobSpec) -> None:
        if asked.objective in ("gpus", "cost"):
            raise SpecError(
                f"objective {asked.objective} on {asked.hardware.profile}",
                where="objective",
                rule="gpus and cost choose a number of GPUs; a CPU host is always used as given",
                way_out="objective=step_time",
            )
        self.asked, self.model = restore_job_spec(asked), job.load_model()
        self.job = _size_kv_cache(job, self.model, is_open=self.asked.rollout.kv_cache_memory == "auto")
        self.choices, self.impossible = list_choices(self.job)

    @cached_property
    def profile(self) -> CpuProfile:
        """Hardware profile of the host."""
        return self.job.load_profile()

    @cached_property
    def _others(self) -> dict[Role, ModelSpec]:
        return self.job.load_role_models()

    def restrict_to_plan(self, plan: Plan) -> "HostSearch":
        """Return self: a CPU host's devices are always used as given."""
        return self

    def predict_step_s(self, choice: Choice, kv_cache: int) -> float:
        """Predict a choice's step seconds; 0 if the profile has no rates. kv_cache: unused, the job fixes its size."""
        timing = self._predict_timing(build_schedule(self.job, choice))
        return timing.step.seconds if timing else 0.0

    def run(self, *, with_others: bool = True, may_leave_idle: bool = True) -> Plan:
        """Find the fastest choice that fits, or the one that overflows least. with_others: add all other choices with
        reasons.
        """
        if not self.choices:
            for reason in rules.find_job_refusals(self.job):
                raise rules.build_refusal(reason)
            raise plan_parts.explain_impossible(self.impossible)
        fitting = [plan for plan in self._plans if plan.fit is Verdict.FITS]
        best = min(self._plans, key=lambda plan: plan.binding.num_bytes)
        if fitting:
            fastest = min(plan.seconds for plan in fitting)
            # choices are in order of preference, so the first within SAME_SPEED wins
            best = next(plan for plan in fitting if plan.seconds <= fastest * (1 + SAME_SPEED))
        updates: dict[str, object] = {}
        if with_others:
            updates = {
                "runners_up": tuple(_build_alternative(plan) for plan in self._in_order if plan is not best),
                "considered": (*self.impossible, *self._list_rejected(best)),
            }
        job = resolve(self.job, best.choice, self.job.rollout.kv_cache_memory)
        updates |= {
            "job": job,
            "refusals": rules.list_refusals(job, best.choice),
            "not_counted": plan_parts.list_uncounted(job, ()),
            "checkpoint_bytes": job_checkpoint_bytes(job, {Role.POLICY: self.model} | self._others),
            "stats": plan_parts.SearchStats(len(self.choices), len(self.choices)),
        }
        return best.model_copy(update=updates)

    def find_better_plan(self, verdict: Verdict) -> Plan | None:
        """Find the best choice with a better verdict than `verdict`; None if there is none."""
        if not any(plan.fit.rank < verdict.rank for plan in self._plans):
            return None
        plan = self.run(with_others=False)
        return plan if plan.verdict.rank < verdict.rank else None

    def find_pareto_front(self) -> tuple[plan_parts.Alternative, ...]:
        """List the choices that fit and that no other beats in both seconds and headroom, the fastest first."""
        front: list[Plan] = []
        for plan in sorted(self._plans, key=lambda plan: (plan.seconds, plan.binding.num_bytes)):
            if plan.fit is Verdict.FITS and (not front or plan.headroom_bytes > front[-1].headroom_bytes):
                front.append(plan)
        return tuple(map(_build_alternative, front))

    @cached_property
    def _plans(self) -> tuple[Plan, ...]:
        """A plan of each choice with only bytes and seconds filled in."""
        return tuple(map(self._build_plan, self.choices))

    @property
    def _in_order(self) -> list[Plan]:
        return sorted(self._plans, key=lambda plan: (plan.fit.rank, plan.seconds))

    def _build_plan(self, choice: Choice) -> Plan:
        schedule = build_schedule(self.job, choice)
        ledger = predict_cpu_ledger(self.job, self.model, self.profile, schedule, self._others)
        return Plan.model_construct(  # skips validation: these values are already checked
            asked=self.asked,
            job=self.job,
            choice=choice,
            schedule=schedule,
            ledger=ledger,
            fit=Verdict.judge(ledger),
            timing=self._predict_timing(schedule),
            kv=self._kv,
        )

    def _predict_timing(self, schedule: Schedule) -> JobTiming | None:
        return predict_job(self.job, self.model, self.profile, schedule, self._others)

    @cached_property
    def _kv(self) -> plan_parts.KvReport | None:
        """KV cache of each engine, which generates its share of a step's rollouts."""
        job, rollout, work = self.job, self.job.rollout, self.job.workload
        if not job.has_rollouts:
            return None
        demand = KvDemand(
            build_host_pool(self.model, rollout),
            min(rollout.max_num_seqs, ceil_div(work.num_rollouts_per_step, rollout.num_engines)),
            work.usual_prompt_len,
            work.max_prompt_len,
            work.num_samples_per_prompt,
            cut_lengths(work.response_lengths, work.max_response_len),  # a mean alone does not bound the longest
        )
        return plan_parts.KvReport.build(demand, rollout.kv_cache_memory, rollout.tp)

    def _list_rejected(self, best: Plan) -> Iterator[plan_parts.Considered]:
        """Explain for each other placement why its best choice was not taken."""
        best_by_placement: dict[Placement, Plan] = {}
        for plan in self._in_order:
            best_by_placement.setdefault(plan.choice.arrangement.placement, plan)
        for placement, plan in best_by_placement.items():
            if placement is not best.choice.arrangement.placement:
                yield plan_parts.Considered(placement, _explain_rejection(plan, best))


def _build_alternative(plan: Plan) -> plan_parts.Alternative:
    step, kv_cache = plan.timing.step if plan.timing else None, plan.job.rollout.kv_cache_memory
    peak = plan.binding.num_bytes
    return plan_parts.Alternative(plan.choice, step, kv_cache, peak, plan.headroom_bytes, plan.fit)


def _explain_rejection(plan: Plan, best: Plan) -> str:
    peak = plan.binding
    if plan.fit is Verdict.DOES_NOT_FIT:
        process, role, kind, size = peak.rows[0]
        return (
            f"{peak.scope} needs {format_bytes(peak.num_bytes)} in {peak.action_id}, "
            f"{format_bytes(plan.binding_capacity)} available; largest: {kind} of {role} in {process}, "
            f"{format_bytes(size)}"
        )
    if plan.seconds > best.seconds * (1 + SAME_SPEED):
        return f"fits too, {format_seconds(plan.seconds)} a step instead of {format_seconds(best.seconds)}"
    return "fits too and is as fast; the other is preferred"


def _size_kv_cache(job: ResolvedJob, model: ModelSpec, *, is_open: bool) -> ResolvedJob:
    """The job with a KV cache for one longest sequence and vLLM's null block, at least.

    is_open: whether the size may be raised. Raises: SpecError for a size that is too small.
    """
    rollout, length, pool = job.rollout, job.workload.max_seq_len, build_host_pool(model, job.rollout)
    needed = ceil_div(length, rollout.block_size) + 1  # vLLM 0.32.0 v1/core/block_pool.py, `null_block`
    blocks = pool.num_blocks(rollout.kv_cache_memory)
    least = ceil_div(needed * pool.bytes_per_block, MIB)
    if blocks < needed and is_open:
        return job.model_copy(update={"rollout": rollout.model_copy(update={"kv_cache_memory": least * MIB})})
    if blocks < needed:
        raise SpecError(
            f"rollout.kv_cache_memory = {format_bytes(rollout.kv_cache_memory)} holds "
            f"{blocks} blocks of {rollout.block_size} tokens, one sequence of {length} tokens needs {needed}",
            where="rollout.kv_cache_memory",
            rule="the KV cache holds at least one longest sequence and one spare block",
            way_out=f"rollout.kv_cache_memory={least}MiB or more",
        )
    return job
