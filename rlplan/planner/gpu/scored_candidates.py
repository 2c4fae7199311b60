"""Scored candidates: memory, KV cache and step time of each, and the order among them.

In: candidates, their bytes and seconds. Out: ScoredCandidate, KV cache sizes, sort keys. Left out: which candidates are
examined (best_first.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rlplan.dataflow.choice import NO_TRAINER, Arrangement, Choice, EngineChoice, TrainerChoice
from rlplan.dataflow.placements import GENERATION
from rlplan.dataflow.schedule import HOST_DEVICE
from rlplan.memory.roles.engine import EngineOnGpu, choose_engine_class
from rlplan.memory.roles.states import build_fixed_states, build_zero_settings
from rlplan.memory.serving.kv import KvDemand
from rlplan.memory.trainers.optimizers import disk_bytes
from rlplan.planner.gpu.engine_costs import EngineCosts
from rlplan.planner.gpu.roles import UNKNOWN, Ahead, GpuRoles, RoleBytes, reduce_to_shape
from rlplan.planner.gpu.tables import ENGINE, BytesByMoment, Fit, ProcessPlace, Side, compute_left, fit
from rlplan.planner.gpu.times import GpuTimes
from rlplan.planner.memo import Memo, memoize
from rlplan.planner.setting import GpuSetting
from rlplan.spec.resolved import SettledJob
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.step import StepTiming
from rlplan.units import GIB, ceil_div
from rlplan.vocabulary import Placement, Role

Key = tuple[float, float]
"""(seconds of a step, seconds of all its actions). Of two equally fast async steps, the one with less work is better.
Values are rounded to a nanosecond, so that the order of additions does not matter."""
TwoParts = tuple[BytesByMoment, BytesByMoment]
"""Bytes of both sides of an arrangement: what trains and scores, and what generates."""
SAME_PLACE = (Placement.HYBRID, Placement.COLOCATED, Placement.DISAGGREGATED)


def round_key(seconds: float, busy: float) -> Key:
    """Round two durations to a key."""
    return round(seconds, 9), round(busy, 9)


@dataclass(frozen=True)
class ScoredCandidate:
    """A candidate with its memory, KV cache and step time."""

    choice: Choice
    need: Fit
    kv_cache: int
    """KV cache bytes per GPU."""
    rank: int
    """0 fits in the worst case, 1 fits in expectation only, 2 does not fit."""
    timing: StepTiming
    excess: tuple[float, float] = (0.0, 0.0)
    """(largest, sum) of the shortages of GPU, KV cache and host, each as a share of its capacity."""

    @property
    def key(self) -> Key:
        """Sort key by speed."""
        return round_key(self.timing.seconds, sum([action.cost.seconds for action in self.timing.actions]))

    @property
    def order(self) -> tuple[object, ...]:
        """Total order, better first: fit, then speed, then simplicity; among misfits, the smallest overflow first."""
        return (self.rank, (0.0, 0.0) if self.rank < 2 else self.excess, *self.key, *rank_simplicity(self.choice))


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """An engine with a lower bound of its seconds."""

    seconds: float
    """Seconds of rollouts and switches with `kv_cache`."""
    choice: EngineChoice
    kv_cache: int
    """Largest KV cache in bytes, if nothing else is on the GPU."""

    def order(self) -> tuple[float, int]:
        """Sort key, the fastest first."""
        return self.seconds, -self.choice.max_num_seqs


def rank_simplicity(candidate: Choice) -> tuple[object, ...]:
    """Sort key by simplicity in a fixed total order.

    Simpler means fewer switches, less offloading, fewer communicating ranks, less sharding, larger micro-batches.
    """
    step, trainer, engine = candidate.arrangement, candidate.trainer, candidate.engine
    return (
        step.is_async,
        step.offloaded == "all",
        step.offloaded == "frozen",
        engine.sleep_level,
        SAME_PLACE.index(step.placement),
        trainer.offloads_parameters,
        trainer.offloads_optimizer,
        trainer.gradient_checkpointing,
        trainer.ranks_per_sequence * trainer.ep,
        engine.attention_dp,
        engine.tp,
        trainer.zero_stage,
        engine.quantization or "",
        engine.has_expert_parallel,
        step.num_scoring,
        step.num_generation,
        trainer.max_tokens,
        -trainer.micro_batch,
        (trainer.ulysses, trainer.tp, trainer.pp, trainer.cp, trainer.ep),
        engine.max_num_seqs,
        candidate.sync_mode,
    )


MANY_MISFITS = 64
"""After this many chains that do not fit, check memory of all remaining candidates before their seconds. Checking from
the first chain on takes 1.7 times as many calls (tried with 70B on 64 GPUs)."""


BUFFERS = 4 * GIB
"""Upper limit of a rank's communication buffers, which a smaller group may not need. Largest seen: 2.7 GiB (ZeRO-3,
offloaded)."""


def size_kv_cache(
    asked: tuple[KvDemand, int, int], wanted: int | Literal["auto"], expected: int, high: int
) -> tuple[int, int]:
    """Size (KV cache bytes per GPU, resulting rank): all free memory up to what is useful.

    demand: as `EngineCosts.predict_demand` returns it. wanted: bytes that the job asks for. expected, high: free bytes
    during generation, in expectation and in the worst case.
    """
    demand, enough, least = asked
    largest = max(enough, least) if wanted == "auto" else int(wanted)
    least = least if wanted == "auto" else largest
    rank = 0
    # vLLM does not start with less than one longest sequence
    if largest < demand.least_bytes:
        rank = 2
    elif min(high, largest) < least:
        rank = 1 if expected >= least else 2
    room = high if high >= least else expected
    size = min(largest, room) if wanted == "auto" else largest  # a stated size is kept, even if it does not fit
    block = demand.pool.bytes_per_block
    return max(0, size) // block * block, rank


class EnginesAlone:
    """Engines with nothing else on their GPUs."""

    def __init__(self, roles: RoleBytes, engines: EngineCosts) -> None:
        self.roles, self.engines, self.known = roles, engines, roles.known

    @memoize
    def build_entry(
        self,
        kind: tuple[Arrangement, Ahead, type[EngineOnGpu]],
        cluster: Cluster,
        capacity: int,
        wanted: int | Literal["auto"],
        engine: EngineChoice,
        rank: int,
    ) -> EngineEntry | None:
        """Build an engine's entry with its largest KV cache; None if it does not fit. capacity: bytes per GPU."""
        _, ahead, _ = kind
        engine_bytes = self.roles.sum_bytes(self._build_side(*kind), NO_TRAINER, engine)
        sizes = engine_bytes.expected if rank else engine_bytes.high
        if max(sizes) > capacity:
            return None
        room = min([capacity - sizes[place] for place in engine_bytes.holds_kv], default=0)
        versions = ahead[0] if ahead[1] else 0
        most = least_rank = 0
        if self.engines.job.has_rollouts:
            demand = self.engines.predict_demand(cluster.num_gpus, versions or 1, engine)
            most, least_rank = size_kv_cache(demand, wanted, room, room)
        if least_rank > rank:
            return None
        if versions:
            return EngineEntry(self.engines.bound_async_step(versions, cluster, engine, most), engine, most)
        return EngineEntry(self.engines.predict_seconds(cluster, engine, most, kind[0].sleeps), engine, most)

    @memoize
    def _build_side(self, shape: Arrangement, ahead: Ahead, generates_with: type[EngineOnGpu]) -> Side:
        """Build the side of the engine's processes on one host."""
        roles = self.roles
        processes = [name for name, _ in roles.build_schedule_view(shape, ahead).processes]
        moments = roles.list_moments(shape, ahead, tuple((name, HOST_DEVICE) for name in processes))
        places = tuple(ProcessPlace(name, 1, copies=False) for name in processes if name.startswith(ENGINE))
        return roles.build_side(shape, moments, places, generates_with)


Shortages = dict[object, list[tuple[int, int]]]
"""Group sizes (training, frozen) that were far too small, by kind of arrangement, choice and rank. They save time and
never change an answer."""


class CandidateScorer:
    """Scores candidates of one job on one setting."""

    def __init__(self, job: SettledJob, setting: GpuSetting, memo: Memo, hopeless: Shortages | None = None) -> None:
        """hopeless: from a search on the same kind of GPUs for a job with other choices."""
        self.job, self.setting, self.memo = job, setting, memo
        self.hopeless: Shortages = {} if hopeless is None else hopeless
        self.roles = GpuRoles(job, setting, memo)
        self.times = GpuTimes(job, setting, self.roles)
        self.alone = EnginesAlone(self.roles, self.roles.engines)
        self.num_misfits = 0
        """Chains of trainers that did not fit at all."""

    @property
    def is_tight(self) -> bool:
        """Whether so little fits that memory is checked before seconds."""
        return self.num_misfits > MANY_MISFITS

    def derive(self, job: SettledJob, setting: GpuSetting) -> "CandidateScorer":
        """Create a scorer for a job with other choices or on fewer of these GPUs, with what it knows to be hopeless."""
        derived = CandidateScorer(job, setting, self.memo, self.hopeless)
        derived.num_misfits = self.num_misfits
        return derived

    def is_hopeless(self, arrangement: Arrangement, choice: TrainerChoice, rank: int) -> bool:
        """Whether a choice is known to miss more than BUFFERS in a similar arrangement with at least as many ranks.

        With fewer ranks, each rank holds no less except for buffers (a property test). The largest possible group is
        checked first.
        """
        key = self.roles.build_kind_key(arrangement), choice, rank
        if key not in self.hopeless:
            self.hopeless[key] = []
            ranks = choice.ranks_per_sequence * choice.ep
            most = ceil_div(self.setting.num_gpus, ranks) * ranks
            largest = replace(arrangement, num_training=most, num_scoring=most if arrangement.num_scoring else 0)
            parts = self.roles.sum_state_bytes(largest, choice), self.roles.nothing(largest)
            self.record_shortage(largest, choice, rank, -self.compute_slack(largest, parts, rank))
        return any(arrangement.num_training <= n and arrangement.num_frozen <= s for n, s in self.hopeless[key])

    def compute_slack(self, arrangement: Arrangement, parts: TwoParts, rank: int) -> int:
        """Bytes that two parts of an arrangement leave free on their devices."""
        return self.compute_slacks(arrangement, parts, rank)[0]

    def compute_slacks(self, arrangement: Arrangement, parts: TwoParts, rank: int) -> tuple[int, int]:
        """Bytes that two parts of an arrangement leave free on (devices, hosts)."""
        if self.setting.gpu.shares_host_memory:
            need = self.compute_fit(arrangement, parts)
            return need.slack_high if rank == 0 else need.slack_expected, need.slack_host
        return compute_left(*parts, self.roles.parts(arrangement).capacities, at_high=rank == 0)

    def compute_fit(self, arrangement: Arrangement, parts: TwoParts) -> Fit:
        """Predict the fit of two parts of an arrangement together."""
        return self.roles.subtract_host_memory(fit(*parts, self.roles.parts(arrangement).capacities))

    def record_shortage(self, arrangement: Arrangement, choice: TrainerChoice, rank: int, lack: int) -> None:
        """Record that a choice misses `lack` bytes in an arrangement, if that exceeds BUFFERS."""
        if lack > BUFFERS:
            self.hopeless.setdefault((self.roles.build_kind_key(arrangement), choice, rank), []).append(
                (arrangement.num_training, arrangement.num_frozen)
            )

    def score(self, candidate: Choice) -> ScoredCandidate:
        """Predict a candidate's memory, KV cache, verdict and step time."""
        need = self.roles.predict_fit(candidate)
        rank = 0 if need.slack_high >= 0 else 1 if need.slack_expected >= 0 else 2
        if need.slack_host < 0:
            rank = 2
        kv_cache, kv_rank = self.size_free_kv_cache(
            candidate.arrangement, candidate.engine, need.room_expected, need.room_high
        )
        timing = self.times.time_step(candidate, kv_cache)
        return ScoredCandidate(
            candidate, need, kv_cache, max(rank, kv_rank), timing, self.compute_excess(candidate, need)
        )

    def count_swap_bytes(self, choice: Choice) -> int:
        """Count disk bytes per host for swapped states; 0 without NVMe offload."""
        training, trainer, setting = self.job.training, choice.trainer, self.setting
        if training.offload_device != "nvme" or not trainer.offloads_optimizer:
            return 0
        settings = build_zero_settings(training, trainer, choice.arrangement.num_training)
        ranks = min(choice.arrangement.num_training, setting.gpus_per_host)
        lora = {Role.POLICY: training.lora}
        models = {role: setting.get_model(role) for role in self.job.trained_roles}
        parts = (
            build_fixed_states(model, role, lora.get(role), settings, trainer.tp) for role, model in models.items()
        )
        return ranks * sum(disk_bytes(part.after_step.host) for part in parts)

    def size_free_kv_cache(
        self, arrangement: Arrangement, engine: EngineChoice, expected: int, high: int
    ) -> tuple[int, int]:
        """Size (KV cache bytes per GPU, resulting rank) in the given free memory (`size_kv_cache`)."""
        if not self.job.has_rollouts:
            return 0, 0
        wanted = self._read_wanted_kv_cache(arrangement, engine)
        return size_kv_cache(self.roles.predict_demand(arrangement, engine), wanted, expected, high)

    def _read_wanted_kv_cache(self, arrangement: Arrangement, engine: EngineChoice) -> int | Literal["auto"]:
        """Read the KV cache per rank that the job asks for, in bytes or as vLLM's share of a GPU."""
        rollout = self.job.rollout
        if rollout.gpu_memory_utilization is None or rollout.generates_in_trainer:
            return rollout.kv_cache_memory
        total = self.setting.get_pool(GENERATION).gpu.memory.value
        on_gpu = self.roles.forecast_process(f"{ENGINE}/0", Choice(arrangement, NO_TRAINER, engine), 1.0)
        assert isinstance(on_gpu, EngineOnGpu), "this process is an engine"
        return on_gpu.kv_budget(total, rollout.gpu_memory_utilization)

    def list_engine_entries(
        self, arrangement: Arrangement, engines: Sequence[EngineChoice], rank: int
    ) -> Iterator[EngineEntry]:
        """List engines that fit alone, each with its largest KV cache.

        Host memory is ignored, so the result holds for all arrangements with the same generation GPUs.
        """
        shape = replace(reduce_to_shape(arrangement), num_scoring=0, offloaded="none")
        cluster, capacity = self.times.get_cluster(arrangement, GENERATION), self.setting.get_pool(GENERATION).capacity
        generates_with = choose_engine_class(self.job, arrangement.num_training)
        kind = shape, self.roles.places.ahead(arrangement), generates_with
        entry, wanted = self.alone.build_entry, self._read_wanted_kv_cache
        entries = (entry(kind, cluster, capacity, wanted(arrangement, engine), engine, rank) for engine in engines)
        return (found_entry for found_entry in entries if found_entry is not None)

    def find_max_kv_cache(
        self, arrangement: Arrangement, engine: EngineChoice, beside: BytesByMoment, rank: int, *, keeps_sent: bool
    ) -> int | None:
        """Find an engine's largest KV cache beside other bytes; None if both do not fit together."""
        engine_bytes = self.roles.sum_engine_bytes(arrangement, engine, keeps_sent=keeps_sent)
        need = self.compute_fit(arrangement, (beside, engine_bytes))
        if need.slack_host < 0 or (need.slack_expected if rank else need.slack_high) < 0:
            return None
        room = need.room_expected if rank else need.room_high
        most, least_rank = self.size_free_kv_cache(arrangement, engine, room, room)
        return most if least_rank <= rank else None

    def compute_excess(self, candidate: Choice, need: Fit | None = None) -> tuple[float, float]:
        """Shares that a candidate misses: (largest, sum); at most 0 if it fits in expectation.

        Counts: the peak of a GPU, with room for one longest sequence during generation, over a training GPU's capacity;
        and the fullest host over a host's capacity.
        """
        need = need or self.roles.predict_fit(candidate)
        lacks = -need.slack_expected
        if self.job.has_rollouts:
            lacks = max(
                lacks, self.roles.predict_demand(candidate.arrangement, candidate.engine)[2] - need.room_expected
            )
        return self._divide_excess(lacks, need)

    def overflows_more(
        self, arrangement: Arrangement, trainer: TrainerChoice, floor: BytesByMoment, excess: float
    ) -> bool:
        """Whether a trainer overflows by more than `excess` beside the smallest engine, even without KV cache."""
        for sum_bytes in (self.roles.sum_state_bytes, self.roles.sum_trainer_bytes):
            need = self.compute_fit(arrangement, (sum_bytes(arrangement, trainer), floor))
            if self._divide_excess(-need.slack_expected, need)[0] > excess:
                return True
        return False

    def _divide_excess(self, lacks: int, need: Fit) -> tuple[float, float]:
        shares = lacks / self.setting.capacity, -need.slack_host / (self.setting.host_capacity or UNKNOWN)
        return max(shares), sum(max(0.0, share) for share in shares)
