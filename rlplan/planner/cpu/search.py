"""Search on a CPU host: the fastest choice whose peak fits, by predicted seconds of a step; each is built and rated.

In: a ResolvedJob. Out: a Plan: what was chosen, or the nearest that does not fit, and every other choice with why it
was not taken. Left out: which choices there are (candidates.py).
"""

from collections.abc import Callable, Iterator
from functools import cached_property

from rlplan.dataflow.build import build_schedule
from rlplan.dataflow.choice import Choice
from rlplan.dataflow.schedule import Schedule
from rlplan.errors import SpecError
from rlplan.memory.ledger import MemoryLedger
from rlplan.memory.machine.host import job_checkpoint_bytes
from rlplan.memory.roles.ledger import predict_cpu_ledger
from rlplan.memory.serving.generation import host_pool
from rlplan.memory.serving.kv_demand import KvDemand
from rlplan.planner import plan_parts, rules
from rlplan.planner.cpu.candidates import list_choices
from rlplan.planner.margins import SAME_SPEED
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Verdict
from rlplan.planner.resolve import plain, resolve
from rlplan.records import dataclass
from rlplan.spec.hardware.profile import CpuProfile
from rlplan.spec.job import JobSpec
from rlplan.spec.model import ModelSpec
from rlplan.spec.parts.lengths import cut_lengths
from rlplan.spec.resolved import ResolvedJob
from rlplan.timing.cpu.actions import predict_job
from rlplan.timing.job import JobTiming
from rlplan.units import MIB, ceil_div, format_bytes, format_seconds
from rlplan.vocabulary import Role


@dataclass(frozen=True)
class _Built:
    """A choice with its schedule and bytes, and its seconds once they are asked for."""

    choice: Choice
    schedule: Schedule
    ledger: MemoryLedger
    verdict: Verdict
    predict_timing: Callable[[Schedule], JobTiming | None]

    @cached_property
    def timing(self) -> JobTiming | None:
        """None without rates."""
        return self.predict_timing(self.schedule)

    @property
    def seconds(self) -> float:
        """Of a step; all alike without rates, so that the order of candidates decides."""
        return self.timing.step.seconds if self.timing else 0.0

    @property
    def peak_bytes(self) -> int:
        """Of the fullest host."""
        return self.ledger.fullest.num_bytes

    @property
    def headroom_bytes(self) -> int:
        """That are left on it."""
        return self.ledger.host_capacity_of(self.ledger.fullest.scope) - self.peak_bytes


class HostSearch:
    """One search of a job. Raises: SpecError where the job contradicts its model, or the KV cache is too small."""

    def __init__(self, job: ResolvedJob, asked: JobSpec) -> None:
        if asked.objective in ("gpus", "cost"):
            raise SpecError(
                f"objective {asked.objective} on {asked.hardware.profile}",
                where="objective",
                rule="gpus and cost ask how many GPUs to take; the devices of a CPU host are taken as they are given",
                way_out="objective=step_time",
            )
        self.job, self.asked, self.model = job, plain(asked), job.load_model()
        self.choices, self.impossible = list_choices(job)
        if _missing_kv_cache(job, self.model):
            raise _small_kv_cache(job, self.model)

    @cached_property
    def profile(self) -> CpuProfile:
        """The host's."""
        return self.job.load_profile()

    @cached_property
    def _others(self) -> dict[Role, ModelSpec]:
        return self.job.load_role_models()

    def of(self, plan: Plan) -> "HostSearch":
        """Itself: the devices of a CPU host are taken as they are given."""
        return self

    def step_s(self, choice: Choice, kv_cache: int) -> float:
        """Seconds of a step of one choice; 0 where the profile has no rates. kv_cache: the job's own."""
        timing = self._timing(build_schedule(self.job, choice))
        return timing.step.seconds if timing else 0.0

    def run(self, *, with_others: bool = True, may_leave_idle: bool = True) -> Plan:
        """The fastest choice that fits, or the one that overflows least. with_others: and every other, with why not."""
        if not self.choices:
            for reason in rules.job_refusals(self.job):
                raise rules.refused(reason)
            raise plan_parts.nothing_possible(self.impossible)
        fitting = [one for one in self._built if one.verdict is Verdict.FITS]
        best = min(self._built, key=lambda one: one.peak_bytes)
        if fitting:
            fastest = min(one.seconds for one in fitting)
            best = next(one for one in fitting if one.seconds <= fastest * (1 + SAME_SPEED))
        plan = self._whole(best)
        if not with_others:
            return plan
        rest = sorted((one for one in self._built if one is not best), key=lambda one: (one.verdict.rank, one.seconds))
        return plan.model_copy(
            update={
                "runners_up": tuple(map(self._alternative, rest)),
                "considered": (*self.impossible, *self._not_taken(best)),
                "stats": plan_parts.SearchStats(len(self.choices), len(self.choices)),
            }
        )

    def better_than(self, verdict: Verdict) -> Plan | None:
        """The best choice with a better verdict than that; None where there is none."""
        if not any(one.verdict.rank < verdict.rank for one in self._built):
            return None
        plan = self.run(with_others=False)
        return plan if plan is not None and plan.verdict.rank < verdict.rank else None

    def pareto(self) -> tuple[plan_parts.Alternative, ...]:
        """Of all that fit those that nothing beats in both seconds and headroom, the fastest first."""
        front: list[_Built] = []
        for one in sorted(self._built, key=lambda one: (one.seconds, one.peak_bytes)):
            if one.verdict is Verdict.FITS and (not front or one.headroom_bytes > front[-1].headroom_bytes):
                front.append(one)
        return tuple(map(self._alternative, front))

    @cached_property
    def _built(self) -> tuple[_Built, ...]:
        return tuple(map(self._build, self.choices))

    def _build(self, choice: Choice) -> _Built:
        schedule = build_schedule(self.job, choice)
        ledger = predict_cpu_ledger(self.job, self.model, self.profile, schedule, self._others)
        return _Built(choice, schedule, ledger, Verdict.of(ledger), self._timing)

    def _timing(self, schedule: Schedule) -> JobTiming | None:
        return predict_job(self.job, self.model, self.profile, schedule, self._others)

    def _whole(self, one: _Built) -> Plan:
        job = resolve(self.job, one.choice, self.job.rollout.kv_cache_memory)
        return Plan(
            asked=self.asked,
            job=job,
            choice=one.choice,
            schedule=one.schedule,
            ledger=one.ledger,
            fit=one.verdict,
            timing=one.timing,
            kv=self._kv,
            refusals=rules.list_refusals(job, one.choice),
            not_counted=plan_parts.list_uncounted(job, ()),
            checkpoint_bytes=job_checkpoint_bytes(job, {Role.POLICY: self.model} | self._others),
        )

    @cached_property
    def _kv(self) -> plan_parts.KvReport | None:
        """Of each engine, which takes its share of a step's rollouts."""
        job, rollout, work = self.job, self.job.rollout, self.job.workload
        if not job.has_rollouts:
            return None
        demand = KvDemand(
            host_pool(self.model, rollout),
            min(rollout.max_num_seqs, ceil_div(work.num_rollouts_per_step, rollout.num_engines)),
            work.usual_prompt_len,
            work.max_prompt_len,
            work.num_samples_per_prompt,
            cut_lengths(work.response_lengths, work.max_response_len),  # a mean alone says nothing of the longest
        )
        return plan_parts.KvReport.of(demand, rollout.kv_cache_memory, rollout.tp)

    def _alternative(self, one: _Built) -> plan_parts.Alternative:
        step = one.timing.step if one.timing else None
        kv_cache = self.job.rollout.kv_cache_memory
        return plan_parts.Alternative(one.choice, step, kv_cache, one.peak_bytes, one.headroom_bytes, one.verdict)

    def _not_taken(self, best: _Built) -> Iterator[plan_parts.Considered]:
        """Of each other placement that can be built what its best choice would come to."""
        found: dict[object, _Built] = {}
        for one in sorted(self._built, key=lambda one: (one.verdict.rank, one.seconds)):
            found.setdefault(one.choice.arrangement.placement, one)
        for placement, one in found.items():
            if placement is not best.choice.arrangement.placement:
                yield plan_parts.Considered(one.choice.arrangement.placement, _why_not(one, best))


def _why_not(one: _Built, best: _Built) -> str:
    peak = one.ledger.fullest
    if one.verdict is Verdict.DOES_NOT_FIT:
        process, role, kind, size = peak.rows[0]
        room = format_bytes(one.ledger.host_capacity_of(peak.scope))
        return (
            f"{peak.scope} needs {format_bytes(peak.num_bytes)} in {peak.action_id}, {room} available; largest: {kind} "
            f"of {role} in {process}, {format_bytes(size)}"
        )
    if one.seconds > best.seconds * (1 + SAME_SPEED):
        return f"fits too, {format_seconds(one.seconds)} a step instead of {format_seconds(best.seconds)}"
    return "fits too and is as fast; the other is preferred"


def _missing_kv_cache(job: ResolvedJob, model: ModelSpec) -> int:
    """Blocks that are missing for one longest sequence beside vLLM's own (v1/core/block_pool.py, `null_block`)."""
    rollout = job.rollout
    blocks = host_pool(model, rollout).num_blocks(rollout.kv_cache_memory)
    return max(0, ceil_div(job.workload.max_seq_len, rollout.block_size) + 1 - blocks)


def _small_kv_cache(job: ResolvedJob, model: ModelSpec) -> SpecError:
    rollout, length = job.rollout, job.workload.max_seq_len
    needed = ceil_div(length, rollout.block_size) + 1
    least = needed * host_pool(model, rollout).bytes_per_block
    return SpecError(
        f"rollout.kv_cache_memory = {format_bytes(rollout.kv_cache_memory)} holds "
        f"{needed - _missing_kv_cache(job, model)} blocks of {rollout.block_size} tokens, "
        f"one sequence of {length} tokens takes {needed}",
        where="rollout.kv_cache_memory",
        rule="the KV cache holds at least one longest sequence and one spare block",
        way_out=f"rollout.kv_cache_memory={ceil_div(least, MIB)}MiB or more",
    )
