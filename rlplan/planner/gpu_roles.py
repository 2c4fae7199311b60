"""What each role holds in each candidate: forecasts made once a choice, and tables that every candidate shares.

In: a BudgetSpec and its setting. Out: schedules, forecasts, tables and KV demands of candidates.
Left out: which candidates there are (gpu_candidates.py) and which is best (gpu_search.py).
"""

from functools import cached_property

from rlplan.dataflow.gpu_step import GENERATION, GpuStep, build_gpu_schedule
from rlplan.dataflow.schedule import HOST_DEVICE, Schedule
from rlplan.memory.gpu.engine import EngineChoice, EngineOnGpu
from rlplan.memory.gpu.kv_demand import ENOUGH, KvDemand
from rlplan.memory.gpu.predict import GpuForecast
from rlplan.memory.gpu.scorer import ScorerOnGpu
from rlplan.memory.gpu.trainer import Passes, TrainerOnGpu
from rlplan.memory.logits import Loss
from rlplan.planner.budget import GpuSetting
from rlplan.planner.gpu_candidates import GpuCandidate
from rlplan.planner.gpu_tables import Pattern, RoleTable, fit, pattern_of
from rlplan.spec.budget import BudgetSpec
from rlplan.units import ceil_div
from rlplan.vocabulary import Placement, Role


class GpuRoles:
    """Bytes of every role of a budget, by choice."""

    def __init__(self, budget: BudgetSpec, setting: GpuSetting) -> None:
        self.budget, self.setting = budget, setting
        self.lengths = budget.workload.lengths
        self._tables: dict[object, RoleTable] = {}
        self._covered: set[tuple[int, GpuStep]] = set()
        self._patterns: dict[GpuStep, tuple[Schedule, Pattern]] = {}
        self._hosts: dict[GpuStep, dict[str, tuple[str, int]]] = {}
        self._demands: dict[tuple[EngineChoice, int], tuple[KvDemand, int, int]] = {}

    def schedule(self, step: GpuStep) -> tuple[Schedule, Pattern]:
        """The schedule of a step and its pattern."""
        if step not in self._patterns:
            schedule = build_gpu_schedule(step)
            self._patterns[step] = schedule, pattern_of(schedule)
        return self._patterns[step]

    def hosts(self, step: GpuStep) -> dict[str, tuple[str, int]]:
        """Of each process the host of the one that stands for all, and how many on that host are like it.

        Groups of their own devices have hosts of their own where there is more than one host.
        """
        if step not in self._hosts:
            schedule, _ = self.schedule(step)
            hosts = {}
            for index, group in enumerate(schedule.groups):
                per_host = self.setting.pool(group.name).gpus_per_host
                host = f"host:{index}" if self.setting.num_gpus > per_host else HOST_DEVICE
                for name, device in schedule.processes:
                    if device in group.devices:
                        hosts[name] = host, min(len(group.devices), per_host)
            self._hosts[step] = hosts
        return self._hosts[step]

    def other_capacities(self, step: GpuStep) -> dict[str, int]:
        """Bytes of devices and hosts that are not those of the training pool."""
        setting = self.setting
        capacities: dict[str, int] = {}
        if not setting.has_pools:
            return {}
        schedule, _ = self.schedule(step)
        for index, group in enumerate(schedule.groups):
            pool = setting.pool(group.name)
            capacities |= dict.fromkeys(group.devices[:1], pool.capacity)
            if pool.host_capacity is not None:
                capacities[f"host:{index}"] = pool.host_capacity
        return capacities

    def lacking(self, step: GpuStep) -> dict[str, int]:
        """Bytes by which each process's device is smaller than one that trains; negative where it is larger."""
        schedule, _ = self.schedule(step)
        other, capacity = self.other_capacities(step), self.setting.capacity
        return {name: capacity - other[device] for name, device in schedule.processes if device in other}

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
        key = candidate.engine, step.num_generation
        if key not in self._demands:
            engine = EngineOnGpu(
                self.setting.policy, self.budget.rollout, candidate.engine, step.placement, self.setting.overheads, 1
            )
            share = ceil_div(workload.num_rollouts_per_step, self.num_engines(step))
            demand = KvDemand(
                engine.pool,
                min(candidate.engine.max_num_seqs, share),
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
                setting.pool(GENERATION).overheads,
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
                step.num_frozen,
                setting.overheads,
                is_sharded=step.zero_stage == 3 and step.num_frozen > 1,
                target=budget.target,
                cut=candidate.trainer,
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
            in_transfer_group=step.placement is Placement.DISAGGREGATED and role is Role.POLICY,
            target=budget.target,
        )

    def passes(self, candidate: GpuCandidate, response_len: float) -> Passes:
        """One micro-batch of a rank whose rollouts are padded to `response_len`, or packed up to the limit."""
        workload, trainer = self.budget.workload, candidate.trainer
        sequences = candidate.trainer.micro_batch * self.budget.declaration.sequences_per_sample
        length = workload.prompt_len + response_len
        if response_len >= workload.max_response_len:
            length = workload.max_seq_len
        tokens = sequences * length
        if workload.max_tokens_per_micro_batch is not None:
            tokens = float(workload.max_tokens_per_micro_batch * self.budget.declaration.sequences_per_sample)
        tokens /= candidate.trainer.token_ways
        head = tokens * response_len / length
        share = workload.rollouts_per_mini_batch // (candidate.step.num_training // trainer.ranks_per_sequence)
        num = ceil_div(share, trainer.micro_batch)
        return Passes(int(tokens), int(head), accumulates=num > 1, num_micro_batches=num)

    @cached_property
    def usual_len(self) -> float:
        """The longest response of a step, at its median: what a usual step's largest micro-batch is padded to."""
        return self.lengths.longest_of(self.budget.workload.num_rollouts_per_step)

    def oom_risk(self, candidate: GpuCandidate, kv_cache: int) -> float:
        """Probability that some micro-batch of a step is too long.

        Counts: 1 - F(l)^n, l the longest response with which every moment still fits as expected, n rollouts a step.
        """
        workload, capacity = self.budget.workload, self.setting.capacity
        low, high = 1.0, float(workload.max_response_len)
        if self._need_at(candidate, kv_cache, low) > capacity:
            return 1.0
        if self._need_at(candidate, kv_cache, high) <= capacity:
            return 0.0
        for _ in range(12):
            middle = (low + high) / 2
            low, high = (middle, high) if self._need_at(candidate, kv_cache, middle) <= capacity else (low, middle)
        return 1.0 - self.lengths.at_most(low) ** workload.num_rollouts_per_step

    def _need_at(self, candidate: GpuCandidate, kv_cache: int, response_len: float) -> int:
        """Bytes at the worst moment when the longest response has so many tokens."""
        schedule, pattern = self.schedule(candidate.step)
        tables = {}
        for name, _ in schedule.processes:
            forecast = self.forecast(name, candidate, response_len, kv_cache)
            tables[name] = RoleTable(forecast, forecast)
            tables[name].cover((*schedule.start, *schedule.step), name)
        step = candidate.step
        return fit(pattern, tables, self.setting.capacity, self.hosts(step), self.lacking(step)).expected

    def _table(self, process: str, candidate: GpuCandidate) -> RoleTable:
        """A process's table, shared by all candidates in which it holds the same."""
        step = candidate.step
        is_engine = process.startswith("rollout_engine")
        key: tuple[object, ...] = (process, step.placement is Placement.DISAGGREGATED, candidate.engine)
        if process.startswith("scorer"):
            key = (process, step.num_frozen, step.zero_stage == 3, candidate.trainer.micro_batch)
            if self.budget.target != "rlplan":
                key = (process, step.num_frozen, candidate.trainer)
        elif not is_engine:
            key = (process, step.num_training, candidate.trainer)
        if key not in self._tables:
            longest = float(self.budget.workload.max_response_len)
            usual = self.forecast(process, candidate, self.usual_len)
            is_same = is_engine or self.usual_len >= longest
            self._tables[key] = RoleTable(
                usual,
                usual if is_same else self.forecast(process, candidate, longest),
                self.forecast(process, candidate, longest, 1) if is_engine else None,
            )
        return self._tables[key]
