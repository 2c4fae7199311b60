"""Search on GPUs: the best candidate whose every moment fits, with its whole ledger, and what else there was.

In: a SettledJob and its setting. Out: a Plan: what was chosen, ledger, verdict, seconds, runners-up and risks, or
the nearest that does not fit. Left out: the order in which candidates are looked at (best_first.py).

Where every candidate has all GPUs, seconds of a step, tokens per second and dollars per token are one order. The
objectives `gpus` and `cost` try smaller numbers of GPUs too (counts.py).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, dropwhile, islice

from rlplan.dataflow.build import build_schedule
from rlplan.dataflow.choice import Arrangement, Choice
from rlplan.dataflow.schedule import Schedule
from rlplan.errors import SpecError
from rlplan.memory.ledger import MemoryLedger
from rlplan.memory.machine.host import job_checkpoint_bytes
from rlplan.memory.roles.ledger import gpu_process, predict_gpu_ledger
from rlplan.planner import rules
from rlplan.planner.checks.gpus import check_job
from rlplan.planner.gpu.best_first import NEVER, BestFirst, PairBounds
from rlplan.planner.gpu.candidates import GpuSpace
from rlplan.planner.gpu.counts import fastest_on_fewer, on_best_count
from rlplan.planner.gpu.notes import considered, list_cut_passes, notes_of
from rlplan.planner.gpu.scored_candidates import MANY_MISFITS, CandidateScorer, ScoredCandidate, simplicity
from rlplan.planner.gpu.streams import least_of_engines
from rlplan.planner.margins import ENOUGH_ROOM, SAME_SPEED, roominess, simpler_jobs
from rlplan.planner.memo import Memo, memoized
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import (
    Alternative,
    Considered,
    KvReport,
    SearchStats,
    Verdict,
    list_uncounted,
    nothing_possible,
)
from rlplan.planner.resolve import plain, resolve
from rlplan.planner.setting import GpuSetting
from rlplan.spec.job import JobSpec
from rlplan.spec.parts.placement import PoolSpec
from rlplan.spec.resolved import SettledJob, settle
from rlplan.units import ceil_div, format_bytes, format_seconds
from rlplan.vocabulary import Placement

NUM_RUNNERS_UP = 5
HEADROOM_SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
MANY = 50_000
"""Candidates beyond which another placement's best is not looked for: that takes as long as the answer itself."""
MAX_LOOKED_AT = 100
"""Candidates behind the best that are looked at for runners-up of other families."""


@dataclass(frozen=True)
class Best:
    """What a search found."""

    plan: Plan
    one: ScoredCandidate
    """That it is the plan of."""
    stream: BestFirst | None
    """That it came from, and that goes on with the next best; None where nothing fits."""
    num_scored: int
    """Candidates that were scored for better verdicts."""


class GpuSearch:
    """One search of a job."""

    def __init__(
        self,
        job: SettledJob,
        setting: GpuSetting,
        asked: JobSpec | None = None,
        memo: Memo | None = None,
        scorer: CandidateScorer | None = None,
    ) -> None:
        """memo: of a search that asks this one. scorer: with what a search on such GPUs has come upon."""
        self.job, self.setting, self.asked, self.memo = job, setting, plain(asked or job), memo or Memo()
        self.scorer = scorer or CandidateScorer(job, setting, self.memo)
        self.roles, self.times = self.scorer.roles, self.scorer.times
        self.space, self.known = GpuSpace(job, setting, self.memo), self.memo.own_table()
        self._best: Best | None = None
        self.least_on_fewer = float("inf")
        """Seconds that nothing on fewer GPUs falls below."""
        self.instead_of = ""
        """Why the pools are not in the order that was asked for, where that order could not run."""
        self.chosen_words: tuple[str, ...] = ()
        """Why keys are what they are that were left open and searched value by value."""

    def run(self, *, with_others: bool = True, may_leave_idle: bool = True) -> Plan:
        """The best candidate that fits, or the nearest one. with_others: and the runners-up, and what the other
        placements would need.

        Raises: SpecError where sizes do not divide, NoFeasiblePlanError where no placement can be built.
        """
        if not may_leave_idle:
            return self._run(with_others=with_others)
        plan = on_best_count(self)._run(with_others=with_others)
        return plan.model_copy(update={"notes": (*notes_of(self, plan), *plan.notes)})

    @memoized
    def on(self, num_gpus: int) -> "GpuSearch":
        """The same search on fewer GPUs, which lie on as few hosts as they can."""
        if num_gpus == self.setting.num_gpus or self.setting.has_pools:
            return self
        hosts = self.num_hosts_of(num_gpus)
        fewer = {"num_devices": num_gpus, "num_hosts": hosts}
        job = self.job.model_copy(update={"hardware": self.job.hardware.model_copy(update=fewer)})
        setting = self.setting.with_gpus(num_gpus, hosts)
        return self._beside(job, setting)

    def other_pools(self) -> Iterator["GpuSearch"]:
        """Of two pools the other order, where the job does not say more of the one, and each by itself."""
        hardware, second = self.asked.hardware, self.asked.hardware.generation
        if hardware.link is not None:
            return  # the first group is where the trainers are
        if second is None or hardware.num_hosts != "auto" or self.asked.placement.num_generation_devices != "auto":
            return
        first = PoolSpec(profile=hardware.profile, num_devices=hardware.num_devices)
        for pool, other in ((second, first), (first, None), (second, None)):
            changed = {"profile": pool.profile, "num_devices": pool.num_devices, "generation": other}
            job = settle(self.asked.model_copy(update={"hardware": hardware.model_copy(update=changed)}))
            mine = self.setting.pools[:: 1 if pool is first else -1]
            setting = replace(self.setting, pools=mine if other is not None else mine[:1])
            try:
                check_job(job, setting)
            except SpecError:
                continue
            yield GpuSearch(job, setting, self.asked, self.memo)

    def of(self, plan: Plan) -> "GpuSearch":
        """The search that found a plan of this job: on its GPUs."""
        if not self.setting.has_pools:
            return self.on(plan.num_devices)
        mine = (one for one in (self, *self.other_pools()) if one.job.hardware == plan.job.hardware)
        return next(mine, self)

    @property
    def per_node(self) -> int:
        """GPUs of a full host: where the job does not say on how many hosts they lie, of the node."""
        pool = self.setting.pools[0]
        if self.asked.hardware.num_hosts != "auto" or pool.node is None:
            return pool.gpus_per_host
        return pool.node.num_gpus

    def num_hosts_of(self, num_gpus: int) -> int:
        """Hosts on which so many of the GPUs lie."""
        return ceil_div(num_gpus, self.per_node)

    def of_job(self, job: SettledJob) -> "GpuSearch":
        """The same GPUs for a job with another workload."""
        return GpuSearch(job, self.setting, job, self.memo)

    def _beside(self, job: SettledJob, setting: GpuSetting) -> "GpuSearch":
        """The search of a job that differs in its choices, on GPUs that differ in their number."""
        return GpuSearch(job, setting, self.asked, self.memo, self.scorer.of(job, setting))

    @property
    def lies_evenly(self) -> bool:
        """Whether all hosts have as many of the GPUs, as rlplan's own runtime needs it."""
        hardware = self.job.hardware
        return hardware.num_devices % hardware.num_hosts == 0 or self.job.backend != "deepspeed"

    @cached_property
    def floor_seconds(self) -> float:
        """No layout takes fewer, whatever its groups are."""
        return min(map(self.times.floor_seconds, self.space.groups()), default=float("inf"))

    def fastest(self, rank: int, limit: float) -> tuple[float | None, float]:
        """Seconds of the best candidate that fits with a rank, where below a limit; and what none falls below."""
        stream = self.stream(rank)
        found = next(stream.up_to(limit), None)
        seconds = found.timing.seconds if found is not None else stream.least
        return (seconds, seconds) if found is not None and seconds < limit else (None, seconds)

    def _run(self, *, with_others: bool) -> Plan:
        if not self.space.arrangements:
            raise nothing_possible(self.space.impossible, rules.job_refusals(self.job))
        found = self.best()
        best, stream = self.simplest(), found.stream
        faster = () if best is found.plan else (found.one,)
        behind = dropwhile(lambda one: one is not found.one, stream or ())
        next_best = islice(behind, 1, MAX_LOOKED_AT + 1)
        others = self._others(best, chain(faster, next_best)) if with_others else ()
        num_scored = found.num_scored + (stream.num_scored if stream is not None else 0)
        stats = SearchStats(self.space.num_candidates, num_scored)
        best = best.model_copy(update={"runners_up": others, "stats": stats, "notes": self._notes_of_room(best)})
        if not with_others:
            return best
        there = dict.fromkeys(arrangement.placement for arrangement in self.space.arrangements)
        other_placements = (placement for placement in there if placement is not best.choice.arrangement.placement)
        considered = (*self.space.impossible, *(self._other(placement, best.seconds) for placement in other_placements))
        return best.model_copy(update={"considered": considered})

    def _notes_of_room(self, chosen: Plan) -> tuple[str, ...]:
        """The plan's notes, and why it is not the fastest layout where it leaves more room than that."""
        fastest = self.best().plan
        more = chosen.headroom_bytes - fastest.headroom_bytes
        if (
            chosen.choice == fastest.choice
            or more <= 0
            or fastest.headroom_bytes >= ENOUGH_ROOM * self.setting.capacity
        ):
            return chosen.notes
        words = (
            f"the fastest layout takes {format_seconds(fastest.seconds)} a step and leaves "
            f"{format_bytes(fastest.headroom_bytes)} at the high end; this one takes "
            f"{format_seconds(chosen.seconds)} ({chosen.seconds / fastest.seconds - 1:+.2%}) and leaves "
            f"{format_bytes(chosen.headroom_bytes)}"
        )
        return (*chosen.notes, words)

    def better_than(self, verdict: Verdict) -> Plan | None:
        """The best candidate with a better verdict than that; None where there is none."""
        self.scorer.num_misfits = MANY_MISFITS + 1
        for rank in range(verdict.rank):
            for one in self.stream(rank):
                plan = self.full_plan(one)
                if plan.fit.rank <= rank:
                    return plan
        return None

    def best(self) -> Best:
        """The best candidate, or where none fits the nearest; looked for once."""
        if self._best is None:
            self._best = self._find_best()
        return self._best

    def _find_best(self) -> Best:
        num_scored = 0
        for rank in (0, 1):
            stream = self.stream(rank)
            for one in stream:
                plan = self.full_plan(one)
                if plan.fit.rank <= rank:
                    return Best(plan, one, stream, num_scored)
            num_scored += stream.num_scored
        nearest = self.nearest()
        if isinstance(nearest, str):
            nearest_one = Considered(self.space.arrangements[0].placement, nearest)
            raise nothing_possible((nearest_one,), rules.job_refusals(self.job))
        return Best(self.full_plan(nearest), nearest, None, num_scored)

    def pareto(self) -> tuple[Alternative, ...]:
        """For each headroom (HEADROOM_SHARES of a GPU) the fastest candidate that surely fits, where more room
        costs time. Exact at these shares; what KV cache a candidate gives up for its headroom is counted.
        """
        found: list[Alternative] = []
        for share in HEADROOM_SHARES:
            with_headroom = GpuSearch(self.job, self.setting.with_capacity(1 - share), self.asked, self.memo)
            for one in islice(with_headroom.stream(0), 1):
                here = self.alternative(one)
                lost = [there for there in found if there.seconds >= here.seconds * (1 - 1e-9)]
                found = [there for there in found if there not in lost]
                found.append(here)
        return tuple(found)

    def stream(self, rank: int, placement: Placement | None = None) -> BestFirst:
        """Candidates that fit with a rank, the best first: all, or those of a placement."""
        arrangements = [
            arrangement for arrangement in self.space.arrangements if placement in (None, arrangement.placement)
        ]
        return BestFirst([self.bounds(arrangement, rank) for arrangement in arrangements])

    @memoized
    def bounds(self, arrangement: Arrangement, rank: int) -> PairBounds:
        """The pairs of an arrangement; made once."""
        return PairBounds(self.scorer, self.space, arrangement, rank)

    def step_s(self, choice: Choice, kv_cache: int) -> float:
        """Seconds of a step of one candidate with so many bytes of KV cache a GPU."""
        return self.times.timing(choice, kv_cache).seconds

    def score(self, candidate: Choice) -> ScoredCandidate:
        """What a candidate needs, how large its KV cache can be, whether it fits, and how long a step takes."""
        return self.scorer.score(candidate)

    def nearest(self, placement: Placement | None = None) -> ScoredCandidate | str:
        """Where nothing fits: the candidate that overflows least, of those that save the most memory; or, where none of
        them could run, why.

        Counts: of each layout the smallest pass that saves the most memory, beside every engine; no engine is looked at
        where the trainer beside the least of any overflows by more already.
        """
        best: tuple[tuple[float, float], Choice] | None = None
        reason = ""
        for arrangement in self.space.arrangements:
            if placement in (None, arrangement.placement):
                sweeps = self.space.sweeps(arrangement)
                most_savings = max(sum(sweep.savings) for sweep in sweeps)
                floor = least_of_engines(self.scorer, arrangement, self.space.engines(arrangement))
                for trainer in (sweep.choices[-1] for sweep in sweeps if sum(sweep.savings) == most_savings):
                    if best is not None and self.scorer.overflows_more(arrangement, trainer, floor, best[0][0]):
                        continue
                    for engine in self.space.engines(arrangement):
                        transport = self.space.transports(arrangement, engine)[0]
                        candidate = Choice(arrangement, trainer, engine, transport)
                        reason = next(rules.choice_refusals(self.job, candidate), "")
                        if not reason:
                            excess = self.scorer.excess(candidate)
                            best = (excess, candidate) if best is None or excess < best[0] else best
        return self.score(best[1]) if best is not None else reason

    def full_plan(self, one: ScoredCandidate) -> Plan:
        """The plan of a rated candidate, with its whole ledger."""
        candidate = one.choice
        schedule = build_schedule(self.job, candidate)
        ledger = self._ledger(one, schedule)
        timing = self.times.job_timing(schedule, candidate, one.kv_cache)
        kv = None
        if self.job.has_rollouts:
            demand, _, _ = self.roles.demand(candidate.arrangement, candidate.engine)
            kv = KvReport.of(demand, one.kv_cache, candidate.engine.tp, candidate.engine.attention_dp)
        fit = Verdict.of(ledger, at_least=one.rank, takes_from_host=self.setting.gpu.shares_host_memory)
        return Plan.model_construct(  # of values that are checked already
            asked=self.asked,
            job=resolve(self.job, candidate, one.kv_cache),
            choice=candidate,
            schedule=schedule,
            ledger=ledger,
            fit=fit,
            timing=timing,
            kv=kv,
            oom_risk=0.0 if fit is Verdict.FITS else self.roles.oom_risk(candidate, one.kv_cache),
            checkpoint_bytes=job_checkpoint_bytes(self.job, self.setting.models),
            swap_bytes=self.scorer.swap_bytes(candidate),
            refusals=rules.list_refusals(self.job, candidate),
            notes=tuple(list_cut_passes(self.job, candidate)),
            not_counted=list_uncounted(self.job, self.setting.models.values()),
        )

    def _ledger(self, one: ScoredCandidate, schedule: Schedule) -> MemoryLedger:
        lengths = self.roles.lengths
        three = (lengths.mean, self.roles.usual_len, float(self.job.workload.max_response_len))
        hosts = self.roles.places.hosts(schedule, one.choice.arrangement)
        processes = []
        for layout in schedule.layouts:
            name = layout.processes[0][0]
            short, usual, longest = (self.roles.forecast(name, one.choice, length, one.kv_cache) for length in three)
            processes.append(gpu_process(layout, *hosts[name], (short, usual, longest)))
        empty = MemoryLedger(
            rows=(),
            device_capacity=self.setting.capacity,
            host_capacity=self.setting.host_capacity or 0,
            shares_host_memory=False,
            order=(),
            capacities=tuple(self.roles.places.other_capacities(schedule).items()),
        )
        return predict_gpu_ledger(schedule, processes, empty, self.job.workload.num_steps, self.roles.rollout_buffer)

    def simplest(self) -> Plan:
        """Of layouts that surely fit and are as fast within SAME_SPEED the simplest that leaves room enough, or the one
        that leaves most; none slower than on fewer GPUs.
        """
        best = self.best().plan
        plan = self._roomiest(best, best.seconds * (1 + SAME_SPEED))
        if plan.seconds > self.least_on_fewer and (limit := fastest_on_fewer(self, plan.seconds)) < plan.seconds:
            return self._roomiest(best, max(best.seconds, limit))
        return plan

    def _roomiest(self, best: Plan, limit: float) -> Plan:
        """What `roominess` puts first of all layouts that surely fit in so many seconds.

        The simplest of them is looked at alone where it leaves room enough: then nothing comes before it.
        """
        plan = self._without_complications(best, limit)
        room = int(ENOUGH_ROOM * self.setting.capacity)
        if plan.verdict is not Verdict.FITS or limit <= best.seconds or plan.headroom_bytes >= room:
            return plan
        stream = self.best().stream
        as_fast = stream.up_to(limit) if stream is not None else ()
        roomiest = min(as_fast, key=lambda one: (*self._roominess(one), *simplicity(one.choice)), default=None)
        if roomiest is None or self._roominess(roomiest) >= self._roominess(self.score(plan.choice)):
            return plan
        other = self.full_plan(roomiest)
        return other if other.verdict is Verdict.FITS else plan

    def _roominess(self, one: ScoredCandidate) -> tuple[object, ...]:
        return roominess(one.choice, self.headroom(one), self.setting.capacity, one.timing.seconds)

    def _without_complications(self, best: Plan, limit: float) -> Plan:
        """What gave up what it can of COMPLICATIONS in so many seconds, one after the other; the fastest of those."""
        plan, tried = best, set[str]()
        while plan.verdict is Verdict.FITS:
            jobs = ((key, job) for key, job in simpler_jobs(self.job, plan.choice) if key not in tried)
            key, job = next(jobs, ("", None))
            if job is None:
                break
            tried.add(key)
            if (found := next(self._beside(job, self.setting).stream(0).up_to(limit), None)) is not None:
                other = self.full_plan(found)
                plan = other if other.verdict is Verdict.FITS else plan
        return plan

    def _others(self, best: Plan, stream: Iterable[ScoredCandidate]) -> tuple[Alternative, ...]:
        """The next best candidates of other families than those before them."""
        families, found = {best.choice.family}, list[Alternative]()
        for one in stream:
            if (family := one.choice.family) not in families:
                families.add(family)
                found.append(self.alternative(one))
            if len(found) == NUM_RUNNERS_UP:
                break
        return tuple(found)

    def alternative(self, one: ScoredCandidate) -> Alternative:
        """A scored candidate that was not chosen."""
        headroom = self.headroom(one)
        peak, verdict = self.setting.capacity - headroom, list(Verdict)[one.rank]
        return Alternative(one.choice, one.timing, one.kv_cache, peak, headroom, verdict)

    def headroom(self, one: ScoredCandidate) -> int:
        """Bytes that the fullest moment of a GPU leaves at the high end, with the KV cache."""
        need = self.roles.fit(one.choice)
        return min(need.slack_high, need.room_high - one.kv_cache) if self.job.has_rollouts else need.slack_high

    def _other(self, placement: Placement, chosen_s: float) -> Considered:
        """What another placement would come to: its best candidate, or the nearest; of very many their least alone."""
        if self.space.num_candidates > MANY:
            least = NEVER
            for bounds in sorted(self.stream(1, placement).bounds, key=lambda bounds: bounds.floor):
                if bounds.floor < least:  # else no engine makes it faster
                    least = min(least, bounds.first_bound)
                if least[0] <= chosen_s:
                    return Considered(placement, "no layout with this placement that fits is faster")
            words = f"takes at least {format_seconds(least[0])} a step" if least < NEVER else "no engine fits"
            return Considered(placement, words)
        streams = (self.stream(rank, placement) for rank in (0, 1))
        found = next((one for stream in streams for one in islice(stream, 1)), None)
        one = found or self.nearest(placement)
        return Considered(placement, one) if isinstance(one, str) else considered(self, one, chosen_s)
