"""Generation of one engine's share of a step, in closed form over the distribution of lengths.

In: a model, the engine's settings and choice, a cluster; rollouts, lengths, KV cache capacity. Out: a Cost.
Left out: preemption, rollouts that wait for tools, rebalancing between engines; randomness (simulate/).

    seconds = prompts, in batches of max_num_batched_tokens + sum over pieces of steps * step(busy, context)

Symbols: N rollouts, S concurrent ones, P prompt, n samples per prompt, D a decode step.
"""

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import ceil, hypot, log, sqrt
from typing import Self

from rlplan.dataflow.choice import EngineChoice
from rlplan.memory.model.engine_base import find_engine_quantization
from rlplan.memory.serving.versions import LATEST, VllmVersion, find_version
from rlplan.spec.model import ModelSpec
from rlplan.spec.parts.lengths import Lengths
from rlplan.spec.resolved import SettledJob, SettledRollout
from rlplan.timing.cost import Cost, Resource
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.serving.counts import EngineCounts, EngineCut, engine_counts
from rlplan.timing.serving.occupancy import DEEPEST, SAMPLE, Occupancy, compute_occupancy, mean_age, mean_footprint
from rlplan.timing.serving.step import RESOURCES, EngineRates, Parts, StepLoad, make_cost
from rlplan.timing.training.mini_batch import largest_normal

GRID_RATIO = 1.2
"""Ratio between the concurrency values at which a step is computed; values in between are interpolated."""


@dataclass(frozen=True, eq=False)
class EngineSpeed:
    """Speed of one engine.

    Raises, when asked: SpecError where a profile lacks a rate, or sizes do not divide.
    """

    model: ModelSpec
    rollout: SettledRollout
    choice: EngineChoice
    cluster: Cluster
    has_custom_all_reduce: bool = True
    """Whether vLLM's own all-reduce is used within a host, instead of NCCL's."""
    version: VllmVersion = LATEST
    """Release of vLLM."""
    returns_log_probs: bool = False
    """Whether the engine returns the log-prob of each sampled token."""
    has_ray_executor: bool = False
    """Whether Ray runs the engine's ranks if it has several."""
    grids: dict[tuple[object, ...], list[Parts]] = field(default_factory=dict, repr=False)
    """Cache of step times, because a search asks for the same speed many times."""

    @classmethod
    def from_job(cls, job: SettledJob, policy: ModelSpec, choice: EngineChoice, cluster: Cluster) -> Self:
        """Make the speed of the emitted engine. rlplan's own runtime switches vLLM's custom all-reduce off."""
        # SGLang and TensorRT-LLM overlap their schedulers with the GPU in every release that is modelled.
        has_vllm = job.rollout.engine not in ("sglang", "tensorrt_llm") and job.release.name != "slime"
        stated = job.rollout.engine_version or job.release.engine_version
        version = find_version(stated, job.release.date) if has_vllm else LATEST
        release = job.release
        has_ray_executor = has_vllm and release.has_ray_executor
        with_custom = not job.is_for_rlplan
        return cls(
            policy, job.rollout, choice, cluster, with_custom, version, release.engine_log_probs, has_ray_executor
        )

    @cached_property
    def cut(self) -> EngineCut:
        """How the engine shards and quantizes the model."""
        choice, element_bytes = self.choice, self.rollout.dtype.num_bytes
        job_quantization = self.rollout.quantization
        word = choice.quantization or ("" if job_quantization in ("none", "auto") else job_quantization)
        return EngineCut(
            tp=choice.tp,
            ep=choice.expert_ranks if self.model.experts else 1,
            replicas=choice.attention_dp,
            element_bytes=element_bytes,
            kv_element_bytes=1 if self.rollout.kv_dtype == "fp8" else element_bytes,
            scheme=find_engine_quantization(self.rollout, word),
        )

    @cached_property
    def counts(self) -> EngineCounts:
        """Work of one rank in a step."""
        return engine_counts(self.model, self.cut)

    @cached_property
    def rates(self) -> EngineRates:
        """Rates that turn the counts into seconds."""
        return EngineRates(
            self.counts,
            self.cluster,
            kv_element_bytes=self.cut.kv_element_bytes,
            has_graphs=self.rollout.has_cuda_graphs,
            has_custom_all_reduce=self.has_custom_all_reduce,
            version=self.version,
            returns_log_probs=self.returns_log_probs,
            has_ray_executor=self.has_ray_executor,
            drafts=(self.rollout.speculative_tokens, self.rollout.acceptance_rate or 0.0),
        )

    def decode_step_s(self, num_seqs: float, context_tokens: float) -> float:
        """Seconds of a step in which `num_seqs` sequences decode. context_tokens: cached tokens of all of them."""
        return self.rates.seconds(StepLoad(num_seqs, context_tokens))

    def prefill_s(self, num_tokens: float, context_tokens: float = 0.0) -> float:
        """Seconds to prefill `num_tokens` of a prompt after `context_tokens` cached ones, in a step of their own."""
        return self.rates.seconds(StepLoad(0, 0, num_tokens, num_tokens * (context_tokens + num_tokens / 2), 1))


@dataclass(frozen=True, slots=True)
class EngineRollouts:
    """One engine's share of a step's rollouts."""

    num_rollouts: int
    prompt_len: float
    num_samples: int
    """Samples per prompt, which is prefilled once."""
    lengths: Lengths
    max_num_seqs: int
    """Most sequences that run at once."""
    kv_tokens: float
    """Tokens that fit in the KV cache."""

    @property
    def limit(self) -> float:
        """Most concurrent rollouts, apart from the KV cache."""
        return float(min(self.num_rollouts, self.max_num_seqs))

    @property
    def concurrency(self) -> float:
        """S: concurrent rollouts within the engine's limit and its KV cache; at least one.

        Counts: kv_tokens / (P/n + footprint), because samples of a prompt share its blocks (mean_footprint).
        """
        tokens_per_rollout = self.prompt_len / max(1, self.num_samples) + mean_footprint(self.lengths)
        return max(1.0, min(self.limit, self.kv_tokens / tokens_per_rollout))


def generate_cost(speed: EngineSpeed, rollouts: EngineRollouts) -> Cost:
    """Seconds from the first prompt to the last token of one engine's rollouts, by resource.

    Counts: prompts, then each piece of the occupancy at its own decode step. Where the KV cache limits concurrency, the
    time is interpolated on a grid. No grid point is faster than one with more concurrency, so more cache is never
    slower. Assumes: as occupancy.py.
    Differs: rollouts * mean length / throughput leaves the tail out, 20 to 60 % of the time.
    """
    if rollouts.num_rollouts < 1:
        return Cost({})
    grid, fewer = _grid(speed, rollouts), rollouts.limit / rollouts.concurrency
    index = int(log(fewer, GRID_RATIO) + 1e-9)
    position = (fewer / GRID_RATIO**index - 1) / (GRID_RATIO - 1)
    below = above = _extend_grid(speed, rollouts, grid, index)
    if position > 1e-9:
        above = _extend_grid(speed, rollouts, grid, index + 1)
    compute, memory, latency, link, host = (a + position * (b - a) for a, b in zip(below, above, strict=True))
    return make_cost((compute, memory, latency, link, host), speed.rates.link)


def slowest_engine_cost(speed: EngineSpeed, rollouts: EngineRollouts, num_rollouts: int) -> Cost:
    """Seconds that a step waits for the slowest engine, beyond one engine's own share.

    Counts: (d1^2 + d2^2)^(1/2). d1: tokens by which the mean longest of all `num_rollouts` exceeds one engine's
    longest, decoded one at a time. d2: the largest of E normal numbers times the deviation of an engine's work
    (_compute_deviation).
    Source: order statistics; Blom 1958. Assumes: lengths are independent, so that d1 and d2 are.
    """
    if rollouts.lengths.variance == 0:
        return Cost({Resource.IDLE: 0.0})  # engines with responses of one length end together
    count = max(num_rollouts, rollouts.num_rollouts)
    longest = sum(_list_sample(rollouts.lengths, count)) / SAMPLE
    longer_s = max(0.0, longest - _last_quantile(rollouts)) * speed.decode_step_s(1, rollouts.prompt_len + longest)
    busier_s = largest_normal(round(num_rollouts / rollouts.num_rollouts)) * _compute_deviation(speed, rollouts)
    return Cost({Resource.IDLE: hypot(longer_s, busier_s)})


def _compute_deviation(speed: EngineSpeed, rollouts: EngineRollouts) -> float:
    """Standard deviation of an engine's seconds that comes from the lengths of its N rollouts.

    Counts: sqrt(N) times the deviation of one rollout's seconds, (a + m) R + k (P R + R^2 / 2): m and k are the seconds
    that a sequence and a cached token add to a step. Where sequences wait for a slot, a is a sequence's part of the
    step's other seconds, otherwise 0.
    """
    lengths, prompt = rollouts.lengths, rollouts.prompt_len
    busy = max(1.0, min(rollouts.concurrency, rollouts.num_rollouts * lengths.mean / max(1.0, lengths.quantile(1.0))))
    context = busy * (prompt + mean_age(lengths))
    step_s = speed.decode_step_s(busy, context)
    per_sequence_s = speed.decode_step_s(busy + 1, context) - step_s
    per_token_s = (speed.decode_step_s(busy, 2 * context) - step_s) / context
    if rollouts.num_rollouts > rollouts.concurrency:
        per_sequence_s = (step_s - per_token_s * context) / busy
    seconds = [per_sequence_s * n + per_token_s * (prompt * n + n * n / 2) for n in _list_sample(lengths, 1)]
    mean = sum(seconds) / SAMPLE  # statistics.pstdev adds fractions, which takes a tenth of a search
    return sqrt(sum((value - mean) ** 2 for value in seconds) / SAMPLE * rollouts.num_rollouts)


@lru_cache(maxsize=64)
def _list_sample(lengths: Lengths, count: int) -> tuple[float, ...]:
    """Evenly spread quantiles of the longest of `count` responses."""
    return tuple(lengths.quantile(((index + 0.5) / SAMPLE) ** (1 / count)) for index in range(SAMPLE))


def _grid(speed: EngineSpeed, rollouts: EngineRollouts) -> list[Parts]:
    key = (
        rollouts.num_rollouts,
        rollouts.limit,
        rollouts.prompt_len,
        rollouts.num_samples,
        rollouts.lengths.spec,
        rollouts.lengths.longest,
    )
    return speed.grids.setdefault(key, [])


def _extend_grid(speed: EngineSpeed, rollouts: EngineRollouts, grid: list[Parts], index: int) -> Parts:
    """Seconds by resource at a grid point, never below those of the point before."""
    while len(grid) <= index:
        parts = _parts(speed, rollouts, max(1.0, rollouts.limit / GRID_RATIO ** len(grid)))
        grid.append(max(parts, grid[-1], key=sum) if grid else parts)
    return grid[index]


def _parts(speed: EngineSpeed, rollouts: EngineRollouts, places: float) -> Parts:
    """Seconds by resource with `places` concurrency slots."""
    lengths, ratio = rollouts.lengths, rollouts.num_rollouts / places
    steady = max(0, int(ratio - DEEPEST))  # whole rounds, so that the remaining occupancy comes from the cache
    shape = compute_occupancy(lengths.spec, lengths.longest, rollouts.num_rollouts, ratio - steady)
    age = mean_age(lengths)
    pieces = [(steady * lengths.mean, places, age)] if steady else []
    pieces += [(piece.steps, max(1.0, piece.busy * places), piece.age) for piece in shape.pieces]
    pieces.append(_longest(rollouts, shape, ratio - steady))
    totals = prompt_parts(speed, rollouts)
    for steps, busy, age in pieces:
        # once rollouts are no longer replaced, replicas drift apart; `busiest_replica` needs the initial number
        left_of = 0.0 if busy >= places else places
        parts = speed.rates.parts(StepLoad(busy, busy * (rollouts.prompt_len + age), num_places=left_of))
        totals = [total + steps * seconds for total, seconds in zip(totals, parts, strict=True)]
    compute, memory, latency, link, host = totals
    return compute, memory, latency, link, host


def _longest(rollouts: EngineRollouts, shape: Occupancy, ratio: float) -> tuple[float, float, float]:
    """Steps, running rollouts and age for the part of the longest rollout that exceeds the sample's longest.

    Counts: of the N/SAMPLE rollouts that the last quantile represents, half exceed it, fewer and fewer over time. The
    number running is the geometric mean of that and one half. Only one of r consecutive rollouts is the last in its
    slot, so only 1/r of the excess delays the end.
    """
    beyond = max(0.0, _last_quantile(rollouts) - shape.longest)
    return beyond / ratio, max(1.0, 0.5 * (rollouts.num_rollouts / SAMPLE) ** 0.5), shape.longest


def _last_quantile(rollouts: EngineRollouts) -> float:
    """The longest response of an engine in occupancy.py, which represents N responses by evenly spread quantiles."""
    return rollouts.lengths.quantile(1 - 0.5 / rollouts.num_rollouts)


def prompt_parts(speed: EngineSpeed, rollouts: EngineRollouts) -> list[float]:
    """Seconds of all prompts of a step, each prefilled once, in full batches."""
    prompts, length = ceil(rollouts.num_rollouts / max(1, rollouts.num_samples)), rollouts.prompt_len
    return time_prefill(speed, prompts * length, length)


def time_prefill(speed: EngineSpeed, tokens: float, length: float) -> list[float]:
    """Seconds to prefill `tokens` of sequences of one length, in full batches over the ranks that have any."""
    ranks, prompts = speed.choice.attention_dp, max(1.0, tokens / length) if length else 1.0
    batch = min(tokens, speed.rollout.max_num_batched_tokens * min(ranks, prompts) / ranks)
    if not batch:
        return [0.0] * len(RESOURCES)
    load = StepLoad(0.0, 0.0, batch, batch * length / 2, batch / length, num_prompts=min(ranks, prompts))
    return [part * tokens / batch for part in speed.rates.parts(load)]
