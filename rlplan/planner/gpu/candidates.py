"""Candidates on GPUs: every combination of choices that a budget leaves open, that its target can run and that divides.

In: a BudgetSpec, the number of GPUs, the models' shapes. Out: the axes of a candidate, each by itself (`GpuSpace`), so
that a search need not build their product, and the whole list where somebody wants it.
Left out: bytes (gpu_roles.py) and seconds (gpu_times.py).

A candidate is a frame (placement, GPUs of each group, who parks, staleness), a trainer's choice, an engine's choice and
a transport. Ranks of a group are alike, so that a group is its size: permutations of devices are never made.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from rlplan.dataflow.gpu_step import GENERATION, GpuStep
from rlplan.memory.gpu.engine import EngineChoice
from rlplan.memory.gpu.states import TrainerChoice
from rlplan.planner.gpu.axes import (
    Axes,
    can_train,
    engine_sizes,
    parallel_axes,
    powers,
    quantizations,
    zero_stages,
)
from rlplan.planner.setting import GpuSetting
from rlplan.spec.budget import BudgetSpec
from rlplan.units import ceil_div
from rlplan.vocabulary import Placement, Role

MAX_AUTO_TOKENS = 32_768
"""Tokens of a rank's micro-batch beyond which `auto` does not go: kernels are long saturated."""
MAX_AUTO_SEQS = 1024
"""Sequences at once beyond which `auto` does not go: vLLM's largest default (V1, usage context of an H100)."""
MIN_AUTO_SEQS = 16
LEAST_SCORING, MOST_SCORING = 16, 4
"""A group that only scores has a power of two of the GPUs, from one in so many to one in so many: a pass without
gradient is a quarter to a third of one with, and in a smaller group it would take longer than the training after it."""


@dataclass(frozen=True)
class GpuCandidate:
    """One combination. step: placement and devices. transport: how weights reach the engine, empty without one."""

    step: GpuStep
    trainer: TrainerChoice
    engine: EngineChoice
    transport: str = ""

    @property
    def num_gpus(self) -> int:
        """GPUs of all groups."""
        step = self.step
        own = 0 if step.shares_devices else step.num_generation
        return step.num_training + step.num_scoring + own


@dataclass(frozen=True)
class Impossible:
    """A placement that cannot be built, and why."""

    placement: Placement
    reason: str


Lean = tuple[bool, bool, bool]
"""Whether it recomputes, offloads the optimizer, offloads parameters: what saves memory for time."""


@dataclass(frozen=True)
class Chain:
    """Choices of a trainer that differ in their micro-batch alone, the largest first."""

    choices: tuple[TrainerChoice, ...]
    lean: Lean


class GpuSpace:
    """The axes of a budget's candidates."""

    def __init__(self, budget: BudgetSpec, setting: GpuSetting) -> None:
        self.budget, self.num_gpus, self.model = budget, setting.num_gpus, setting.policy
        self.models = (setting.policy, *setting.models.values())
        self.split, self.gpu = setting.split, setting.pool(GENERATION).gpu
        self._chains: dict[int, tuple[Chain, ...]] = {}
        self._engines: dict[tuple[int, bool, bool], tuple[EngineChoice, ...]] = {}
        self._counts: dict[tuple[int, bool], int] = {}

    @cached_property
    def frames(self) -> tuple[GpuStep, ...]:
        """Steps whose ZeRO stage and engine are open, those with fewer switches first."""
        return tuple(frame for placement in self._placements for frame in self._of_placement(placement))

    @cached_property
    def impossible(self) -> tuple[Impossible, ...]:
        """Placements without a frame."""
        there = {frame.placement for frame in self.frames}
        return tuple(Impossible(one, self._reason(one)) for one in self._placements if one not in there)

    @cached_property
    def num_candidates(self) -> int:
        """How many combinations there are, counted and not made."""
        return sum(
            self._num_choices(frame.num_training, parks=frame.parks)
            * sum(len(self.transports(frame, engine)) for engine in self.engines(frame))
            for frame in self.frames
        )

    def __iter__(self) -> Iterator[GpuCandidate]:
        for frame in self.frames:
            trainers = [choice for chain in self.chains(frame) for choice in chain.choices]
            for engine, trainer in product(self.engines(frame), trainers):
                for transport in self.transports(frame, engine):
                    yield self.candidate(frame, trainer, engine, transport)

    def candidate(self, frame: GpuStep, trainer: TrainerChoice, engine: EngineChoice, transport: str) -> GpuCandidate:
        """The combination, its step closed."""
        step = replace(frame, zero_stage=trainer.zero_stage, tp=engine.tp)
        return GpuCandidate(step, trainer, engine, transport)

    def chains(self, frame: GpuStep) -> tuple[Chain, ...]:
        """What may be chosen for trained roles in a frame."""
        if frame.num_training not in self._chains:
            self._chains[frame.num_training] = tuple(self._all_chains(frame.num_training))
        chains = self._chains[frame.num_training]
        # DeepSpeed's `offload_states` refuses weights that are offloaded already
        return tuple(chain for chain in chains if not (frame.parks and chain.lean[2]))

    def engines(self, frame: GpuStep) -> tuple[EngineChoice, ...]:
        """What may be chosen for the engine in a frame and reached by its transports, more sequences at once first."""
        key = frame.num_generation, frame.sleeps, frame.shares_devices
        if key not in self._engines:
            engines = self._all_engines(frame.num_generation, frame.sleeps)
            self._engines[key] = tuple(engine for engine in engines if self.transports(frame, engine))
        return self._engines[key]

    def transports(self, frame: GpuStep, engine: EngineChoice) -> tuple[str, ...]:
        """Ways for weights to the engine. An adapter needs a base that was not dropped while the engine slept."""
        if not frame.has_rollouts:
            return ("",)
        usual = ("cuda_ipc",) if frame.shares_devices else ("nccl", "disk")
        adapter = ("adapter",) if self.budget.training.lora is not None and engine.sleep_level < 2 else ()
        wanted = self.budget.placement.transport
        return (*usual, *adapter) if wanted == "auto" else tuple({wanted} & {*usual, *adapter, "delta", "disk"})

    @property
    def _placements(self) -> tuple[Placement, ...]:
        if not self.budget.declaration.has_rollouts:
            return (Placement.HYBRID,)
        if self.split:
            return (Placement.DISAGGREGATED,)
        wanted = self.budget.placement.placement
        return tuple(Placement) if wanted == "auto" else (Placement(wanted),)

    def _of_placement(self, placement: Placement) -> Iterator[GpuStep]:
        """Frames in which something can train and something can generate."""
        sleeps = placement is Placement.COLOCATED and self.budget.rollout.sleep_level != 0
        for training, generation, scoring in self._splits(placement):
            is_async = self.budget.placement.max_staleness and placement is Placement.DISAGGREGATED
            frame = GpuStep(
                placement=placement,
                num_training=training,
                num_generation=generation,
                num_scoring=scoring,
                trained_roles=self.budget.declaration.trained_roles,
                frozen_roles=frozen_roles(self.budget),
                has_rollouts=self.budget.declaration.has_rollouts,
                num_mini_batches=min(2, self.budget.workload.num_mini_batches),
                zero_stage=0,
                scores_base=scores_base(self.budget),
                sleeps=sleeps,
            )
            for staleness, (parks, parks_frozen) in product((0, 1) if is_async else (0,), self._parking(frame)):
                one = replace(frame, max_staleness=staleness, parks=parks, parks_frozen=parks_frozen)
                if self._can_train(one) and self.engines(one):
                    yield one

    def _can_train(self, frame: GpuStep) -> bool:
        """Whether there is a choice for the trainer."""
        return any(not (frame.parks and lean[2]) for _, _, lean, _ in self._layouts(frame.num_training))

    def _parking(self, frame: GpuStep) -> tuple[tuple[bool, bool], ...]:
        """(whether every role that waits moves to the host, whether frozen ones alone do)."""
        can_park = frame.placement is Placement.COLOCATED
        wanted = self.budget.placement.parks
        frozen = ((False, True),) if frame.frozen_roles and not frame.num_scoring else ()
        if wanted == "frozen":
            return frozen
        if wanted != "auto":
            return ((wanted and can_park, False),)
        return (*(((False, False), (True, False)) if can_park else ((False, False),)), *frozen)

    def _splits(self, placement: Placement) -> Iterator[tuple[int, int, int]]:
        """(GPUs that train, that generate, that score alone). A size that no trainer's layout divides is left out."""
        if placement is not Placement.DISAGGREGATED:
            yield self.num_gpus, self.num_gpus, 0
            return
        share = self.budget.placement.generation_share
        if self.split is None and share != "auto":
            generation = min(self.num_gpus - 1, max(1, round(self.num_gpus * share)))
            yield self.num_gpus - generation, generation, 0
            return
        scoring = [0]
        if frozen_roles(self.budget):
            smallest, largest = self.num_gpus // LEAST_SCORING, self.num_gpus // MOST_SCORING
            scoring += [size for size in powers(largest) if size >= smallest]
        for training, alone in product(self._training_sizes, scoring):
            here = training + alone
            if here < self.num_gpus and (self.split is None or here == self.split[0]):
                yield training, self.num_gpus - training - alone, alone

    @cached_property
    def _training_sizes(self) -> tuple[int, ...]:
        """Sizes of a training group that divide the mini-batch in some layout."""
        rollouts = self.budget.workload.rollouts_per_mini_batch
        divisors = [size for size in range(1, min(rollouts, self.num_gpus) + 1) if rollouts % size == 0]
        ways = {axes.ranks_per_sequence for axes in parallel_axes(self.budget, self.models, self.num_gpus)}
        sizes = {divisor * way for divisor in divisors for way in ways}
        return tuple(sorted(size for size in sizes if size < self.num_gpus))

    def _reason(self, placement: Placement) -> str:
        if placement is Placement.DISAGGREGATED and self.num_gpus < 2:
            return "disaggregated needs at least 2 GPUs: some generate, the others train"
        budget = self.budget
        training, generation, _ = next(iter(self._splits(placement)), (self.num_gpus, self.num_gpus, 0))
        tp = 1 if budget.rollout.tp == "auto" or not budget.declaration.has_rollouts else int(budget.rollout.tp)
        rollouts = budget.workload.rollouts_per_mini_batch
        ways = sorted({axes.ranks_per_sequence for axes in parallel_axes(budget, self.models, training)})
        if all(training % way for way in ways):
            return f"{_words(ways)} ranks that share a sequence do not divide the {training} GPUs that train"
        if generation % tp:
            return f"rollout.tp {tp} does not divide the {generation} GPUs that generate"
        ranks = [training // way for way in ways if training % way == 0]
        if all(rollouts % rank for rank in ranks):
            return f"mini_batch_size {rollouts} does not divide by the {_words(ranks)} ranks that train"
        return "offloaded parameters need zero_stage 3, an offloaded optimizer zero_stage 1 or more"

    def _all_chains(self, training: int) -> Iterator[Chain]:
        for axes, stage, lean, sizes in self._layouts(training):
            chosen = (TrainerChoice(stage, *lean, size, **axes._asdict(), max_tokens=tokens) for size, tokens in sizes)
            yield Chain(tuple(chosen), lean)

    def _layouts(self, training: int) -> Iterator[tuple[Axes, int, Lean, tuple[tuple[int, int], ...]]]:
        """Every parallel layout and ZeRO stage, with and without what saves memory for time, with sizes of passes."""
        wanted, rollouts = self.budget.training, self.budget.workload.rollouts_per_mini_batch
        recomputes = (False, True) if wanted.recompute == "auto" else (wanted.recompute == "full",)
        leans = list(product(recomputes, options(wanted.offloads_optimizer), options(wanted.offloads_parameters)))
        for axes in parallel_axes(self.budget, self.models, training):
            way = axes.ranks_per_sequence
            if training % way or rollouts % (training // way):
                continue
            kinds = self._micro_batches(rollouts // (training // way), axes)
            for stage, lean in product(zero_stages(self.budget, training, axes), leans):
                if can_train(wanted, self.budget.target, stage, optimizer=lean[1], parameters=lean[2]):
                    yield from ((axes, stage, lean, sizes) for sizes in kinds)

    def _num_choices(self, training: int, *, parks: bool) -> int:
        """How many choices of a trainer there are, counted and not made."""
        if (training, parks) not in self._counts:
            lengths = (len(sizes) for _, _, lean, sizes in self._layouts(training) if not (parks and lean[2]))
            self._counts[training, parks] = sum(lengths)
        return self._counts[training, parks]

    def _micro_batches(self, share: int, axes: Axes) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Chains of (rollouts of a pass, tokens of a packed pass or 0), the largest first.

        A packed pass holds as many tokens as a padded one at its longest, and there are no more passes: where lengths
        differ, padding is never better. One rollout a pass pads nothing, and more passes fill a pipeline better.
        """
        workload = self.budget.workload
        if workload.max_tokens_per_micro_batch is not None:
            tokens = workload.max_tokens_per_micro_batch
            return (((max(1, tokens // workload.max_seq_len), tokens),),)
        if workload.micro_batch_size_per_gpu != "auto":
            return (((min(share, int(workload.micro_batch_size_per_gpu)), 0),),)
        largest = max(1, min(share, MAX_AUTO_TOKENS * axes.ulysses * axes.cp // workload.max_seq_len))
        sizes = tuple(size for size in reversed(powers(largest)) if size <= largest)
        if workload.prompt_len + workload.lengths.quantile(0.0) >= workload.max_seq_len:
            return (tuple((size, 0) for size in sizes),)  # all are equally long: there is no padding to save
        return ((*((size, size * workload.max_seq_len) for size in sizes), (1, 0)),)

    def _all_engines(self, generation: int, sleeps: bool) -> Iterator[EngineChoice]:
        if not self.budget.declaration.has_rollouts:
            yield EngineChoice(1, 0)
            return
        rollout = self.budget.rollout
        levels = ((2, 1) if rollout.sleep_level == "auto" else (int(rollout.sleep_level),)) if sleeps else (0,)
        formats = quantizations(self.budget, self.gpu)
        for (tp, has_experts), level, quantization in product(engine_sizes(self.budget, self.model), levels, formats):
            if generation % tp == 0:
                for num_seqs in self._num_seqs(generation // tp):
                    yield EngineChoice(tp, level, num_seqs, quantization, has_experts)

    def _num_seqs(self, num_engines: int) -> tuple[int, ...]:
        """Sequences at once: up to all of an engine's share, the most first."""
        wanted = self.budget.rollout.max_num_seqs
        if wanted != "auto":
            return (wanted,)
        share = ceil_div(self.budget.workload.num_rollouts_per_step, num_engines)
        most = min(MAX_AUTO_SEQS, 2 ** (share - 1).bit_length())
        return tuple(size for size in reversed(powers(most)) if size >= min(MIN_AUTO_SEQS, most))


def frozen_roles(budget: BudgetSpec) -> tuple[Role, ...]:
    """Models that are only read."""
    return ((Role.REFERENCE,) if budget.has_reference else ()) + ((Role.REWARD,) if budget.reward_model else ())


def scores_base(budget: BudgetSpec) -> bool:
    """Whether the policy's frozen base, without its adapters, stands in for a reference model."""
    wanted = budget.declaration.has_reference if budget.kl_coef is None else budget.kl_coef > 0
    return wanted and budget.training.lora is not None


def options(choice: str | bool) -> tuple[bool, ...]:
    """What a choice leaves open."""
    return (False, True) if choice == "auto" else (bool(choice),)


def _words(numbers: list[int]) -> str:
    return " or ".join(map(str, numbers))
