"""Search on GPUs: the best candidate that fits at every moment, with its full ledger and alternatives.

In: a SettledJob and its setting. Out: a Plan with ledger, verdict, seconds, runners-up and risks, or the nearest plan
that does not fit. Left out: the order in which candidates are examined (best_first.py).

If every candidate uses all GPUs, step time, tokens per second and dollars per token give the same order. The objectives
`gpus` and `cost` therefore also try fewer GPUs.

A step can also be faster on fewer GPUs: if all of them do not spread evenly over hosts, if parallel sizes do not divide
them, if one more host adds a slow network, or if more GPUs share one host's memory.
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
from rlplan.memory.roles.ledger import build_gpu_process, predict_gpu_ledger
from rlplan.planner import rules
from rlplan.planner.checks.gpus import check_job
from rlplan.planner.gpu.best_first import NEVER, BestFirst, PairBounds
from rlplan.planner.gpu.candidates import GpuSpace
from rlplan.planner.gpu.notes import PlanNotes, explain_candidate, list_cut_passes
from rlplan.planner.gpu.scored_candidates import (
    BUFFERS,
    MANY_MISFITS,
    CandidateScorer,
    ScoredCandidate,
    rank_simplicity,
)
from rlplan.planner.gpu.streams import find_engine_floor
from rlplan.planner.margins import ENOUGH_ROOM, SAME_SPEED, list_simpler_jobs, rank_roominess
from rlplan.planner.memo import Memo, memoize
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import (
    Alternative,
    Considered,
    KvReport,
    SearchStats,
    Verdict,
    explain_impossible,
    list_uncounted,
)
from rlplan.planner.resolve import resolve, restore_job_spec
from rlplan.planner.setting import GpuSetting
from rlplan.spec.job import JobSpec
from rlplan.spec.parts.placement import PoolSpec
from rlplan.spec.resolved import SettledJob, settle
from rlplan.units import ceil_div, format_bytes, format_seconds
from rlplan.vocabulary import Placement

NUM_RUNNERS_UP = 5
HEADROOM_SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
MANY = 50_000
"""Limit of candidates: with more, the best of another placement is not searched, which would double the time."""
MAX_HOSTS = 16
"""Up to this many hosts, every number of whole hosts is tried."""
FASTER = 1 - 1e-9
"""A plan must beat this share of another's cost to be better. Of equal ones, the plan on all the GPUs is kept."""
MAX_LOOKED_AT = 100
"""Candidates after the best that are examined for runners-up of other families."""


@dataclass(frozen=True)
class Best:
    """Result of a search."""

    plan: Plan
    candidate: ScoredCandidate
    """The candidate of the plan."""
    stream: BestFirst | None
    """Stream that yielded it and continues with the next best; None if nothing fits."""
    num_scored: int
    """Candidates scored for better verdicts."""


class GpuSearch:
    """Search of one job on its GPUs."""

    def __init__(
        self,
        job: SettledJob,
        setting: GpuSetting,
        asked: JobSpec | None = None,
        memo: Memo | None = None,
        scorer: CandidateScorer | None = None,
    ) -> None:
        """memo: of the calling search. scorer: of a search on the same kind of GPUs."""
        self.job, self.setting, self.asked, self.memo = job, setting, restore_job_spec(asked or job), memo or Memo()
        self.scorer = scorer or CandidateScorer(job, setting, self.memo)
        self.roles, self.times = self.scorer.roles, self.scorer.times
        self.space, self.known = GpuSpace(job, setting, self.memo), self.memo.create_table()
        self._best: Best | None = None
        self.least_on_fewer = float("inf")
        """Lower bound of the seconds on fewer GPUs."""
        self.instead_of = ""
        """Reason why the pools' roles are exchanged, if the requested order could not run."""
        self.chosen_words: tuple[str, ...] = ()
        """Explanations of keys that were searched value by value."""

    def run(self, *, with_others: bool = True, may_leave_idle: bool = True) -> Plan:
        """Find the best candidate that fits, or the nearest one. with_others: add runners-up and other placements.

        Raises: SpecError if sizes do not divide, NoFeasiblePlanError if no placement can be built.
        """
        if not may_leave_idle:
            return self._run(with_others=with_others)
        plan = self._choose_count()._run(with_others=with_others)
        return plan.model_copy(update={"notes": (*PlanNotes(self, plan), *plan.notes)})

    def _choose_count(self) -> "GpuSearch":
        """Find the search on the number of GPUs that the objective prefers; self if nothing fits on any.

        `gpus`: the fewest GPUs on which a layout fits in the worst case, else in expectation. `cost`: the fewest
        GPU-seconds a step, because all GPUs cost alike and all steps train on as many tokens; of equals, fewer GPUs.
        """
        if self.job.objective not in ("gpus", "cost"):
            return self._choose_fastest_count()
        searches = [self.restrict_gpus(count) for count in list_gpu_counts(self.setting)]
        searches = [search for search in searches if search.space.arrangements]
        for rank in (0, 1):
            best, least = None, float("inf")
            for search in searches:
                candidate = next(search.open_stream(rank).read_until(least / search.setting.num_gpus), None)
                if candidate is None:
                    continue
                if self.job.objective == "gpus":
                    return search
                gpu_seconds = candidate.timing.seconds * search.setting.num_gpus
                if gpu_seconds < least * FASTER:
                    best, least = search, gpu_seconds
            if best is not None:
                return best
        return self

    def _choose_fastest_count(self) -> "GpuSearch":
        """Find the search on the number of GPUs with the shortest step, among layouts that fit equally well."""
        full = self.find_best().plan if self.lies_evenly and self.space.arrangements else None
        for rank in (0, 1):
            full_fits = full is not None and full.fit.rank == rank
            best, limit = None, full.seconds * FASTER if full is not None and full_fits else float("inf")
            least_on_fewer = float("inf")  # on fewer GPUs than `best`
            for fewer in self._list_fewer():
                if not full_fits and full is not None and not self._may_fit_better(fewer, full):
                    continue
                within_limit = fewer.floor_seconds < limit
                seconds, bound = fewer.find_fastest(rank, limit) if within_limit else (None, fewer.floor_seconds)
                least_on_fewer = min(least_on_fewer, bound)
                if seconds is not None:
                    best, limit, least_on_fewer = fewer, seconds * FASTER, float("inf")
            if best is not None or full_fits:
                chosen = best or self
                chosen.least_on_fewer = float("inf") if self.setting.has_pools else least_on_fewer
                return chosen
        return self

    def _may_fit_better(self, fewer: "GpuSearch", full: Plan) -> bool:
        """Whether a layout may fit on fewer GPUs although none fits on all.

        It may if GPUs share a host's memory, if larger groups can share a tensor there, or if little is missing.
        Otherwise a rank holds no less on fewer GPUs.
        """
        short = full.shortage
        if self.setting.has_pools or short is None or any(shortage.is_of_host for shortage in full.shortages):
            return True
        if short.needed_bytes - short.available_bytes <= BUFFERS:
            return True
        # n & -n is the largest power of two that divides n: the largest group that shares a tensor
        fewer_gpus, all_gpus = fewer.setting.num_gpus, self.setting.num_gpus
        return fewer_gpus & -fewer_gpus > all_gpus & -all_gpus

    def _list_fewer(self) -> Iterator["GpuSearch"]:
        """List searches on fewer GPUs, more GPUs first: any number that is even on one or two hosts, else full hosts.

        With two pools: their roles exchanged, and each pool alone.
        """
        setting, host = self.setting, self.per_node
        if setting.has_pools:
            yield from self.list_other_pools()
            return
        num_gpus = setting.num_gpus
        every_count = range(num_gpus - 1, 0, -1)
        counts = every_count if num_gpus <= MAX_HOSTS * host else reversed(list_gpu_counts(setting)[:-1])
        for count in counts:
            if count % host == 0 or (count < 2 * host and count % self.count_hosts(count) == 0):
                yield self.restrict_gpus(count)

    def _find_fastest_on_fewer(self, limit: float) -> float:
        """Find the shortest step below `limit` on fewer GPUs that fits in the worst case; `limit` if there is none."""
        for fewer in self._list_fewer():
            if fewer.floor_seconds < limit and fewer.find_fastest(0, limit)[0] is not None:
                limit = min(limit, fewer.find_simplest().seconds)
        return limit

    @memoize
    def restrict_gpus(self, num_gpus: int) -> "GpuSearch":
        """The search on fewer GPUs, spread over as few hosts as possible."""
        if num_gpus == self.setting.num_gpus or self.setting.has_pools:
            return self
        hosts = self.count_hosts(num_gpus)
        fewer = {"num_devices": num_gpus, "num_hosts": hosts}
        job = self.job.model_copy(update={"hardware": self.job.hardware.model_copy(update=fewer)})
        setting = self.setting.replace_gpus(num_gpus, hosts)
        return self._derive_search(job, setting)

    def list_other_pools(self) -> Iterator["GpuSearch"]:
        """List searches with the two pools' roles exchanged, if the job leaves them open, and with each pool alone."""
        hardware, second = self.asked.hardware, self.asked.hardware.generation
        if second is None or hardware.num_hosts != "auto" or self.asked.placement.num_generation_devices != "auto":
            return
        first = PoolSpec(profile=hardware.profile, num_devices=hardware.num_devices)
        for pool, other in ((second, first), (first, None), (second, None)):
            changed = {"profile": pool.profile, "num_devices": pool.num_devices, "generation": other}
            job = settle(self.asked.model_copy(update={"hardware": hardware.model_copy(update=changed)}))
            pools = self.setting.pools[:: 1 if pool is first else -1]
            setting = replace(self.setting, pools=pools if other is not None else pools[:1])
            try:
                check_job(job, setting)
            except SpecError:
                continue
            yield GpuSearch(job, setting, self.asked, self.memo)

    def restrict_to_plan(self, plan: Plan) -> "GpuSearch":
        """The search on the GPUs of a plan of this job."""
        if not self.setting.has_pools:
            return self.restrict_gpus(plan.num_devices)
        matching = (search for search in (self, *self.list_other_pools()) if search.job.hardware == plan.job.hardware)
        return next(matching, self)

    @property
    def per_node(self) -> int:
        """GPUs of a full host; those of the node if the job does not state its hosts."""
        pool = self.setting.pools[0]
        if self.asked.hardware.num_hosts != "auto" or pool.node is None:
            return pool.gpus_per_host
        return pool.node.num_gpus

    def count_hosts(self, num_gpus: int) -> int:
        """Count the hosts that hold `num_gpus` GPUs."""
        return ceil_div(num_gpus, self.per_node)

    def replace_job(self, job: SettledJob) -> "GpuSearch":
        """The search on the same GPUs for a job with another workload."""
        return GpuSearch(job, self.setting, job, self.memo)

    def _derive_search(self, job: SettledJob, setting: GpuSetting) -> "GpuSearch":
        """Derive a search for other choices or fewer GPUs that shares the memo and known shortages."""
        return GpuSearch(job, setting, self.asked, self.memo, self.scorer.derive(job, setting))

    @property
    def lies_evenly(self) -> bool:
        """Whether all hosts hold equally many GPUs, which rlplan's runtime requires."""
        hardware = self.job.hardware
        return hardware.num_devices % hardware.num_hosts == 0 or self.job.backend != "deepspeed"

    @cached_property
    def floor_seconds(self) -> float:
        """Lower bound of the seconds of any layout."""
        return min(map(self.times.bound_seconds, self.space.list_groups()), default=float("inf"))

    def find_fastest(self, rank: int, limit: float) -> tuple[float | None, float]:
        """Find (seconds of the best candidate below `limit` or None, lower bound of all)."""
        stream = self.open_stream(rank)
        candidate = next(stream.read_until(limit), None)
        seconds = candidate.timing.seconds if candidate is not None else stream.least
        return (seconds, seconds) if candidate is not None and seconds < limit else (None, seconds)

    def _run(self, *, with_others: bool) -> Plan:
        if not self.space.arrangements:
            raise explain_impossible(self.space.impossible, rules.find_job_refusals(self.job))
        result = self.find_best()
        best, stream = self.find_simplest(), result.stream
        faster = () if best is result.plan else (result.candidate,)
        behind = dropwhile(lambda scored: scored is not result.candidate, stream or ())
        next_best = islice(behind, 1, MAX_LOOKED_AT + 1)
        others = self._list_runners_up(best, chain(faster, next_best)) if with_others else ()
        num_scored = result.num_scored + (stream.num_scored if stream is not None else 0)
        stats = SearchStats(self.space.num_candidates, num_scored)
        best = best.model_copy(update={"runners_up": others, "stats": stats, "notes": self._list_room_notes(best)})
        if not with_others:
            return best
        there = dict.fromkeys(arrangement.placement for arrangement in self.space.arrangements)
        other_placements = (placement for placement in there if placement is not best.choice.arrangement.placement)
        considered = (
            *self.space.impossible,
            *(self._explain_placement(placement, best.seconds) for placement in other_placements),
        )
        return best.model_copy(update={"considered": considered})

    def _list_room_notes(self, chosen: Plan) -> tuple[str, ...]:
        """List the plan's notes, and why it is not the fastest layout if it leaves more headroom."""
        fastest = self.find_best().plan
        more = chosen.headroom_bytes - fastest.headroom_bytes
        has_room = fastest.headroom_bytes >= ENOUGH_ROOM * self.setting.capacity
        if chosen.choice == fastest.choice or more <= 0 or has_room:
            return chosen.notes
        words = (
            f"the fastest layout takes {format_seconds(fastest.seconds)} a step and leaves "
            f"{format_bytes(fastest.headroom_bytes)} in the worst case; this one takes "
            f"{format_seconds(chosen.seconds)} ({chosen.seconds / fastest.seconds - 1:+.2%}) and leaves "
            f"{format_bytes(chosen.headroom_bytes)}"
        )
        return (*chosen.notes, words)

    def find_better_plan(self, verdict: Verdict) -> Plan | None:
        """Find the best candidate with a better verdict than `verdict`; None if there is none."""
        # callers ask this for jobs that do not fit, so memory is checked before seconds
        self.scorer.num_misfits = MANY_MISFITS + 1
        for rank in range(verdict.rank):
            for scored in self.open_stream(rank):
                plan = self.build_plan(scored)
                if plan.fit.rank <= rank:
                    return plan
        return None

    def find_best(self) -> Best:
        """Find the best candidate, or the nearest one if none fits; searched once."""
        if self._best is None:
            self._best = self._find_best()
        return self._best

    def _find_best(self) -> Best:
        num_scored = 0
        for rank in (0, 1):
            stream = self.open_stream(rank)
            for scored in stream:
                plan = self.build_plan(scored)
                if plan.fit.rank <= rank:
                    return Best(plan, scored, stream, num_scored)
            num_scored += stream.num_scored
        nearest = self.find_nearest()
        if isinstance(nearest, str):
            nearest_one = Considered(self.space.arrangements[0].placement, nearest)
            raise explain_impossible((nearest_one,), rules.find_job_refusals(self.job))
        return Best(self.build_plan(nearest), nearest, None, num_scored)

    def find_pareto_front(self) -> tuple[Alternative, ...]:
        """List the fastest candidate that fits in the worst case at each headroom in HEADROOM_SHARES, if headroom costs
        time.

        The result is exact at these shares; KV cache given up for headroom counts.
        """
        front: list[Alternative] = []
        for share in HEADROOM_SHARES:
            with_headroom = GpuSearch(self.job, self.setting.scale_capacity(1 - share), self.asked, self.memo)
            for scored in islice(with_headroom.open_stream(0), 1):
                alternative = self.build_alternative(scored)
                # a candidate with more headroom replaces those that are no faster
                lost = [known for known in front if known.seconds >= alternative.seconds * (1 - 1e-9)]
                front = [known for known in front if known not in lost]
                front.append(alternative)
        return tuple(front)

    def open_stream(self, rank: int, placement: Placement | None = None) -> BestFirst:
        """Open a stream of candidates that fit with a rank, the best first, optionally of one placement."""
        every = self.space.arrangements
        chosen = [arrangement for arrangement in every if placement in (None, arrangement.placement)]
        return BestFirst([self.get_bounds(arrangement, rank) for arrangement in chosen])

    @memoize
    def get_bounds(self, arrangement: Arrangement, rank: int) -> PairBounds:
        """Get the pairs of an arrangement; built once."""
        return PairBounds(self.scorer, self.space, arrangement, rank)

    def predict_step_s(self, choice: Choice, kv_cache: int) -> float:
        """Predict a candidate's step seconds with `kv_cache` bytes per GPU."""
        return self.times.time_step(choice, kv_cache).seconds

    def score(self, candidate: Choice) -> ScoredCandidate:
        """Predict a candidate's memory, KV cache, verdict and step time."""
        return self.scorer.score(candidate)

    def find_nearest(self, placement: Placement | None = None) -> ScoredCandidate | str:
        """Find the candidate that overflows least, or the reason why none can run.

        Counts: per layout, the smallest micro-batch with all memory savings, with every engine. Engines are skipped if
        the trainer already overflows by more beside the smallest engine.
        """
        best: tuple[tuple[float, float], Choice] | None = None
        reason = ""
        for arrangement in self.space.arrangements:
            if placement in (None, arrangement.placement):
                sweeps = self.space.list_sweeps(arrangement)
                most_savings = max(sum(sweep.savings) for sweep in sweeps)
                floor = find_engine_floor(self.scorer, arrangement, self.space.list_engines(arrangement))
                # the last choice of a sweep has the smallest micro-batch
                for trainer in (sweep.choices[-1] for sweep in sweeps if sum(sweep.savings) == most_savings):
                    if best is not None and self.scorer.overflows_more(arrangement, trainer, floor, best[0][0]):
                        continue
                    for engine in self.space.list_engines(arrangement):
                        transport = self.space.list_transports(arrangement, engine)[0]
                        candidate = Choice(arrangement, trainer, engine, transport)
                        reason = next(rules.find_choice_refusals(self.job, candidate), "")
                        if not reason:
                            excess = self.scorer.compute_excess(candidate)
                            best = (excess, candidate) if best is None or excess < best[0] else best
        return self.score(best[1]) if best is not None else reason

    def build_plan(self, scored: ScoredCandidate) -> Plan:
        """Build the plan of a scored candidate with its full ledger."""
        candidate = scored.choice
        schedule = build_schedule(self.job, candidate)
        ledger = self._build_ledger(scored, schedule)
        timing = self.times.time_schedule(schedule, candidate, scored.kv_cache)
        kv = None
        if self.job.has_rollouts:
            demand, _, _ = self.roles.predict_demand(candidate.arrangement, candidate.engine)
            kv = KvReport.build(demand, scored.kv_cache, candidate.engine.tp, candidate.engine.attention_dp)
        fit = Verdict.judge(ledger, at_least=scored.rank, takes_from_host=self.setting.gpu.shares_host_memory)
        return Plan.model_construct(  # skips validation: these values are already checked
            asked=self.asked,
            job=resolve(self.job, candidate, scored.kv_cache),
            choice=candidate,
            schedule=schedule,
            ledger=ledger,
            fit=fit,
            timing=timing,
            kv=kv,
            oom_risk=0.0 if fit is Verdict.FITS else self.roles.estimate_oom_risk(candidate, scored.kv_cache),
            checkpoint_bytes=job_checkpoint_bytes(self.job, self.setting.models),
            swap_bytes=self.scorer.count_swap_bytes(candidate),
            refusals=rules.list_refusals(self.job, candidate),
            notes=tuple(list_cut_passes(self.job, candidate)),
            not_counted=list_uncounted(self.job, self.setting.models.values()),
        )

    def _build_ledger(self, scored: ScoredCandidate, schedule: Schedule) -> MemoryLedger:
        lengths = self.roles.lengths
        # lengths for the low, expected and high end of every row
        three = (lengths.mean, self.roles.usual_len, float(self.job.workload.max_response_len))
        hosts = self.roles.places.assign_hosts(schedule, scored.choice.arrangement)
        processes = []
        for layout in schedule.layouts:
            name = layout.processes[0][0]
            short, usual, longest = (
                self.roles.forecast_process(name, scored.choice, length, scored.kv_cache) for length in three
            )
            factor = self.roles.get_measured_factor(name)
            processes.append(build_gpu_process(layout, *hosts[name], (short, usual, longest), factor))
        empty = MemoryLedger(
            rows=(),
            device_capacity=self.setting.capacity,
            host_capacity=self.setting.host_capacity or 0,
            shares_host_memory=False,
            order=(),
            capacities=tuple(self.roles.places.list_other_capacities(schedule).items()),
        )
        return predict_gpu_ledger(schedule, processes, empty, self.job.workload.num_steps, self.roles.rollout_buffer)

    def find_simplest(self) -> Plan:
        """Find the simplest of equally fast layouts that leaves enough headroom, or the one with most headroom.

        Candidates fit in the worst case and are within SAME_SPEED of the fastest, and no slower than on fewer GPUs.
        """
        best = self.find_best().plan
        plan = self._find_roomiest(best, best.seconds * (1 + SAME_SPEED))
        if plan.seconds > self.least_on_fewer and (limit := self._find_fastest_on_fewer(plan.seconds)) < plan.seconds:
            return self._find_roomiest(best, max(best.seconds, limit))
        return plan

    def _find_roomiest(self, best: Plan, limit: float) -> Plan:
        """Find the first layout by `rank_roominess` among those that fit in the worst case within `limit` seconds.

        The simplest one is returned at once if it leaves enough headroom, because nothing then ranks before it.
        """
        plan = self._simplify(best, limit)
        room = int(ENOUGH_ROOM * self.setting.capacity)
        # with enough headroom nothing ranks before the simplest layout
        if plan.verdict is not Verdict.FITS or limit <= best.seconds or plan.headroom_bytes >= room:
            return plan
        stream = self.find_best().stream
        as_fast = stream.read_until(limit) if stream is not None else ()
        roomiest = min(
            as_fast, key=lambda scored: (*self._roominess(scored), *rank_simplicity(scored.choice)), default=None
        )
        if roomiest is None or self._roominess(roomiest) >= self._roominess(self.score(plan.choice)):
            return plan
        roomier_plan = self.build_plan(roomiest)
        return roomier_plan if roomier_plan.verdict is Verdict.FITS else plan

    def _roominess(self, scored: ScoredCandidate) -> tuple[object, ...]:
        return rank_roominess(
            scored.choice, self.compute_headroom(scored), self.setting.capacity, scored.timing.seconds
        )

    def _simplify(self, best: Plan, limit: float) -> Plan:
        """Give up COMPLICATIONS one after another while a layout fits within `limit` seconds."""
        plan, tried = best, set[str]()
        while plan.verdict is Verdict.FITS:
            jobs = ((key, job) for key, job in list_simpler_jobs(self.job, plan.choice) if key not in tried)
            key, job = next(jobs, ("", None))
            if job is None:
                break
            tried.add(key)
            if (
                scored := next(self._derive_search(job, self.setting).open_stream(0).read_until(limit), None)
            ) is not None:
                simpler_plan = self.build_plan(scored)
                plan = simpler_plan if simpler_plan.verdict is Verdict.FITS else plan
        return plan

    def _list_runners_up(self, best: Plan, stream: Iterable[ScoredCandidate]) -> tuple[Alternative, ...]:
        """List the next best candidates, one per family."""
        families, runners_up = {best.choice.family}, list[Alternative]()
        for scored in stream:
            if (family := scored.choice.family) not in families:
                families.add(family)
                runners_up.append(self.build_alternative(scored))
            if len(runners_up) == NUM_RUNNERS_UP:
                break
        return tuple(runners_up)

    def build_alternative(self, scored: ScoredCandidate) -> Alternative:
        """Build the alternative for a scored candidate that was not chosen."""
        headroom = self.compute_headroom(scored)
        peak, verdict = self.setting.capacity - headroom, list(Verdict)[scored.rank]
        return Alternative(scored.choice, scored.timing, scored.kv_cache, peak, headroom, verdict)

    def compute_headroom(self, scored: ScoredCandidate) -> int:
        """Bytes that a GPU has left at its worst-case peak, KV cache included."""
        need = self.roles.predict_fit(scored.choice)
        return min(need.slack_high, need.room_high - scored.kv_cache) if self.job.has_rollouts else need.slack_high

    def _explain_placement(self, placement: Placement, chosen_s: float) -> Considered:
        """Explain another placement by its best or nearest candidate; in huge spaces, by its lower bound."""
        if self.space.num_candidates > MANY:
            least = NEVER
            for bounds in sorted(self.open_stream(1, placement).bounds, key=lambda bounds: bounds.floor):
                if bounds.floor < least:  # engines only add seconds to the floor
                    least = min(least, bounds.first_bound)
                if least[0] <= chosen_s:
                    return Considered(placement, "no faster layout fits")
            words = f"takes at least {format_seconds(least[0])} a step" if least < NEVER else "no engine fits"
            return Considered(placement, words)
        streams = (self.open_stream(rank, placement) for rank in (0, 1))
        best = next((candidate for stream in streams for candidate in islice(stream, 1)), None)
        scored = best or self.find_nearest(placement)
        if isinstance(scored, str):
            return Considered(placement, scored)
        return explain_candidate(self.setting, scored, chosen_s)


def list_gpu_counts(setting: GpuSetting) -> tuple[int, ...]:
    """List numbers of GPUs to try, fewer first: powers of two, divisors of all, and whole hosts while these are few."""
    num_gpus, host = setting.num_gpus, setting.gpus_per_host
    if setting.has_pools:
        return (num_gpus,)
    counts = {2**power for power in range(num_gpus.bit_length())}
    counts |= {count for count in range(1, num_gpus + 1) if num_gpus % count == 0}
    if num_gpus <= MAX_HOSTS * host:
        counts |= set(range(host, num_gpus + 1, host))
    return tuple(sorted(counts))
