"""Scored candidates: what each needs and how long its step takes, and the order in which candidates are better.

In: candidates, their bytes and seconds. Out: ScoredCandidate, KV caches, keys to compare by. Left out: which are looked
at.
"""

from copy import copy
from dataclasses import dataclass

from rlplan.dataflow.choice import Arrangement, Choice, EngineChoice
from rlplan.planner import rules
from rlplan.planner.gpu.roles import UNKNOWN, GpuRoles
from rlplan.planner.gpu.tables import Fit
from rlplan.planner.gpu.times import GpuTimes
from rlplan.planner.setting import GpuSetting
from rlplan.spec.resolved import SettledJob
from rlplan.timing.step import StepTiming
from rlplan.vocabulary import Placement

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


class CandidateScorer:
    """Scores candidates of one job on one setting."""

    def __init__(self, job: SettledJob, setting: GpuSetting) -> None:
        self.job, self.setting = job, setting
        self.roles = GpuRoles(job, setting)
        self.times = GpuTimes(job, setting, self.roles)
        self.num_misfits = 0
        """Chains of trainers that were found not to fit at all."""

    @property
    def is_tight(self) -> bool:
        """Whether so little fits that bytes are looked at before seconds."""
        return self.num_misfits > MANY_MISFITS

    def on_fewer(self, job: SettledJob, setting: GpuSetting) -> "CandidateScorer":
        """The same on fewer GPUs; what it knows of groups of GPUs is shared where these lie on hosts as before."""
        mine, per_host = self.setting.gpus_per_host, setting.gpus_per_host
        if per_host not in (mine, setting.num_gpus):
            return CandidateScorer(job, setting)
        other = copy(self)
        other.job, other.setting = job, setting
        other.roles, other.times = copy(self.roles), copy(self.times)
        for part in (other.roles, other.times):
            part.job, part.setting = job, setting
        other.times.roles = other.roles
        return other

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

    def kv_cache(self, arrangement: Arrangement, engine: EngineChoice, expected: int, high: int) -> tuple[int, int]:
        """(bytes of KV cache a GPU, the rank that they lead to): all the room, up to what is useful.

        expected, high: the room that is left where the cache is, as expected and at the high end of what else is there.
        """
        if not self.job.has_rollouts:
            return 0, 0
        demand, enough, least = self.roles.demand(arrangement, engine)
        wanted = self.job.rollout.kv_cache_memory
        largest = max(enough, least) if wanted == "auto" else int(wanted)
        least = least if wanted == "auto" else largest
        rank = 0
        if largest < demand.least_bytes:
            rank = 2
        elif min(high, largest) < least:
            rank = 1 if expected >= least else 2
        room = high if high >= least else expected
        block = demand.pool.bytes_per_block
        return max(0, min(largest, room)) // block * block, rank

    def excess(self, candidate: Choice, need: Fit | None = None) -> tuple[float, float]:
        """What a candidate lacks most, over what there is, and all that it lacks; at most 0 where it fits as expected.

        Counts: the worst moment of a GPU, with the room for one longest sequence where the KV cache is, each over what
        a training GPU has, and the fullest host over what a host has.
        """
        need = need or self.roles.fit(candidate)
        lacks = -need.slack_expected
        if self.job.has_rollouts:
            lacks = max(lacks, self.roles.demand(candidate.arrangement, candidate.engine)[2] - need.room_expected)
        each = lacks / self.setting.capacity, -need.slack_host / (self.setting.host_capacity or UNKNOWN)
        return max(each), sum(max(0.0, one) for one in each)
