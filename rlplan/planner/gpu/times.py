"""Seconds of every action of a candidate: timing/ asked once a choice, and shared by all candidates that have it.

In: a SettledJob, its setting, candidates with bytes of KV cache. Out: costs by action id, StepTiming, bounds.
Left out: how seconds are computed (timing/), which candidate is best (search.py).

A step's actions belong to the trainer's choice, to the engine's, or (the weight sync alone) to both. So the seconds of
a synchronous step are a sum of three, and those of an asynchronous one the larger of two sides and the weight sync.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import cached_property, partial

from rlplan.dataflow.choice import NO_ENGINE, NO_TRAINER, Arrangement, Choice, EngineChoice, TrainerChoice
from rlplan.dataflow.placements import GENERATION, TRAINING, group_size, scoring_group
from rlplan.dataflow.schedule import Action, Part, Schedule
from rlplan.memory.roles.gpu.checkpoint_copies import StagedOnHost
from rlplan.memory.roles.gpu.scorer import ScorerOnGpu
from rlplan.memory.roles.gpu.trainer import TrainerOnGpu
from rlplan.planner.gpu.roles import GpuRoles
from rlplan.planner.gpu.sync_times import SyncTimes
from rlplan.planner.setting import GpuSetting
from rlplan.spec.resolved import SettledJob, SettledTraining
from rlplan.timing.cost import NOTHING, Cost, Resource
from rlplan.timing.job import JobTiming, time_job
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.serving.ahead import RolloutsAhead
from rlplan.timing.serving.generation import EngineRollouts, EngineSpeed, generate_cost, slowest_engine_cost
from rlplan.timing.step import StepTiming
from rlplan.timing.training.mini_batch import MiniBatchShape, TrainSetting, least_seconds, train_cost
from rlplan.timing.training.optimizer import optimizer_cost
from rlplan.timing.training.scoring import score_cost
from rlplan.timing.training.settings import FORWARD, training_times
from rlplan.timing.transfer.checkpoints import checkpoint_cost
from rlplan.timing.transfer.switches import offload_cost, reload_cost, sleep_cost, wake_kv_cost, wake_weights_cost
from rlplan.units import ceil_div
from rlplan.vocabulary import ActionKind, Phase, Role

TRAINS = (ActionKind.TRAIN_FORWARD_BACKWARD, ActionKind.OPTIMIZER_STEP, ActionKind.SCORE)
PASSES = (ActionKind.TRAIN_FORWARD_BACKWARD, ActionKind.SCORE)
MOVES = (ActionKind.OFFLOAD_ROLE, ActionKind.RELOAD_ROLE)
SAVES = (ActionKind.SAVE_STATES, ActionKind.WRITE_STATES, ActionKind.CHECKPOINT)
GENERATES = (ActionKind.GENERATE, ActionKind.SLEEP_ENGINE, ActionKind.WAKE_WEIGHTS, ActionKind.WAKE_KV_CACHE)


class GpuTimes:
    """Costs of every action of a job's candidates."""

    def __init__(self, job: SettledJob, setting: GpuSetting, roles: GpuRoles) -> None:
        self.job, self.setting, self.roles = job, setting, roles
        self._costs: dict[object, Cost] = {}
        self._engine_costs: dict[object, Cost] = {}
        self._seconds: dict[object, float] = {}
        self._actions: dict[object, tuple[tuple[Action, ...], int]] = {}
        self._alike: dict[object, int] = {}
        self._rollouts_ahead: dict[object, RolloutsAhead] = {}
        self._speeds: dict[tuple[object, ...], EngineSpeed] = {}
        self._clusters: dict[tuple[str, int, int], Cluster] = {}
        self.syncs = SyncTimes(job, setting, roles, self._cluster)

    def share_engines(self, known: "GpuTimes") -> None:
        """Take what is known of engines of another job whose engines are the same."""
        self._engine_costs, self._speeds = known._engine_costs, known._speeds
        self._rollouts_ahead = known._rollouts_ahead
        self.roles.demands = known.roles.demands

    def of(self, job: SettledJob, setting: GpuSetting, roles: GpuRoles) -> "GpuTimes":
        """Those of another job that differs in its choices alone, with what is known already."""
        other = copy(self)
        other.job, other.setting, other.roles = job, setting, roles
        other.syncs = copy(self.syncs)
        other.syncs.job, other.syncs.setting, other.syncs.roles = job, setting, roles
        other.syncs.cluster = other._cluster
        return other

    def timing(self, candidate: Choice, kv_cache: int) -> StepTiming:
        """A steady step, from the view of its schedule: what happens in every step. kv_cache: bytes a GPU."""
        return self.job_timing(self.roles.every_step(candidate.arrangement), candidate, kv_cache).step

    def job_timing(self, schedule: Schedule, candidate: Choice, kv_cache: int) -> JobTiming:
        """Of all parts of a schedule, or of a view of it. Starting and finishing take no time here but to evaluate."""
        work = self.job.workload
        evaluating = ("start", "finish") if work.num_steps % work.evaluate_every else ("start",)  # the last one once
        timed = {("step", phase) for phase in Phase} | {(part, Phase.EVALUATE) for part in evaluating}
        costs: dict[tuple[Part, str], Cost] = {
            (part, one.id): self._cost(one, candidate, kv_cache) if (part, one.phase) in timed else NOTHING
            for part, actions in schedule.parts
            for one in actions
        }
        if self.roles.versions_ahead(candidate.arrangement):
            self._add_rollouts_ahead(schedule, candidate, kv_cache, costs)
        return time_job(schedule, costs)

    def _add_rollouts_ahead(
        self, schedule: Schedule, candidate: Choice, kv_cache: int, costs: dict[tuple[Part, str], Cost]
    ) -> None:
        """The cost of rollouts that go on beside a step depends on how long the rest of it takes."""
        kinds = {action.kind: action.id for action in schedule.step}
        sync_s = costs["step", kinds[ActionKind.SYNC_WEIGHTS]].seconds
        others_s = sum(costs["step", action.id].seconds for action in schedule.step if action.every == 1) - sync_s
        ahead = self._ahead(candidate.arrangement, candidate.engine, kv_cache)
        travels = self.syncs.over_link(candidate)
        travel_s = travels.travels.seconds if travels else 0.0
        costs["step", kinds[ActionKind.GENERATE]] = ahead.cost(others_s, sync_s, travel_s)

    def _cost(self, action: Action, candidate: Choice, kv_cache: int) -> Cost:
        """Of one action of a step, with those alike that it stands for."""
        arrangement = candidate.arrangement
        if action.kind is ActionKind.GENERATE and self.roles.versions_ahead(arrangement):
            return NOTHING  # until all others are known
        if action.kind in (*GENERATES, ActionKind.EVALUATE):
            return self._of_engine(action.kind, arrangement, candidate.engine, kv_cache)
        if action.kind is ActionKind.SYNC_WEIGHTS:
            return self.syncs.cost(arrangement, candidate.trainer, candidate.engine, candidate.sync_mode)
        if action.kind in (*TRAINS, *MOVES, *SAVES):
            return self._of_trainer(action, arrangement, candidate.trainer)
        return NOTHING

    def trainer_seconds(self, arrangement: Arrangement, choice: TrainerChoice) -> float:
        """A lower bound of a step without rollouts, the engine's switches and the weight sync."""
        return self.pass_seconds(arrangement, choice) + self._sum_of("moves", (*MOVES, *SAVES), arrangement, choice)

    def pass_seconds(self, arrangement: Arrangement, choice: TrainerChoice) -> float:
        """The same without roles that move: what is offloaded for good need not move, so that it may save time."""
        return self._sum_of("passes", TRAINS, arrangement, choice)

    def _sum_of(
        self, name: str, kinds: tuple[ActionKind, ...], arrangement: Arrangement, choice: TrainerChoice
    ) -> float:
        actions, alike = self._actions_of(name, kinds, arrangement)
        key = name, alike, choice
        if key not in self._seconds:
            self._seconds[key] = sum(self._of_trainer(action, arrangement, choice).seconds for action in actions)
        return self._seconds[key]

    def _actions_of(
        self, name: str, kinds: tuple[ActionKind, ...], where: Arrangement
    ) -> tuple[tuple[Action, ...], int]:
        """The step's actions of some kinds that nothing runs beside, and a number: one for arrangements in which these
        take as long. States of a value model are saved beside the policy's passes.
        """
        groups = where.num_training, where.num_scoring
        key = name, groups, where.offloaded, where.placement
        if key not in self._actions:
            actions = tuple(
                each
                for each in self.roles.view(where).step
                if each.kind in kinds and each.every == 1 and (each.kind not in SAVES or each.role is Role.POLICY)
            )
            passes = groups, tuple((each.kind, each.id, each.role, each.repeat) for each in actions)
            self._actions[key] = actions, self._alike.setdefault(passes if name == "passes" else key, len(self._alike))
        return self._actions[key]

    def least_ahead(
        self, arrangement: Arrangement, choice: EngineChoice, kv_cache: int, others_s: float, sync_s: float = 0.0
    ) -> float:
        """No step with rollouts ahead takes fewer seconds beside so many of everything else."""
        key = "ahead", self.roles.versions_ahead(arrangement), arrangement.num_generation, choice, kv_cache
        if (*key, others_s, sync_s) not in self._seconds:
            ahead = self._ahead(arrangement, choice, kv_cache)
            self._seconds[*key, others_s, sync_s] = ahead.step_s(others_s, sync_s)
        return self._seconds[*key, others_s, sync_s]

    def engine_seconds(self, arrangement: Arrangement, choice: EngineChoice, kv_cache: int) -> float:
        """At least what rollouts with so much KV cache take and the engine's switches with any."""
        if self.roles.versions_ahead(arrangement):
            return self._ahead(arrangement, choice, kv_cache).least_step_s()
        key = "engine", arrangement.num_generation, arrangement.sleeps, choice, kv_cache
        if key not in self._seconds:
            kinds = GENERATES if arrangement.sleeps else GENERATES[:1]
            costs = (
                self._of_engine(kind, arrangement, choice, kv_cache if kind is GENERATES[0] else 0) for kind in kinds
            )
            self._seconds[key] = sum(cost.seconds for cost in costs) if self.job.has_rollouts else 0.0
        return self._seconds[key]

    def floor_seconds(self, arrangement: Arrangement) -> float:
        """No trainer takes fewer: its passes at the least that any layout of its ranks could make of them."""
        key = "floor", arrangement.num_training, arrangement.num_scoring
        if key not in self._seconds:
            actions = [one for one in self.roles.view(arrangement).step if one.kind in PASSES and one.every == 1]
            self._seconds[key] = sum(self._floor_of(action, arrangement) for action in actions)
        return self._seconds[key]

    def _floor_of(self, action: Action, arrangement: Arrangement) -> float:
        """Of one action; the same for all sizes of the groups that it is not on."""
        alone = arrangement.num_scoring if action.role in self._frozen else 0
        key = "floor", action.kind, action.role, action.repeat, alone, not alone and arrangement.num_training
        if key not in self._seconds:
            self._seconds[key] = self._floor(action, arrangement)
        return self._seconds[key]

    def _floor(self, action: Action, arrangement: Arrangement) -> float:
        setting, workload = self._train_setting(action.role, arrangement, NO_TRAINER), self.job.workload
        if action.kind is ActionKind.SCORE:
            is_frozen = action.role in self._frozen
            setting = replace(setting, num_ranks=arrangement.num_frozen if is_frozen else arrangement.num_training)
            work = self._work(workload.num_rollouts_per_step, NO_TRAINER)
            cluster = self._cluster(arrangement, scoring_group(arrangement) if is_frozen else TRAINING)
            return least_seconds(setting, work, FORWARD, cluster)
        times = training_times(setting.recompute, is_frozen=setting.training.lora is not None)
        work = self._work(self._num_trained, NO_TRAINER)
        return action.repeat * least_seconds(setting, work, times, self._cluster(arrangement, TRAINING))

    def _of_trainer(self, action: Action, arrangement: Arrangement, choice: TrainerChoice) -> Cost:
        """A pass over a mini-batch (or, scoring, over a step), an optimizer step, a role that moves, or states that are
        saved.
        """
        key = action.kind, action.role, arrangement.num_training, arrangement.num_scoring, _matters(action.kind, choice)
        if action.kind in SAVES:
            return self._once((*key, "saves"), lambda: self._save(action, arrangement, choice))
        if action.kind in MOVES:
            return self._once((*key, arrangement.shares_devices), lambda: self._move(action, arrangement, choice))
        if action.kind is ActionKind.SCORE:
            return self._once((*key, action.id), lambda: self._score(action, arrangement, choice))
        cost = self._once(key, lambda: self._train(action, arrangement, choice))
        return cost if action.repeat == 1 else cost.times(action.repeat)

    def _save(self, action: Action, arrangement: Arrangement, choice: TrainerChoice) -> Cost:
        """Trained states copied to the host, or copied and written where the trainer waits; a model by one rank."""
        if action.kind is ActionKind.CHECKPOINT:
            num_parameters = self._train_setting(action.role, arrangement, choice).model.num_parameters
            num_bytes = self.job.training.dtype.num_bytes * num_parameters
            return checkpoint_cost(num_bytes, 1, self._cluster(arrangement, TRAINING))
        saved = self.roles.saved_bytes(action.role, Choice(arrangement, choice, NO_ENGINE))
        cluster = self._cluster(arrangement, TRAINING)
        cost = checkpoint_cost(saved * arrangement.num_training, cluster.num_hosts, cluster)
        waits = action.kind is ActionKind.WRITE_STATES
        return cost if waits else Cost({Resource.HOST_LINK: cost.parts[Resource.HOST_LINK]})

    def _train(self, action: Action, arrangement: Arrangement, choice: TrainerChoice) -> Cost:
        """A mini-batch forward and backward, or an optimizer step."""
        setting, cluster = self._train_setting(action.role, arrangement, choice), self._cluster(arrangement, TRAINING)
        if action.kind is ActionKind.OPTIMIZER_STEP:
            return optimizer_cost(setting, cluster)
        cost = train_cost(setting, self._work(self._num_trained, choice), cluster)
        if baseline := self.job.num_baseline_answers_per_mini_batch:
            cost += score_cost(setting, self._work(baseline, choice), cluster)
        return cost

    def _score(self, action: Action, arrangement: Arrangement, choice: TrainerChoice) -> Cost:
        """A pass over a step's rollouts, or held-out answers, on a trained role's ranks or a frozen one's own."""
        evaluated, rollouts = self.job.num_evaluated_responses, self.job.workload.num_rollouts_per_step
        work = self._work(evaluated if action.phase is Phase.EVALUATE else rollouts, choice)
        setting = self._train_setting(action.role, arrangement, choice)
        if action.role in (Role.REFERENCE, Role.TEACHER) and action.role not in self._frozen:
            setting = replace(setting, training=self._on_the_base(action.role))
        if action.role not in self._frozen:
            return score_cost(setting, work, self._cluster(arrangement, TRAINING))
        if self.job.target == "rlplan":
            # AutoTP and Ulysses are for what is trained: a frozen role's rank has whole layers and sequences
            setting = replace(setting, choice=replace(choice, tp=1, ulysses=1))
        setting = replace(setting, num_ranks=arrangement.num_frozen)
        return score_cost(setting, work, self._cluster(arrangement, scoring_group(arrangement)))

    def _train_setting(self, role: Role, arrangement: Arrangement, choice: TrainerChoice) -> TrainSetting:
        training = self.job.training if role is Role.POLICY else self._without_adapters
        return TrainSetting(
            self.setting.model_of(role), role, training, choice, arrangement.num_training, self.job.target
        )

    @cached_property
    def _without_adapters(self) -> SettledTraining:
        return self.job.training.model_copy(update={"lora": None})

    def _on_the_base(self, role: Role) -> SettledTraining:
        """A frozen role on the policy's base: with its own adapter, or none; in 4 bits as that is."""
        if (lora := self.job.training.lora) is None:
            return self.job.training
        own = self.job.frozen_adapters.get(role)
        layers = {"rank": own.rank, "target_modules": own.target_modules} if own else {"target_modules": ()}
        return self.job.training.model_copy(update={"lora": lora.model_copy(update=layers)})

    @cached_property
    def _frozen(self) -> tuple[Role, ...]:
        return self.job.frozen_roles

    @property
    def _num_trained(self) -> int:
        """Rollouts that a mini-batch trains on."""
        workload = self.job.workload
        count, num_samples = workload.rollouts_per_mini_batch, workload.num_samples_per_prompt
        return self.job.algorithm.declaration.num_trained(count, num_samples)

    def _work(self, num_rollouts: int, choice: TrainerChoice) -> MiniBatchShape:
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

    def _move(self, action: Action, arrangement: Arrangement, choice: TrainerChoice) -> Cost:
        """A role to the host, or back."""
        forecast = self.roles.forecast(action.processes[0], Choice(arrangement, choice, NO_ENGINE), 1.0)
        if isinstance(forecast, StagedOnHost):
            forecast = forecast.rank
        if isinstance(forecast, TrainerOnGpu):
            num_bytes = forecast.moved_bytes
        else:
            assert isinstance(forecast, ScorerOnGpu), "engines sleep"
            num_bytes = forecast.weights
        move = offload_cost if action.kind is ActionKind.OFFLOAD_ROLE else reload_cost
        group = scoring_group(arrangement) if action.role in self._frozen else TRAINING
        return move(num_bytes, self._cluster(arrangement, group))

    def _of_engine(self, kind: ActionKind, arrangement: Arrangement, choice: EngineChoice, kv_cache: int) -> Cost:
        if kind in (ActionKind.GENERATE, ActionKind.EVALUATE):
            evaluates = kind is ActionKind.EVALUATE
            work_out = partial(self._generate, arrangement, choice, kv_cache, evaluates=evaluates)
        else:
            work_out = partial(self._switch, kind, arrangement, choice, kv_cache)
        return self._once((kind, arrangement.num_generation, choice, kv_cache), work_out, self._engine_costs)

    def _switch(self, kind: ActionKind, arrangement: Arrangement, choice: EngineChoice, kv_cache: int) -> Cost:
        cluster, level = self._cluster(arrangement, GENERATION), choice.sleep_level
        if kind is ActionKind.WAKE_KV_CACHE:
            return wake_kv_cost(kv_cache)
        size = self.roles.engine(Choice(arrangement, NO_TRAINER, choice)).weight_bytes
        if kind is ActionKind.WAKE_WEIGHTS:
            return wake_weights_cost(size, cluster, level=level)
        return sleep_cost(size, cluster, level=level, kv_bytes=kv_cache)

    def _generate(
        self, arrangement: Arrangement, choice: EngineChoice, kv_cache: int, *, evaluates: bool = False
    ) -> Cost:
        """Rollouts of a step, or of held-out prompts, on the slowest engine, and the reward of the last of them."""
        speed, work = self._speed(arrangement, choice), self._rollouts(arrangement, choice, kv_cache)
        num_engines = self.roles.num_engines(arrangement, choice)
        if evaluates:
            share = ceil_div(self.job.num_evaluated_responses, num_engines)
            together = self.roles.samples_together(choice, self.job.workload.num_evaluation_samples)
            work = replace(work, num_rollouts=share, num_samples=together)
        return generate_cost(speed, work) + slowest_engine_cost(speed, work, num_engines) + self._reward_latency

    def _ahead(self, arrangement: Arrangement, choice: EngineChoice, kv_cache: int) -> RolloutsAhead:
        """The same where generation goes on beside training and new weights interrupt it."""
        key = self.roles.versions_ahead(arrangement), arrangement.num_generation, choice, kv_cache
        if key not in self._rollouts_ahead:
            speed, work = self._speed(arrangement, choice), self._rollouts(arrangement, choice, kv_cache)
            num_engines = self.roles.num_engines(arrangement, choice)
            versions, latency_s = self.roles.versions_ahead(arrangement), self.job.workload.reward_latency_s
            kept = choice.keeps_versions
            self._rollouts_ahead[key] = RolloutsAhead(speed, work, num_engines, versions, latency_s, keeps_cache=kept)
        return self._rollouts_ahead[key]

    @property
    def _reward_latency(self) -> Cost:
        latency = self.job.workload.reward_latency_s
        return Cost({Resource.HOST: latency}) if latency else NOTHING

    def _rollouts(self, arrangement: Arrangement, choice: EngineChoice, kv_cache: int) -> EngineRollouts:
        """An engine's share of a step."""
        workload, num_engines = self.job.workload, self.roles.num_engines(arrangement, choice)
        return EngineRollouts(
            ceil_div(self.job.num_generated_per_step, num_engines),
            float(workload.usual_prompt_len),
            self.roles.samples_together(choice, workload.num_samples_per_prompt),
            self.roles.lengths,
            choice.max_num_seqs,
            self._kv_tokens(arrangement, choice, kv_cache),
        )

    def _speed(self, arrangement: Arrangement, choice: EngineChoice) -> EngineSpeed:
        """How fast an engine is: one for all that differ in what a step's speed does not depend on."""
        key = arrangement.num_generation, choice.tp, choice.attention_dp, choice.quantization, choice.expert_ranks
        if key not in self._speeds:
            cluster = self._cluster(arrangement, GENERATION)
            self._speeds[key] = EngineSpeed.of_job(self.job, self.setting.policy, choice, cluster)
        return self._speeds[key]

    def _kv_tokens(self, arrangement: Arrangement, choice: EngineChoice, kv_cache: int) -> int:
        demand, _, _ = self.roles.demand(arrangement, choice)
        blocks, longest = demand.pool.num_blocks(kv_cache), demand.max_prompt_len + demand.lengths.longest
        return choice.attention_dp * demand.pool.num_tokens(blocks, longest)

    def _cluster(self, arrangement: Arrangement, group: str) -> Cluster:
        """The GPUs of a device group."""
        key = group, group_size(arrangement, group), self.setting.pool(group).gpus_per_host
        if key not in self._clusters:
            self._clusters[key] = self.setting.part(*key[:2])
        return self._clusters[key]

    def _once(self, key: object, work_out: Callable[[], Cost], costs: dict[object, Cost] | None = None) -> Cost:
        costs = self._costs if costs is None else costs
        if key not in costs:
            costs[key] = work_out()
        return costs[key]


def _matters(kind: ActionKind, choice: TrainerChoice) -> tuple[object, ...]:
    """What the seconds of an action depend on: an optimizer's step and a role that moves not on passes, a pass without
    gradient not on recomputation and the optimizer, and on ZeRO only where weights are sharded.
    """
    passes = choice.micro_batch, choice.max_tokens
    axes = choice.ulysses, choice.tp, choice.pp, choice.cp, choice.ep
    if kind is ActionKind.SCORE:
        return choice.zero_stage == 3, choice.offloads_parameters, passes, axes
    offloaded = choice.offloads_optimizer, choice.offloads_parameters
    if kind is ActionKind.TRAIN_FORWARD_BACKWARD:
        return choice.zero_stage, offloaded, choice.gradient_checkpointing, passes, axes
    return choice.zero_stage, offloaded, axes
