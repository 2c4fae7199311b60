"""Seconds of every action of a candidate: timing/ asked once a choice, and shared by all candidates that have it.

In: a BudgetSpec, its setting, candidates with bytes of KV cache. Out: costs by action id, StepTiming.
Left out: how seconds are worked out (timing/), which candidate is best (gpu_search.py).
"""

from collections.abc import Callable
from functools import cached_property

from rlplan.dataflow.gpu_step import GpuStep
from rlplan.dataflow.schedule import Action
from rlplan.memory.gpu.engine import EngineChoice
from rlplan.memory.gpu.scorer import ScorerOnGpu
from rlplan.memory.gpu.trainer import TrainerOnGpu
from rlplan.planner.budget import GpuSetting
from rlplan.planner.gpu_candidates import GpuCandidate
from rlplan.planner.gpu_roles import GpuRoles
from rlplan.planner.stand_in_times import (
    EngineSpeed,
    GenerationWork,
    SyncWork,
    TrainSetting,
    TrainWork,
    generate_cost,
    offload_cost,
    optimizer_cost,
    reload_cost,
    score_cost,
    sleep_cost,
    sync_cost,
    train_cost,
    wake_kv_cost,
    wake_weights_cost,
)
from rlplan.spec.budget import BudgetSpec
from rlplan.spec.models.adapters import lora_parameters
from rlplan.timing.cluster import Cluster
from rlplan.timing.cost import Cost, Resource
from rlplan.timing.step import StepTiming, time_step
from rlplan.units import ceil_div
from rlplan.vocabulary import ActionKind


class GpuTimes:
    """Costs of every action of a budget's candidates."""

    def __init__(self, budget: BudgetSpec, setting: GpuSetting, roles: GpuRoles) -> None:
        self.budget, self.setting, self.roles = budget, setting, roles
        self._cache: dict[object, Cost] = {}

    def timing(self, candidate: GpuCandidate, costs: dict[str, Cost]) -> StepTiming:
        """A steady step with these costs."""
        schedule, _ = self.roles.schedule(candidate.step)
        return time_step(schedule, costs, max_staleness=candidate.step.max_staleness)

    def costs(self, candidate: GpuCandidate, kv_cache: int) -> dict[str, Cost]:
        """Of every action of a step its cost. kv_cache: bytes a GPU."""
        schedule, _ = self.roles.schedule(candidate.step)
        return {action.id: self._cost(action, candidate, kv_cache) for action in schedule.step}

    def _cost(self, action: Action, candidate: GpuCandidate, kv_cache: int) -> Cost:
        match action.kind:
            case ActionKind.GENERATE:
                return self.generate(candidate.step, candidate.engine, self._kv_tokens(candidate, kv_cache))
            case ActionKind.TRAIN_FORWARD_BACKWARD | ActionKind.OPTIMIZER_STEP | ActionKind.SCORE:
                return self._pass(action, candidate)
            case ActionKind.SYNC_WEIGHTS:
                return self._sync(candidate)
            case ActionKind.OFFLOAD_ROLE | ActionKind.RELOAD_ROLE:
                size = self._parked_bytes(action, candidate)
                move = offload_cost if action.kind is ActionKind.OFFLOAD_ROLE else reload_cost
                return self._once((action.kind, size), lambda: move(size, self.cluster))
            case _:
                return self._switch(action, candidate, kv_cache)

    def generate(self, step: GpuStep, engine: EngineChoice, kv_tokens: int) -> Cost:
        """Rollouts of a step, and the reward of the last of them."""
        workload = self.budget.workload
        key = ("generate", step.num_generation, engine.tp, engine, kv_tokens)

        def work_out() -> Cost:
            work = GenerationWork(
                ceil_div(workload.num_rollouts_per_step, self.roles.num_engines(step)),
                float(workload.prompt_len),
                workload.num_samples_per_prompt,
                self.roles.lengths,
                self.budget.rollout.max_num_seqs,
                kv_tokens,
            )
            cost = generate_cost(EngineSpeed(self.setting.policy, self.budget.rollout, engine, self.cluster), work)
            latency = self.budget.placement.reward_latency_s
            return cost + Cost({Resource.HOST: latency}) if latency else cost

        return self._once(key, work_out)

    def _kv_tokens(self, candidate: GpuCandidate, kv_cache: int) -> int:
        demand, _, _ = self.roles.demand(candidate)
        longest = demand.max_prompt_len + demand.lengths.longest
        return demand.pool.num_tokens(demand.pool.num_blocks(kv_cache), longest)

    def _pass(self, action: Action, candidate: GpuCandidate) -> Cost:
        """A pass over a mini-batch (or, scoring, over a step), or an optimizer step.

        A schedule has two mini-batches at most; the second stands for all but the first.
        """
        step, role = candidate.step, action.role
        trainer = candidate.trainer
        setting = TrainSetting(
            self.setting.model_of(role),
            role,
            self.budget.training,
            trainer,
            step.num_training,
            self.budget.target,
        )
        if action.kind is ActionKind.SCORE:
            count = self.budget.workload.num_rollouts_per_step
            return self._once((action.kind, setting), lambda: score_cost(setting, self._work(count), self.cluster))
        count = self.budget.workload.rollouts_per_mini_batch
        times = self.budget.workload.num_mini_batches - 1 if action.mini_batch == 1 else 1
        if action.kind is ActionKind.OPTIMIZER_STEP:
            return self._once((action.kind, setting), lambda: optimizer_cost(setting, self.cluster)).times(times)
        cost = self._once((action.kind, setting), lambda: train_cost(setting, self._work(count), self.cluster))
        return cost.times(times)

    def _work(self, num_rollouts: int) -> TrainWork:
        workload, lengths = self.budget.workload, self.roles.lengths
        mean = workload.prompt_len + lengths.mean
        sequences = self.budget.declaration.sequences_per_sample
        return TrainWork(
            num_rollouts * sequences, mean, mean * mean + lengths.variance, workload.max_seq_len, lengths.mean
        )

    def _sync(self, candidate: GpuCandidate) -> Cost:
        step, placement = candidate.step, self.budget.placement
        transport = placement.transport
        if transport == "auto":
            transport = "adapter" if self._adapter_bytes else "cuda_ipc" if step.shares_devices else "nccl"
        work = SyncWork(
            transport,
            self.budget.rollout.dtype.num_bytes,
            step.num_training,
            step.num_generation,
            candidate.engine.tp,
            candidate.trainer.zero_stage,
            placement.sync_bucket,
            self._adapter_bytes if transport == "adapter" else 0,
            step.shares_devices,
        )
        return self._once(work, lambda: sync_cost(self.setting.policy, work, self.cluster, self.cluster))

    @cached_property
    def _adapter_bytes(self) -> int:
        lora = self.budget.training.lora
        if lora is None:
            return 0
        adapters = lora_parameters(self.setting.policy, lora.rank, lora.targets)
        return sum(tensor.numel for tensor in adapters) * self.budget.rollout.dtype.num_bytes

    def _switch(self, action: Action, candidate: GpuCandidate, kv_cache: int) -> Cost:
        level = candidate.engine.sleep_level
        if action.kind is ActionKind.WAKE_KV_CACHE:
            return wake_kv_cost(kv_cache, self.cluster)
        size = self.roles.engine(candidate).weight_bytes
        move = sleep_cost if action.kind is ActionKind.SLEEP_ENGINE else wake_weights_cost
        return self._once((action.kind, size, level), lambda: move(size, level, self.cluster))

    def _parked_bytes(self, action: Action, candidate: GpuCandidate) -> int:
        """Bytes that a role moves to the host and back."""
        forecast = self.roles.forecast(action.processes[0], candidate, self.roles.usual_len)
        if isinstance(forecast, TrainerOnGpu):
            return sum(forecast.fixed.after_step.device.values())
        assert isinstance(forecast, ScorerOnGpu), "engines sleep"
        return forecast.weights

    @cached_property
    def cluster(self) -> Cluster:
        """All GPUs."""
        return Cluster(self.setting.gpu, self.setting.num_gpus, self.setting.gpus_per_host, None)

    def _once(self, key: object, work_out: Callable[[], Cost]) -> Cost:
        if key not in self._cache:
            self._cache[key] = work_out()
        return self._cache[key]
