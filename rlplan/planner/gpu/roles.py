"""Bytes of each role by choice, with tables shared by all candidates, and the memory of one job on its GPUs.

In: the facts of a job, independent of its open choices and number of GPUs (`RoleBytes`); a SettledJob and its setting
(`GpuRoles`). Out: schedules, forecasts, tables; process placement, capacities, Fit of a candidate. Left out: which
candidate is best (search.py).
"""

from dataclasses import replace
from functools import cached_property, partial
from typing import cast

from rlplan.dataflow.build import build_view
from rlplan.dataflow.choice import NO_ENGINE, NO_TRAINER, Arrangement, Choice, EngineChoice, Offloaded, TrainerChoice
from rlplan.dataflow.placements import GENERATION, count_group_devices, find_trainer_choice
from rlplan.dataflow.schedule import HOST_DEVICE, Action, Schedule
from rlplan.frameworks.profile import ScoredWords
from rlplan.memory.machine.host import DRIVER_HOST_BYTES, rollout_buffer_bytes
from rlplan.memory.predict import Forecast
from rlplan.memory.roles.engine import EngineOnGpu, choose_engine_class, find_incoming
from rlplan.memory.roles.rank import MicroBatchTokens, ScoringPass, TrainedRole
from rlplan.memory.roles.scorer import FrozenRole, ScorerOnGpu
from rlplan.memory.roles.trainer import StagedOnHost, TrainerOnGpu, add_sent_weights
from rlplan.memory.serving.kv import KvDemand
from rlplan.memory.trainers.checkpoints import saved_bytes
from rlplan.memory.trainers.training import build_role_rank
from rlplan.planner.gpu.engine_costs import EngineCosts
from rlplan.planner.gpu.tables import (
    DEPENDS_ON_TOKENS,
    ENGINE,
    ArrangementParts,
    BytesByMoment,
    Fit,
    ProcessMoments,
    ProcessPlace,
    RoleTable,
    ScheduleMoments,
    Side,
    fit,
    list_capacities,
    list_schedule_moments,
    reduce_action,
    sum_process_bytes,
)
from rlplan.planner.measured_errors import PEAK, Stratum, find_error
from rlplan.planner.memo import Memo, memoize, strip_choices
from rlplan.planner.setting import GpuSetting
from rlplan.spec.model import ModelSpec
from rlplan.spec.resolved import ResolvedTraining, SettledJob
from rlplan.units import ceil_div
from rlplan.vocabulary import ActionKind, Placement, Role

Ahead = tuple[int, bool]
"""(maximum staleness, whether new weights interrupt rollouts); (0, False) for synchronous steps."""


class RoleBytes:
    """Bytes of every role of a job, by choice."""

    def __init__(self, job: SettledJob, setting: GpuSetting, memo: Memo) -> None:
        self.job, self.memo = strip_choices(job), memo
        self.models, self.policy = setting.models, setting.policy
        self.overheads, self.engine_overheads = setting.overheads, setting.get_pool(GENERATION).overheads
        self.known = memo.get_table(RoleBytes, self.job, self.models, self.overheads, self.engine_overheads)
        self.lengths = job.workload.lengths
        workload = job.workload
        self.rollout_buffer = rollout_buffer_bytes(workload.num_rollouts_per_step, workload.max_seq_len)
        self.peak_factor = find_error(PEAK, Stratum(self.policy.experts is not None, job.backend)).factor
        """Measured over predicted peaks of training at the high end of their range."""

    def get_model(self, role: Role) -> ModelSpec:
        """Model of a role; the policy if the role has none of its own."""
        return self.models.get(role, self.policy)

    @memoize
    def build_schedule_view(self, shape: Arrangement, ahead: Ahead) -> Schedule:
        """Build the schedule for `shape`, which has one device per group."""
        staleness, interrupts = ahead
        place = self.job.placement.model_copy(update={"max_staleness": staleness, "partial_rollouts": interrupts})
        job = self.job.model_copy(update={"placement": place})
        return build_view(job, shape, has_engine=self.job.has_rollouts)

    @memoize
    def build_steady_schedule(self, shape: Arrangement, ahead: Ahead) -> Schedule:
        """Build that schedule with only the actions of every step."""
        view = self.build_schedule_view(shape, ahead)
        return replace(view, start=(), step=tuple(action for action in view.step if action.every == 1), finish=())

    @memoize
    def list_actions(self, shape: Arrangement, ahead: Ahead, kinds: tuple[ActionKind, ...]) -> tuple[Action, ...]:
        """List the actions of every step of given kinds."""
        view = self.build_schedule_view(shape, ahead)
        return tuple(action for action in view.step if action.kind in kinds and action.every == 1)

    @memoize
    def list_similar_actions(
        self, shape: Arrangement, ahead: Ahead, kinds: tuple[ActionKind, ...]
    ) -> tuple[Action, ...]:
        """List these actions reduced to what their duration depends on."""
        return tuple(
            replace(reduce_action(action), repeat=action.repeat) for action in self.list_actions(shape, ahead, kinds)
        )

    def copies_states(self, schedule: Schedule, process: str) -> bool:
        """Whether a trained role keeps a host copy of its states for checkpoints."""
        actions = schedule.step if self.job.checkpoints.every and self.job.backend == "deepspeed" else ()
        return any(action.kind is ActionKind.SAVE_STATES and process in action.processes for action in actions)

    @memoize
    def list_moments(self, shape: Arrangement, ahead: Ahead, hosts: tuple[tuple[str, str], ...]) -> ScheduleMoments:
        """List the moments of a schedule. hosts: (process, host) pairs."""
        return list_schedule_moments(self.build_schedule_view(shape, ahead), dict(hosts))

    @memoize
    def build_side(
        self,
        where: Arrangement,
        moments: ScheduleMoments,
        processes: tuple[ProcessPlace, ...],
        generates_with: type[EngineOnGpu],
    ) -> Side:
        """Build one side, shared by arrangements that differ only in the sizes of the other side."""
        return Side(where, moments, processes, generates_with)

    @memoize
    def _moments_of_process(self, moments: ScheduleMoments, process: str) -> ProcessMoments:
        return moments.locate_process(process)

    @memoize
    def sum_bytes(
        self,
        side: Side,
        trainer: TrainerChoice,
        engine: EngineChoice,
        keeps_sent: bool = False,
        leaves_out: tuple[ActionKind, ...] = (),
    ) -> BytesByMoment:
        """Sum the bytes of one side, without KV cache.

        keeps_sent: include the copies that delta sync keeps. leaves_out: actions that count as what remains after them.
        """
        candidate = Choice(side.where, trainer, engine, "delta" if keeps_sent else "")
        total = side.moments.nothing
        for process in side.processes:
            moments, table = (
                self._moments_of_process(side.moments, process.name),
                self.get_table(process, candidate, side),
            )
            total += sum_process_bytes(moments, process.alike, table, leaves_out=leaves_out)
        return total

    def get_table(self, process: ProcessPlace, candidate: Choice, side: Side) -> RoleTable:
        """Get a process's table, shared by all candidates that look the same to it."""
        return self._build_table(
            process.name, self._reduce_candidate(process.name, candidate), process.copies, side.generates_with
        )

    @memoize
    def _build_table(
        self, process: str, candidate: Choice, copies: bool, generates_with: type[EngineOnGpu]
    ) -> RoleTable:
        longest = float(self.job.workload.max_response_len)
        # an engine's bytes do not depend on the response length; its KV cache is added later
        is_same = process.startswith(ENGINE) or self.usual_len >= longest
        states = replace(candidate, trainer=candidate.trainer.without_passes)
        return RoleTable(
            self.forecast_role(process, candidate, self.usual_len, copies=copies, generates_with=generates_with),
            None if is_same else partial(self.forecast_role, process, candidate, longest, copies=copies),
            None if states == candidate else self._build_table(process, states, copies, generates_with),
            known=self.memo.create_table(),
            measured_factor=self.get_measured_factor(process),
        )

    def get_measured_factor(self, process: str) -> float:
        """Measured over predicted peaks of a process's passes, at the high end; 1 for an engine."""
        return 1.0 if process.startswith(ENGINE) else self.peak_factor

    @memoize
    def find_table(self, side: Side, process: str, choice: TrainerChoice) -> RoleTable:
        """Find the table of a process that trains or scores."""
        place = next(place for place in side.processes if place.name == process)
        return self.get_table(place, Choice(side.where, choice, NO_ENGINE), side)

    def _reduce_candidate(self, process: str, candidate: Choice) -> Choice:
        """Reduce a candidate to what a process's bytes depend on."""
        where, trainer = candidate.arrangement, candidate.trainer
        # colocated and hybrid differ in their actions, not in the bytes of a process
        place = Placement.DISAGGREGATED if where.placement is Placement.DISAGGREGATED else Placement.HYBRID
        if process.startswith(ENGINE):
            return Choice(Arrangement(place, 0, 0), NO_TRAINER, candidate.engine, candidate.sync_mode)
        if process.startswith("scorer"):
            if self.job.backend == "deepspeed":  # frozen roles are neither tensor- nor sequence-parallel
                stage = 3 if trainer.zero_stage == 3 else 0
                trainer = replace(
                    NO_TRAINER, zero_stage=stage, micro_batch=trainer.micro_batch, max_tokens=trainer.max_tokens
                )
            return Choice(Arrangement(Placement.HYBRID, where.num_frozen, 0), trainer, NO_ENGINE)
        moves: Offloaded = "all" if where.offloaded == "all" else "none"
        return Choice(
            Arrangement(place, where.num_training, 0, offloaded=moves), trainer, NO_ENGINE, candidate.sync_mode
        )

    def forecast_role(
        self,
        process: str,
        candidate: Choice,
        response_len: float,
        kv_cache: int = 0,
        *,
        copies: bool = False,
        generates_with: type[EngineOnGpu] = EngineOnGpu,
    ) -> Forecast:
        """Forecast a process whose micro-batch has a longest response of `response_len` tokens."""
        if process.startswith(ENGINE):
            forecast: Forecast = generates_with(
                self.policy,
                self.job.rollout,
                candidate.engine,
                candidate.arrangement.placement,
                self.engine_overheads,
                find_incoming(self.job, self.policy, candidate.engine),
                kv_cache,
            )
        else:
            forecast = self._forecast(process, candidate, response_len, copies=copies)
        return add_sent_weights(forecast, self.job) if candidate.sends_changes else forecast

    def _forecast(self, process: str, candidate: Choice, response_len: float, *, copies: bool) -> Forecast:
        arrangement, job = candidate.arrangement, self.job
        worker, *suffix = process.split("/")
        if worker == "scorer":
            role = Role(suffix[0])
            # under DeepSpeed, frozen roles are not sequence-parallel
            scored = candidate.without_ulysses if job.backend == "deepspeed" else candidate
            return ScorerOnGpu(
                FrozenRole(
                    role,
                    self.get_model(role),
                    job.training.dtype.num_bytes,
                    job.training.loss,
                    self.size_scoring_micro_batch(role, scored, response_len),
                    arrangement.num_frozen,
                    self.overheads,
                    is_sharded=candidate.trainer.zero_stage == 3 and arrangement.num_frozen > 1,
                    backend=job.backend,
                    cut=candidate.trainer,
                    kept_bytes=job.frozen_dtype(role).num_bytes,
                    scored_words=job.scored_words(role),
                )
            )
        role = Role(worker.removesuffix("_trainer"))
        candidate = replace(candidate, trainer=find_trainer_choice(job, role, candidate.trainer))
        rank = TrainerOnGpu(
            TrainedRole(
                role,
                self.get_model(role),
                job.training,
                candidate.trainer,
                self.size_micro_batch(candidate, response_len),
                arrangement.num_training,
                self.overheads,
                0 if job.rollout.generates_in_trainer else job.placement.sync_bucket,
                in_transfer_group=arrangement.placement is Placement.DISAGGREGATED and role is Role.POLICY,
                backend=job.backend,
                offloads_states=job.backend != "deepspeed" and arrangement.offloaded == "all",
                never_offloaded=job.release.never_offloaded.get(job.backend, ()),
                frozen_adapters=tuple(job.frozen_adapters.values()) if role is Role.POLICY else (),
                scoring=tuple(
                    ScoringPass(scored, self.size_scoring_micro_batch(scored, candidate, response_len), words)
                    for scored, words in self._scored_by[role]
                ),
            )
        )
        return StagedOnHost(rank, self.count_saved_bytes(role, candidate)) if copies else rank

    @cached_property
    def _scored_by(self) -> dict[Role, list[tuple[Role, ScoredWords | None]]]:
        """Roles that each trained role's ranks score, with the logits that such a pass holds."""
        by_holder: dict[Role, list[tuple[Role, ScoredWords | None]]] = {role: [] for role in self.job.trained_roles}
        for role in self.job.scored_roles:
            if (holder := self.job.find_holder(role)) in by_holder:
                by_holder[holder].append((role, self.job.scored_words(role)))
        return by_holder

    def count_saved_bytes(self, role: Role, candidate: Choice) -> int:
        """Count the bytes that a rank of a trained role writes into a checkpoint."""
        job, model = self.job, self.get_model(role)
        trainer = find_trainer_choice(job, role, candidate.trainer)
        offloads = {"offloads_optimizer": trainer.offloads_optimizer}
        training = cast(ResolvedTraining, job.training.model_copy(update=offloads))
        cut = trainer.tp, trainer.zero_stage, candidate.arrangement.num_training // trainer.tp
        return saved_bytes(build_role_rank(job, role, model, cut, 0, training=training).states)

    @cached_property
    def takes_all_rows(self) -> bool:
        """Whether a trainer also computes logits for prompts."""
        return self.job.takes_all_rows

    def size_micro_batch(self, candidate: Choice, response_len: float) -> MicroBatchTokens:
        """Size one micro-batch, padded to `response_len` or packed up to the token limit."""
        workload, trainer = self.job.workload, candidate.trainer
        is_longest = response_len >= workload.max_response_len
        length = workload.max_seq_len if is_longest else workload.usual_prompt_len + response_len
        tokens = (trainer.max_tokens or trainer.micro_batch * length) / trainer.num_token_shards
        head = tokens if self.takes_all_rows else tokens * response_len / length
        share = self.job.count_trained(candidate.arrangement.num_training // trainer.ranks_per_sequence)
        num = ceil_div(share, trainer.micro_batch)
        # packs of several sequences have a mask, and so have padded rows
        has_mask = trainer.micro_batch > 1 and (trainer.max_tokens or workload.response_lengths.kind != "constant")
        pairs = 0 if has_mask else int(trainer.micro_batch * length**2)
        return MicroBatchTokens(int(tokens), int(head), accumulates=num > 1, num_micro_batches=num, num_pairs=pairs)

    def choose_scoring(self, role: Role, choice: TrainerChoice) -> TrainerChoice:
        """Replace the micro-batch size by that of a role's scoring passes."""
        choice = find_trainer_choice(self.job, role, choice)
        asked, longest = self.job.scoring.get_pass(role), self.job.workload.max_seq_len
        if asked.max_tokens_per_micro_batch != "auto":
            tokens = int(asked.max_tokens_per_micro_batch)
            return replace(choice, micro_batch=max(1, tokens // longest), max_tokens=tokens)
        if asked.micro_batch_size_per_gpu != "auto":
            size = int(asked.micro_batch_size_per_gpu)
            return replace(choice, micro_batch=size, max_tokens=size * longest if choice.max_tokens else 0)
        return choice

    def size_scoring_micro_batch(self, role: Role, candidate: Choice, response_len: float) -> MicroBatchTokens:
        """Size one micro-batch of scoring: at most a rank's share of a step's rollouts."""
        arrangement, trainer = candidate.arrangement, self.choose_scoring(role, candidate.trainer)
        if trainer is candidate.trainer:
            return self.size_micro_batch(candidate, response_len)
        groups = max(1, arrangement.num_training // trainer.ranks_per_sequence)
        share = ceil_div(self.job.workload.num_rollouts_per_step, groups)
        size = min(trainer.micro_batch, share)
        tokens = min(trainer.max_tokens, share * self.job.workload.max_seq_len)
        return self.size_micro_batch(
            replace(candidate, trainer=replace(trainer, micro_batch=size, max_tokens=tokens)), response_len
        )

    @cached_property
    def usual_len(self) -> float:
        """Median of a step's longest response: the length to which its largest micro-batch is padded."""
        return self.lengths.estimate_longest(self.job.workload.num_rollouts_per_step)


def reduce_to_shape(arrangement: Arrangement) -> Arrangement:
    """Reduce an arrangement to one device per group, which stands for all group sizes."""
    num_scoring = min(1, arrangement.num_scoring)
    switches = arrangement.offloaded, arrangement.is_async, arrangement.sleeps
    return Arrangement(arrangement.placement, 1, 1, num_scoring, *switches)


UNKNOWN = 1 << 60
"""Capacity used for a host of unknown size, so that it never is the bottleneck."""


class Places:
    """Placement of a job's processes on GPUs and hosts, with capacities."""

    def __init__(self, job: SettledJob, setting: GpuSetting, roles: RoleBytes) -> None:
        self.job, self.setting, self.roles = job, setting, roles
        self.known = roles.memo.create_table()

    def ahead(self, arrangement: Arrangement) -> Ahead:
        """Async settings that a schedule depends on in addition to its arrangement."""
        place = self.job.placement
        return (place.max_staleness, place.partial_rollouts) if arrangement.is_async else (0, False)

    @memoize
    def parts(self, arrangement: Arrangement) -> ArrangementParts:
        """Parts shared by all choices in an arrangement."""
        roles, shape, ahead = self.roles, reduce_to_shape(arrangement), self.ahead(arrangement)
        schedule = roles.build_schedule_view(shape, ahead)
        hosts = self.assign_hosts(schedule, arrangement)
        moments = roles.list_moments(shape, ahead, tuple((name, host) for name, (host, _) in hosts.items()))
        host = UNKNOWN if self.setting.host_capacity is None else self.setting.host_capacity
        driver, others = DRIVER_HOST_BYTES + roles.rollout_buffer, self.list_other_capacities(schedule)
        places = [ProcessPlace(name, alike, roles.copies_states(schedule, name)) for name, (_, alike) in hosts.items()]
        trainers = tuple(place for place in places if not place.name.startswith(ENGINE))
        engines = tuple(place for place in places if place.name.startswith(ENGINE))
        generates_with = choose_engine_class(self.job, arrangement.num_training)
        return ArrangementParts(
            moments,
            schedule,
            list_capacities(moments, self.setting.capacity, host, driver, others),
            roles.build_side(replace(arrangement, num_generation=0), moments, trainers, EngineOnGpu),
            roles.build_side(replace(shape, num_scoring=0), moments, engines, generates_with),
        )

    def assign_hosts(self, schedule: Schedule, arrangement: Arrangement) -> dict[str, tuple[str, int]]:
        """Assign each process (host, number of equal processes on that host); one process stands for all equal ones.

        With more than one host, groups with their own devices have their own hosts.
        """
        hosts = {}
        for index, group in enumerate(schedule.groups):
            per_host = self.setting.get_pool(group.name).gpus_per_host
            host = f"host:{index}" if self.setting.num_gpus > per_host else HOST_DEVICE
            members = set(group.devices)
            for name, device in schedule.processes:
                if device in members:
                    hosts[name] = host, min(count_group_devices(arrangement, group.name), per_host)
        return hosts

    def list_other_capacities(self, schedule: Schedule) -> dict[str, int]:
        """List capacities of devices and hosts outside the training pool."""
        capacities: dict[str, int] = {}
        for index, group in enumerate(schedule.groups if self.setting.has_pools else ()):
            pool = self.setting.get_pool(group.name)
            capacities |= dict.fromkeys(group.devices[:1], pool.capacity)
            if pool.host_capacity is not None:
                capacities[f"host:{index}"] = pool.host_capacity
        return capacities


class GpuRoles(RoleBytes):
    """Bytes of every role of a job on its GPUs."""

    def __init__(self, job: SettledJob, setting: GpuSetting, memo: Memo) -> None:
        super().__init__(job, setting, memo)
        self.setting, self.places = setting, Places(job, setting, self)
        self.engines = EngineCosts(job, setting.policy, memo)

    def build_kind_key(self, arrangement: Arrangement) -> tuple[Arrangement, Ahead]:
        """Key shared by arrangements that differ only in group sizes."""
        return reduce_to_shape(arrangement), self.places.ahead(arrangement)

    def parts(self, arrangement: Arrangement) -> ArrangementParts:
        """Parts shared by all choices in an arrangement."""
        return self.places.parts(arrangement)

    def predict_fit(self, candidate: Choice) -> Fit:
        """Predict a candidate's peaks and the room for its KV cache."""
        where, keeps = candidate.arrangement, candidate.sends_changes
        trainers = self.sum_trainer_bytes(where, candidate.trainer, keeps_sent=keeps)
        engines = self.sum_engine_bytes(where, candidate.engine, keeps_sent=keeps)
        return self.subtract_host_memory(fit(trainers, engines, self.parts(where).capacities))

    def subtract_host_memory(self, need: Fit) -> Fit:
        """Subtract host bytes from the room of a GPU that shares the host's memory."""
        if not self.setting.gpu.shares_host_memory:
            return need
        names = ("slack_expected", "slack_high", "room_expected", "room_high")
        return replace(need, **{name: getattr(need, name) - need.host for name in names})

    def sum_trainer_bytes(
        self, where: Arrangement, choice: TrainerChoice, *, keeps_sent: bool = False
    ) -> BytesByMoment:
        """Sum the bytes of trainers and scorers. keeps_sent: include the copies that delta sync keeps."""
        return self.sum_bytes(self.parts(where).others, choice, NO_ENGINE, keeps_sent)

    def sum_state_bytes(self, where: Arrangement, choice: TrainerChoice, *, keeps_sent: bool = False) -> BytesByMoment:
        """Sum the bytes of states without activations: a lower bound for all micro-batch sizes.

        Counts: passes as what remains after them. At no moment does the sum exceed that of any choice with the same
        states.
        """
        return self.sum_bytes(self.parts(where).others, choice.without_passes, NO_ENGINE, keeps_sent, DEPENDS_ON_TOKENS)

    def sum_engine_bytes(self, where: Arrangement, choice: EngineChoice, *, keeps_sent: bool = False) -> BytesByMoment:
        """Sum the bytes of the engine without its KV cache. keeps_sent: as above."""
        return self.sum_bytes(self.parts(where).engines, NO_TRAINER, choice, keeps_sent)

    def nothing(self, arrangement: Arrangement) -> BytesByMoment:
        """Zero bytes at every moment."""
        return self.parts(arrangement).moments.nothing

    def predict_demand(self, arrangement: Arrangement, choice: EngineChoice) -> tuple[KvDemand, int, int]:
        """Predict (demand of one engine's rollouts, bytes that are enough, bytes required to start)."""
        return self.engines.predict_demand(
            arrangement.num_generation, self.count_versions_ahead(arrangement) or 1, choice
        )

    def count_versions_ahead(self, arrangement: Arrangement) -> int:
        """Steps of rollouts in flight beside training if new weights interrupt them; 0 for synchronous batches."""
        staleness, interrupts = self.places.ahead(arrangement)
        return staleness if interrupts else 0

    def forecast_process(self, process: str, candidate: Choice, response_len: float, kv_cache: int = 0) -> Forecast:
        """Forecast a process whose micro-batch has a longest response of `response_len` tokens."""
        where = candidate.arrangement
        return self.forecast_role(
            process,
            candidate,
            response_len,
            kv_cache,
            copies=self.copies_states(self.parts(where).schedule, process),
            generates_with=choose_engine_class(self.places.job, where.num_training),
        )

    def estimate_oom_risk(self, candidate: Choice, kv_cache: int) -> float:
        """Probability that any micro-batch of a step is too long to fit.

        Counts: 1 - F(l)^n, l the longest response with which every moment still fits as expected, n rollouts a step.
        """
        workload = self.job.workload
        low, high = 1.0, float(workload.max_response_len)
        if not self._check_response_len(candidate, kv_cache, low):
            return 1.0
        if self._check_response_len(candidate, kv_cache, high):
            return 0.0
        for _ in range(12):
            middle = (low + high) / 2
            low, high = (middle, high) if self._check_response_len(candidate, kv_cache, middle) else (low, middle)
        return 1.0 - self.lengths.compute_probability(low) ** workload.num_rollouts_per_step

    def _check_response_len(self, candidate: Choice, kv_cache: int, response_len: float) -> bool:
        """Whether every moment fits in expectation with a longest response of `response_len` tokens."""
        parts = self.parts(candidate.arrangement)
        total = nothing = parts.moments.nothing
        for name, _ in parts.schedule.processes:
            forecast = self.forecast_process(name, candidate, response_len, kv_cache)
            total += sum_process_bytes(parts.moments.locate_process(name), 1, RoleTable(forecast))
        return self.subtract_host_memory(fit(total, nothing, parts.capacities)).slack_expected >= 0
