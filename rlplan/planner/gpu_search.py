"""Search on GPUs: the candidate with the least handicap whose every moment fits.

In: a BudgetSpec. Out: a Budget: what was chosen, its ledger, verdict and risks, or the nearest that does not fit.
Left out: time (gpu_candidates.py says what stands in for it).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from rlplan.dataflow.gpu_step import GpuStep, build_gpu_schedule
from rlplan.dataflow.schedule import Schedule
from rlplan.errors import NoFeasiblePlanError
from rlplan.memory.gpu.engine import EngineOnGpu
from rlplan.memory.gpu.kv_demand import ENOUGH, KvDemand
from rlplan.memory.gpu.predict import GpuForecast, GpuProcess, predict_gpu_ledger
from rlplan.memory.gpu.scorer import ScorerOnGpu
from rlplan.memory.gpu.trainer import Passes, TrainerOnGpu
from rlplan.memory.ledger import MemoryLedger
from rlplan.memory.logits import Loss
from rlplan.planner.budget import Budget, Considered, GpuSetting, KvReport, Verdict
from rlplan.planner.gpu_candidates import GpuCandidate, Impossible, list_gpu_candidates
from rlplan.planner.gpu_tables import Fit, Pattern, RoleTable, fit, pattern_of
from rlplan.spec.budget import BudgetSpec
from rlplan.units import ceil_div, format_bytes
from rlplan.vocabulary import Placement, Role

KV_SHORTFALL = 8.0
"""Handicap where no rollout can run; none where all of a step run at once. In between they run in turns."""


@dataclass(frozen=True)
class Rated:
    """A candidate with what it needs. kv_cache: bytes a GPU. rank: 0 fits, 1 fits in expectation only, 2 does not."""

    candidate: GpuCandidate
    need: Fit
    kv_cache: int
    rank: int
    total: float

    @property
    def order(self) -> tuple[int, float]:
        """Better ones first: what fits, then what costs little; among what does not fit, what needs least."""
        return self.rank, self.total if self.rank < 2 else float(self.need.expected)


class GpuSearch:
    """One search. Forecasts and tables are made once a choice and used by every candidate that makes it."""

    def __init__(self, budget: BudgetSpec, setting: GpuSetting) -> None:
        self.budget, self.setting = budget, setting
        self._tables: dict[object, RoleTable] = {}
        self._covered: set[tuple[int, GpuStep]] = set()
        self._patterns: dict[GpuStep, tuple[Schedule, Pattern]] = {}
        self._demands: dict[tuple[int, int], tuple[KvDemand, int, int]] = {}
        self.lengths = budget.workload.lengths

    def run(self) -> Budget:
        """The best candidate that fits, or the nearest one.

        Raises: SpecError where sizes do not divide, NoFeasiblePlanError where no placement can be built.
        """
        candidates, impossible = list_gpu_candidates(self.budget, self.setting.num_gpus, self.setting.policy)
        if not candidates:
            raise _nothing_possible(impossible)
        rated: list[Rated] = []
        limit = float("inf")
        for candidate in candidates:
            if candidate.handicap >= limit:
                break
            one = self.rate(candidate)
            rated.append(one)
            if one.rank == 0:
                limit = min(limit, one.total)
        considered = [Considered(item.placement, None, item.reason) for item in impossible]
        return self._first_that_holds(sorted(rated, key=lambda one: one.order), considered)

    def rate(self, candidate: GpuCandidate) -> Rated:
        """What a candidate needs, how large its KV cache can be, and whether it fits."""
        capacity = self.setting.capacity
        _, pattern = self.schedule(candidate.step)
        need = fit(pattern, self.tables(candidate), capacity)
        rank = 0 if need.high <= capacity else 1 if need.expected <= capacity else 2
        if not candidate.step.has_rollouts:
            return Rated(candidate, need, 0, rank, candidate.handicap)
        demand, enough, least = self.demand(candidate)
        wanted = self.budget.rollout.kv_cache_memory
        largest = enough if wanted == "auto" else int(wanted)
        least = least if wanted == "auto" else largest
        if min(need.room_high, largest) < least:
            rank = max(rank, 1 if need.room_expected >= least else 2)
        room = need.room_high if need.room_high >= least else need.room_expected
        kv_cache = max(0, min(largest, room)) // demand.pool.bytes_per_block * demand.pool.bytes_per_block
        at_once = demand.num_seqs * self.num_engines(candidate.step) * min(1.0, kv_cache / enough)
        shortfall = KV_SHORTFALL * (1 - min(1.0, at_once / self.budget.workload.num_rollouts_per_step))
        return Rated(candidate, need, kv_cache, rank, candidate.handicap + shortfall)

    def schedule(self, step: GpuStep) -> tuple[Schedule, Pattern]:
        """The schedule of a step and its pattern."""
        if step not in self._patterns:
            schedule = build_gpu_schedule(step)
            self._patterns[step] = schedule, pattern_of(schedule)
        return self._patterns[step]

    def tables(self, candidate: GpuCandidate) -> dict[str, RoleTable]:
        """The table of every process, with an entry for every action."""
        schedule, _ = self.schedule(candidate.step)
        tables = {name: self._table(name, candidate) for name, _ in schedule.processes}
        for name, table in tables.items():
            if (known := (id(table), candidate.step)) not in self._covered:
                table.cover((*schedule.start, *schedule.step), name)
                self._covered.add(known)
        return tables

    def demand(self, candidate: GpuCandidate) -> tuple[KvDemand, int, int]:
        """What one engine's rollouts ask for, bytes that are enough for them, and the least that it starts with."""
        step, workload = candidate.step, self.budget.workload
        key = step.tp, step.num_generation
        if key not in self._demands:
            engine = EngineOnGpu(
                self.setting.policy, self.budget.rollout, candidate.engine, step.placement, self.setting.overheads, 1
            )
            share = ceil_div(workload.num_rollouts_per_step, self.num_engines(step))
            demand = KvDemand(
                engine.pool,
                min(self.budget.rollout.max_num_seqs, share),
                workload.prompt_len,
                workload.max_prompt_len,
                workload.num_samples_per_prompt,
                self.lengths,
            )
            self._demands[key] = demand, demand.bytes_at(ENOUGH), demand.least_bytes
        return self._demands[key]

    def num_engines(self, step: GpuStep) -> int:
        """Engines that share the rollouts of a step."""
        return max(1, step.num_generation // step.tp)

    def forecast(self, process: str, candidate: GpuCandidate, response_len: float, kv_cache: int = 0) -> GpuForecast:
        """What a process holds when the longest response of a micro-batch has so many tokens."""
        step, budget, setting = candidate.step, self.budget, self.setting
        worker, *rest = process.split("/")
        passes = self.passes(candidate, response_len)
        if worker == "rollout_engine":
            return EngineOnGpu(
                setting.policy,
                budget.rollout,
                candidate.engine,
                step.placement,
                setting.overheads,
                budget.placement.sync_bucket,
                kv_cache,
            )
        if worker == "scorer":
            role = Role(rest[0])
            return ScorerOnGpu(
                role,
                setting.model_of(role),
                budget.training.dtype.num_bytes,
                Loss(budget.training.logits),
                passes,
                step.num_training,
                setting.overheads,
                is_sharded=step.zero_stage == 3 and step.num_training > 1,
            )
        role = Role(worker.removesuffix("_trainer"))
        return TrainerOnGpu(
            role,
            setting.model_of(role),
            budget.training,
            candidate.trainer,
            passes,
            step.num_training,
            setting.overheads,
            budget.placement.sync_bucket,
        )

    def passes(self, candidate: GpuCandidate, response_len: float) -> Passes:
        """One micro-batch of a rank whose rollouts are padded to `response_len`, or packed up to the limit."""
        workload, training = self.budget.workload, self.budget.training
        sequences = candidate.trainer.micro_batch * self.budget.declaration.sequences_per_sample
        length = workload.prompt_len + response_len
        if response_len >= workload.max_response_len:
            length = workload.max_seq_len
        tokens = sequences * length
        if workload.max_tokens_per_micro_batch is not None:
            tokens = float(workload.max_tokens_per_micro_batch * self.budget.declaration.sequences_per_sample)
        tokens /= training.ulysses
        head = tokens * response_len / length
        share = workload.rollouts_per_mini_batch // (candidate.step.num_training // training.ulysses)
        return Passes(int(tokens), int(head), accumulates=share > candidate.trainer.micro_batch)

    @cached_property
    def usual_len(self) -> float:
        """The longest response of a step, at its median: what a usual step's largest micro-batch is padded to."""
        return self.lengths.longest_of(self.budget.workload.num_rollouts_per_step)

    def _table(self, process: str, candidate: GpuCandidate) -> RoleTable:
        """A process's table, shared by all candidates in which it holds the same."""
        step = candidate.step
        is_engine = process.startswith("rollout_engine")
        key: tuple[object, ...] = (process, step.placement is Placement.DISAGGREGATED, candidate.engine)
        if process.startswith("scorer"):
            key = (process, step.num_training, step.zero_stage == 3, candidate.trainer.micro_batch)
        elif not is_engine:
            key = (process, step.num_training, candidate.trainer)
        if key not in self._tables:
            longest = float(self.budget.workload.max_response_len)
            self._tables[key] = RoleTable(
                self.forecast(process, candidate, self.usual_len),
                self.forecast(process, candidate, longest),
                self.forecast(process, candidate, longest, 1) if is_engine else None,
            )
        return self._tables[key]

    def _first_that_holds(self, rated: list[Rated], considered: list[Considered]) -> Budget:
        """The first in order whose whole ledger holds: also while starting, and in the host's memory."""
        nearest: Budget | None = None
        for one in rated[:50]:
            budget = self.whole(one)
            if nearest is None or budget.verdict.rank < nearest.verdict.rank:
                nearest = budget
            if budget.verdict.rank == one.rank:
                break
        assert nearest is not None, "there is a candidate"
        chosen = nearest.candidate.step.placement
        others = [self._considered(one) for one in self._best_of_others(chosen)]
        return nearest.with_considered((*considered, *others))

    def _best_of_others(self, chosen: Placement) -> Iterator[Rated]:
        """Of each other placement the first candidate that fits, else the one that needs least."""
        candidates, _ = list_gpu_candidates(self.budget, self.setting.num_gpus, self.setting.policy)
        for placement in Placement:
            mine = [candidate for candidate in candidates if candidate.step.placement is placement]
            if placement is not chosen and mine:
                rated = (self.rate(candidate) for candidate in mine)
                yield next((one for one in rated if one.rank == 0), None) or min(
                    map(self.rate, mine), key=lambda one: one.order
                )

    def whole(self, one: Rated) -> Budget:
        """The budget of a rated candidate, with its whole ledger."""
        schedule, _ = self.schedule(one.candidate.step)
        ledger = self._ledger(one, schedule)
        kv = None
        if one.candidate.step.has_rollouts:
            demand, _, _ = self.demand(one.candidate)
            kv = KvReport.of(demand, one.kv_cache, one.candidate.engine.tp)
        verdict = Verdict.of(ledger, self.setting.host_capacity, holds_kv=one.rank)
        return Budget(
            self.budget, self.setting, one.candidate, schedule, ledger, verdict, kv, self._oom_risk(one, verdict)
        )

    def _ledger(self, one: Rated, schedule: Schedule) -> MemoryLedger:
        lengths = self.lengths
        three = (lengths.mean, self.usual_len, float(self.budget.workload.max_response_len))
        processes = []
        for name, device in schedule.processes:
            short, usual, longest = (self.forecast(name, one.candidate, length, one.kv_cache) for length in three)
            role = next(layout.role for layout in schedule.layouts if (name, device) in layout.processes)
            group = next(group for group in schedule.groups if device in group.devices)
            alike = min(len(group.devices), self.setting.gpus_per_host)
            processes.append(GpuProcess(name, device, role, short, usual, longest, alike))
        return predict_gpu_ledger(schedule, processes, self.setting.capacity, self.setting.host_capacity or 0)

    def _oom_risk(self, one: Rated, verdict: Verdict) -> float:
        """Probability that some micro-batch of a step is too long.

        Counts: 1 - F(l)^n, l the longest response with which every moment still fits as expected, n rollouts a step.
        """
        workload, capacity = self.budget.workload, self.setting.capacity
        if verdict is Verdict.FITS:
            return 0.0
        pattern = self.schedule(one.candidate.step)[1]
        low, high = 1.0, float(workload.max_response_len)
        if self._need_at(one, pattern, low) > capacity:
            return 1.0
        if self._need_at(one, pattern, high) <= capacity:
            return 0.0
        for _ in range(12):
            middle = (low + high) / 2
            low, high = (middle, high) if self._need_at(one, pattern, middle) <= capacity else (low, middle)
        return 1.0 - self.lengths.at_most(low) ** workload.num_rollouts_per_step

    def _need_at(self, one: Rated, pattern: Pattern, response_len: float) -> int:
        """Bytes at the worst moment when the longest response has so many tokens."""
        schedule, _ = self.schedule(one.candidate.step)
        tables = {}
        for name, _ in schedule.processes:
            forecast = self.forecast(name, one.candidate, response_len, one.kv_cache)
            tables[name] = RoleTable(forecast, forecast)
            tables[name].cover((*schedule.start, *schedule.step), name)
        return fit(pattern, tables, self.setting.capacity).expected

    def _considered(self, one: Rated) -> Considered:
        capacity = self.setting.capacity
        where = f"{format_bytes(one.need.expected)} without KV cache, {format_bytes(capacity)} available"
        if one.rank == 2 and one.need.expected <= capacity:
            return Considered(one.candidate.step.placement, one, f"no room for a KV cache: {where}")
        if one.rank == 2:
            return Considered(one.candidate.step.placement, one, f"needs {where}")
        words = "would fit too, and is thought slower" if one.rank == 0 else "would fit in expectation only"
        return Considered(one.candidate.step.placement, one, f"{words} ({where})")


def _nothing_possible(impossible: list[Impossible]) -> NoFeasiblePlanError:
    reasons = "; ".join(f"{one.placement}: {one.reason}" for one in impossible)
    return NoFeasiblePlanError(
        "no layout can be built for this budget",
        where="placement, training, gpus",
        rule=reasons or "offloaded parameters need zero_stage 3, an offloaded optimizer zero_stage 1 or more",
        way_out="leave the choices on auto, or change the number of GPUs",
    )
