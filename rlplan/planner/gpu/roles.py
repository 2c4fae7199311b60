"""What each role holds in each candidate: forecasts made once a choice, and tables that every candidate shares.

In: a BudgetSpec and its setting. Out: schedules, forecasts, tables and KV demands of candidates.
Left out: which candidates there are (gpu_candidates.py) and which is best (gpu_search.py).
"""

from dataclasses import dataclass, replace
from functools import cached_property

from rlplan.dataflow.gpu_step import GENERATION, GpuStep, build_gpu_schedule
from rlplan.dataflow.schedule import HOST_DEVICE, Schedule
from rlplan.memory.gpu.engine import EngineChoice, EngineOnGpu
from rlplan.memory.gpu.kv_demand import ENOUGH, KvDemand
from rlplan.memory.gpu.predict import DRIVER_HOST_BYTES, GpuForecast
from rlplan.memory.gpu.scorer import ScorerOnGpu
from rlplan.memory.gpu.states import TrainerChoice
from rlplan.memory.gpu.trainer import Passes, TrainerOnGpu
from rlplan.memory.host import rollout_buffer_bytes
from rlplan.memory.logits import loss_named
from rlplan.planner.budget import GpuSetting
from rlplan.planner.gpu.candidates import GpuCandidate
from rlplan.planner.gpu.tables import Fit, Frame, RoleTable, Room, Vector, fit, frame_of, room_of, vector_of
from rlplan.spec.budget import BudgetSpec
from rlplan.units import ceil_div
from rlplan.vocabulary import Placement, Role

UNKNOWN = 1 << 60
"""Bytes of a host of which nothing is known: it is not what binds."""
NO_ENGINE = EngineChoice(1, 0)
NO_TRAINER = TrainerChoice(0, False, False, False, 1)
"""Stand in for the half of a candidate that a forecast does not look at."""


@dataclass(frozen=True)
class FrameParts:
    """A frame with what every candidate in it shares."""

    frame: Frame
    schedule: Schedule
    room: Room

    @cached_property
    def others(self) -> tuple[str, ...]:
        """Processes that train and score."""
        return tuple(name for name, _ in self.schedule.processes if not name.startswith("rollout_engine"))

    @cached_property
    def engines(self) -> tuple[str, ...]:
        """Processes that generate."""
        return tuple(name for name, _ in self.schedule.processes if name.startswith("rollout_engine"))


class GpuRoles:
    """Bytes of every role of a budget, by choice."""

    def __init__(self, budget: BudgetSpec, setting: GpuSetting) -> None:
        self.budget, self.setting = budget, setting
        self.lengths = budget.workload.lengths
        workload = budget.workload
        self.rollout_buffer = rollout_buffer_bytes(workload.num_rollouts_per_step, workload.max_seq_len)
        self._tables: dict[object, RoleTable] = {}
        self._frames: dict[GpuStep, FrameParts] = {}
        self._vectors: dict[object, Vector] = {}
        self._demands: dict[object, tuple[KvDemand, int, int]] = {}

    def parts(self, step: GpuStep) -> FrameParts:
        """The frame of a step, whatever its ZeRO stage and engine."""
        step = opened(step)
        if step not in self._frames:
            schedule = build_gpu_schedule(step)
            frame = frame_of(schedule, self.hosts(schedule))
            host = UNKNOWN if self.setting.host_capacity is None else self.setting.host_capacity
            driver = DRIVER_HOST_BYTES + self.rollout_buffer
            others = self.other_capacities(schedule)
            room = room_of(frame, self.setting.capacity, host, driver, others)
            self._frames[step] = FrameParts(frame, schedule, room)
        return self._frames[step]

    def hosts(self, schedule: Schedule) -> dict[str, tuple[str, int]]:
        """Of each process the host of the one that stands for all, and how many on that host are like it.

        Groups of their own devices have hosts of their own where there is more than one host.
        """
        hosts = {}
        for index, group in enumerate(schedule.groups):
            per_host = self.setting.pool(group.name).gpus_per_host
            host = f"host:{index}" if self.setting.num_gpus > per_host else HOST_DEVICE
            members = set(group.devices)
            for name, device in schedule.processes:
                if device in members:
                    hosts[name] = host, min(len(members), per_host)
        return hosts

    def other_capacities(self, schedule: Schedule) -> dict[str, int]:
        """Bytes of devices and hosts that are not those of the training pool."""
        capacities: dict[str, int] = {}
        for index, group in enumerate(schedule.groups if self.setting.has_pools else ()):
            pool = self.setting.pool(group.name)
            capacities |= dict.fromkeys(group.devices[:1], pool.capacity)
            if pool.host_capacity is not None:
                capacities[f"host:{index}"] = pool.host_capacity
        return capacities

    def fit(self, candidate: GpuCandidate) -> Fit:
        """What a candidate needs at its worst moments, and the room for its KV cache."""
        parts = self.parts(candidate.step)
        one = self.trainer_vector(candidate.step, candidate.trainer)
        return self.without_host_memory(fit(one, self.engine_vector(candidate.step, candidate.engine), parts.room))

    def without_host_memory(self, need: Fit) -> Fit:
        """The same where the GPU's memory is the host's, so that both must fit into it together."""
        if not self.setting.gpu.shares_host_memory:
            return need
        left = {
            name: getattr(need, name) - need.host
            for name in ("slack_expected", "slack_high", "room_expected", "room_high")
        }
        return replace(need, **left)

    @staticmethod
    def closed(frame: GpuStep, trainer: TrainerChoice, engine: EngineChoice) -> GpuCandidate:
        """A frame with choices."""
        return GpuCandidate(replace(frame, zero_stage=trainer.zero_stage, tp=engine.tp), trainer, engine)

    def trainer_vector(self, step: GpuStep, choice: TrainerChoice, *, any_tokens: bool = False) -> Vector:
        """Everything that trains and scores. any_tokens: at least, however many tokens its passes have."""
        frame = opened(step)
        key = frame, choice, any_tokens
        if key not in self._vectors:
            candidate = self.closed(frame, choice, NO_ENGINE)
            parts = self.parts(frame)
            self._vectors[key] = self._sum(parts, parts.others, candidate, any_tokens=any_tokens)
        return self._vectors[key]

    def holding_vector(self, step: GpuStep, choice: TrainerChoice) -> Vector:
        """What every choice holds at least that differs from this one in its passes alone: states, not activations.

        Counts: passes as what is left after them. At no moment is it more than any such choice's own vector.
        """
        return self.trainer_vector(
            step, replace(choice, recomputes=False, micro_batch=1, max_tokens=0), any_tokens=True
        )

    def engine_vector(self, step: GpuStep, choice: EngineChoice) -> Vector:
        """The engine, without its KV cache."""
        frame = opened(step)
        key = frame, choice
        if key not in self._vectors:
            candidate = self.closed(frame, NO_TRAINER, choice)
            parts = self.parts(frame)
            self._vectors[key] = self._sum(parts, parts.engines, candidate)
        return self._vectors[key]

    def _sum(
        self, parts: FrameParts, processes: tuple[str, ...], candidate: GpuCandidate, *, any_tokens: bool = False
    ) -> Vector:
        total = _nothing(parts)
        for name in processes:
            total += vector_of(parts.frame, name, self._table(name, candidate), any_tokens=any_tokens)
        return total

    def demand(self, step: GpuStep, choice: EngineChoice) -> tuple[KvDemand, int, int]:
        """What one engine's rollouts ask for, bytes that are enough for them, and the least that it starts with."""
        workload = self.budget.workload
        key = step.num_generation, choice.tp, choice.max_num_seqs
        if key not in self._demands:
            engine = self.engine(GpuCandidate(step, NO_TRAINER, choice))
            share = ceil_div(workload.num_rollouts_per_step, self.num_engines(step, choice.tp))
            demand = KvDemand(
                engine.pool,
                min(choice.max_num_seqs, share),
                workload.prompt_len,
                workload.max_prompt_len,
                workload.num_samples_per_prompt,
                self.lengths,
            )
            self._demands[key] = demand, demand.bytes_at(ENOUGH), demand.least_bytes
        return self._demands[key]

    def engine(self, candidate: GpuCandidate, kv_cache: int = 0) -> EngineOnGpu:
        """One rank of one engine."""
        forecast = self.forecast("rollout_engine/0", candidate, self.usual_len, kv_cache)
        assert isinstance(forecast, EngineOnGpu), "this process is an engine"
        return forecast

    def num_engines(self, step: GpuStep, tp: int) -> int:
        """Engines that share the rollouts of a step."""
        return max(1, step.num_generation // tp)

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
            if budget.target == "rlplan":  # a frozen role's rank has whole sequences
                alone = replace(candidate.trainer, ulysses=1)
                passes = self.passes(replace(candidate, trainer=alone), response_len)
            return ScorerOnGpu(
                role,
                setting.model_of(role),
                budget.training.dtype.num_bytes,
                loss_named(budget.training.logits, budget.target),
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
        workload = self.budget.workload
        sequences = candidate.trainer.micro_batch * self.budget.declaration.sequences_per_sample
        length = workload.prompt_len + response_len
        if response_len >= workload.max_response_len:
            length = workload.max_seq_len
        tokens = sequences * length
        trainer = candidate.trainer
        if trainer.max_tokens:
            tokens = float(trainer.max_tokens * self.budget.declaration.sequences_per_sample)
        tokens /= trainer.token_ways
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
        workload = self.budget.workload
        low, high = 1.0, float(workload.max_response_len)
        if not self._fits_at(candidate, kv_cache, low):
            return 1.0
        if self._fits_at(candidate, kv_cache, high):
            return 0.0
        for _ in range(12):
            middle = (low + high) / 2
            low, high = (middle, high) if self._fits_at(candidate, kv_cache, middle) else (low, middle)
        return 1.0 - self.lengths.at_most(low) ** workload.num_rollouts_per_step

    def _fits_at(self, candidate: GpuCandidate, kv_cache: int, response_len: float) -> bool:
        """Whether every moment fits as expected when the longest response has so many tokens."""
        parts = self.parts(candidate.step)
        total = nothing = _nothing(parts)
        for name, _ in parts.schedule.processes:
            forecast = self.forecast(name, candidate, response_len, kv_cache)
            total += vector_of(parts.frame, name, RoleTable(forecast, forecast))
        return self.without_host_memory(fit(total, nothing, parts.room)).slack_expected >= 0

    def _table(self, process: str, candidate: GpuCandidate) -> RoleTable:
        """A process's table, shared by all candidates in which it holds the same."""
        step = candidate.step
        is_engine = process.startswith("rollout_engine")
        key: tuple[object, ...] = (process, step.placement is Placement.DISAGGREGATED, candidate.engine)
        if process.startswith("scorer"):
            trainer = candidate.trainer
            sizes = trainer.micro_batch, trainer.max_tokens, trainer.token_ways
            key = (process, step.num_frozen, step.zero_stage == 3, sizes)
            if self.budget.target != "rlplan":
                key = (process, step.num_frozen, trainer)
        elif not is_engine:
            key = (process, step.placement is Placement.DISAGGREGATED, step.num_training, candidate.trainer)
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


def opened(step: GpuStep) -> GpuStep:
    """The frame of a step: the same whatever its ZeRO stage and engine."""
    return step if step.zero_stage == 0 and step.tp == 1 else replace(step, zero_stage=0, tp=1)


def _nothing(parts: FrameParts) -> Vector:
    """No bytes at every moment."""
    nothing = (0,) * len(parts.frame.places)
    return Vector(nothing, nothing, (0,) * len(parts.frame.hosts))
