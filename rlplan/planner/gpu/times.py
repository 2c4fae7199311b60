"""Seconds of every action of a candidate: timing/ asked once a choice, and shared by all candidates that have it.

In: a SettledJob, its setting, candidates with bytes of KV cache. Out: costs by action id, StepTiming, bounds.
Left out: how seconds are computed (timing/), which candidate is best (search.py).

A step's actions belong to the trainer's choice, to the engine's, or (the weight sync alone) to both. So the seconds of
a synchronous step are a sum of three, and those of an asynchronous one the larger of two sides and the weight sync.
"""

from dataclasses import replace
from functools import cached_property

from rlplan.dataflow.choice import NO_ENGINE, NO_TRAINER, Arrangement, Choice, EngineChoice, TrainerChoice
from rlplan.dataflow.placements import GENERATION, TRAINING, group_size, scoring_group, trainer_of
from rlplan.dataflow.schedule import Action, Part, Schedule
from rlplan.memory.roles.kept_copies import StagedOnHost
from rlplan.memory.roles.scorer import ScorerOnGpu
from rlplan.memory.roles.trainer import TrainerOnGpu
from rlplan.planner.gpu.engine_costs import GENERATES
from rlplan.planner.gpu.placed_roles import GpuRoles
from rlplan.planner.gpu.roles import RoleBytes
from rlplan.planner.gpu.sync_times import SyncTimes
from rlplan.planner.gpu.tables import RoleTable
from rlplan.planner.memo import Memo, memoize
from rlplan.planner.setting import GpuPool, GpuSetting
from rlplan.spec.resolved import SettledJob, SettledTraining
from rlplan.timing.cost import NOTHING, Cost, Resource
from rlplan.timing.job import JobTiming, time_job
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.step import StepTiming
from rlplan.timing.training.mini_batch import MiniBatchShape, TrainSetting, least_seconds, score_cost, train_cost
from rlplan.timing.training.optimizer import optimizer_cost
from rlplan.timing.training.settings import FORWARD, training_times
from rlplan.timing.transfer.switches import checkpoint_cost, offload_cost
from rlplan.vocabulary import ActionKind, Phase, Placement, Role

TRAINS = (ActionKind.TRAIN_FORWARD_BACKWARD, ActionKind.OPTIMIZER_STEP, ActionKind.SCORE)
PASSES = (ActionKind.TRAIN_FORWARD_BACKWARD, ActionKind.SCORE)
MOVES = (ActionKind.OFFLOAD_ROLE, ActionKind.RELOAD_ROLE)
SAVES = (ActionKind.SAVE_STATES, ActionKind.WRITE_STATES, ActionKind.CHECKPOINT)


class Clusters:
    """Clusters of one kind of GPU, one object for each."""

    def __init__(self, pool: GpuPool, memo: Memo) -> None:
        self.gpu, self.node, self.known = pool.gpu, pool.node, memo.get_table(Clusters, pool.gpu, pool.node)

    @memoize
    def get_cluster(self, num_gpus: int, per_host: int, beside: bool = False) -> Cluster:
        """So many GPUs on hosts of so many. beside: it matters what else is on their hosts."""
        return Cluster(self.gpu, num_gpus, min(num_gpus, per_host), self.node, per_host if beside else 0)


class TrainerCosts:
    """Costs of what trains and scores: the same on any number of GPUs, of which the clusters are a part."""

    def __init__(self, roles: RoleBytes) -> None:
        self.job, self.roles, self.known = roles.job, roles, roles.known

    @memoize
    def bound_passes(self, actions: tuple[Action, ...], training: Cluster, scoring: Cluster) -> float:
        """No trainer takes fewer seconds for these passes: the least that any layout of its ranks could make of them.

        scoring: where frozen roles are.
        """
        return sum(self._bound_pass(action, scoring if action.role in self.frozen else training) for action in actions)

    @memoize
    def _bound_pass(self, action: Action, cluster: Cluster) -> float:
        setting, workload = self._build_setting(action.role, cluster.num_gpus, NO_TRAINER), self.job.workload
        if action.kind is ActionKind.SCORE:
            return least_seconds(
                setting, self._build_shape(workload.num_rollouts_per_step, NO_TRAINER), FORWARD, cluster
            )
        times = training_times(setting.recompute, is_frozen=setting.training.lora is not None)
        return action.repeat * least_seconds(setting, self._build_shape(self._num_trained, NO_TRAINER), times, cluster)

    @memoize
    def predict_seconds(
        self, actions: tuple[Action, ...], training: Cluster, scoring: Cluster, choice: TrainerChoice
    ) -> float:
        """Passes and optimizer steps of one choice."""
        return sum(self.predict_cost(action, training, scoring, choice).seconds for action in actions)

    def predict_cost(self, action: Action, training: Cluster, scoring: Cluster, choice: TrainerChoice) -> Cost:
        """A pass over a mini-batch (or, scoring, over a step), or an optimizer step."""
        if action.kind is ActionKind.SCORE:
            cluster = scoring if action.role in self.frozen else training
            return self._cost_scoring(action.role, action.phase, cluster, choice.without_gradients)
        steps = action.kind is ActionKind.OPTIMIZER_STEP
        cost = self._cost_training(action.kind, action.role, training, choice.without_passes if steps else choice)
        return cost if action.repeat == 1 else cost.times(action.repeat)

    @memoize
    def _cost_training(self, kind: ActionKind, role: Role, cluster: Cluster, choice: TrainerChoice) -> Cost:
        """A mini-batch forward and backward, or an optimizer step."""
        choice = trainer_of(self.job, role, choice)
        setting = self._build_setting(role, cluster.num_gpus, choice)
        if kind is ActionKind.OPTIMIZER_STEP:
            return optimizer_cost(setting, cluster)
        cost = train_cost(setting, self._build_shape(self._num_trained, choice), cluster)
        if baseline := self.job.num_baseline_answers_per_mini_batch:
            cost += score_cost(setting, self._build_shape(baseline, choice), cluster)
        return cost

    @memoize
    def _cost_scoring(self, role: Role, phase: Phase, cluster: Cluster, choice: TrainerChoice) -> Cost:
        """A pass over a step's rollouts, or held-out answers, on a trained role's ranks or a frozen one's own."""
        evaluated, rollouts = self.job.num_evaluated_responses, self.job.workload.num_rollouts_per_step
        choice = self.roles.choose_scoring(role, choice)
        work = self._build_shape(evaluated if phase is Phase.EVALUATE else rollouts, choice)
        setting = self._build_setting(role, cluster.num_gpus, choice)
        if role in (Role.REFERENCE, Role.TEACHER) and role not in self.frozen:
            setting = replace(setting, training=self._replace_adapter(role))
        if role in self.frozen and self.job.backend == "deepspeed":
            # AutoTP and Ulysses are for what is trained: a frozen role's rank has whole layers and sequences
            setting = replace(setting, choice=replace(choice, tp=1, ulysses=1))
        return score_cost(setting, work, cluster)

    @memoize
    def cost_save(self, kind: ActionKind, role: Role, cluster: Cluster, choice: TrainerChoice) -> Cost:
        """Trained states copied to the host, or copied and written where the trainer waits; a model by one rank."""
        if kind is ActionKind.CHECKPOINT:
            num_bytes = self.job.training.dtype.num_bytes * self.roles.get_model(role).num_parameters
            return checkpoint_cost(num_bytes, 1, cluster)
        where = Arrangement(Placement.HYBRID, cluster.num_gpus, 0)
        saved = self.roles.count_saved_bytes(role, Choice(where, choice, NO_ENGINE))
        cost = checkpoint_cost(saved * cluster.num_gpus, cluster.num_hosts, cluster)
        waits = kind is ActionKind.WRITE_STATES
        return cost if waits else Cost({Resource.HOST_LINK: cost.parts[Resource.HOST_LINK]})

    @memoize
    def cost_move(self, kind: ActionKind, table: RoleTable, cluster: Cluster) -> Cost:
        """A role to the host, or back."""
        forecast = table.usual
        if isinstance(forecast, StagedOnHost):
            forecast = forecast.rank
        if isinstance(forecast, TrainerOnGpu):
            num_bytes = forecast.moved_bytes
        else:
            assert isinstance(forecast, ScorerOnGpu), "engines sleep"
            num_bytes = forecast.weights
        return offload_cost(num_bytes, cluster, is_pinned=self.job.release.host_copies == "pinned")

    def _build_setting(self, role: Role, num_ranks: int, choice: TrainerChoice) -> TrainSetting:
        training = self.job.training if role is Role.POLICY else self._without_adapters
        return TrainSetting(self.roles.get_model(role), role, training, choice, num_ranks, self.job.backend)

    @cached_property
    def _without_adapters(self) -> SettledTraining:
        return self.job.training.model_copy(update={"lora": None})

    def _replace_adapter(self, role: Role) -> SettledTraining:
        """A frozen role on the policy's base: with its own adapter, or none; in 4 bits as that is."""
        if (lora := self.job.training.lora) is None:
            return self.job.training
        own = self.job.frozen_adapters.get(role)
        layers = {"rank": own.rank, "target_modules": own.target_modules} if own else {"target_modules": ()}
        return self.job.training.model_copy(update={"lora": lora.model_copy(update=layers)})

    @cached_property
    def frozen(self) -> tuple[Role, ...]:
        """Roles that are never trained."""
        return self.job.frozen_roles

    @property
    def _num_trained(self) -> int:
        """Rollouts that a mini-batch trains on."""
        workload = self.job.workload
        count, num_samples = workload.rollouts_per_mini_batch, workload.num_samples_per_prompt
        return self.job.algorithm.declaration.num_trained(count, num_samples)

    def _build_shape(self, num_rollouts: int, choice: TrainerChoice) -> MiniBatchShape:
        workload, lengths = self.job.workload, self.roles.lengths
        mean = workload.usual_prompt_len + lengths.mean
        return MiniBatchShape(
            num_rollouts,
            mean,
            mean * mean + lengths.variance,
            workload.max_seq_len,
            mean if self.roles.takes_all_rows else lengths.mean,
            choice.max_tokens,
        )


class GpuTimes:
    """Costs of every action of a job's candidates."""

    def __init__(self, job: SettledJob, setting: GpuSetting, roles: GpuRoles) -> None:
        self.job, self.setting, self.roles, self.engines = job, setting, roles, roles.engines
        self.trainers = TrainerCosts(roles)
        self._training, self._generation = (
            Clusters(setting.get_pool(group), roles.memo) for group in (TRAINING, GENERATION)
        )
        self.syncs = SyncTimes(job, setting, roles, self._get_cluster_with_neighbours)
        self.known = roles.memo.create_table()

    def time_step(self, candidate: Choice, kv_cache: int) -> StepTiming:
        """A steady step, from the view of its schedule: what happens in every step. kv_cache: bytes a GPU."""
        return self.time_schedule(self.roles.build_steady_view(candidate.arrangement), candidate, kv_cache).step

    def time_schedule(self, schedule: Schedule, candidate: Choice, kv_cache: int) -> JobTiming:
        """Of all parts of a schedule, or of a view of it. Starting and finishing take no time here but to evaluate."""
        work = self.job.workload
        evaluating = ("start", "finish") if work.num_steps % work.evaluate_every else ("start",)  # the last one once
        timed = {("step", phase) for phase in Phase} | {(part, Phase.EVALUATE) for part in evaluating}
        where = candidate.arrangement
        clusters = *self._trainer_clusters(where), self.get_cluster(where, GENERATION)
        costs: dict[tuple[Part, str], Cost] = {
            (part, action.id): self._cost_action(action, candidate, kv_cache, clusters)
            if (part, action.phase) in timed
            else NOTHING
            for part, actions in schedule.parts
            for action in actions
        }
        if self.roles.count_versions_ahead(where):
            self._add_async_rollouts(schedule, candidate, kv_cache, costs)
        return time_job(schedule, costs)

    def _add_async_rollouts(
        self, schedule: Schedule, candidate: Choice, kv_cache: int, costs: dict[tuple[Part, str], Cost]
    ) -> None:
        """The cost of rollouts that go on beside a step depends on how long the rest of it takes."""
        kinds = {action.kind: action.id for action in schedule.step}
        sync_s = costs["step", kinds[ActionKind.SYNC_WEIGHTS]].seconds
        others_s = sum(costs["step", action.id].seconds for action in schedule.step if action.every == 1) - sync_s
        where, engine = candidate.arrangement, candidate.engine
        ahead = self.engines.build_async_rollouts(
            self.roles.count_versions_ahead(where), self.get_cluster(where, GENERATION), engine, kv_cache
        )
        travels = self.syncs.predict_link(candidate)
        travel_s = travels.travels.seconds if travels else 0.0
        costs["step", kinds[ActionKind.GENERATE]] = ahead.cost(others_s, sync_s, travel_s)

    def _cost_action(
        self, action: Action, candidate: Choice, kv_cache: int, clusters: tuple[Cluster, Cluster, Cluster]
    ) -> Cost:
        """Of one action of a step, with those alike that it stands for. clusters: that train, score and generate."""
        arrangement, (training, scoring, generation) = candidate.arrangement, clusters
        if action.kind is ActionKind.GENERATE and self.roles.count_versions_ahead(arrangement):
            return NOTHING  # until all others are known
        if action.kind in (*GENERATES, ActionKind.EVALUATE):
            return self.engines.predict_cost(action.kind, generation, candidate.engine, kv_cache)
        if action.kind is ActionKind.SYNC_WEIGHTS:
            return self.syncs.predict_cost(arrangement, candidate.trainer, candidate.engine, candidate.sync_mode)
        if action.kind in TRAINS:
            return self.trainers.predict_cost(action, training, scoring, candidate.trainer)
        return self._cost_move(action, arrangement, candidate.trainer) if action.kind in (*MOVES, *SAVES) else NOTHING

    def predict_trainer_seconds(self, arrangement: Arrangement, choice: TrainerChoice) -> float:
        """Everything of a step but rollouts, the engine's switches, the weight sync, and what may run beside all of it:
        a value model's states are saved beside the policy's passes.
        """
        actions = self.roles.list_actions(arrangement, (*MOVES, *SAVES))
        moves = (action for action in actions if action.kind not in SAVES or action.role is Role.POLICY)
        return self.predict_pass_seconds(arrangement, choice) + sum(
            self._cost_move(action, arrangement, choice).seconds for action in moves
        )

    def predict_pass_seconds(self, arrangement: Arrangement, choice: TrainerChoice) -> float:
        """The same without roles that move: what is offloaded for good need not move, so that it may save time."""
        actions = self.roles.list_similar_actions(arrangement, TRAINS)
        return self.trainers.predict_seconds(actions, *self._trainer_clusters(arrangement), choice)

    def bound_seconds(self, arrangement: Arrangement) -> float:
        """No trainer takes fewer: its passes at the least that any layout of its ranks could make of them."""
        actions = self.roles.list_similar_actions(arrangement, PASSES)
        return self.trainers.bound_passes(actions, *self._trainer_clusters(arrangement))

    def _cost_move(self, action: Action, arrangement: Arrangement, choice: TrainerChoice) -> Cost:
        """A role to the host, or back; or states that are saved."""
        training, scoring = self._trainer_clusters(arrangement)
        if action.kind in SAVES:
            return self.trainers.cost_save(action.kind, action.role, training, choice.without_passes)
        table = self.roles.get_trainer_table(arrangement, action.processes[0], choice.without_passes)
        cluster = scoring if action.role in self.trainers.frozen else training
        return self.trainers.cost_move(action.kind, table, cluster)

    def bound_async_step(
        self, arrangement: Arrangement, choice: EngineChoice, kv_cache: int, others_s: float, sync_s: float = 0.0
    ) -> float:
        """No step with rollouts ahead takes fewer seconds beside so many of everything else."""
        versions, cluster = self.roles.count_versions_ahead(arrangement), self.get_cluster(arrangement, GENERATION)
        return self.engines.bound_async_step(versions, cluster, choice, kv_cache, (others_s, sync_s))

    def predict_engine_seconds(self, arrangement: Arrangement, choice: EngineChoice, kv_cache: int) -> float:
        """At least what rollouts with so much KV cache take and the engine's switches with any."""
        cluster = self.get_cluster(arrangement, GENERATION)
        if versions := self.roles.count_versions_ahead(arrangement):
            return self.engines.bound_async_step(versions, cluster, choice, kv_cache)
        return self.engines.predict_seconds(cluster, choice, kv_cache, arrangement.sleeps)

    @memoize
    def _trainer_clusters(self, arrangement: Arrangement) -> tuple[Cluster, Cluster]:
        """The GPUs that train, and those on which frozen roles are."""
        return self.get_cluster(arrangement, TRAINING), self.get_cluster(arrangement, scoring_group(arrangement))

    def get_cluster(self, arrangement: Arrangement, group: str) -> Cluster:
        """The GPUs of a device group."""
        clusters = self._generation if group == GENERATION else self._training
        return clusters.get_cluster(group_size(arrangement, group), self.setting.get_pool(group).gpus_per_host)

    @memoize
    def _get_cluster_with_neighbours(self, arrangement: Arrangement, group: str) -> Cluster:
        """The same with those that share their hosts."""
        clusters = self._generation if group == GENERATION else self._training
        return clusters.get_cluster(
            group_size(arrangement, group), self.setting.get_pool(group).gpus_per_host, beside=True
        )
