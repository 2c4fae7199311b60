"""Scored candidates: what each needs and how long its step takes, and the order in which candidates are better.

In: candidates, their bytes and seconds. Out: ScoredCandidate, KV caches, keys to compare by. Left out: which are looked
at.
"""

from collections import deque
from copy import copy
from dataclasses import replace

from rlplan.dataflow.choice import NO_TRAINER, Arrangement, Choice, EngineChoice, TrainerChoice
from rlplan.dataflow.placements import GENERATION
from rlplan.memory.roles.gpu.states import fixed_states, zero_settings
from rlplan.memory.trainers.nvme import on_disk_bytes
from rlplan.planner import rules
from rlplan.planner.gpu.roles import UNKNOWN, GpuRoles
from rlplan.planner.gpu.tables import BytesByMoment, Fit, fit, left_of
from rlplan.planner.gpu.times import GpuTimes
from rlplan.planner.setting import GpuSetting
from rlplan.records import dataclass
from rlplan.spec.resolved import SettledJob
from rlplan.timing.step import StepTiming
from rlplan.units import GIB, ceil_div
from rlplan.vocabulary import Placement, Role

Key = tuple[float, float]
"""Seconds of a step, and seconds of all its actions together: of two asynchronous steps that take as long, the one with
less work is better. To a nanosecond, so that the order in which numbers were added does not matter."""
SAME_PLACE = (Placement.HYBRID, Placement.COLOCATED, Placement.DISAGGREGATED)


def rounded(seconds: float, busy: float) -> Key:
    """Two durations as a key."""
    return round(seconds, 9), round(busy, 9)


@dataclass(frozen=True)
class ScoredCandidate:
    """A candidate with what it needs."""

    choice: Choice
    need: Fit
    kv_cache: int
    """Bytes of a GPU."""
    rank: int
    """0 fits, 1 fits in expectation only, 2 does not."""
    timing: StepTiming
    excess: tuple[float, float] = (0.0, 0.0)
    """The largest shortage among GPU, KV cache and host as a share of what there is, and the sum of all three."""

    @property
    def key(self) -> Key:
        """How long a step takes."""
        return rounded(self.timing.seconds, sum(action.cost.seconds for action in self.timing.actions))

    @property
    def order(self) -> tuple[object, ...]:
        """A total order. Better ones first: what fits, then what is fast, then what is simple; among what does not fit,
        what overflows least.
        """
        return (self.rank, (0.0, 0.0) if self.rank < 2 else self.excess, *self.key, *simplicity(self.choice))


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """An engine with its bound."""

    seconds: float
    """Of rollouts and switches with that cache."""
    choice: EngineChoice
    kv_cache: int
    """Bytes at most: where nothing is beside it."""

    def order(self) -> tuple[float, int]:
        """The fastest first."""
        return self.seconds, -self.choice.max_num_seqs


def simplicity(candidate: Choice) -> tuple[object, ...]:
    """Of two that are as fast the simpler one, in a fixed total order: fewer switches, less offload, fewer ranks that
    must speak with each other, less sharding, larger passes.
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
"""Chains that do not fit, from which on looking at the bytes of all is cheaper than coming upon the next ones. Tried:
from the first one on, a plan of 70B on 64 GPUs takes 1.7 times as many calls."""


BUFFERS = 4 * GIB
"""Of a rank, for what it exchanges with others and does not need alone, at most; seen: 2.7 GiB (ZeRO-3, offloaded)."""
OPEN = {
    "workload": ("micro_batch_size_per_gpu",),
    "training": (
        *("zero_stage", "gradient_checkpointing", "offloads_optimizer", "offloads_parameters"),
        *("ulysses", "tp", "pp", "cp", "ep", "max_tokens_per_micro_batch"),
    ),
    "rollout": (
        *("num_engines", "tp", "attention_dp", "has_expert_parallel", "sleep_level", "kv_cache_memory"),
        "gpu_memory_utilization",
        *("max_num_seqs", "quantization"),
    ),
    "placement": (
        *("placement", "num_generation_devices", "num_scoring_devices", "offload", "offload_roles"),
        *("transport", "sync_content", "max_staleness", "partial_rollouts"),
    ),
}
"""Keys of a job that say what may be chosen: bytes and seconds are asked with the choice itself."""
APART = ("name", "objective", "hardware", "limits")
"""Parts of a job that no byte and no second depends on but through the setting."""
NOT_OF_ENGINES = ("training", "roles")
"""Parts of a job that no engine depends on but through the policy's shape."""
_RECENT: deque["CandidateScorer"] = deque(maxlen=16)
"""Scorers, the last one used last. A question of `explain` that fits nowhere tries some ten other jobs (adapters, other
optimizers), and the next such question the same ones."""


def scorer_of(job: SettledJob, setting: GpuSetting) -> "CandidateScorer":
    """A scorer of a job; one of the last ones shares what it knows, where that holds: a plan, its explanation and its
    remedies ask the same again and again.
    """
    asked = _without_choices(job)
    for known in reversed(_RECENT):
        if known.knows(asked, setting):
            _RECENT.remove(known)
            _RECENT.append(known)
            found = known.of(job, setting)
            found.num_misfits = 0
            return found
    new = CandidateScorer(job, setting)
    as_full = next((one for one in reversed(_RECENT) if one.holds_as(asked, setting)), None)
    if as_full is not None:
        new.roles.share_bytes(as_full.roles)
    alike = next((one for one in reversed(_RECENT) if one.has_engines_of(new)), None)
    if alike is not None:
        new.times.share_engines(alike.times)
        new._sizes = alike._sizes
    _RECENT.append(new)
    return new


def _without_choices(job: SettledJob) -> tuple[object, ...]:
    """A job without what the search may choose."""
    parts = {name: getattr(job, name) for name in type(job).model_fields if name not in APART}
    parts |= {name: parts[name].model_copy(update=dict.fromkeys(keys)) for name, keys in OPEN.items()}
    return tuple(parts.values())


def _of_engines(job: SettledJob, setting: GpuSetting) -> tuple[object, ...]:
    """What seconds of engines and the cache that they ask for depend on, but for the choice."""
    names = (name for name in type(job).model_fields if name not in APART)
    parts = zip(names, _without_choices(job), strict=True)
    kept = tuple(part for name, part in parts if name not in NOT_OF_ENGINES)
    return setting.policy, setting.pools, setting.link, kept


def _lie_alike(one: GpuSetting, other: GpuSetting) -> bool:
    """Whether groups of the same size are the same in two settings: on hosts of as many GPUs, or on one with fewer."""
    if (one.models, one.link) != (other.models, other.link) or len(one.pools) != len(other.pools):
        return False
    if one.has_pools:
        return one.pools == other.pools
    sizes = [(setting.num_gpus, setting.gpus_per_host) for setting in (one, other)]
    return (
        _hosts_agree(*sizes)
        and replace(one.pools[0], num_gpus=sizes[1][0], gpus_per_host=sizes[1][1]) == other.pools[0]
    )


def _hosts_agree(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether no group lies otherwise on so many (GPUs, GPUs of a host) than on others."""
    fewer, more = sorted((one, other), key=lambda sizes: sizes[1])
    return fewer[1] in (more[1], fewer[0])


class CandidateScorer:
    """Scores candidates of one job on one setting."""

    def __init__(self, job: SettledJob, setting: GpuSetting) -> None:
        self.job, self.setting = job, setting
        self.roles = GpuRoles(job, setting)
        self.times = GpuTimes(job, setting, self.roles)
        self.num_misfits = 0
        """Chains of trainers that were found not to fit at all."""
        self.first_fitting: dict[object, int] = {}
        """For each sweep of micro-batches the index of the largest that fits, in the last arrangement looked at."""
        self._known_of = _without_choices(job)
        self._engines = _of_engines(job, setting)
        self._hopeless: dict[object, list[tuple[int, int]]] = {}
        self._entries: dict[object, EngineEntry | None] = {}
        self._sizes = {(setting.num_gpus, setting.gpus_per_host)}
        """Of all settings with these tables. One host agrees with hosts of any size, which do not with each other."""

    @property
    def is_tight(self) -> bool:
        """Whether so little fits that bytes are looked at before seconds."""
        return self.num_misfits > MANY_MISFITS

    def knows(self, asked: tuple[object, ...], setting: GpuSetting) -> bool:
        """Whether what it knows holds for another job, `asked` without its choices: it differs in those that the search
        leaves open (a choice says what was taken, and nothing else is asked), or in the number of GPUs, which lie on
        hosts as before.
        """
        sizes = setting.num_gpus, setting.gpus_per_host
        agree = all(_hosts_agree(one, sizes) for one in self._sizes)
        return agree and _lie_alike(self.setting, setting) and self._known_of == asked

    def holds_as(self, asked: tuple[object, ...], setting: GpuSetting) -> bool:
        """Whether processes hold as much for another job, `asked` without its choices, on other GPUs."""
        one, other = self.setting, setting
        if one.has_pools or other.has_pools or (one.models, one.link) != (other.models, other.link):
            return False
        is_alike = one.gpu.shares_host_memory == other.gpu.shares_host_memory and one.overheads == other.overheads
        return is_alike and self._known_of == asked

    def has_engines_of(self, other: "CandidateScorer") -> bool:
        """Whether engines of both are the same: jobs that differ in who trains, and how."""
        return self._engines == other._engines

    def of(self, job: SettledJob, setting: GpuSetting) -> "CandidateScorer":
        """One for another job or other numbers of GPUs, with what is known already where that holds for them."""
        if not self.knows(_without_choices(job), setting):
            return CandidateScorer(job, setting)
        self._sizes.add((setting.num_gpus, setting.gpus_per_host))
        other = copy(self)
        other.job, other.setting = job, setting
        other.roles = copy(self.roles)
        other.roles.job, other.roles.setting = job, setting
        other.times = self.times.of(job, setting, other.roles)
        return other

    def with_rates(self, setting: GpuSetting) -> "CandidateScorer":
        """One for GPUs that have other rates and hold as many bytes."""
        other = copy(self)
        other.setting, other.roles, other._entries = setting, copy(self.roles), {}
        other.roles.setting = setting
        other.times = GpuTimes(self.job, setting, other.roles)
        return other

    def is_hopeless(self, arrangement: Arrangement, choice: TrainerChoice, rank: int) -> bool:
        """Whether a choice lacks more than BUFFERS in a like arrangement with as many ranks or more: with fewer a rank
        holds no less but for those (a property test). Asked first of as many ranks as there are GPUs at all.
        """
        key = self.roles.kind(arrangement), choice, rank
        if key not in self._hopeless:
            self._hopeless[key] = []
            ranks = choice.ranks_per_sequence * choice.ep
            most = ceil_div(self.setting.num_gpus, ranks) * ranks
            largest = replace(arrangement, num_training=most, num_scoring=most if arrangement.num_scoring else 0)
            held = self.roles.resident_bytes(largest, choice), self.roles.nothing(largest)
            self.note_lack(largest, choice, rank, -self.slack(largest, held, rank))
        return any(arrangement.num_training <= n and arrangement.num_frozen <= s for n, s in self._hopeless[key])

    def slack(self, arrangement: Arrangement, held: tuple[BytesByMoment, BytesByMoment], rank: int) -> int:
        """What two parts of an arrangement leave of its devices together."""
        return self.left(arrangement, held, rank)[0]

    def left(self, arrangement: Arrangement, held: tuple[BytesByMoment, BytesByMoment], rank: int) -> tuple[int, int]:
        """The same, and what they leave of its hosts."""
        if self.setting.gpu.shares_host_memory:
            need = self.need(arrangement, held)
            return need.slack_high if rank == 0 else need.slack_expected, need.slack_host
        return left_of(*held, self.roles.parts(arrangement).capacities, at_high=rank == 0)

    def need(self, arrangement: Arrangement, held: tuple[BytesByMoment, BytesByMoment]) -> Fit:
        """What two parts of an arrangement need together."""
        return self.roles.without_host_memory(fit(*held, self.roles.parts(arrangement).capacities))

    def note_lack(self, arrangement: Arrangement, choice: TrainerChoice, rank: int, lack: int) -> None:
        """What a choice lacks on the devices of an arrangement."""
        if lack > BUFFERS:
            self._hopeless.setdefault((self.roles.kind(arrangement), choice, rank), []).append(
                (arrangement.num_training, arrangement.num_frozen)
            )

    def can_run(self, candidate: Choice) -> bool:
        """Whether the target runs it."""
        return not any(rules.choice_refusals(self.job, candidate))

    def score(self, candidate: Choice) -> ScoredCandidate:
        """What a candidate needs, how large its KV cache can be, whether it fits, and how long a step takes."""
        need = self.roles.fit(candidate)
        rank = 0 if need.slack_high >= 0 else 1 if need.slack_expected >= 0 else 2
        if need.slack_host < 0:
            rank = 2
        kv_cache, kv_rank = self.kv_cache(candidate.arrangement, candidate.engine, need.room_expected, need.room_high)
        timing = self.times.timing(candidate, kv_cache)
        return ScoredCandidate(candidate, need, kv_cache, max(rank, kv_rank), timing, self.excess(candidate, need))

    def swap_bytes(self, choice: Choice) -> int:
        """On the disks of one host, of states that are swapped; 0 without NVMe offload."""
        training, trainer, setting = self.job.training, choice.trainer, self.setting
        if training.offload_device != "nvme" or not trainer.offloads_optimizer:
            return 0
        settings = zero_settings(training, trainer, choice.arrangement.num_training)
        ranks = min(choice.arrangement.num_training, setting.gpus_per_host)
        lora = {Role.POLICY: training.lora}
        models = {role: setting.model_of(role) for role in self.job.trained_roles}
        parts = (fixed_states(model, role, lora.get(role), settings, trainer.tp) for role, model in models.items())
        return ranks * sum(on_disk_bytes(part.after_step.host) for part in parts)

    def kv_cache(self, arrangement: Arrangement, engine: EngineChoice, expected: int, high: int) -> tuple[int, int]:
        """(bytes of KV cache a GPU, the rank that they lead to): all the room, up to what is useful.

        expected, high: the room that is left where the cache is, as expected and at the high end of what else is there.
        """
        if not self.job.has_rollouts:
            return 0, 0
        demand, enough, least = self.roles.demand(arrangement, engine)
        wanted = self._wanted_kv_cache(arrangement, engine)
        largest = max(enough, least) if wanted is None else wanted
        least = least if wanted is None else largest
        rank = 0
        if largest < demand.least_bytes:
            rank = 2
        elif min(high, largest) < least:
            rank = 1 if expected >= least else 2
        room = high if high >= least else expected
        size = min(largest, room) if wanted is None else largest  # what is asked for is taken, whether it fits or not
        block = demand.pool.bytes_per_block
        return max(0, size) // block * block, rank

    def _wanted_kv_cache(self, arrangement: Arrangement, engine: EngineChoice) -> int | None:
        """Bytes of KV cache of a rank that the job asks for, in bytes or by vLLM's share of a GPU; None where open."""
        rollout = self.job.rollout
        if rollout.gpu_memory_utilization is not None and not rollout.generates_in_trainer:
            total = self.setting.pool(GENERATION).gpu.memory.value
            return self.roles.engine(Choice(arrangement, NO_TRAINER, engine)).kv_budget(total)
        return None if rollout.kv_cache_memory == "auto" else int(rollout.kv_cache_memory)

    def engine_entry(self, arrangement: Arrangement, engine: EngineChoice, rank: int) -> EngineEntry | None:
        """An engine with the most KV cache that it may have, where nothing is beside it; None where it does not fit.

        Memory of hosts is not looked at, so that it is one for all arrangements in which as many GPUs generate alike.
        """
        rollout = self.job.rollout
        roles, wanted = self.roles, (rollout.kv_cache_memory, rollout.gpu_memory_utilization)
        where = arrangement.num_generation, arrangement.placement, arrangement.sleeps
        key = where, arrangement.is_async, roles.versions_ahead(arrangement), wanted, engine, rank
        if key not in self._entries:
            held = roles.engine_bytes(arrangement, engine), roles.nothing(arrangement)
            most = self._most_kv_cache(arrangement, engine, fit(*held, roles.parts(arrangement).capacities), rank)
            seconds = 0.0 if most is None else self.times.engine_seconds(arrangement, engine, most)
            self._entries[key] = None if most is None else EngineEntry(seconds, engine, most)
        return self._entries[key]

    def kv_cache_beside(
        self, arrangement: Arrangement, engine: EngineChoice, beside: BytesByMoment, rank: int, *, keeps_sent: bool
    ) -> int | None:
        """The most KV cache that an engine may have beside so many bytes; None where both do not fit together."""
        held = self.roles.engine_bytes(arrangement, engine, keeps_sent=keeps_sent)
        need = self.need(arrangement, (beside, held))
        return None if need.slack_host < 0 else self._most_kv_cache(arrangement, engine, need, rank)

    def _most_kv_cache(self, arrangement: Arrangement, engine: EngineChoice, need: Fit, rank: int) -> int | None:
        if (need.slack_expected if rank else need.slack_high) < 0:
            return None
        room = need.room_expected if rank else need.room_high
        most, least_rank = self.kv_cache(arrangement, engine, room, room)
        return most if least_rank <= rank else None

    def excess(self, candidate: Choice, need: Fit | None = None) -> tuple[float, float]:
        """What a candidate lacks most, over what there is, and all that it lacks; at most 0 where it fits as expected.

        Counts: the worst moment of a GPU, with the room for one longest sequence where the KV cache is, each over what
        a training GPU has, and the fullest host over what a host has.
        """
        need = need or self.roles.fit(candidate)
        lacks = -need.slack_expected
        if self.job.has_rollouts:
            lacks = max(lacks, self.roles.demand(candidate.arrangement, candidate.engine)[2] - need.room_expected)
        return self._shares(lacks, need)

    def overflows_more(
        self, arrangement: Arrangement, trainer: TrainerChoice, floor: BytesByMoment, excess: float
    ) -> bool:
        """Whether a trainer overflows by more than that beside the least of any engine, without room for a KV cache."""
        for held in (self.roles.resident_bytes, self.roles.trainer_bytes):
            need = self.need(arrangement, (held(arrangement, trainer), floor))
            if self._shares(-need.slack_expected, need)[0] > excess:
                return True
        return False

    def _shares(self, lacks: int, need: Fit) -> tuple[float, float]:
        each = lacks / self.setting.capacity, -need.slack_host / (self.setting.host_capacity or UNKNOWN)
        return max(each), sum(max(0.0, one) for one in each)
