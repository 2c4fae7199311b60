"""Seconds of what the oracle tries: each action asked of timing/, and what a step makes of them, the plain way.

A subclass has the job, its setting and the forecasts of processes (oracle.py).
"""

from dataclasses import replace
from typing import Any

from rlplan.dataflow.choice import Arrangement, EngineChoice, TrainerChoice, WeightSyncMode
from rlplan.dataflow.placements import GENERATION, SCORING, SHARED
from rlplan.dataflow.schedule import Action
from rlplan.spec.models.adapters import list_lora_parameters
from rlplan.timing.cost import NOTHING, Cost, Resource
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.serving.ahead import RolloutsAhead
from rlplan.timing.serving.generation import EngineRollouts, EngineSpeed, generate_cost, slowest_engine_cost
from rlplan.timing.training.mini_batch import MiniBatchShape, TrainSetting, score_cost, train_cost
from rlplan.timing.training.optimizer import optimizer_cost
from rlplan.timing.transfer.switches import offload_cost, sleep_cost, wake_kv_cost
from rlplan.timing.transfer.weight_sync import SyncSetup, sync_cost
from rlplan.vocabulary import ActionKind, Placement, Role
from tests.planner.gpu.raw_axes import RawAxes


class RawSeconds(RawAxes):
    """Costs of a combination's actions."""

    costs: dict[Any, Cost]
    """Results computed before."""

    @staticmethod
    def _seconds(arrangement: Arrangement, actions: list[Action], costs: dict[str, Cost]) -> float:
        """A synchronous step is its longest chain; in an asynchronous one generation runs beside everything else, and
        the weight sync waits for both.
        """
        if arrangement.is_async:
            sides = {ActionKind.GENERATE: 0, ActionKind.SYNC_WEIGHTS: 1}
            sums = [0.0, 0.0, 0.0]
            for action in actions:
                sums[sides.get(action.kind, 2)] += costs[action.id].seconds
            return max(sums[0], sums[2]) + sums[1]
        ends: dict[str, float] = {}
        for action in actions:
            ends[action.id] = (
                max((ends.get(name, 0.0) for name in action.after), default=0.0) + costs[action.id].seconds
            )
        return max(ends.values())

    def _staleness(self, arrangement: Arrangement) -> int:
        place = self.spec.placement
        return place.max_staleness if arrangement.is_async and place.partial_rollouts else 0

    def _run_ahead(
        self,
        arrangement: Arrangement,
        engine: EngineChoice,
        kv_cache: int,
        actions: list[Action],
        costs: dict[str, Cost],
    ) -> None:
        """Rollouts that go on beside a step: their seconds depend on those of everything else."""
        (generate,) = [action.id for action in actions if action.kind is ActionKind.GENERATE]
        sync = sum(costs[action.id].seconds for action in actions if action.kind is ActionKind.SYNC_WEIGHTS)
        others = sum(costs[action.id].seconds for action in actions if action.id != generate) - sync
        speed, rollouts, num_engines = self._rollouts(arrangement, engine, kv_cache)
        key = "ahead", engine, kv_cache, others, sync, arrangement.num_generation
        if key not in self.costs:
            staleness = self._staleness(arrangement)
            latency_s, keeps = self.work.reward_latency_s, engine.adapter_versions > 1
            ahead = RolloutsAhead(speed, rollouts, num_engines, staleness, latency_s, keeps_cache=keeps)
            self.costs[key] = ahead.cost(others, sync)
        costs[generate] = self.costs[key]

    def _cost(
        self,
        action: Action,
        arrangement: Arrangement,
        trainer: TrainerChoice,
        engine: EngineChoice,
        transport: WeightSyncMode,
        kv_cache: int,
    ) -> Cost:
        sizes = arrangement.num_training, arrangement.num_generation, arrangement.num_scoring, arrangement.placement
        kind, key = action.kind, (action.id, sizes)
        if kind in (ActionKind.GENERATE, ActionKind.SLEEP_ENGINE, ActionKind.WAKE_WEIGHTS, ActionKind.WAKE_KV_CACHE):
            key = (*key, engine, kv_cache)
        elif kind is ActionKind.SYNC_WEIGHTS:
            key = (*key, trainer, engine, transport)
        else:
            key = (*key, trainer)
        if key not in self.costs:
            self.costs[key] = self._work_out(action, arrangement, trainer, engine, transport, kv_cache)
        return self.costs[key]

    def _cluster(self, arrangement: Arrangement, group: str) -> Cluster:
        pool = self.setting.get_pool(group)
        size = arrangement.num_training
        if group in (GENERATION, SCORING):
            size = arrangement.num_generation if group == GENERATION else arrangement.num_scoring
        return Cluster(pool.gpu, size, min(size, pool.gpus_per_host), pool.node, pool.gpus_per_host)

    def _work_out(
        self,
        action: Action,
        arrangement: Arrangement,
        trainer: TrainerChoice,
        engine: EngineChoice,
        transport: WeightSyncMode,
        kv_cache: int,
    ) -> Cost:
        here, there = self._cluster(arrangement, SHARED), self._cluster(arrangement, GENERATION)
        scoring = self._cluster(arrangement, SCORING) if arrangement.num_scoring else here
        weights, level = self._engine(arrangement, engine).weight_bytes, engine.sleep_level
        is_frozen = action.role in self.spec.frozen_roles
        match action.kind:
            case ActionKind.GENERATE:
                return self._generate(arrangement, engine, kv_cache)
            case ActionKind.SLEEP_ENGINE:
                return sleep_cost(weights, there, level=level, kv_bytes=kv_cache)
            case ActionKind.WAKE_WEIGHTS:
                return sleep_cost(weights, there, level=level)
            case ActionKind.WAKE_KV_CACHE:
                return wake_kv_cost(kv_cache)
            case ActionKind.SYNC_WEIGHTS:
                return self._sync(arrangement, trainer, engine, transport)
            case ActionKind.OFFLOAD_ROLE | ActionKind.RELOAD_ROLE:
                forecast = self._others(arrangement, trainer, action.processes[0], 1.0)
                size = forecast.weights if is_frozen else forecast.moved_bytes
                return offload_cost(size, scoring if is_frozen else here)
        return self._compute(action, arrangement, trainer, here, scoring)

    def _compute(
        self, action: Action, arrangement: Arrangement, trainer: TrainerChoice, here: Cluster, scoring: Cluster
    ) -> Cost:
        """A pass or an optimizer step. What the driver does takes no time here."""
        if action.kind not in (ActionKind.SCORE, ActionKind.TRAIN_FORWARD_BACKWARD, ActionKind.OPTIMIZER_STEP):
            return NOTHING
        role, is_frozen, training = action.role, action.role in self.spec.frozen_roles, self.spec.training
        if role is not Role.POLICY:
            training = training.model_copy(update={"lora": None})
        model, backend, rollouts = self.setting.get_model(role), self.spec.backend, self.work.rollouts_per_mini_batch
        if action.kind is ActionKind.SCORE:
            all_of_them = self._mini_batch_shape(self.work.num_rollouts_per_step, trainer)
            lora = self.spec.training.lora
            if role is Role.REFERENCE and not is_frozen and lora is not None:  # the policy without its adapters
                training = training.model_copy(update={"lora": lora.model_copy(update={"target_modules": ()})})
            if is_frozen:
                ranks = arrangement.num_scoring or arrangement.num_training
                trainer = replace(trainer, tp=1, ulysses=1) if backend == "deepspeed" else trainer
                return score_cost(TrainSetting(model, role, training, trainer, ranks, backend), all_of_them, scoring)
            setting = TrainSetting(model, role, training, trainer, arrangement.num_training, backend)
            return score_cost(setting, all_of_them, here)
        setting = TrainSetting(model, role, training, trainer, arrangement.num_training, backend)
        times = self.work.num_mini_batches - 1 if action.mini_batch == 1 else 1
        if action.kind is ActionKind.OPTIMIZER_STEP:
            return optimizer_cost(setting, here).times(times)
        return train_cost(setting, self._mini_batch_shape(rollouts, trainer), here).times(times)

    def _mini_batch_shape(self, rollouts: int, trainer: TrainerChoice) -> MiniBatchShape:
        mean = self.work.usual_prompt_len + self.lengths.mean
        square = mean**2 + self.lengths.variance
        head = self.lengths.mean if self.selects_rows else mean
        by = self.spec.release.balances
        even = by == "mini_batch" or (by == "step" and rollouts >= self.work.num_rollouts_per_step)
        return MiniBatchShape(rollouts, mean, square, self.work.max_seq_len, head, trainer.max_tokens, even)

    def _generate(self, arrangement: Arrangement, engine: EngineChoice, kv_cache: int) -> Cost:
        speed, rollouts, _ = self._rollouts(arrangement, engine, kv_cache)
        cost = generate_cost(speed, rollouts) + slowest_engine_cost(speed, rollouts, self.work.num_rollouts_per_step)
        latency = self.spec.workload.reward_latency_s
        return cost + Cost({Resource.HOST: latency}) if latency else cost

    def _rollouts(
        self, arrangement: Arrangement, engine: EngineChoice, kv_cache: int
    ) -> tuple[EngineSpeed, EngineRollouts, int]:
        dp = engine.attention_dp
        num_engines = max(1, arrangement.num_generation // (engine.tp * dp))
        if self.spec.release.dispatch == "groups":
            whole_groups = self.work.num_prompts_per_step * (1 + self._staleness(arrangement))
            num_busy = min(num_engines, whole_groups)
            share = -(-self.work.num_prompts_per_step // num_engines) * self.work.num_samples_per_prompt
        else:
            num_busy = num_engines
            share = -(-self.work.num_rollouts_per_step // num_engines)
        if self._staleness(arrangement):
            share = -(-self.work.num_rollouts_per_step // num_busy)
        pool = self._engine(arrangement, engine).pool
        tokens = dp * pool.num_tokens(pool.num_blocks(kv_cache), self.work.max_prompt_len + self.lengths.longest)
        samples, prompt = max(1, self.work.num_samples_per_prompt // dp), float(self.work.usual_prompt_len)
        rollouts = EngineRollouts(share, prompt, samples, self.lengths, engine.max_num_seqs, tokens)
        # rlplan's engines are emitted without vLLM's custom all-reduce
        speed = EngineSpeed.from_job(self.spec, self.setting.policy, engine, self._cluster(arrangement, GENERATION))
        return speed, rollouts, num_busy

    def _sync(
        self, arrangement: Arrangement, trainer: TrainerChoice, engine: EngineChoice, transport: WeightSyncMode
    ) -> Cost:
        width = 1 if engine.quantization in ("fp8", "fp8_block") else self.spec.rollout.dtype.num_bytes
        lora, adapters = self.spec.training.lora, 0
        if transport == "adapter" and lora is not None:
            adapters = self.spec.rollout.dtype.num_bytes * sum(
                p.numel for p in list_lora_parameters(self.setting.policy, lora.rank, lora.target_modules)
            )
        work = SyncSetup(
            transport,  # type: ignore[arg-type]
            width,
            arrangement.num_training,
            arrangement.num_generation,
            engine.tp,
            trainer.zero_stage,
            self.spec.placement.sync_bucket,
            adapters,
            arrangement.placement is not Placement.DISAGGREGATED,
            self.spec.backend,
            attention_dp=engine.attention_dp,
        )
        return sync_cost(
            self.setting.policy, work, self._cluster(arrangement, SHARED), self._cluster(arrangement, GENERATION)
        )
