"""The search's oracle: every combination of the raw axes, tried one after the other.

It shares the forecasts of memory/roles, the ledger and the formulas of timing/ with the search, and nothing else:
axes, what may be combined, what the runtime refuses, who is there at which moment, the KV cache, the verdict and the
step's seconds are written here once more, the plain way.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from rlplan.dataflow.build import build_view
from rlplan.dataflow.choice import Arrangement, Choice, EngineChoice, TrainerChoice, WeightSyncMode
from rlplan.dataflow.placements import GENERATION
from rlplan.memory.machine.host import DRIVER_HOST_BYTES, rollout_buffer_bytes
from rlplan.memory.roles.engine import EngineOnGpu, Incoming
from rlplan.memory.roles.process import sync_staging
from rlplan.memory.roles.rank import MicroBatchTokens, ScoringPass, TrainedRole
from rlplan.memory.roles.scorer import FrozenRole, ScorerOnGpu
from rlplan.memory.roles.trainer import TrainerOnGpu, sent_weights_bytes
from rlplan.memory.serving.kv import KvDemand
from rlplan.memory.weight_sync.adapters import EngineAdapters
from rlplan.planner.measured_errors import Stratum, find_error
from rlplan.planner.setting import GpuSetting
from rlplan.spec.resolved import SettledJob
from rlplan.timing.cost import Cost
from rlplan.vocabulary import Placement, Role
from tests.planner.gpu.oracle_moments import Bytes, PhaseBytes
from tests.planner.gpu.oracle_seconds import RawSeconds

REFUSED = 3
"""The rank of what rlplan's own runtime does not run, behind what does not fit."""


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
        """Values to compare, to a nanosecond."""
        return self.rank, round(self.seconds, 9), round(self.busy, 9)


class Oracle(RawSeconds):
    """All combinations of one job."""

    def __init__(self, spec: SettledJob, setting: GpuSetting) -> None:
        self.spec, self.setting = spec, setting
        is_moe = setting.policy.experts is not None
        self.factor = find_error("train_peak", Stratum(is_moe, spec.backend)).factor
        self.work, self.lengths = spec.workload, spec.workload.lengths
        self.usual = self.lengths.estimate_longest(self.work.num_rollouts_per_step)
        self.longest = float(self.work.max_response_len)
        self.costs: dict[Any, Cost] = {}

    def run(self) -> Iterator[Tried]:
        """Every combination that divides."""
        for arrangement in self._frames():
            schedule = build_view(self.spec, arrangement, has_engine=self.spec.has_rollouts)
            actions = [action for action in schedule.step if action.every == 1]
            moments = PhaseBytes(schedule, self.setting, self.factor)
            trainers = [
                (trainer, self._trainer_bytes(moments, arrangement, trainer)) for trainer in self._trainers(arrangement)
            ]
            copies = self._copies(moments)
            for engine in self._engines(arrangement):
                engine_bytes, holds = self._engine_bytes(moments, arrangement, engine)
                for trainer, other in trainers:
                    if not self._has_framework(arrangement, trainer, engine):
                        continue
                    for sync_mode in self._sync_modes(arrangement, engine):
                        copied = (
                            (engine_bytes[0], engine_bytes[1], copies(engine_bytes[2]))
                            if sync_mode == "delta"
                            else engine_bytes
                        )
                        rank, kv_cache = self._fit(moments, arrangement, engine, copied, other, holds)
                        choice = Choice(arrangement, trainer, engine, sync_mode)
                        if not self._can_run(arrangement, engine, sync_mode):
                            yield Tried(REFUSED, 0.0, 0.0, choice, kv_cache)
                            continue
                        costs = {
                            action.id: self._cost(action, arrangement, trainer, engine, sync_mode, kv_cache)
                            for action in actions
                        }
                        if self._staleness(arrangement):
                            self._run_ahead(arrangement, engine, kv_cache, actions, costs)
                        busy = sum(cost.seconds for cost in costs.values())
                        yield Tried(rank, self._seconds(arrangement, actions, costs), busy, choice, kv_cache)

    def _can_run(self, arrangement: Arrangement, engine: EngineChoice, sync_mode: WeightSyncMode) -> bool:
        """Whether rlplan's own runtime runs it: whole hosts, engines within one."""
        if self.spec.backend != "deepspeed" or not sync_mode:
            return True
        hosts = self.spec.hardware.num_hosts
        count, per_host = arrangement.num_devices, -(-self.spec.hardware.num_devices // hosts)
        if count > per_host:
            if count % per_host:
                return False
            first = count - arrangement.num_generation
            starts = range(first, count, engine.tp)
            if engine.tp <= per_host and any(
                start // per_host != (start + engine.tp - 1) // per_host for start in starts
            ):
                return False
        if arrangement.placement is Placement.COLOCATED and not (
            self.setting.gpu.supports_sleep and engine.sleep_level
        ):
            return False
        lora = self.spec.training.lora
        return sync_mode != "adapter" or (lora is not None and lora.rank <= 512)

    # ------------------------------------------------------------------------------------------------ axes

    # ------------------------------------------------------------------------------------------------ bytes

    def _engine(self, arrangement: Arrangement, engine: EngineChoice, kv_cache: int = 0) -> EngineOnGpu:
        overheads = self.setting.get_pool(GENERATION).overheads
        model, bytes_each, bucket = (
            self.setting.policy,
            self.spec.rollout.dtype.num_bytes,
            self.spec.placement.sync_bucket,
        )
        comes = Incoming(sync_staging(model, bytes_each, bucket, self.spec.backend))
        if engine.adapter_versions and (lora := self.spec.training.lora):
            adapters = EngineAdapters(lora, engine.adapter_versions, bytes_each)
            comes = Incoming(adapters.staging_bytes(model, bucket), adapters)
        return EngineOnGpu(model, self.spec.rollout, engine, arrangement.placement, overheads, comes, kv_cache)

    def _size_micro_batch(self, arrangement: Arrangement, choice: TrainerChoice, response: float) -> MicroBatchTokens:
        length = self.work.usual_prompt_len + response if response < self.longest else float(self.work.max_seq_len)
        tokens = (choice.max_tokens or choice.micro_batch * length) / (choice.ulysses * choice.cp)
        share = self.work.rollouts_per_mini_batch // (arrangement.num_training // choice.ranks_per_sequence)
        num = -(-share // choice.micro_batch)
        head = tokens * response / length if self.selects_rows else tokens
        return MicroBatchTokens(int(tokens), int(head), num > 1, num)

    def _others(self, arrangement: Arrangement, choice: TrainerChoice, name: str, response: float) -> Any:
        spec, setting, micro_batch = self.spec, self.setting, self._size_micro_batch(arrangement, choice, response)
        if name.startswith("scorer"):
            role = Role(name.split("/")[1])
            ranks = arrangement.num_scoring or arrangement.num_training
            if spec.backend == "deepspeed":  # a frozen role's rank has whole sequences, whatever the trainer does
                micro_batch = self._size_micro_batch(arrangement, replace(choice, ulysses=1), response)
            return ScorerOnGpu(
                FrozenRole(
                    role,
                    setting.get_model(role),
                    spec.training.dtype.num_bytes,
                    spec.training.loss,
                    micro_batch,
                    ranks,
                    setting.overheads,
                    is_sharded=choice.zero_stage == 3 and ranks > 1,
                    backend=spec.backend,
                    cut=choice,
                )
            )
        role = Role(name.split("_trainer")[0])
        return TrainerOnGpu(
            TrainedRole(
                role,
                setting.get_model(role),
                spec.training,
                choice,
                micro_batch,
                arrangement.num_training,
                setting.overheads,
                spec.placement.sync_bucket,
                in_transfer_group=arrangement.placement is Placement.DISAGGREGATED and role is Role.POLICY,
                backend=spec.backend,
                offloads_states=spec.backend != "deepspeed" and arrangement.offloaded == "all",
                scoring=tuple(
                    ScoringPass(scored, micro_batch, spec.scored_words(scored))
                    for scored in spec.scored_roles
                    if spec.find_holder(scored) is role
                ),
            )
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
                forecast = self._engine(arrangement, engine)
                moments.add(total, name, forecast, forecast)
                full = moments.nothing()
                moments.add(full, name, *(self._engine(arrangement, engine, 1 << 40),) * 2)
                holds = {i for i, (a, b) in enumerate(zip(total[0], full[0], strict=True)) if a != b}
        return total, sorted(holds)

    def _copies(self, moments: "PhaseBytes") -> Callable[[list[int]], list[int]]:
        """Adds to bytes of hosts what rlplan's runtime keeps where changes travel alone, once something was sent: a
        copy on the rank that sends, one on every rank that generates.
        """
        bytes_each, bucket = self.spec.rollout.dtype.num_bytes, self.spec.placement.sync_bucket
        copy = sent_weights_bytes(self.setting.policy, bytes_each, bucket)
        number = {name: count for name, count in moments.alike.items() if name.startswith("rollout_engine")}
        number |= {name: 1 for name in moments.names if name.startswith("policy_trainer")}
        added = [
            copy
            * sum(
                number.get(name, 0)
                for name, (_, action, _) in there.items()
                if moments.home[name] == host and not action.kind.startswith("start_")
            )
            for _, host, there in moments.rows
        ]
        return lambda sizes: [size + more for size, more in zip(sizes, added, strict=True)]

    def _fit(
        self,
        moments: "PhaseBytes",
        arrangement: Arrangement,
        engine: EngineChoice,
        first: Bytes,
        other: Bytes,
        holds: list[int],
    ) -> tuple[int, int]:
        expected = [a + b for a, b in zip(first[0], other[0], strict=True)]
        high = [a + b for a, b in zip(first[1], other[1], strict=True)]
        driver = DRIVER_HOST_BYTES + rollout_buffer_bytes(self.work.num_rollouts_per_step, self.work.max_seq_len)
        hosts = [a + b for a, b in zip(first[2], other[2], strict=True)]
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
        rooms = [min((left[i] - sizes[i] for i in holds), default=0) for sizes in (expected, high)]
        wants = self.spec.rollout.kv_cache_memory
        most = max(demand.predict_bytes(0.99), demand.least_bytes) if wants == "auto" else wants
        least = demand.least_bytes if wants == "auto" else wants
        if most < demand.least_bytes:
            rank = 2
        room = rooms[1]
        if min(rooms[1], most) < least:
            room = rooms[0]
            rank = max(rank, 1 if rooms[0] >= least else 2)
        block = demand.pool.bytes_per_block
        return rank, max(0, min(most, room) if wants == "auto" else most) // block * block

    def _demand(self, arrangement: Arrangement, engine: EngineChoice) -> KvDemand:
        num_engines = max(1, arrangement.num_generation // (engine.tp * engine.attention_dp))
        batches, samples = max(1, self._staleness(arrangement)), self.work.num_samples_per_prompt
        unit = samples if self.spec.release.dispatch == "groups" else 1
        share = -(-self.work.num_rollouts_per_step * batches // unit // num_engines) * unit
        pool = self._engine(arrangement, engine).pool
        return KvDemand(
            pool,
            -(-min(engine.max_num_seqs, share) // engine.attention_dp),
            self.work.usual_prompt_len,
            self.work.max_prompt_len,
            max(1, self.work.num_samples_per_prompt // engine.attention_dp),
            self.lengths,
        )
