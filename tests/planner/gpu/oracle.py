"""The search's oracle: every combination of the raw axes, tried one after the other.

It shares the forecasts of memory/gpu, the ledger and the formulas of timing/ with the search, and nothing else: axes,
what may be combined, who is there at which moment, the KV cache, the verdict and the step's seconds are written here
once more, the plain way.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from rlplan.dataflow.gpu_step import GENERATION, SCORING, SHARED, GpuStep, build_gpu_schedule
from rlplan.dataflow.schedule import Action, Schedule
from rlplan.errors import SpecError
from rlplan.memory.gpu.engine import EngineChoice, EngineOnGpu
from rlplan.memory.gpu.kv_demand import KvDemand
from rlplan.memory.gpu.predict import DRIVER_HOST_BYTES, host_bytes
from rlplan.memory.gpu.scorer import ScorerOnGpu
from rlplan.memory.gpu.spread import spread
from rlplan.memory.gpu.states import TrainerChoice
from rlplan.memory.gpu.trainer import Passes, TrainerOnGpu
from rlplan.memory.host import rollout_buffer_bytes
from rlplan.memory.logits import loss_named
from rlplan.planner.setting import GpuSetting
from rlplan.spec.budget import BudgetSpec
from rlplan.spec.hardware import ComputeDtype
from rlplan.spec.models.adapters import lora_parameters
from rlplan.timing.cluster import Cluster
from rlplan.timing.cost import Cost, Resource
from rlplan.timing.generation import EngineSpeed, GenerationWork, generate_cost, slowest_engine_cost
from rlplan.timing.optimizer import optimizer_cost
from rlplan.timing.scoring import score_cost
from rlplan.timing.step import time_step
from rlplan.timing.switches import offload_cost, reload_cost, sleep_cost, wake_kv_cost, wake_weights_cost
from rlplan.timing.training import TrainSetting, TrainWork, train_cost
from rlplan.timing.weight_sync import SyncWork, sync_cost
from rlplan.vocabulary import ActionKind, Placement, Role

FLAGS = (False, True)
POWERS = tuple(2**power for power in range(15))


@dataclass(frozen=True)
class Tried:
    """One combination that may be built: (rank, seconds, seconds of all actions), and what it was."""

    rank: int
    seconds: float
    busy: float
    choice: tuple[GpuStep, TrainerChoice, EngineChoice, str]
    kv_cache: int

    @property
    def key(self) -> tuple[int, float, float]:
        """What is compared, to a nanosecond."""
        return self.rank, round(self.seconds, 9), round(self.busy, 9)


Bytes = tuple[list[int], list[int], list[int]]
"""At every moment: of the device as expected and at most, and of the host."""


class Oracle:
    """All combinations of one budget."""

    def __init__(self, spec: BudgetSpec, setting: GpuSetting) -> None:
        self.spec, self.setting = spec, setting
        self.work, self.lengths = spec.workload, spec.workload.lengths
        self.usual = self.lengths.longest_of(self.work.num_rollouts_per_step)
        self.longest = float(self.work.max_response_len)
        self.costs: dict[Any, Cost] = {}

    def run(self) -> Iterator[Tried]:
        """Every combination that may be built."""
        for frame in self._frames():
            schedule = build_gpu_schedule(frame)
            moments = Moments(schedule, self.setting)
            trainers = [(one, self._trainer_bytes(moments, frame, one)) for one in self._trainers(frame)]
            for engine in self._engines(frame):
                mine, holds = self._engine_bytes(moments, frame, engine)
                for trainer, other in trainers:
                    rank, kv_cache = self._fit(moments, frame, engine, mine, other, holds)
                    for transport in self._transports(frame, engine):
                        costs = {
                            action.id: self._cost(action, frame, trainer, engine, transport, kv_cache)
                            for action in schedule.step
                        }
                        step = replace(frame, zero_stage=trainer.zero_stage, tp=engine.tp)
                        timing = time_step(schedule, costs, max_staleness=frame.max_staleness)
                        busy = sum(cost.seconds for cost in costs.values())
                        yield Tried(rank, timing.seconds, busy, (step, trainer, engine, transport), kv_cache)

    # ------------------------------------------------------------------------------------------------ axes

    def _frames(self) -> Iterator[GpuStep]:
        spec, count = self.spec, self.setting.num_gpus
        wants, frozen = spec.placement, self._frozen_roles()
        wants_base = spec.declaration.has_reference if spec.kl_coef is None else spec.kl_coef > 0
        axes = product(Placement, range(1, count + 1), (0, *POWERS), FLAGS, FLAGS, range(wants.max_staleness + 1))
        for placement, training, scoring, parks, parks_frozen, staleness in axes:
            disaggregated = placement is Placement.DISAGGREGATED
            has_rollouts = spec.declaration.has_rollouts
            generation = count - training - scoring if disaggregated else count
            if not has_rollouts and placement is not Placement.HYBRID:
                continue
            if has_rollouts and wants.placement not in ("auto", placement.value):
                continue
            if not disaggregated and (training != count or scoring or staleness):
                continue
            if disaggregated and (generation < 1 or (scoring and not frozen)):
                continue
            if disaggregated and scoring and not count // 16 <= scoring <= count // 4:
                continue
            if disaggregated and wants.generation_share != "auto":
                asked = min(count - 1, max(1, round(count * wants.generation_share)))
                if (scoring, generation) != (0, asked):
                    continue
            if parks and (placement is not Placement.COLOCATED or parks_frozen):
                continue
            if parks_frozen and (not frozen or scoring):
                continue
            if wants.parks != "auto" and (parks_frozen or parks != (wants.parks and placement is Placement.COLOCATED)):
                continue
            yield GpuStep(
                placement,
                training,
                generation,
                spec.declaration.trained_roles,
                frozen,
                has_rollouts,
                min(2, self.work.num_mini_batches),
                0,
                1,
                wants_base and spec.training.lora is not None,
                placement is Placement.COLOCATED and spec.rollout.sleep_level != 0 and has_rollouts,
                parks,
                scoring,
                staleness,
                parks_frozen,
            )

    def _frozen_roles(self) -> tuple[Role, ...]:
        return ((Role.REFERENCE,) if self.spec.has_reference else ()) + (
            (Role.REWARD,) if self.spec.reward_model else ()
        )

    def _trainers(self, frame: GpuStep) -> Iterator[TrainerChoice]:
        wants, target, heads = self.spec.training, self.spec.target, self.setting.policy.num_heads
        experts = self.setting.policy.experts.num_experts if self.setting.policy.experts else 1
        contexts = min(8, max(1, self.work.max_seq_len // 2048))
        opens = {
            "rlplan": (contexts, 1 if wants.lora else 8, 1, 1, 1),
            "fsdp2": (1, 8, 1, contexts, 1),
            "megatron": (1, 8, 16, contexts, 64),
        }[target]
        given = wants.ulysses, wants.tp, wants.pp, wants.cp, wants.ep
        ranges = [
            [size for size in POWERS if size <= most] if way == "auto" else [way]
            for way, most in zip(given, opens, strict=True)
        ]
        for ulysses, tp, pp, cp, ep in product(*ranges):
            ways, ranks = ulysses * tp * pp * cp, frame.num_training
            if target == "rlplan" and not self._has_autotp(ulysses, tp):
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
            for stage, recompute, optimizer, parameters in product(range(4), FLAGS, FLAGS, FLAGS):
                if not self._has_stage(stage, ranks, tp) or not self._has_offload(stage, optimizer, parameters):
                    continue
                if wants.recompute != "auto" and recompute != (wants.recompute == "full"):
                    continue
                if frame.parks and parameters:
                    continue
                for micro, tokens in self._passes(share, ulysses * cp):
                    yield TrainerChoice(stage, recompute, optimizer, parameters, micro, ulysses, tp, pp, cp, ep, tokens)

    def _has_autotp(self, ulysses: int, tp: int) -> bool:
        model = self.setting.policy
        is_cut = self.spec.training.tp != "auto" or (model.experts is None and model.num_kv_heads % tp == 0)
        return tp == 1 or (is_cut and ulysses == 1)

    def _has_stage(self, stage: int, ranks: int, tp: int) -> bool:
        wants, target = self.spec.training.zero_stage, self.spec.target
        if target == "rlplan" and tp > 1 and stage == 3:
            return False
        if wants != "auto":
            return stage == wants
        if target != "rlplan":
            return stage == {"fsdp2": 3, "megatron": 1}[target]
        return stage in ((0, 1, 2, 3) if ranks > 1 else (0, 3))

    def _has_offload(self, stage: int, optimizer: bool, parameters: bool) -> bool:
        wants = self.spec.training
        if wants.offloads_optimizer not in ("auto", optimizer) or wants.offloads_parameters not in ("auto", parameters):
            return False
        if self.spec.target == "fsdp2":
            return optimizer == parameters
        if self.spec.target == "megatron":
            return not parameters
        if parameters and stage < 3:
            return False
        if optimizer and (stage == 0 or wants.optimizer != "adamw"):
            return False
        if optimizer and wants.offload_device == "nvme" and stage < 3:
            return False
        return not (wants.lora is not None and wants.lora.base == "nf4" and stage == 3)

    def _passes(self, share: int, ways: int) -> Iterator[tuple[int, int]]:
        work = self.work
        if work.max_tokens_per_micro_batch is not None:
            yield max(1, work.max_tokens_per_micro_batch // work.max_seq_len), work.max_tokens_per_micro_batch
            return
        if work.micro_batch_size_per_gpu != "auto":
            yield min(share, work.micro_batch_size_per_gpu), 0
            return
        is_even = work.prompt_len + self.lengths.quantile(0.0) >= work.max_seq_len
        for micro in POWERS:
            if micro == 1 or (micro <= share and micro * work.max_seq_len <= 32_768 * ways):
                yield micro, 0
                if not is_even:
                    yield micro, micro * work.max_seq_len

    def _engines(self, frame: GpuStep) -> Iterator[EngineChoice]:
        if not frame.has_rollouts:
            yield EngineChoice(1, 0)
            return
        wants, model = self.spec.rollout, self.setting.policy
        fp8 = ComputeDtype.FLOAT8 in self.setting.pool(GENERATION).gpu.dense_flops_per_s
        all_seqs = POWERS[:11] if wants.max_num_seqs == "auto" else (wants.max_num_seqs,)
        for tp, level, whole, form, seqs in product(POWERS[:6], (0, 1, 2), FLAGS, (None, "fp8"), all_seqs):
            if wants.tp not in ("auto", tp) or frame.num_generation % tp or model.num_heads % tp:
                continue
            if frame.sleeps != (level > 0) or (frame.sleeps and wants.sleep_level not in ("auto", level)):
                continue
            if wants.has_expert_parallel not in ("auto", whole) or (whole and (model.experts is None or tp == 1)):
                continue
            if wants.quantization == "auto":
                if form and not fp8:
                    continue
            elif form is not None:
                continue
            if seqs not in self._num_seqs(frame.num_generation // tp):
                continue
            engine = EngineChoice(tp, level, seqs, form if wants.quantization == "auto" else wants.quantization, whole)
            try:
                _ = self._engine(frame, engine).weight_bytes
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

    def _transports(self, frame: GpuStep, engine: EngineChoice) -> Iterator[str]:
        if not frame.has_rollouts:
            yield ""
            return
        for way in ("cuda_ipc", "nccl", "disk", "adapter", "delta"):
            if self.spec.placement.transport not in ("auto", way):
                continue
            if way == "adapter" and (self.spec.training.lora is None or engine.sleep_level == 2):
                continue
            if self.spec.placement.transport == "auto":
                usual = ("cuda_ipc",) if frame.shares_devices else ("nccl", "disk")
                if way not in (*usual, "adapter"):
                    continue
            yield way

    # ------------------------------------------------------------------------------------------------ bytes

    def _engine(self, frame: GpuStep, engine: EngineChoice, kv_cache: int = 0) -> EngineOnGpu:
        overheads = self.setting.pool(GENERATION).overheads
        bucket = self.spec.placement.sync_bucket
        return EngineOnGpu(self.setting.policy, self.spec.rollout, engine, frame.placement, overheads, bucket, kv_cache)

    def _passes_of(self, frame: GpuStep, choice: TrainerChoice, response: float) -> Passes:
        length = self.work.prompt_len + response if response < self.longest else float(self.work.max_seq_len)
        pairs = self.spec.declaration.sequences_per_sample
        tokens = (choice.max_tokens or choice.micro_batch * length) * pairs / (choice.ulysses * choice.cp)
        share = self.work.rollouts_per_mini_batch // (frame.num_training // choice.ranks_per_sequence)
        num = -(-share // choice.micro_batch)
        return Passes(int(tokens), int(tokens * response / length), num > 1, num)

    def _others(self, frame: GpuStep, choice: TrainerChoice, name: str, response: float) -> Any:
        spec, setting, passes = self.spec, self.setting, self._passes_of(frame, choice, response)
        if name.startswith("scorer"):
            role = Role(name.split("/")[1])
            ranks = frame.num_scoring or frame.num_training
            if spec.target == "rlplan":  # a frozen role's rank has whole sequences, whatever the trainer does
                passes = self._passes_of(frame, replace(choice, ulysses=1), response)
            return ScorerOnGpu(
                role,
                setting.model_of(role),
                spec.training.dtype.num_bytes,
                loss_named(spec.training.logits, spec.target),
                passes,
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
            passes,
            frame.num_training,
            setting.overheads,
            spec.placement.sync_bucket,
            in_transfer_group=frame.placement is Placement.DISAGGREGATED and role is Role.POLICY,
            target=spec.target,
        )

    def _trainer_bytes(self, moments: "Moments", frame: GpuStep, choice: TrainerChoice) -> Bytes:
        total = moments.nothing()
        for name in moments.names:
            if not name.startswith("rollout_engine"):
                usual = self._others(frame, choice, name, self.usual)
                moments.add(total, name, usual, self._others(frame, choice, name, self.longest))
        return total

    def _engine_bytes(self, moments: "Moments", frame: GpuStep, engine: EngineChoice) -> tuple[Bytes, list[int]]:
        total = moments.nothing()
        holds: set[int] = set()
        for name in moments.names:
            if name.startswith("rollout_engine"):
                one = self._engine(frame, engine)
                moments.add(total, name, one, one)
                full = moments.nothing()
                moments.add(full, name, *(self._engine(frame, engine, 1 << 40),) * 2)
                holds = {i for i, (a, b) in enumerate(zip(total[0], full[0], strict=True)) if a != b}
        return total, sorted(holds)

    def _fit(
        self, moments: "Moments", frame: GpuStep, engine: EngineChoice, one: Bytes, other: Bytes, holds: list[int]
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
        if not frame.has_rollouts:
            return rank, 0
        demand = self._demand(frame, engine)
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

    def _demand(self, frame: GpuStep, engine: EngineChoice) -> KvDemand:
        num_engines = max(1, frame.num_generation // engine.tp)
        share = -(-self.work.num_rollouts_per_step // num_engines)
        pool = self._engine(frame, engine).pool
        return KvDemand(
            pool,
            min(engine.max_num_seqs, share),
            self.work.prompt_len,
            self.work.max_prompt_len,
            self.work.num_samples_per_prompt,
            self.lengths,
        )

    # ------------------------------------------------------------------------------------------------ seconds

    def _cost(
        self,
        action: Action,
        frame: GpuStep,
        trainer: TrainerChoice,
        engine: EngineChoice,
        transport: str,
        kv_cache: int,
    ) -> Cost:
        sizes = frame.num_training, frame.num_generation, frame.num_scoring, frame.placement
        kind, key = action.kind, (action.id, sizes)
        if kind in (ActionKind.GENERATE, ActionKind.SLEEP_ENGINE, ActionKind.WAKE_WEIGHTS, ActionKind.WAKE_KV_CACHE):
            key = (*key, engine, kv_cache)
        elif kind is ActionKind.SYNC_WEIGHTS:
            key = (*key, trainer, engine, transport)
        else:
            key = (*key, trainer)
        if key not in self.costs:
            self.costs[key] = self._work_out(action, frame, trainer, engine, transport, kv_cache)
        return self.costs[key]

    def _cluster(self, frame: GpuStep, group: str) -> Cluster:
        pool = self.setting.pool(group)
        size = frame.num_training
        if group in (GENERATION, SCORING):
            size = frame.num_generation if group == GENERATION else frame.num_scoring
        return Cluster(pool.gpu, size, min(size, pool.gpus_per_host), pool.node)

    def _work_out(
        self,
        action: Action,
        frame: GpuStep,
        trainer: TrainerChoice,
        engine: EngineChoice,
        transport: str,
        kv_cache: int,
    ) -> Cost:
        here, there = self._cluster(frame, SHARED), self._cluster(frame, GENERATION)
        scoring = self._cluster(frame, SCORING) if frame.num_scoring else here
        weights, level = self._engine(frame, engine).weight_bytes, engine.sleep_level
        role, is_frozen = action.role, action.role in frame.frozen_roles
        match action.kind:
            case ActionKind.GENERATE:
                return self._generate(frame, engine, kv_cache, there)
            case ActionKind.SLEEP_ENGINE:
                return sleep_cost(weights, there, level=level, kv_bytes=kv_cache)
            case ActionKind.WAKE_WEIGHTS:
                return wake_weights_cost(weights, there, level=level)
            case ActionKind.WAKE_KV_CACHE:
                return wake_kv_cost(kv_cache, there)
            case ActionKind.SYNC_WEIGHTS:
                return self._sync(frame, trainer, engine, transport)
            case ActionKind.OFFLOAD_ROLE | ActionKind.RELOAD_ROLE:
                move = offload_cost if action.kind is ActionKind.OFFLOAD_ROLE else reload_cost
                one = self._others(frame, trainer, action.processes[0], 1.0)
                size = one.weights if is_frozen else sum(one.fixed.after_step.device.values())
                return move(size, scoring if is_frozen else here)
        training = self.spec.training
        if role is not Role.POLICY:
            training = training.model_copy(update={"lora": None})
        model, target, rollouts = self.setting.model_of(role), self.spec.target, self.work.rollouts_per_mini_batch
        if action.kind is ActionKind.SCORE:
            all_of_them = self._train_work(self.work.num_rollouts_per_step, trainer)
            if action.id == "score/base" and training.lora is not None:
                training = training.model_copy(update={"lora": training.lora.model_copy(update={"targets": ()})})
            if is_frozen:
                ranks = frame.num_scoring or frame.num_training
                trainer = replace(trainer, tp=1) if target == "rlplan" else trainer
                return score_cost(TrainSetting(model, role, training, trainer, ranks, target), all_of_them, scoring)
            one = TrainSetting(model, role, training, trainer, frame.num_training, target)
            return score_cost(one, all_of_them, here)
        one = TrainSetting(model, role, training, trainer, frame.num_training, target)
        times = self.work.num_mini_batches - 1 if action.mini_batch == 1 else 1
        if action.kind is ActionKind.OPTIMIZER_STEP:
            return optimizer_cost(one, here).times(times)
        return train_cost(one, self._train_work(rollouts, trainer), here).times(times)

    def _train_work(self, rollouts: int, trainer: TrainerChoice) -> TrainWork:
        mean = self.work.prompt_len + self.lengths.mean
        count = rollouts * self.spec.declaration.sequences_per_sample
        square = mean**2 + self.lengths.variance
        return TrainWork(count, mean, square, self.work.max_seq_len, self.lengths.mean, trainer.max_tokens)

    def _generate(self, frame: GpuStep, engine: EngineChoice, kv_cache: int, cluster: Cluster) -> Cost:
        num_engines = max(1, frame.num_generation // engine.tp)
        share = -(-self.work.num_rollouts_per_step // num_engines)
        pool = self._engine(frame, engine).pool
        tokens = pool.num_tokens(pool.num_blocks(kv_cache), self.work.max_prompt_len + self.lengths.longest)
        samples, prompt = self.work.num_samples_per_prompt, float(self.work.prompt_len)
        one = GenerationWork(share, prompt, samples, self.lengths, engine.max_num_seqs, tokens)
        rollout = self.spec.rollout.model_copy(update={"quantization": engine.quantization})
        speed = EngineSpeed(self.setting.policy, rollout, engine, cluster)
        cost = generate_cost(speed, one) + slowest_engine_cost(speed, one, num_engines)
        latency = self.spec.placement.reward_latency_s
        return cost + Cost({Resource.HOST: latency}) if latency else cost

    def _sync(self, frame: GpuStep, trainer: TrainerChoice, engine: EngineChoice, transport: str) -> Cost:
        width = 1 if engine.quantization in ("fp8", "fp8_block") else self.spec.rollout.dtype.num_bytes
        lora, adapters = self.spec.training.lora, 0
        if transport == "adapter" and lora is not None:
            adapters = width * sum(p.numel for p in lora_parameters(self.setting.policy, lora.rank, lora.targets))
        work = SyncWork(
            transport,  # type: ignore[arg-type]
            width,
            frame.num_training,
            frame.num_generation,
            engine.tp,
            trainer.zero_stage,
            self.spec.placement.sync_bucket,
            adapters,
            frame.placement is not Placement.DISAGGREGATED,
            self.spec.target,
        )
        return sync_cost(self.setting.policy, work, self._cluster(frame, SHARED), self._cluster(frame, GENERATION))


class Moments:
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
        for moment, actions in parts:
            for action in actions:
                inside = dict(now)
                for other in actions:
                    if (action.id, other.id) in schedule.concurrent or (other.id, action.id) in schedule.concurrent:
                        inside.update(dict.fromkeys(other.processes, (moment, other, True)))
                inside.update(dict.fromkeys(action.processes, (moment, action, True)))
                for device in {devices[name] for name in action.processes}:
                    for host in set(self.home.values()):
                        self.rows.append((device, host, dict(inside)))
                now.update(dict.fromkeys(action.processes, (moment, action, False)))
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
            moment, action, inside = there[name]
            key = moment, action.id, inside
            if key not in known:
                held = usual.peak(action, moment) if inside else usual.resident(action, moment)
                most = longest.peak(action, moment) if inside else held
                high = sum(spread(kind, size)[1] for kind, size in most.items())
                known[key] = sum(held.values()), high, sum(host_bytes(usual, action, moment).values())
            expected, high, on_host = known[key]
            if self.on[name] == device:
                total[0][index] += expected
                total[1][index] += high
            if self.home[name] == host:
                total[2][index] += on_host * self.alike[name]
