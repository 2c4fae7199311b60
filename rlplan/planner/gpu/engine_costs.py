"""Memory demand and seconds of engines by choice: KV demand, rollouts and sleep switches.

In: a job without its trainers, the policy, a cluster that generates, an engine's choice. Out: KvDemand, bytes, Cost.
Left out: other memory on these GPUs (roles.py) and the formulas of seconds (timing/).
"""

from rlplan.dataflow.choice import EngineChoice
from rlplan.memory.roles.engine import build_rank_pool, held_weight_bytes
from rlplan.memory.serving.kv import ENOUGH, KvDemand
from rlplan.planner.memo import Memo, memoize, strip_trainers
from rlplan.spec.model import ModelSpec
from rlplan.spec.resolved import SettledJob
from rlplan.timing.cost import Cost, Resource
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.serving.ahead import RolloutsAhead
from rlplan.timing.serving.generation import EngineRollouts, EngineSpeed, generate_cost, slowest_engine_cost
from rlplan.timing.transfer.switches import sleep_cost, wake_kv_cost
from rlplan.units import ceil_div
from rlplan.vocabulary import ActionKind

SWITCHES = (ActionKind.SLEEP_ENGINE, ActionKind.WAKE_WEIGHTS, ActionKind.WAKE_KV_CACHE)
GENERATES = (ActionKind.GENERATE, *SWITCHES)


class EngineCosts:
    """Engines of one job. Results are shared with all jobs that differ only in their trainers."""

    def __init__(self, job: SettledJob, policy: ModelSpec, memo: Memo) -> None:
        self.job, self.policy = strip_trainers(job), policy
        self.known = memo.get_table(EngineCosts, self.job, policy)
        self.lengths = job.workload.lengths

    def count_engines(self, num_generation: int, choice: EngineChoice) -> int:
        """Count engines that share the rollouts of a step."""
        return max(1, num_generation // choice.ranks)

    def count_shared_samples(self, choice: EngineChoice, num_samples: int) -> int:
        """Count samples of a prompt that share its KV blocks.

        Data-parallel attention spreads requests over ranks; a transformers engine shares no blocks.
        """
        return 1 if self.job.rollout.generates_in_trainer else max(1, num_samples // choice.attention_dp)

    def predict_demand(self, num_generation: int, batches: int, choice: EngineChoice) -> tuple[KvDemand, int, int]:
        """Predict (demand of one engine's rollouts, bytes that are enough, bytes required to start).

        batches: batches of rollouts generated concurrently.
        """
        # only these fields affect the demand; the rest would split the table
        cut = EngineChoice(choice.tp, 0, choice.max_num_seqs, attention_dp=choice.attention_dp)
        return self._predict_demand(num_generation, batches, cut)

    @memoize
    def _predict_demand(self, num_generation: int, batches: int, choice: EngineChoice) -> tuple[KvDemand, int, int]:
        workload = self.job.workload
        share = self.job.count_most_rollouts(self.count_engines(num_generation, choice), batches)
        demand = KvDemand(
            build_rank_pool(self.policy, self.job.rollout, choice.tp),
            ceil_div(min(choice.max_num_seqs, share), choice.attention_dp),
            workload.usual_prompt_len,
            workload.max_prompt_len,
            self.count_shared_samples(choice, workload.num_samples_per_prompt),
            self.lengths,
        )
        return demand, demand.predict_bytes(ENOUGH), demand.least_bytes

    @memoize
    def count_weight_bytes(self, choice: EngineChoice) -> int:
        """Weight bytes of one rank."""
        return held_weight_bytes(self.policy, self.job.rollout, choice)

    @memoize
    def predict_seconds(self, cluster: Cluster, choice: EngineChoice, kv_cache: int, sleeps: bool) -> float:
        """Lower bound of the engine's seconds: rollouts with `kv_cache` bytes, and switches with any."""
        if not self.job.has_rollouts:
            return 0.0
        costs = [self.predict_cost(ActionKind.GENERATE, cluster, choice, kv_cache)]
        costs += [self.predict_cost(kind, cluster, choice, 0) for kind in SWITCHES if sleeps]
        return sum(cost.seconds for cost in costs)

    def predict_cost(self, kind: ActionKind, cluster: Cluster, choice: EngineChoice, kv_cache: int) -> Cost:
        """Predict the cost of one engine action. kv_cache: bytes per GPU."""
        if kind in (ActionKind.GENERATE, ActionKind.EVALUATE):
            return self._cost_generation(kind, cluster, _strip_sleep(choice), kv_cache)
        return self._cost_switch(kind, cluster, choice, kv_cache)

    @memoize
    def _cost_switch(self, kind: ActionKind, cluster: Cluster, choice: EngineChoice, kv_cache: int) -> Cost:
        if kind is ActionKind.WAKE_KV_CACHE:
            return wake_kv_cost(kv_cache)
        size, level = self.count_weight_bytes(choice), choice.sleep_level
        kept_bytes = 0 if kind is ActionKind.WAKE_WEIGHTS else kv_cache
        return sleep_cost(size, cluster, level=level, kv_bytes=kept_bytes)

    @memoize
    def _cost_generation(self, kind: ActionKind, cluster: Cluster, choice: EngineChoice, kv_cache: int) -> Cost:
        """Cost of a step's or an evaluation's rollouts on the slowest engine, including the last reward."""
        speed = self._build_speed(cluster, _strip_num_seqs(choice))
        rollouts = self._build_rollouts(cluster, choice, kv_cache)
        num_rollouts = self.job.num_generated_per_step
        if kind is ActionKind.EVALUATE:
            num_rollouts = self.job.num_evaluated_responses
            share = ceil_div(num_rollouts, self.count_engines(cluster.num_gpus, choice))
            together = self.count_shared_samples(choice, self.job.workload.num_evaluation_samples)
            rollouts = self._build_rollouts(cluster, choice, kv_cache, (share, together))
        cost = generate_cost(speed, rollouts) + slowest_engine_cost(speed, rollouts, num_rollouts)
        latency_s = self.job.workload.reward_latency_s
        return cost + Cost({Resource.HOST: latency_s}) if latency_s else cost

    def bound_async_step(
        self,
        versions: int,
        cluster: Cluster,
        choice: EngineChoice,
        kv_cache: int,
        beside: tuple[float, float] | None = None,
    ) -> float:
        """Lower bound of a step with async rollouts. beside: seconds of (everything else, the weight sync)."""
        return self._bound_async_step(versions, cluster, _strip_sleep(choice), choice.keeps_versions, kv_cache, beside)

    @memoize
    def _bound_async_step(
        self,
        versions: int,
        cluster: Cluster,
        choice: EngineChoice,
        keeps: bool,
        kv_cache: int,
        beside: tuple[float, float] | None,
    ) -> float:
        ahead = self._build_async_rollouts(versions, cluster, choice, keeps, kv_cache)
        return ahead.least_step_s() if beside is None else ahead.step_s(*beside)

    def build_async_rollouts(
        self, versions: int, cluster: Cluster, choice: EngineChoice, kv_cache: int
    ) -> RolloutsAhead:
        """Build the model of async rollouts, which new weights interrupt."""
        return self._build_async_rollouts(versions, cluster, _strip_sleep(choice), choice.keeps_versions, kv_cache)

    @memoize
    def _build_async_rollouts(
        self, versions: int, cluster: Cluster, choice: EngineChoice, keeps: bool, kv_cache: int
    ) -> RolloutsAhead:
        speed = self._build_speed(cluster, _strip_num_seqs(choice))
        latency_s = self.job.workload.reward_latency_s
        num_engines = self.job.count_busy_engines(self.count_engines(cluster.num_gpus, choice), 1 + versions)
        # engines refill freed places, so each has an even share over time, also of whole groups
        share = ceil_div(self.job.num_generated_per_step, num_engines)
        together = self.count_shared_samples(choice, self.job.workload.num_samples_per_prompt)
        rollouts = self._build_rollouts(cluster, choice, kv_cache, (share, together))
        return RolloutsAhead(speed, rollouts, num_engines, versions, latency_s, keeps_cache=keeps)

    @memoize
    def _build_speed(self, cluster: Cluster, choice: EngineChoice) -> EngineSpeed:
        """Speed of an engine, independent of its number of sequences."""
        return EngineSpeed.from_job(self.job, self.policy, choice, cluster)

    def _build_rollouts(
        self, cluster: Cluster, choice: EngineChoice, kv_cache: int, part: tuple[int, int] | None = None
    ) -> EngineRollouts:
        """Rollouts of the engine with the most in a step. part: (rollouts, samples that share a prompt) to use
        instead."""
        workload = self.job.workload
        pool, longest = build_rank_pool(self.policy, self.job.rollout, choice.tp), self.lengths.longest
        num_tokens = pool.num_tokens(pool.num_blocks(kv_cache), workload.max_prompt_len + longest)
        share, together = part or (
            self.job.count_most_rollouts(self.count_engines(cluster.num_gpus, choice)),
            self.count_shared_samples(choice, workload.num_samples_per_prompt),
        )
        return EngineRollouts(
            share,
            float(workload.usual_prompt_len),
            together,
            self.lengths,
            choice.max_num_seqs,
            choice.attention_dp * num_tokens,
        )


def _strip_sleep(choice: EngineChoice) -> EngineChoice:
    """Drop the sleep level, which does not matter during generation."""
    cut = choice.has_expert_parallel, choice.attention_dp
    return EngineChoice(choice.tp, 0, choice.max_num_seqs, choice.quantization, *cut)


def _strip_num_seqs(choice: EngineChoice) -> EngineChoice:
    """Drop the number of sequences and the sleep level, so that one choice stands for all of them."""
    return EngineChoice(choice.tp, 0, 0, choice.quantization, choice.has_expert_parallel, choice.attention_dp)
