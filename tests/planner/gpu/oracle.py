"""The search's oracle: every combination of the raw axes, tried one after the other.

It shares the forecasts of memory/gpu, the ledger and the formulas of timing/ with the search, and nothing else: axes,
what may be combined, what the runtime refuses, who is there at which moment, the KV cache, the verdict and the step's
seconds are written here once more, the plain way.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from rlplan.dataflow.build import build_view
from rlplan.dataflow.choice import Arrangement, Choice, EngineChoice, TrainerChoice, WeightSyncMode
from rlplan.dataflow.placements import GENERATION, SCORING, SHARED
from rlplan.dataflow.schedule import Action, Schedule
from rlplan.errors import SpecError
from rlplan.memory.gpu.engine import EngineOnGpu
from rlplan.memory.gpu.kv_demand import KvDemand
from rlplan.memory.gpu.predict import DRIVER_HOST_BYTES, host_bytes
from rlplan.memory.gpu.scorer import ScorerOnGpu
from rlplan.memory.gpu.spread import spread
from rlplan.memory.gpu.trainer import MicroBatchTokens, TrainerOnGpu
from rlplan.memory.host import rollout_buffer_bytes
from rlplan.memory.logits import loss_named
from rlplan.planner.setting import GpuSetting
from rlplan.spec.hardware import ComputeDtype
from rlplan.spec.models.adapters import lora_parameters
from rlplan.spec.resolved import SettledJob
from rlplan.timing.cluster import Cluster
from rlplan.timing.cost import NOTHING, Cost, Resource
from rlplan.timing.generation import EngineRollouts, EngineSpeed, generate_cost, slowest_engine_cost
from rlplan.timing.optimizer import optimizer_cost
from rlplan.timing.scoring import score_cost
from rlplan.timing.switches import offload_cost, reload_cost, sleep_cost, wake_kv_cost, wake_weights_cost
from rlplan.timing.training import MiniBatchShape, TrainSetting, train_cost
from rlplan.timing.weight_sync import SyncSetup, sync_cost
from rlplan.vocabulary import ActionKind, Placement, Role, SyncContent

FLAGS = (False, True)
POWERS = tuple(2**power for power in range(15))
REFUSED = 3
"""The rank of what rlplan's own runtime does not run, behind what does not fit."""
PARTS = {"start": "start", "steady": "step", "finish": "finish"}


@dataclass(frozen=True)
class Tried:
    """One combination: (rank, seconds, seconds of all actions), and what it was."""

    rank: int
    seconds: float
    busy: float
    choice: Choice
    kv_cache: int

    @property
    def key(self) -> tuple[int, float, float]:
        """What is compared, to a nanosecond."""
        return self.rank, round(self.seconds, 9), round(self.busy, 9)


Bytes = tuple[list[int], list[int], list[int]]
"""At every run_phase: of the device as expected and at most, and of the host."""


class Oracle:
    """All combinations of one job."""

    def __init__(self, spec: SettledJob, setting: GpuSetting) -> None:
        self.spec, self.setting = spec, setting
        self.work, self.lengths = spec.workload, spec.workload.lengths
        self.usual = self.lengths.longest_of(self.work.num_rollouts_per_step)
        self.longest = float(self.work.max_response_len)
        self.costs: dict[Any, Cost] = {}

    def run(self) -> Iterator[Tried]:
        """Every combination that divides."""
        for arrangement in self._frames():
            schedule = build_view(self.spec, arrangement, has_engine=self.spec.has_rollouts)
            actions = [action for action in schedule.step if action.every == 1]
            moments = PhaseBytes(schedule, self.setting)
            trainers = [(one, self._trainer_bytes(moments, arrangement, one)) for one in self._trainers(arrangement)]
            for engine in self._engines(arrangement):
                mine, holds = self._engine_bytes(moments, arrangement, engine)
                for trainer, other in trainers:
                    rank, kv_cache = self._fit(moments, arrangement, engine, mine, other, holds)
                    for sync_mode in self._sync_modes(arrangement, engine):
                        choice = Choice(arrangement, trainer, engine, sync_mode)
                        if not self._can_run(arrangement, engine, sync_mode):
                            yield Tried(REFUSED, 0.0, 0.0, choice, kv_cache)
                            continue
                        costs = {
                            action.id: self._cost(action, arrangement, trainer, engine, sync_mode, kv_cache)
                            for action in actions
                        }
                        busy = sum(cost.seconds for cost in costs.values())
                        yield Tried(rank, self._seconds(arrangement, actions, costs), busy, choice, kv_cache)

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

    def _can_run(self, arrangement: Arrangement, engine: EngineChoice, sync_mode: WeightSyncMode) -> bool:
        """Whether rlplan's own runtime runs it: whole hosts, engines within one, adapters within the only one."""
        if self.spec.target != "rlplan" or not sync_mode:
            return True
        hosts = self.spec.hardware.num_hosts
        count, per_host = arrangement.num_devices, -(-self.spec.hardware.num_devices // hosts)
        if count > per_host:
            if count % per_host:
                return False
            first = count - arrangement.num_generation
            starts = range(first, count, engine.tp)
            if engine.tp <= per_host and any(one // per_host != (one + engine.tp - 1) // per_host for one in starts):
                return False
        if arrangement.placement is Placement.COLOCATED and not (
            self.setting.gpu.supports_sleep and engine.sleep_level
        ):
            return False
        lora = self.spec.training.lora
        return sync_mode != "adapter" or (hosts == 1 and lora is not None and lora.rank <= 512)

    # ------------------------------------------------------------------------------------------------ axes

    def _frames(self) -> Iterator[Arrangement]:
        spec, count = self.spec, self.setting.num_gpus
        wants, frozen, has_rollouts = spec.placement, spec.frozen_roles, spec.has_rollouts
        axes = product(Placement, range(1, count + 1), (0, *POWERS), ("none", "all", "frozen"), FLAGS)
        for placement, training, scoring, offloaded, is_async in axes:
            disaggregated, colocated = placement is Placement.DISAGGREGATED, placement is Placement.COLOCATED
            generation = count - training - scoring if disaggregated else count
            if not has_rollouts and placement is not Placement.HYBRID:
                continue
            if has_rollouts and wants.placement not in ("auto", placement.value):
                continue
            if not disaggregated and (training != count or scoring or is_async):
                continue
            if is_async and not wants.max_staleness:
                continue
            if disaggregated and (generation < 1 or (scoring and not frozen)):
                continue
            if wants.num_scoring_devices not in ("auto", scoring):
                continue
            if disaggregated and not self._has_sizes(generation, scoring):
                continue
            if offloaded == "all" and not colocated:
                continue
            if offloaded == "frozen" and (not frozen or scoring):
                continue
            if not self._may_offload(offloaded, colocated, scoring):
                continue
            sleeps = colocated and spec.rollout.sleep_level != 0 and has_rollouts
            yield Arrangement(placement, training, generation, scoring, offloaded, is_async, sleeps)  # type: ignore[arg-type]

    def _may_offload(self, offloaded: str, colocated: bool, scoring: int) -> bool:
        """Whether the job leaves it open, or asks for it. Where it asks for all and none can go, all stay."""
        place = self.spec.placement
        if place.offload in ("auto", "none") and offloaded == "none":
            return True
        if place.offload == "none":
            return False
        if offloaded == "none":
            frozen_can = place.offload_roles == "auto" and self.spec.frozen_roles and not scoring
            return not colocated and place.offload_roles != "frozen" and not frozen_can
        return place.offload_roles in ("auto", offloaded)

    def _has_sizes(self, generation: int, scoring: int) -> bool:
        """Whether groups of their own may have so many GPUs."""
        wants, count = self.spec.placement, self.setting.num_gpus
        is_open = wants.num_scoring_devices == "auto"
        if is_open and scoring and not count // 16 <= scoring <= count // 4:
            return False
        if wants.num_generation_devices == "auto":
            return True
        return generation == wants.num_generation_devices and not (is_open and scoring)

    def _trainers(self, arrangement: Arrangement) -> Iterator[TrainerChoice]:
        wants, target, heads = self.spec.training, self.spec.target, self.setting.policy.num_heads
        experts = self.setting.policy.experts.num_experts if self.setting.policy.experts else 1
        contexts = min(8, max(1, self.work.max_seq_len // 2048))
        opens = {
            "rlplan": (contexts, 8, 1, 1, 1),
            "fsdp2": (1, 8, 1, contexts, 1),
            "megatron": (1, 8, 16, contexts, 64),
        }[target]
        given = wants.ulysses, wants.tp, wants.pp, wants.cp, wants.ep
        ranges = [
            [size for size in POWERS if size <= most] if sync_mode == "auto" else [sync_mode]
            for sync_mode, most in zip(given, opens, strict=True)
        ]
        for ulysses, tp, pp, cp, ep in product(*ranges):
            ways, ranks = ulysses * tp * pp * cp, arrangement.num_training
            if target == "rlplan" and not self._can_share(ulysses, tp):
                continue
            if heads % (ulysses * tp) or ways > ranks or ranks % ways or pp > self.setting.policy.num_layers:
                continue
            if wants.tp == "auto" and any(model.num_heads % tp for model in self.setting.models.values()):
                continue
            if experts % ep or (ep > 1 and ranks % (tp * pp * ep) and ranks % (pp * ep)):
                continue
            if self.work.rollouts_per_mini_batch % (ranks // ways):
                continue
            share = self.work.rollouts_per_mini_batch // (ranks // ways)
            for stage, again, optimizer, parameters in product(range(4), FLAGS, FLAGS, FLAGS):
                if not self._has_stage(stage, ranks, tp) or not self._has_offload(stage, tp, optimizer, parameters):
                    continue
                if wants.gradient_checkpointing not in ("auto", again):
                    continue
                if arrangement.offloaded == "all" and parameters:
                    continue
                for micro, tokens in self._passes(share, ulysses * cp):
                    yield TrainerChoice(stage, again, optimizer, parameters, micro, ulysses, tp, pp, cp, ep, tokens)

    def _can_share(self, ulysses: int, tp: int) -> bool:
        """Whether DeepSpeed's ranks can share the policy's micro_batch: with as many heads, and AutoTP as much of
        all.
        """
        model = self.setting.policy
        keys = model.num_kv_heads
        if keys % ulysses and ulysses % keys:
            return False
        divides = keys % tp == 0 and model.intermediate_size % tp == 0
        return tp == 1 or (model.experts is None and divides and ulysses == 1 and self.spec.training.lora is None)

    def _has_stage(self, stage: int, ranks: int, tp: int) -> bool:
        wants, target = self.spec.training.zero_stage, self.spec.target
        if target == "rlplan" and tp > 1 and stage == 3:
            return False
        if wants != "auto":
            return stage == wants
        if target != "rlplan":
            return stage == {"fsdp2": 3, "megatron": 1}[target]
        return stage in ((0, 1, 2, 3) if ranks > 1 else (0, 3))

    def _has_offload(self, stage: int, tp: int, optimizer: bool, parameters: bool) -> bool:
        wants = self.spec.training
        if wants.offloads_optimizer not in ("auto", optimizer) or wants.offloads_parameters not in ("auto", parameters):
            return False
        if self.spec.target == "fsdp2":
            return optimizer == parameters
        if self.spec.target == "megatron":
            return not parameters
        if parameters and stage < 3:
            return False
        if optimizer and (stage < 2 or tp > 1 or wants.optimizer != "adamw"):
            return False
        if optimizer and wants.offload_device == "nvme" and stage < 3:
            return False
        return not (wants.lora is not None and wants.lora.base_dtype == "nf4" and stage == 3)

    def _passes(self, share: int, ways: int) -> Iterator[tuple[int, int]]:
        work, tokens, packs = self.work, self.spec.training.max_tokens_per_micro_batch, self.spec.target == "rlplan"
        if tokens != "auto":
            yield max(1, tokens // work.max_seq_len), tokens
            return
        if work.micro_batch_size_per_gpu != "auto":
            size = min(share, work.micro_batch_size_per_gpu)
            yield size, size * work.max_seq_len if packs else 0
            return
        is_even = work.usual_prompt_len + self.lengths.quantile(0.0) >= work.max_seq_len
        for micro in POWERS:
            if micro == 1 or (micro <= share and micro * work.max_seq_len <= 32_768 * ways):
                if not packs:
                    yield micro, 0
                if packs or not is_even:
                    yield micro, micro * work.max_seq_len

    def _engines(self, arrangement: Arrangement) -> Iterator[EngineChoice]:
        if not self.spec.has_rollouts:
            yield EngineChoice(1, 0)
            return
        wants, model = self.spec.rollout, self.setting.policy
        fp8 = ComputeDtype.FLOAT8 in self.setting.pool(GENERATION).gpu.dense_flops_per_s
        all_seqs = POWERS[:11] if wants.max_num_seqs == "auto" else (wants.max_num_seqs,)
        for tp, level, whole, form, seqs in product(POWERS[:6], (0, 1, 2), FLAGS, (None, "fp8"), all_seqs):
            if wants.tp not in ("auto", tp) or arrangement.num_generation % tp or model.num_heads % tp:
                continue
            if arrangement.sleeps != (level > 0) or (arrangement.sleeps and wants.sleep_level not in ("auto", level)):
                continue
            if wants.has_expert_parallel not in ("auto", whole) or (whole and (model.experts is None or tp == 1)):
                continue
            if wants.quantization == "auto":
                if form and not fp8:
                    continue
            elif form is not None:
                continue
            if seqs not in self._num_seqs(arrangement.num_generation // tp):
                continue
            given = None if wants.quantization in ("auto", "none") else wants.quantization
            engine = EngineChoice(tp, level, seqs, form or given, whole)
            try:
                _ = self._engine(arrangement, engine).weight_bytes
            except SpecError:
                continue
            yield engine

    def _num_seqs(self, num_engines: int) -> list[int]:
        wanted = self.spec.rollout.max_num_seqs
        if wanted != "auto":
            return [wanted]
        share = -(-self.work.num_rollouts_per_step // num_engines)
        most = min(1024, 2 ** (share - 1).bit_length())
        return [seqs for seqs in POWERS if min(16, most) <= seqs <= most]

    def _sync_modes(self, arrangement: Arrangement, engine: EngineChoice) -> Iterator[WeightSyncMode]:
        place = self.spec.placement
        if not self.spec.has_rollouts:
            yield ""
            return
        ways: tuple[WeightSyncMode, ...] = ("cuda_ipc", "nccl", "disk", "adapter", "delta")
        for sync_mode in ways:
            content = {"adapter": SyncContent.ADAPTER, "delta": SyncContent.DELTA}.get(sync_mode, SyncContent.FULL)
            if place.sync_content not in ("auto", content) or (place.sync_content == "auto" and sync_mode == "delta"):
                continue
            if sync_mode == "adapter" and (self.spec.training.lora is None or engine.sleep_level == 2):
                continue
            if place.transport != "auto" and sync_mode != place.transport and place.sync_content in ("auto", "full"):
                continue
            usual = ("cuda_ipc",) if arrangement.shares_devices else ("nccl", "disk")
            if content is SyncContent.FULL and sync_mode not in usual and place.transport != "disk":
                continue
            yield sync_mode

    # ------------------------------------------------------------------------------------------------ bytes

    def _engine(self, arrangement: Arrangement, engine: EngineChoice, kv_cache: int = 0) -> EngineOnGpu:
        overheads = self.setting.pool(GENERATION).overheads
        bucket = self.spec.placement.sync_bucket
        return EngineOnGpu(
            self.setting.policy, self.spec.rollout, engine, arrangement.placement, overheads, bucket, kv_cache
        )

    def _micro_batch_of(self, arrangement: Arrangement, choice: TrainerChoice, response: float) -> MicroBatchTokens:
        length = self.work.usual_prompt_len + response if response < self.longest else float(self.work.max_seq_len)
        tokens = (choice.max_tokens or choice.micro_batch * length) / (choice.ulysses * choice.cp)
        share = self.work.rollouts_per_mini_batch // (arrangement.num_training // choice.ranks_per_sequence)
        num = -(-share // choice.micro_batch)
        return MicroBatchTokens(int(tokens), int(tokens * response / length), num > 1, num)

    def _others(self, arrangement: Arrangement, choice: TrainerChoice, name: str, response: float) -> Any:
        spec, setting, micro_batch = self.spec, self.setting, self._micro_batch_of(arrangement, choice, response)
        if name.startswith("scorer"):
            role = Role(name.split("/")[1])
            ranks = arrangement.num_scoring or arrangement.num_training
            if spec.target == "rlplan":  # a frozen role's rank has whole sequences, whatever the trainer does
                micro_batch = self._micro_batch_of(arrangement, replace(choice, ulysses=1), response)
            return ScorerOnGpu(
                role,
                setting.model_of(role),
                spec.training.dtype.num_bytes,
                loss_named(spec.training.logits, spec.target),
                micro_batch,
                ranks,
                setting.overheads,
                is_sharded=choice.zero_stage == 3 and ranks > 1,
                target=spec.target,
                cut=choice,
            )
        role = Role(name.split("_trainer")[0])
        return TrainerOnGpu(
            role,
            setting.model_of(role),
            spec.training,
            choice,
            micro_batch,
            arrangement.num_training,
            setting.overheads,
            spec.placement.sync_bucket,
            in_transfer_group=arrangement.placement is Placement.DISAGGREGATED and role is Role.POLICY,
            target=spec.target,
        )

    def _trainer_bytes(self, moments: "PhaseBytes", arrangement: Arrangement, choice: TrainerChoice) -> Bytes:
        total = moments.nothing()
        for name in moments.names:
            if not name.startswith("rollout_engine"):
                usual = self._others(arrangement, choice, name, self.usual)
                moments.add(total, name, usual, self._others(arrangement, choice, name, self.longest))
        return total

    def _engine_bytes(
        self, moments: "PhaseBytes", arrangement: Arrangement, engine: EngineChoice
    ) -> tuple[Bytes, list[int]]:
        total = moments.nothing()
        holds: set[int] = set()
        for name in moments.names:
            if name.startswith("rollout_engine"):
                one = self._engine(arrangement, engine)
                moments.add(total, name, one, one)
                full = moments.nothing()
                moments.add(full, name, *(self._engine(arrangement, engine, 1 << 40),) * 2)
                holds = {i for i, (a, b) in enumerate(zip(total[0], full[0], strict=True)) if a != b}
        return total, sorted(holds)

    def _fit(
        self,
        moments: "PhaseBytes",
        arrangement: Arrangement,
        engine: EngineChoice,
        one: Bytes,
        other: Bytes,
        holds: list[int],
    ) -> tuple[int, int]:
        expected = [a + b for a, b in zip(one[0], other[0], strict=True)]
        high = [a + b for a, b in zip(one[1], other[1], strict=True)]
        driver = DRIVER_HOST_BYTES + rollout_buffer_bytes(self.work.num_rollouts_per_step, self.work.max_seq_len)
        hosts = [a + b for a, b in zip(one[2], other[2], strict=True)]
        hosts = [size + driver * (name == "host:0") for size, name in zip(hosts, moments.hosts, strict=True)]
        left = [size - (max(hosts) if self.setting.gpu.shares_host_memory else 0) for size in moments.capacities]
        rank = 0 if all(a <= b for a, b in zip(high, left, strict=True)) else 1
        if any(a > b for a, b in zip(expected, left, strict=True)):
            rank = 2
        if self.setting.host_capacity is not None and max(hosts) > self.setting.host_capacity:
            rank = 2
        if not self.spec.has_rollouts:
            return rank, 0
        demand = self._demand(arrangement, engine)
        rooms = [min((left[i] - held[i] for i in holds), default=0) for held in (expected, high)]
        wants = self.spec.rollout.kv_cache_memory
        most = max(demand.bytes_at(0.99), demand.least_bytes) if wants == "auto" else wants
        least = demand.least_bytes if wants == "auto" else wants
        if most < demand.least_bytes:
            rank = 2
        room = rooms[1]
        if min(rooms[1], most) < least:
            room = rooms[0]
            rank = max(rank, 1 if rooms[0] >= least else 2)
        block = demand.pool.bytes_per_block
        return rank, max(0, min(most, room)) // block * block

    def _demand(self, arrangement: Arrangement, engine: EngineChoice) -> KvDemand:
        num_engines = max(1, arrangement.num_generation // engine.tp)
        share = -(-self.work.num_rollouts_per_step // num_engines)
        pool = self._engine(arrangement, engine).pool
        return KvDemand(
            pool,
            min(engine.max_num_seqs, share),
            self.work.usual_prompt_len,
            self.work.max_prompt_len,
            self.work.num_samples_per_prompt,
            self.lengths,
        )

    # ------------------------------------------------------------------------------------------------ seconds

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
        pool = self.setting.pool(group)
        size = arrangement.num_training
        if group in (GENERATION, SCORING):
            size = arrangement.num_generation if group == GENERATION else arrangement.num_scoring
        return Cluster(pool.gpu, size, min(size, pool.gpus_per_host), pool.node)

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
                return self._generate(arrangement, engine, kv_cache, there)
            case ActionKind.SLEEP_ENGINE:
                return sleep_cost(weights, there, level=level, kv_bytes=kv_cache)
            case ActionKind.WAKE_WEIGHTS:
                return wake_weights_cost(weights, there, level=level)
            case ActionKind.WAKE_KV_CACHE:
                return wake_kv_cost(kv_cache, there)
            case ActionKind.SYNC_WEIGHTS:
                return self._sync(arrangement, trainer, engine, transport)
            case ActionKind.OFFLOAD_ROLE | ActionKind.RELOAD_ROLE:
                move = offload_cost if action.kind is ActionKind.OFFLOAD_ROLE else reload_cost
                one = self._others(arrangement, trainer, action.processes[0], 1.0)
                size = one.weights if is_frozen else sum(one.fixed.after_step.device.values())
                return move(size, scoring if is_frozen else here)
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
        model, target, rollouts = self.setting.model_of(role), self.spec.target, self.work.rollouts_per_mini_batch
        if action.kind is ActionKind.SCORE:
            all_of_them = self._mini_batch_shape(self.work.num_rollouts_per_step, trainer)
            lora = self.spec.training.lora
            if role is Role.REFERENCE and not is_frozen and lora is not None:  # the policy without its adapters
                training = training.model_copy(update={"lora": lora.model_copy(update={"target_modules": ()})})
            if is_frozen:
                ranks = arrangement.num_scoring or arrangement.num_training
                trainer = replace(trainer, tp=1, ulysses=1) if target == "rlplan" else trainer
                return score_cost(TrainSetting(model, role, training, trainer, ranks, target), all_of_them, scoring)
            one = TrainSetting(model, role, training, trainer, arrangement.num_training, target)
            return score_cost(one, all_of_them, here)
        one = TrainSetting(model, role, training, trainer, arrangement.num_training, target)
        times = self.work.num_mini_batches - 1 if action.mini_batch == 1 else 1
        if action.kind is ActionKind.OPTIMIZER_STEP:
            return optimizer_cost(one, here).times(times)
        return train_cost(one, self._mini_batch_shape(rollouts, trainer), here).times(times)

    def _mini_batch_shape(self, rollouts: int, trainer: TrainerChoice) -> MiniBatchShape:
        mean = self.work.usual_prompt_len + self.lengths.mean
        square = mean**2 + self.lengths.variance
        return MiniBatchShape(rollouts, mean, square, self.work.max_seq_len, self.lengths.mean, trainer.max_tokens)

    def _generate(self, arrangement: Arrangement, engine: EngineChoice, kv_cache: int, cluster: Cluster) -> Cost:
        num_engines = max(1, arrangement.num_generation // engine.tp)
        share = -(-self.work.num_rollouts_per_step // num_engines)
        pool = self._engine(arrangement, engine).pool
        tokens = pool.num_tokens(pool.num_blocks(kv_cache), self.work.max_prompt_len + self.lengths.longest)
        samples, prompt = self.work.num_samples_per_prompt, float(self.work.usual_prompt_len)
        one = EngineRollouts(share, prompt, samples, self.lengths, engine.max_num_seqs, tokens)
        is_own = self.spec.target == "rlplan"  # its engines are emitted without vLLM's custom all-reduce
        speed = EngineSpeed(self.setting.policy, self.spec.rollout, engine, cluster, has_custom_all_reduce=not is_own)
        cost = generate_cost(speed, one) + slowest_engine_cost(speed, one, num_engines)
        latency = self.spec.workload.reward_latency_s
        return cost + Cost({Resource.HOST: latency}) if latency else cost

    def _sync(
        self, arrangement: Arrangement, trainer: TrainerChoice, engine: EngineChoice, transport: WeightSyncMode
    ) -> Cost:
        width = 1 if engine.quantization in ("fp8", "fp8_block") else self.spec.rollout.dtype.num_bytes
        lora, adapters = self.spec.training.lora, 0
        if transport == "adapter" and lora is not None:
            adapters = self.spec.rollout.dtype.num_bytes * sum(
                p.numel for p in lora_parameters(self.setting.policy, lora.rank, lora.target_modules)
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
            self.spec.target,
        )
        return sync_cost(
            self.setting.policy, work, self._cluster(arrangement, SHARED), self._cluster(arrangement, GENERATION)
        )


class PhaseBytes:
    """Every moment of a schedule, walked as it happens: who is inside an action, and who waits after which."""

    def __init__(self, schedule: Schedule, setting: GpuSetting) -> None:
        devices = dict(schedule.processes)
        self.names = list(devices)
        self.rows: list[tuple[str, str, dict[str, tuple[str, Action, bool]]]] = []
        groups = {device: (i, group) for i, group in enumerate(schedule.groups) for device in group.devices}
        self.home, self.alike = {}, {}
        for name, device in devices.items():
            index, group = groups[device]
            per_host = setting.pool(group.name).gpus_per_host
            self.home[name] = f"host:{index}" if setting.num_gpus > per_host else "host:0"
            self.alike[name] = min(len(group.devices), per_host)
        now: dict[str, tuple[str, Action, bool]] = {}
        parts = (("start", schedule.start), *(("steady", schedule.step),) * 2, ("finish", schedule.finish))
        for run_phase, actions in parts:
            for action in actions:
                inside = dict(now)
                for other in actions:
                    pairs = {frozenset((a, b)) for part, a, b in schedule.concurrent if part == PARTS[run_phase]}
                    if frozenset((action.id, other.id)) in pairs:
                        inside.update(dict.fromkeys(other.processes, (run_phase, other, True)))
                inside.update(dict.fromkeys(action.processes, (run_phase, action, True)))
                for device in {devices[name] for name in action.processes}:
                    for host in set(self.home.values()):
                        self.rows.append((device, host, dict(inside)))
                now.update(dict.fromkeys(action.processes, (run_phase, action, False)))
        self.devices, self.hosts = [device for device, _, _ in self.rows], [host for _, host, _ in self.rows]
        self.capacities = [setting.pool(groups[device][1].name).capacity for device in self.devices]
        self.on = devices

    def nothing(self) -> Bytes:
        """No bytes at any moment."""
        return [0] * len(self.rows), [0] * len(self.rows), [0] * len(self.rows)

    def add(self, total: Bytes, name: str, usual: Any, longest: Any) -> None:
        """Add a process where it is at each moment."""
        known: dict[tuple[str, str, bool], tuple[int, int, int]] = {}
        for index, (device, host, there) in enumerate(self.rows):
            if name not in there:
                continue
            run_phase, action, inside = there[name]
            key = run_phase, action.id, inside
            if key not in known:
                held = usual.peak(action, run_phase) if inside else usual.resident(action, run_phase)
                most = longest.peak(action, run_phase) if inside else held
                high = sum(spread(kind, size)[1] for kind, size in most.items())
                known[key] = sum(held.values()), high, sum(host_bytes(usual, action, run_phase).values())
            expected, high, on_host = known[key]
            if self.on[name] == device:
                total[0][index] += expected
                total[1][index] += high
            if self.home[name] == host:
                total[2][index] += on_host * self.alike[name]
