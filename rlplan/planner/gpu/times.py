"""Seconds of a candidate's actions: timing/ is called once per choice and shared by all candidates with it.

In: a SettledJob, its setting, candidates with their KV cache. Out: costs by action id, StepTiming, lower bounds. Left
out: the formulas (timing/) and which candidate is best (search.py).

Each action of a step belongs to the trainer's choice, to the engine's choice, or to both (weight sync only). So a
synchronous step is the sum of three terms. An async step is the larger side plus the weight sync.
"""

from dataclasses import replace
from functools import cached_property

from rlplan.dataflow.choice import NO_ENGINE, NO_TRAINER, Arrangement, Choice, EngineChoice, TrainerChoice
from rlplan.dataflow.placements import (
    GENERATION,
    TRAINING,
    count_group_devices,
    find_scoring_group,
    find_trainer_choice,
)
from rlplan.dataflow.schedule import Action, Part, Schedule
from rlplan.memory.roles.scorer import ScorerOnGpu
from rlplan.memory.roles.trainer import StagedOnHost, TrainerOnGpu
from rlplan.planner.gpu.engine_costs import GENERATES
from rlplan.planner.gpu.roles import GpuRoles, RoleBytes
from rlplan.planner.gpu.sync_times import SyncTimes
from rlplan.planner.gpu.tables import RoleTable
from rlplan.planner.memo import Memo, memoize
from rlplan.planner.setting import GpuPool, GpuSetting
from rlplan.spec.resolved import SettledJob, SettledTraining
from rlplan.timing.cost import NOTHING, Cost, Resource
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.step import JobTiming, StepTiming, time_job
from rlplan.timing.training.mini_batch import MiniBatchShape, TrainSetting, least_seconds, score_cost, train_cost
from rlplan.timing.training.optimizer import optimizer_cost
from rlplan.timing.training.settings import FORWARD, training_times
from rlplan.timing.transfer.driver import send_batch_cost
from rlplan.timing.transfer.switches import checkpoint_cost, offload_cost
from rlplan.vocabulary import ActionKind, Phase, Placement, Role

TRAINS = (ActionKind.TRAIN_FORWARD_BACKWARD, ActionKind.OPTIMIZER_STEP, ActionKind.SCORE)
PASSES = (ActionKind.TRAIN_FORWARD_BACKWARD, ActionKind.SCORE)
MOVES = (ActionKind.OFFLOAD_ROLE, ActionKind.RELOAD_ROLE)
SAVES = (ActionKind.SAVE_STATES, ActionKind.WRITE_STATES, ActionKind.CHECKPOINT)


class Clusters:
    """Clusters of one kind of GPU, one object per size."""

    def __init__(self, pool: GpuPool, memo: Memo) -> None:
        self.gpu, self.node, self.known = pool.gpu, pool.node, memo.get_table(Clusters, pool.gpu, pool.node)

    @memoize
    def get_cluster(self, num_gpus: int, per_host: int, beside: bool = False) -> Cluster:
        """Get a cluster of `num_gpus` on hosts of `per_host`. beside: other jobs' GPUs on these hosts matter."""
        return Cluster(self.gpu, num_gpus, min(num_gpus, per_host), self.node, per_host if beside else 0)


class TrainerCosts:
    """Costs of training and scoring, shared by all numbers of GPUs: clusters are arguments."""

    def __init__(self, roles: RoleBytes) -> None:
        self.job, self.roles, self.known = roles.job, roles, roles.known

    @memoize
    def bound_passes(self, actions: tuple[Action, ...], training: Cluster, scoring: Cluster) -> float:
        """Lower bound of the seconds of passes for any layout. scoring: cluster of frozen roles."""
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
        """Predict the seconds of passes and optimizer steps of one choice."""
        return sum(self.predict_cost(action, training, scoring, choice).seconds for action in actions)

    def predict_cost(self, action: Action, training: Cluster, scoring: Cluster, choice: TrainerChoice) -> Cost:
        """Predict the cost of a pass over a mini-batch, of scoring a step, or of an optimizer step."""
        if action.kind is ActionKind.SCORE:
            cluster = scoring if action.role in self.frozen else training
            return self._cost_scoring(action.role, action.phase, cluster, choice.without_gradients)
        steps = action.kind is ActionKind.OPTIMIZER_STEP
        cost = self._cost_training(action.kind, action.role, training, choice.without_passes if steps else choice)
        return cost if action.repeat == 1 else cost.times(action.repeat)

    @memoize
    def _cost_training(self, kind: ActionKind, role: Role, cluster: Cluster, choice: TrainerChoice) -> Cost:
        """Cost of a mini-batch's forward and backward pass, or of an optimizer step."""
        choice = find_trainer_choice(self.job, role, choice)
        setting = self._build_setting(role, cluster.num_gpus, choice)
        if kind is ActionKind.OPTIMIZER_STEP:
            return optimizer_cost(setting, cluster)
        cost = train_cost(setting, self._build_shape(self._num_trained, choice), cluster)
        if baseline := self.job.num_baseline_answers_per_mini_batch:
            cost += score_cost(setting, self._build_shape(baseline, choice), cluster)
        return cost + self._send_batch(self._num_trained / self.job.workload.num_epochs_per_step)

    @memoize
    def _cost_scoring(self, role: Role, phase: Phase, cluster: Cluster, choice: TrainerChoice) -> Cost:
        """Cost of scoring a step's rollouts or held-out responses, on a trained role's ranks or a frozen role's own."""
        evaluated, rollouts = self.job.num_evaluated_responses, self.job.workload.num_rollouts_per_step
        choice = self.roles.choose_scoring(role, choice)
        work = self._build_shape(evaluated if phase is Phase.EVALUATE else rollouts, choice)
        setting = self._build_setting(role, cluster.num_gpus, choice)
        if role in (Role.REFERENCE, Role.TEACHER) and role not in self.frozen:
            setting = replace(setting, training=self._replace_adapter(role))
        if role in self.frozen and self.job.backend == "deepspeed":
            # under DeepSpeed, AutoTP and Ulysses apply to trained roles only; frozen roles are not sharded so
            setting = replace(setting, choice=replace(choice, tp=1, ulysses=1))
        num_results = 2 if role is Role.POLICY and self.job.takes_entropies else 1
        return score_cost(setting, work, cluster) + self._send_batch(work.num_rollouts, num_results)

    def _send_batch(self, num_rollouts: float, num_results: int = 0) -> Cost:
        """Cost of sending a batch through the driver; an update sends its rollouts once for all epochs."""
        if not self.job.release.pads_batches:
            return NOTHING
        work = self.job.workload
        return send_batch_cost(num_rollouts, work.max_prompt_len, work.max_response_len, num_results=num_results)

    @memoize
    def cost_save(self, kind: ActionKind, role: Role, cluster: Cluster, choice: TrainerChoice) -> Cost:
        """Cost of a checkpoint: copying trained states to the host, writing them if the trainer waits, or writing a
        model by one rank.
        """
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
        """Cost of moving a role to the host or back."""
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
        model, backend = self.roles.get_model(role), self.job.backend
        return TrainSetting(model, role, training, choice, num_ranks, backend, host_waits=self.job.host_waits)

    @cached_property
    def _without_adapters(self) -> SettledTraining:
        return self.job.training.model_copy(update={"lora": None})

    def _replace_adapter(self, role: Role) -> SettledTraining:
        """Training settings of a frozen role on the policy's base: with its own adapter or none."""
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
        workload, lengths, balances = self.job.workload, self.roles.lengths, self.job.release.balances
        is_whole = num_rollouts >= workload.num_rollouts_per_step
        mean = workload.usual_prompt_len + lengths.mean
        return MiniBatchShape(
            num_rollouts,
            mean,
            mean * mean + lengths.variance,
            workload.max_seq_len,
            mean if self.roles.takes_all_rows else lengths.mean,
            choice.max_tokens,
            balances == "mini_batch" or (balances == "step" and is_whole),
        )


class GpuTimes:
    """Costs of all actions of a job's candidates."""

    def __init__(self, job: SettledJob, setting: GpuSetting, roles: GpuRoles) -> None:
        self.job, self.setting, self.roles, self.engines = job, setting, roles, roles.engines
        self.trainers = TrainerCosts(roles)
        self._training, self._generation = (
            Clusters(setting.get_pool(group), roles.memo) for group in (TRAINING, GENERATION)
        )
        self.syncs = SyncTimes(job, setting, roles, self._get_cluster_with_neighbours)
        self.known = roles.memo.create_table()

    def time_step(self, candidate: Choice, kv_cache: int) -> StepTiming:
        """Time a steady step with the actions of every step. kv_cache: bytes per GPU."""
        return self.time_schedule(
            self.roles.build_steady_schedule(*self.roles.build_kind_key(candidate.arrangement)), candidate, kv_cache
        ).step

    def time_schedule(self, schedule: Schedule, candidate: Choice, kv_cache: int) -> JobTiming:
        """Time all parts of a schedule. Start and finish count only their evaluation."""
        work = self.job.workload
        evaluating = (
            ("start", "finish") if work.num_steps % work.evaluate_every else ("start",)
        )  # an evaluation after the last step is not repeated at the end
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
        """Add the cost of async rollouts, which depends on the duration of the rest of the step."""
        kinds = {action.kind: action.id for action in schedule.step}
        sync_s = costs["step", kinds[ActionKind.SYNC_WEIGHTS]].seconds
        others_s = sum(costs["step", action.id].seconds for action in schedule.step if action.every == 1) - sync_s
        where, engine = candidate.arrangement, candidate.engine
        ahead = self.engines.build_async_rollouts(
            self.roles.count_versions_ahead(where), self.get_cluster(where, GENERATION), engine, kv_cache
        )
        costs["step", kinds[ActionKind.GENERATE]] = ahead.cost(others_s, sync_s)

    def _cost_action(
        self, action: Action, candidate: Choice, kv_cache: int, clusters: tuple[Cluster, Cluster, Cluster]
    ) -> Cost:
        """Cost of one action of a step, including its repeats. clusters: those that train, score and generate."""
        arrangement, (training, scoring, generation) = candidate.arrangement, clusters
        if action.kind is ActionKind.GENERATE and self.roles.count_versions_ahead(arrangement):
            return NOTHING  # added by _add_async_rollouts once all other costs are known
        if action.kind in (*GENERATES, ActionKind.EVALUATE):
            return self.engines.predict_cost(action.kind, generation, candidate.engine, kv_cache)
        if action.kind is ActionKind.SYNC_WEIGHTS:
            return self.syncs.predict_cost(arrangement, candidate.trainer, candidate.engine, candidate.sync_mode)
        if action.kind in TRAINS:
            return self.trainers.predict_cost(action, training, scoring, candidate.trainer)
        return self._cost_move(action, arrangement, candidate.trainer) if action.kind in (*MOVES, *SAVES) else NOTHING

    def predict_trainer_seconds(self, arrangement: Arrangement, choice: TrainerChoice) -> float:
        """Predict the seconds of a step without rollouts, engine switches and weight sync.

        Work that may overlap with all of it is excluded: a value model's states are saved beside the policy's passes.
        """
        actions = self.roles.list_actions(*self.roles.build_kind_key(arrangement), (*MOVES, *SAVES))
        moves = (action for action in actions if action.kind not in SAVES or action.role is Role.POLICY)
        return self.predict_pass_seconds(arrangement, choice) + sum(
            self._cost_move(action, arrangement, choice).seconds for action in moves
        )

    def predict_pass_seconds(self, arrangement: Arrangement, choice: TrainerChoice) -> float:
        """Predict the seconds of passes alone. Moving roles is excluded because permanently offloaded states need not
        move.
        """
        actions = self.roles.list_similar_actions(*self.roles.build_kind_key(arrangement), TRAINS)
        return self.trainers.predict_seconds(actions, *self._trainer_clusters(arrangement), choice)

    def bound_seconds(self, arrangement: Arrangement) -> float:
        """Lower bound of the training passes for any layout of these ranks."""
        actions = self.roles.list_similar_actions(*self.roles.build_kind_key(arrangement), PASSES)
        return self.trainers.bound_passes(actions, *self._trainer_clusters(arrangement))

    def _cost_move(self, action: Action, arrangement: Arrangement, choice: TrainerChoice) -> Cost:
        """Cost of moving a role to the host or back, or of saving states."""
        training, scoring = self._trainer_clusters(arrangement)
        if action.kind in SAVES:
            return self.trainers.cost_save(action.kind, action.role, training, choice.without_passes)
        side = self.roles.parts(arrangement).others
        table = self.roles.find_table(side, action.processes[0], choice.without_passes)
        cluster = scoring if action.role in self.trainers.frozen else training
        return self.trainers.cost_move(action.kind, table, cluster)

    def bound_async_step(
        self, arrangement: Arrangement, choice: EngineChoice, kv_cache: int, others_s: float, sync_s: float = 0.0
    ) -> float:
        """Lower bound of a step with async rollouts beside `others_s` seconds of other work."""
        versions, cluster = self.roles.count_versions_ahead(arrangement), self.get_cluster(arrangement, GENERATION)
        return self.engines.bound_async_step(versions, cluster, choice, kv_cache, (others_s, sync_s))

    def predict_engine_seconds(self, arrangement: Arrangement, choice: EngineChoice, kv_cache: int) -> float:
        """Lower bound of the engine's seconds: rollouts with `kv_cache` bytes, and switches with any."""
        cluster = self.get_cluster(arrangement, GENERATION)
        if versions := self.roles.count_versions_ahead(arrangement):
            return self.engines.bound_async_step(versions, cluster, choice, kv_cache)
        return self.engines.predict_seconds(cluster, choice, kv_cache, arrangement.sleeps)

    @memoize
    def _trainer_clusters(self, arrangement: Arrangement) -> tuple[Cluster, Cluster]:
        """(cluster that trains, cluster of frozen roles)."""
        return self.get_cluster(arrangement, TRAINING), self.get_cluster(arrangement, find_scoring_group(arrangement))

    def get_cluster(self, arrangement: Arrangement, group: str) -> Cluster:
        """Get the cluster of a device group."""
        clusters = self._generation if group == GENERATION else self._training
        return clusters.get_cluster(count_group_devices(arrangement, group), self.setting.get_pool(group).gpus_per_host)

    @memoize
    def _get_cluster_with_neighbours(self, arrangement: Arrangement, group: str) -> Cluster:
        """Get the cluster of a device group, aware of other GPUs on its hosts."""
        clusters = self._generation if group == GENERATION else self._training
        per_host = self.setting.get_pool(group).gpus_per_host
        return clusters.get_cluster(count_group_devices(arrangement, group), per_host, beside=True)
