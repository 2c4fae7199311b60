"""What each role holds in each candidate: forecasts made once a choice, and tables that every candidate shares.

In: a SettledJob and its setting. Out: schedules, forecasts, tables and KV demands of candidates.
Left out: which candidates there are (candidates.py) and which is best (search.py).
"""

from dataclasses import replace
from functools import cached_property, partial

from rlplan.dataflow.build import build_view
from rlplan.dataflow.choice import NO_ENGINE, NO_TRAINER, Arrangement, Choice, EngineChoice, TrainerChoice
from rlplan.dataflow.placements import GENERATION, group_size, trainer_of
from rlplan.dataflow.schedule import HOST_DEVICE, Schedule
from rlplan.frameworks.profile import ScoredWords
from rlplan.memory.machine.host import DRIVER_HOST_BYTES, rollout_buffer_bytes
from rlplan.memory.predict import Forecast
from rlplan.memory.roles.gpu.checkpoint_copies import StagedOnHost
from rlplan.memory.roles.gpu.engine import EngineOnGpu, incoming
from rlplan.memory.roles.gpu.own_generation import engine_class
from rlplan.memory.roles.gpu.rank import ScoringPass, TrainedRole
from rlplan.memory.roles.gpu.scorer import FrozenRole, ScorerOnGpu
from rlplan.memory.roles.gpu.sent_weights import keeping_sent_weights
from rlplan.memory.roles.gpu.trainer import MicroBatchTokens, TrainerOnGpu
from rlplan.memory.serving.kv_demand import ENOUGH, KvDemand
from rlplan.memory.trainers.checkpoints import saved_bytes
from rlplan.memory.trainers.training import held_parameters, trained_rank
from rlplan.planner.gpu.tables import (
    DEPENDS_ON_TOKENS,
    ENGINE,
    ArrangementParts,
    BytesByMoment,
    Fit,
    RoleTable,
    ScheduleMoments,
    bytes_by_moment,
    capacities_of,
    fit,
    moments_of_schedule,
)
from rlplan.planner.resolve import resolve
from rlplan.planner.setting import GpuSetting
from rlplan.spec.resolved import SettledJob
from rlplan.units import ceil_div
from rlplan.vocabulary import ActionKind, Placement, Role

UNKNOWN = 1 << 60
"""Bytes of a host of which nothing is known: it is not what binds."""


class GpuRoles:
    """Bytes of every role of a job, by choice."""

    def __init__(self, job: SettledJob, setting: GpuSetting) -> None:
        self.job, self.setting = job, setting
        self.lengths = job.workload.lengths
        workload = job.workload
        self.rollout_buffer = rollout_buffer_bytes(workload.num_rollouts_per_step, workload.max_seq_len)
        self._tables: dict[object, RoleTable] = {}
        self._views: dict[object, Schedule] = {}
        self._moments: dict[object, ScheduleMoments] = {}
        self._parts: dict[object, ArrangementParts] = {}
        self._alike: dict[object, int] = {}
        self._bytes: dict[object, BytesByMoment] = {}
        self.demands: dict[object, tuple[KvDemand, int, int]] = {}
        """What engines' rollouts ask for: one for jobs that differ in who trains."""

    def view(self, arrangement: Arrangement) -> Schedule:
        """The view of an arrangement's schedule, whose groups have a device each: one for all sizes of the groups."""
        key = self.kind(arrangement)
        if key not in self._views:
            smallest = replace(
                arrangement, num_training=1, num_generation=1, num_scoring=min(1, arrangement.num_scoring)
            )
            self._views[key] = build_view(self.job, smallest, has_engine=self.job.has_rollouts)
        return self._views[key]

    def every_step(self, arrangement: Arrangement) -> Schedule:
        """The same view with what happens in every step alone."""
        key = "every step", self.kind(arrangement)
        if key not in self._views:
            view = self.view(arrangement)
            always = tuple(action for action in view.step if action.every == 1)
            self._views[key] = replace(view, start=(), step=always, finish=())
        return self._views[key]

    def kind(self, arrangement: Arrangement) -> tuple[object, ...]:
        """What arrangements have in common that differ in the sizes of their groups alone."""
        ahead = (self.job.placement.max_staleness, self.job.placement.partial_rollouts) if arrangement.is_async else ()
        has_scoring = arrangement.num_scoring > 0
        return arrangement.placement, arrangement.offloaded, arrangement.sleeps, has_scoring, ahead

    def parts(self, arrangement: Arrangement) -> ArrangementParts:
        """What every choice in an arrangement shares."""
        key = self.kind(arrangement), arrangement
        if key not in self._parts:
            schedule = self.view(arrangement)
            moments = self._moments_of(arrangement, schedule)
            host = UNKNOWN if self.setting.host_capacity is None else self.setting.host_capacity
            driver = DRIVER_HOST_BYTES + self.rollout_buffer
            capacities = capacities_of(moments, self.setting.capacity, host, driver, self.other_capacities(schedule))
            hosts = self.hosts(schedule, arrangement)
            apart = tuple(
                tuple(
                    (host, alike if name.startswith(ENGINE) is engines else 0) for name, (host, alike) in hosts.items()
                )
                for engines in (False, True)
            )
            others = key[0], arrangement.num_training, arrangement.num_scoring, apart[0]
            numbers = [self._alike.setdefault(one, len(self._alike)) for one in (others, (key[0], apart[1]))]
            self._parts[key] = ArrangementParts(moments, schedule, capacities, *numbers)
        return self._parts[key]

    def _moments_of(self, arrangement: Arrangement, schedule: Schedule) -> ScheduleMoments:
        """The moments of a view, one for all sizes of groups that lie on hosts alike."""
        hosts = self.hosts(schedule, arrangement)
        key = self.kind(arrangement), *((name, host) for name, (host, _) in hosts.items())
        if key not in self._moments:
            self._moments[key] = moments_of_schedule(schedule, hosts)
        return self._moments[key].with_kinds({name: alike for name, (_, alike) in hosts.items()})

    def hosts(self, schedule: Schedule, arrangement: Arrangement) -> dict[str, tuple[str, int]]:
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
                    hosts[name] = host, min(group_size(arrangement, group.name), per_host)
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

    def fit(self, candidate: Choice) -> Fit:
        """What a candidate needs at its worst moments, and the room for its KV cache."""
        where, keeps = candidate.arrangement, candidate.sends_changes
        one = self.trainer_bytes(where, candidate.trainer, keeps_sent=keeps)
        other = self.engine_bytes(where, candidate.engine, keeps_sent=keeps)
        return self.without_host_memory(fit(one, other, self.parts(where).capacities))

    def without_host_memory(self, need: Fit) -> Fit:
        """The same where the GPU's memory is the host's, so that both must fit into it together."""
        if not self.setting.gpu.shares_host_memory:
            return need
        left = {
            name: getattr(need, name) - need.host
            for name in ("slack_expected", "slack_high", "room_expected", "room_high")
        }
        return replace(need, **left)

    def trainer_bytes(self, where: Arrangement, choice: TrainerChoice, *, keeps_sent: bool = False) -> BytesByMoment:
        """Everything that trains and scores. keeps_sent: with what is kept where changes alone are sent."""
        parts, one = self.parts(where), Choice(where, choice, NO_ENGINE, "delta" if keeps_sent else "")
        return self._sum((parts.without_engines, choice), parts, parts.others, one)

    def resident_bytes(self, where: Arrangement, choice: TrainerChoice, *, keeps_sent: bool = False) -> BytesByMoment:
        """What every choice holds at least that differs from this one in its passes alone: states, not activations.

        Counts: passes as what is left after them. At no moment is it more than any such choice holds.
        """
        parts, choice = self.parts(where), choice.without_passes
        one = Choice(where, choice, NO_ENGINE, "delta" if keeps_sent else "")
        return self._sum(("resident", parts.without_engines, choice), parts, parts.others, one, DEPENDS_ON_TOKENS)

    def engine_bytes(self, where: Arrangement, choice: EngineChoice, *, keeps_sent: bool = False) -> BytesByMoment:
        """The engine, without its KV cache. keeps_sent: as above."""
        parts, one = self.parts(where), Choice(where, NO_TRAINER, choice, "delta" if keeps_sent else "")
        return self._sum((parts.of_engines, choice), parts, parts.engines, one)

    def _sum(
        self,
        key: tuple[object, ...],
        parts: ArrangementParts,
        processes: tuple[str, ...],
        candidate: Choice,
        leaves_out: tuple[ActionKind, ...] = (),
    ) -> BytesByMoment:
        key = *key, candidate.sends_changes
        if key not in self._bytes:
            total = parts.nothing
            for name in processes:
                total += bytes_by_moment(parts.moments, name, self._table(name, candidate), leaves_out=leaves_out)
            self._bytes[key] = total
        return self._bytes[key]

    def nothing(self, arrangement: Arrangement) -> BytesByMoment:
        """No bytes at any moment."""
        return self.parts(arrangement).nothing

    def demand(self, arrangement: Arrangement, choice: EngineChoice) -> tuple[KvDemand, int, int]:
        """What one engine's rollouts ask for, bytes that are enough for them, and the least that it starts with."""
        workload = self.job.workload
        cut = choice.tp, choice.attention_dp, choice.max_num_seqs
        key = arrangement.num_generation, self.batches_under_way(arrangement), cut
        if key not in self.demands:
            engine = self.engine(Choice(arrangement, NO_TRAINER, choice))
            under_way = self.job.num_generated_per_step * self.batches_under_way(arrangement)
            share = ceil_div(under_way, self.num_engines(arrangement, choice))
            demand = KvDemand(
                engine.pool,
                ceil_div(min(choice.max_num_seqs, share), choice.attention_dp),
                workload.usual_prompt_len,
                workload.max_prompt_len,
                self.samples_together(choice, workload.num_samples_per_prompt),
                self.lengths,
            )
            self.demands[key] = demand, demand.bytes_at(ENOUGH), demand.least_bytes
        return self.demands[key]

    def share_bytes(self, known: "GpuRoles") -> None:
        """Take what is known of the same job on GPUs of which each process takes as much."""
        self._tables, self._bytes, self.demands = known._tables, known._bytes, known.demands
        self._views, self._moments, self._alike = known._views, known._moments, known._alike

    def engine(self, candidate: Choice, kv_cache: int = 0) -> EngineOnGpu:
        """One rank of one engine."""
        forecast = self.forecast(f"{ENGINE}/0", candidate, self.usual_len, kv_cache)
        assert isinstance(forecast, EngineOnGpu), "this process is an engine"
        return forecast

    def batches_under_way(self, arrangement: Arrangement) -> int:
        """Steps whose rollouts are generated beside each other: as many as versions that they may be behind, where new
        weights interrupt them and do not wait until none is under way.
        """
        return self.versions_ahead(arrangement) or 1

    def versions_ahead(self, arrangement: Arrangement) -> int:
        """How many steps' rollouts are under way beside training, where new weights interrupt them; else 0: a batch."""
        place = self.job.placement
        return place.max_staleness if arrangement.is_async and place.partial_rollouts else 0

    def num_engines(self, arrangement: Arrangement, choice: EngineChoice) -> int:
        """Engines that share the rollouts of a step."""
        return max(1, arrangement.num_generation // choice.ranks)

    def samples_together(self, choice: EngineChoice, num_samples: int) -> int:
        """Samples of a prompt that share its blocks: engines deal requests out over ranks, transformers shares none."""
        return 1 if self.job.rollout.generates_in_trainer else max(1, num_samples // choice.attention_dp)

    def forecast(self, process: str, candidate: Choice, response_len: float, kv_cache: int = 0) -> Forecast:
        """What a process holds when the longest response of a micro-batch has so many tokens."""
        one = self._forecast(process, candidate, response_len, kv_cache)
        return keeping_sent_weights(one, self.job) if candidate.sends_changes else one

    def _forecast(self, process: str, candidate: Choice, response_len: float, kv_cache: int) -> Forecast:
        arrangement, job, setting = candidate.arrangement, self.job, self.setting
        worker, *rest = process.split("/")
        micro_batch = self.micro_batch(candidate, response_len)
        if worker == ENGINE:
            return engine_class(job, arrangement.num_training)(
                setting.policy,
                job.rollout,
                candidate.engine,
                arrangement.placement,
                setting.pool(GENERATION).overheads,
                incoming(job, setting.policy, candidate.engine),
                kv_cache,
            )
        if worker == "scorer":
            role = Role(rest[0])
            scored = candidate
            if job.backend == "deepspeed":  # a frozen role's rank has whole sequences
                scored = candidate.with_whole_sequences
            micro_batch = self.scoring_micro_batch(role, scored, response_len)
            return ScorerOnGpu(
                FrozenRole(
                    role,
                    setting.model_of(role),
                    job.training.dtype.num_bytes,
                    job.training.loss,
                    micro_batch,
                    arrangement.num_frozen,
                    setting.overheads,
                    is_sharded=candidate.trainer.zero_stage == 3 and arrangement.num_frozen > 1,
                    backend=job.backend,
                    cut=candidate.trainer,
                    kept_bytes=job.frozen_dtype(role).num_bytes,
                    scored_words=job.scored_words(role),
                )
            )
        role = Role(worker.removesuffix("_trainer"))
        candidate = replace(candidate, trainer=trainer_of(job, role, candidate.trainer))
        micro_batch = self.micro_batch(candidate, response_len)
        rank = TrainerOnGpu(
            TrainedRole(
                role,
                setting.model_of(role),
                job.training,
                candidate.trainer,
                micro_batch,
                arrangement.num_training,
                setting.overheads,
                0 if job.rollout.generates_in_trainer else job.placement.sync_bucket,
                in_transfer_group=arrangement.placement is Placement.DISAGGREGATED and role is Role.POLICY,
                backend=job.backend,
                puts_states_away=job.backend != "deepspeed" and arrangement.offloaded == "all",
                frozen_adapters=tuple(job.frozen_adapters.values()) if role is Role.POLICY else (),
                scoring=tuple(
                    ScoringPass(scored, self.scoring_micro_batch(scored, candidate, response_len), words)
                    for scored, words in self._scored_by[role]
                ),
            )
        )
        return StagedOnHost(rank, self.saved_bytes(role, candidate)) if self._copies(arrangement, process) else rank

    @cached_property
    def _scored_by(self) -> dict[Role, list[tuple[Role, ScoredWords | None]]]:
        """The roles that each trained role's ranks score, with what such a pass holds of the vocabulary."""
        by_holder: dict[Role, list[tuple[Role, ScoredWords | None]]] = {role: [] for role in self.job.trained_roles}
        for role in self.job.scored_roles:
            if (holder := self.job.holder_of(role)) in by_holder:
                by_holder[holder].append((role, self.job.scored_words(role)))
        return by_holder

    def _copies(self, arrangement: Arrangement, process: str) -> bool:
        """Whether a trained role copies its states for checkpoints, and the copy stays."""
        actions = self.parts(arrangement).schedule.step if self.job.checkpoints.every else ()
        return self.job.backend == "deepspeed" and any(
            one.kind is ActionKind.SAVE_STATES and process in one.processes for one in actions
        )

    def saved_bytes(self, role: Role, candidate: Choice) -> int:
        """Bytes that a rank of a trained role writes of itself into a checkpoint."""
        job, model = self.job, self.setting.model_of(role)
        trainer = trainer_of(job, role, candidate.trainer)
        parameters = held_parameters(model, trainer.tp, job.trained_parameters(role, model))
        training = resolve(job, candidate, 0).training
        shards = candidate.arrangement.num_training // trainer.tp
        return saved_bytes(trained_rank(training, model, trainer.zero_stage, shards, 0, parameters).states)

    @cached_property
    def takes_all_rows(self) -> bool:
        """Whether a trainer takes the logits of prompts too."""
        return self.job.takes_all_rows

    def micro_batch(self, candidate: Choice, response_len: float) -> MicroBatchTokens:
        """One micro-batch of a rank whose rollouts are padded to `response_len`, or packed up to the limit."""
        workload, trainer = self.job.workload, candidate.trainer
        is_longest = response_len >= workload.max_response_len
        length = workload.max_seq_len if is_longest else workload.usual_prompt_len + response_len
        tokens = (trainer.max_tokens or trainer.micro_batch * length) / trainer.num_token_shards
        head = tokens if self.takes_all_rows else tokens * response_len / length
        share = self.job.num_trained_by(candidate.arrangement.num_training // trainer.ranks_per_sequence)
        num = ceil_div(share, trainer.micro_batch)
        return MicroBatchTokens(int(tokens), int(head), accumulates=num > 1, num_micro_batches=num)

    def scoring_choice(self, role: Role, choice: TrainerChoice) -> TrainerChoice:
        """The choice with the size of a role's scoring passes in place of the training passes' size."""
        choice = trainer_of(self.job, role, choice)
        asked, longest = self.job.scoring.pass_of(role), self.job.workload.max_seq_len
        if asked.max_tokens_per_micro_batch != "auto":
            tokens = int(asked.max_tokens_per_micro_batch)
            return replace(choice, micro_batch=max(1, tokens // longest), max_tokens=tokens)
        if asked.micro_batch_size_per_gpu != "auto":
            size = int(asked.micro_batch_size_per_gpu)
            return replace(choice, micro_batch=size, max_tokens=size * longest if choice.max_tokens else 0)
        return choice

    def scoring_micro_batch(self, role: Role, candidate: Choice, response_len: float) -> MicroBatchTokens:
        """One micro-batch of a rank's scoring passes of a role: no more than its share of a step's rollouts."""
        arrangement, trainer = candidate.arrangement, self.scoring_choice(role, candidate.trainer)
        if trainer is candidate.trainer:
            return self.micro_batch(candidate, response_len)
        groups = max(1, arrangement.num_training // trainer.ranks_per_sequence)
        share = ceil_div(self.job.workload.num_rollouts_per_step, groups)
        size = min(trainer.micro_batch, share)
        tokens = min(trainer.max_tokens, share * self.job.workload.max_seq_len)
        return self.micro_batch(
            replace(candidate, trainer=replace(trainer, micro_batch=size, max_tokens=tokens)), response_len
        )

    @cached_property
    def usual_len(self) -> float:
        """The longest response of a step, at its median: what a usual step's largest micro-batch is padded to."""
        return self.lengths.longest_of(self.job.workload.num_rollouts_per_step)

    def oom_risk(self, candidate: Choice, kv_cache: int) -> float:
        """Probability that some micro-batch of a step is too long.

        Counts: 1 - F(l)^n, l the longest response with which every moment still fits as expected, n rollouts a step.
        """
        workload = self.job.workload
        low, high = 1.0, float(workload.max_response_len)
        if not self._fits_at(candidate, kv_cache, low):
            return 1.0
        if self._fits_at(candidate, kv_cache, high):
            return 0.0
        for _ in range(12):
            middle = (low + high) / 2
            low, high = (middle, high) if self._fits_at(candidate, kv_cache, middle) else (low, middle)
        return 1.0 - self.lengths.at_most(low) ** workload.num_rollouts_per_step

    def _fits_at(self, candidate: Choice, kv_cache: int, response_len: float) -> bool:
        """Whether every moment fits as expected when the longest response has so many tokens."""
        parts = self.parts(candidate.arrangement)
        total = nothing = parts.nothing
        for name, _ in parts.schedule.processes:
            forecast = self.forecast(name, candidate, response_len, kv_cache)
            total += bytes_by_moment(parts.moments, name, RoleTable(forecast))
        return self.without_host_memory(fit(total, nothing, parts.capacities)).slack_expected >= 0

    def _table(self, process: str, candidate: Choice) -> RoleTable:
        """A process's table, shared by all candidates in which it holds the same."""
        arrangement = candidate.arrangement
        is_engine = process.startswith(ENGINE)
        is_apart, keeps = arrangement.placement is Placement.DISAGGREGATED, candidate.sends_changes
        key: tuple[object, ...] = (process, is_apart, candidate.engine, keeps)
        if process.startswith("scorer"):
            trainer = candidate.trainer
            sizes = trainer.micro_batch, trainer.max_tokens, trainer.num_token_shards
            key = (process, arrangement.num_frozen, trainer.zero_stage == 3, sizes)
            if self.job.backend != "deepspeed":
                key = (process, arrangement.num_frozen, trainer)
        elif not is_engine:
            moves = self._copies(arrangement, process), arrangement.offloaded == "all", keeps
            key = (process, is_apart, arrangement.num_training, candidate.trainer, *moves)
        if key not in self._tables:
            longest = float(self.job.workload.max_response_len)
            is_same = is_engine or self.usual_len >= longest
            states = replace(candidate, trainer=candidate.trainer.without_passes)
            self._tables[key] = RoleTable(
                self.forecast(process, candidate, self.usual_len),
                None if is_same else partial(self.forecast, process, candidate, longest),
                None if is_engine or states == candidate else self._table(process, states),
            )
        return self._tables[key]
