"""Candidates on GPUs: all combinations of open choices that the framework can run and whose sizes divide.

In: a SettledJob, the number of GPUs, the models' shapes. Out: the choices per part of a candidate (`GpuSpace`), so that
the search never builds their product; iteration yields the full product for tests. Left out: bytes (roles.py) and
seconds (times.py).

A candidate is an arrangement (placement, GPUs per group, offloaded roles), a trainer's choice, an engine's choice and a
weight-sync mode. Ranks of a group are alike, so a group is just its size; permutations of devices do not exist.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod

from rlplan.dataflow.choice import Arrangement, Choice, EngineChoice, Offloaded, TrainerChoice, WeightSyncMode
from rlplan.dataflow.placements import GENERATION
from rlplan.frameworks.rules import SHARE, format_value
from rlplan.memory.weight_sync.adapters import count_adapter_versions
from rlplan.planner.gpu.axes import (
    Axes,
    can_cut,
    can_train,
    list_engine_axes,
    list_parallel_axes,
    list_powers,
    list_quantizations,
    list_zero_stages,
)
from rlplan.planner.gpu.sync_times import SyncModes
from rlplan.planner.memo import Memo, memoize, strip_devices
from rlplan.planner.plan_parts import Considered
from rlplan.planner.setting import GpuSetting
from rlplan.spec.resolved import SettledJob, build_search_rules
from rlplan.units import ceil_div
from rlplan.vocabulary import Placement

MAX_AUTO_TOKENS = 32_768
"""Most tokens per rank and micro-batch that `auto` tries; kernels are saturated long before."""
MAX_AUTO_SEQS = 1024
"""Most concurrent sequences that `auto` tries: vLLM's largest default (V1, usage context of an H100)."""
MIN_AUTO_SEQS = 16
ANY_SIZE = 16
"""Up to this many GPUs, training groups of every size are tried."""
MAX_STEPS = 16
"""Most training group sizes that are whole hosts; with very many hosts, they are spaced evenly."""
LEAST_SCORING, MOST_SCORING = 16, 4
"""A group that only scores has a power of two of the GPUs, between 1/LEAST_SCORING and 1/MOST_SCORING of them. A
forward pass costs a quarter to a third of training. In a smaller group, scoring would take longer than the training
after it."""


MemorySavings = tuple[bool, bool, bool]
"""(gradient checkpointing, optimizer offload, parameter offload): switches that trade time for memory."""


@dataclass(frozen=True)
class MicroBatchSweep:
    """Trainer choices that differ only in micro-batch size, the largest first."""

    choices: tuple[TrainerChoice, ...]
    savings: MemorySavings


Arranged = tuple[tuple[str, object], ...]
"""An arrangement as (key, value) pairs for the framework's rules; empty if it has none."""
Layout = tuple[Axes, int, MemorySavings, tuple[tuple[int, int], ...]]
"""Parallel sizes, ZeRO stage, memory savings, and micro-batch sizes as (rollouts, tokens or 0)."""


class GroupChoices:
    """Choices for device groups of any size; they do not depend on the job's total number of GPUs."""

    def __init__(self, job: SettledJob, setting: GpuSetting, memo: Memo) -> None:
        self.job, self.model, self.gpu = strip_devices(job), setting.policy, setting.get_pool(GENERATION).gpu
        self.models, self.rules = (setting.policy, *setting.models.values()), build_search_rules(job)
        self.has_rules = bool(self.rules)
        self.known = memo.get_table(GroupChoices, self.job, self.models, self.gpu)

    @memoize
    def list_group_sweeps(
        self, training: int, scoring: int, offloads_all: bool, arranged: Arranged = ()
    ) -> tuple[MicroBatchSweep, ...]:
        """List trainer choices for a group size, beside `scoring` GPUs that only score."""
        sweeps = self._build_sweeps(training)
        return tuple(
            sweep
            for sweep in sweeps
            if self._can_combine(scoring, offloads_all, arranged, _read_axes(sweep.choices[0]), sweep.savings)
        )

    @memoize
    def can_train(self, training: int, scoring: int, offloads_all: bool, arranged: Arranged = ()) -> bool:
        """Whether any trainer choice exists."""
        layouts = self._list_layouts(training)
        return any(self._can_combine(scoring, offloads_all, arranged, axes, savings) for axes, _, savings, _ in layouts)

    @memoize
    def count_trainers(self, training: int, scoring: int, offloads_all: bool, arranged: Arranged = ()) -> int:
        """Count trainer choices without building them."""
        layouts = self._list_layouts(training)
        return sum(
            len(sizes)
            for axes, _, savings, sizes in layouts
            if self._can_combine(scoring, offloads_all, arranged, axes, savings)
        )

    def _can_combine(
        self, scoring: int, offloads_all: bool, arranged: Arranged, axes: Axes, savings: MemorySavings
    ) -> bool:
        """Whether a trainer's layout is compatible with an arrangement.

        DeepSpeed's `offload_states` rejects weights that are already offloaded. Other trainers shard a frozen role like
        the policy, so its own GPUs must divide by that layout. The framework may have further rules.
        """
        if offloads_all and savings[2]:
            return False
        if self.has_rules and not self.rules.allows(dict(arranged) | _list_trainer_values(axes, savings)):
            return False
        return not scoring or self.job.backend == "deepspeed" or can_cut(scoring, axes)

    @memoize
    def _build_sweeps(self, training: int) -> tuple[MicroBatchSweep, ...]:
        sweeps = []
        for axes, stage, savings, sizes in self._list_layouts(training):
            chosen = (
                TrainerChoice(stage, *savings, size, **axes._asdict(), max_tokens=tokens) for size, tokens in sizes
            )
            sweeps.append(MicroBatchSweep(tuple(chosen), savings))
        return tuple(sweeps)

    def _list_layouts(self, training: int) -> Iterator[Layout]:
        """List every parallel layout, ZeRO stage and combination of memory savings, with micro-batch sizes."""
        wanted, rollouts = self.job.training, self.job.workload.rollouts_per_mini_batch
        switches = wanted.gradient_checkpointing, wanted.offloads_optimizer, wanted.offloads_parameters
        backend = self.job.backend
        all_savings = [(first, second, third) for first, second, third in product(*map(list_options, switches))]
        for axes in list_parallel_axes(self.job, self.models, training):
            group_size = axes.ranks_per_sequence
            groups = training // group_size
            if training % group_size or not self._can_distribute(groups):
                continue
            kinds = self._list_micro_batches(ceil_div(rollouts, groups), axes)
            for stage, savings in product(list_zero_stages(self.job, training), all_savings):
                chosen = {"training.zero_stage": stage} | _list_trainer_values(axes, savings) if self.has_rules else {}
                if self.has_rules and not self.rules.allows(chosen):
                    continue
                if can_train(wanted, backend, stage, axes, optimizer=savings[1], parameters=savings[2]):
                    yield from ((axes, stage, savings, sizes) for sizes in kinds)

    def _can_distribute(self, groups: int) -> bool:
        """Whether a mini-batch can be split over `groups` groups of ranks.

        rlplan's runtime packs uneven shares. Most other trainers need equal numbers of rollouts (or pairs) per group.
        """
        if self.job.is_for_rlplan or self.job.release.splits_unevenly:
            return groups <= self.job.num_units_per_mini_batch
        return self.job.workload.rollouts_per_mini_batch % (groups * self.job.sequences_per_unit) == 0

    def _list_micro_batches(self, share: int, axes: Axes) -> tuple[tuple[tuple[int, int], ...], ...]:
        """List sweeps of (rollouts per micro-batch, tokens of a packed micro-batch or 0), the largest first.

        Packing is never worse than padding if lengths differ: a packed micro-batch holds the tokens of a full padded
        one, and there are no more of them. rlplan's runtime always packs. With other trainers, a single rollout per
        micro-batch has no padding either, and more micro-batches fill a pipeline better. Pairs stay in one micro-batch.
        """
        work, unit = self.job.workload, self.job.sequences_per_unit
        tokens = self.job.training.max_tokens_per_micro_batch
        longest, may_pack = work.max_seq_len, self.job.release.packs
        packs = may_pack and self.job.backend == "deepspeed"
        if tokens != "auto":
            return (((max(1, tokens // longest), tokens),),)
        if work.micro_batch_size_per_gpu != "auto":
            size = min(share, work.micro_batch_size_per_gpu)
            if not packs and share % size:
                return ()  # unpacked micro-batches must all have the same size
            return (((size, size * longest if packs else 0),),)
        largest = max(unit, min(share, MAX_AUTO_TOKENS * axes.ulysses * axes.cp // longest))
        sizes = tuple(size for size in reversed(list_powers(largest)) if unit <= size <= largest)
        if packs:
            return (tuple((size, size * longest) for size in sizes),)
        if not may_pack or work.usual_prompt_len + work.lengths.quantile(0.0) >= longest:
            # without packing, or with equally long rollouts, there is no padding to save
            return (tuple((size, 0) for size in sizes if share % size == 0),)
        return ((*((size, size * longest) for size in sizes), *(((1, 0),) if unit == 1 else ())),)

    @memoize
    def list_group_engines(
        self,
        generation: int,
        sleeps: bool,
        is_async: bool,
        takes_weights: bool,
        takes_adapters: bool,
        arranged: Arranged = (),
    ) -> tuple[EngineChoice, ...]:
        """List engine choices that can receive full weights or adapters."""
        versions = (0, count_adapter_versions(self.job) if is_async else 1)
        every = product(self._build_engines(generation, sleeps, arranged), versions)
        return tuple(
            replace(engine, adapter_versions=number) if number else engine
            for engine, number in every
            if (takes_adapters and engine.sleep_level < 2 if number else takes_weights)
        )

    def _build_engines(self, generation: int, sleeps: bool, arranged: Arranged) -> Iterator[EngineChoice]:
        if not self.job.has_rollouts:
            yield EngineChoice(1, 0)
            return
        rollout = self.job.rollout
        levels = ((2, 1) if rollout.sleep_level == "auto" else (int(rollout.sleep_level),)) if sleeps else (0,)
        formats = list_quantizations(self.job, self.gpu)
        for (tp, dp, has_experts), level, quantization in product(
            list_engine_axes(self.job, self.model), levels, formats
        ):
            num_engines, left = divmod(generation, tp * dp)
            if not left and num_engines and rollout.num_engines in ("auto", num_engines):
                engine = EngineChoice(tp, level, 1, quantization, has_experts, dp)
                chosen = dict(arranged) | _list_engine_values(engine) if self.has_rules else {}
                if self.rules.allows(chosen):
                    for num_seqs in self._list_num_seqs(num_engines, dp, chosen):
                        yield EngineChoice(tp, level, num_seqs, quantization, has_experts, dp)

    def _list_num_seqs(self, num_engines: int, attention_dp: int, chosen: dict[str, object]) -> tuple[int, ...]:
        """List numbers of concurrent sequences per engine: up to its share, the largest first, equal on all its ranks.

        With data-parallel attention, vLLM refuses more than the tokens of a step. chosen: values for the framework's
        rules.
        """
        wanted, num_rollouts = self.job.rollout.max_num_seqs, self.job.num_generated_per_step
        if wanted != "auto":
            return (wanted,)
        if (fixed := self.rules.values("rollout.max_num_seqs", chosen)) is not None:
            share_per_engine, remainder = divmod(num_rollouts, num_engines)
            shares = () if remainder else (share_per_engine,)
            return shares if fixed == (SHARE,) else fixed
        share = ceil_div(self.job.count_most_rollouts(num_engines), attention_dp)
        # the next power of two covers the full share at once
        most = min(MAX_AUTO_SEQS, 2 ** (share - 1).bit_length())
        if attention_dp > 1:
            most = min(most, list_powers(self.job.rollout.max_num_batched_tokens // attention_dp)[-1])
        return tuple(size * attention_dp for size in reversed(list_powers(most)) if size >= min(MIN_AUTO_SEQS, most))


class GpuSpace(GroupChoices):
    """The search space of a job on its GPUs."""

    def __init__(self, job: SettledJob, setting: GpuSetting, memo: Memo) -> None:
        super().__init__(job, setting, memo)
        self.num_gpus, self.gpus_per_host, self.split = setting.num_gpus, setting.gpus_per_host, setting.split
        self.sync_modes = SyncModes(job, setting, memo)

    @cached_property
    def arrangements(self) -> tuple[Arrangement, ...]:
        """All arrangements, those with fewer switches first. Trainer and engine are still open."""
        return tuple(
            arrangement for placement in self._placements for arrangement in self._list_arrangements(placement)
        )

    def list_groups(self) -> Iterator[Arrangement]:
        """List device groups of all arrangements, including those where nothing can train or generate."""
        for placement in self._placements:
            yield from (Arrangement(placement, *sizes) for sizes in self._list_splits(placement))

    @cached_property
    def impossible(self) -> tuple[Considered, ...]:
        """Placements without any arrangement, with reasons."""
        there = {arrangement.placement for arrangement in self.arrangements}
        return tuple(
            Considered(placement, self._explain_impossible(placement))
            for placement in self._placements
            if placement not in there
        )

    @cached_property
    def num_candidates(self) -> int:
        """Number of candidates, counted without building them."""
        return sum(
            self.count_trainers(*self._build_trainer_key(arrangement))
            * sum(len(self.list_transports(arrangement, engine)) for engine in self.list_engines(arrangement))
            for arrangement in self.arrangements
        )

    def __iter__(self) -> Iterator[Choice]:
        for arrangement in self.arrangements:
            trainers = [choice for sweep in self.list_sweeps(arrangement) for choice in sweep.choices]
            for engine, trainer in product(self.list_engines(arrangement), trainers):
                for transport in self.list_transports(arrangement, engine):
                    yield Choice(arrangement, trainer, engine, transport)

    def list_sweeps(self, arrangement: Arrangement) -> tuple[MicroBatchSweep, ...]:
        """List trainer choices in an arrangement."""
        return self.list_group_sweeps(*self._build_trainer_key(arrangement))

    def list_engines(self, arrangement: Arrangement) -> tuple[EngineChoice, ...]:
        """List engine choices in an arrangement that its transports can reach, more concurrent sequences first."""
        modes, switches = self.sync_modes, (arrangement.sleeps, arrangement.is_async)
        takes_weights = bool(modes.list_weight_modes(arrangement))
        sends = takes_weights, modes.may_send_adapters
        return self.list_group_engines(
            arrangement.num_generation, *switches, *sends, self._list_rule_values(arrangement)
        )

    def list_transports(self, arrangement: Arrangement, engine: EngineChoice) -> tuple[WeightSyncMode, ...]:
        """List weight-sync modes to an engine."""
        return self.sync_modes.list_engine_modes(arrangement, engine)

    @property
    def _placements(self) -> tuple[Placement, ...]:
        if not self.job.has_rollouts:
            return (Placement.HYBRID,)
        if self.split:
            return (Placement.DISAGGREGATED,)
        wanted = self.job.placement.placement
        return tuple(Placement) if wanted == "auto" else (Placement(wanted),)

    def _list_arrangements(self, placement: Placement) -> Iterator[Arrangement]:
        """List arrangements of a placement that have a trainer and an engine."""
        sleeps = placement is Placement.COLOCATED and self.job.rollout.sleep_level != 0
        may_be_async = self.job.placement.max_staleness > 0 and placement is Placement.DISAGGREGATED
        for training, generation, scoring in self._list_splits(placement):
            arrangement = Arrangement(placement, training, generation, scoring, sleeps=sleeps)
            async_options = (False, True) if may_be_async else (False,)
            for is_async, offloaded in product(async_options, self._list_offloads(arrangement)):
                variant = replace(arrangement, is_async=is_async, offloaded=offloaded)
                is_allowed = self.rules.allows(_list_arrangement_values(variant))
                if is_allowed and self.can_train(*self._build_trainer_key(variant)) and self.list_engines(variant):
                    yield variant

    def _build_trainer_key(self, arrangement: Arrangement) -> tuple[int, int, bool, Arranged]:
        """Build the part of an arrangement that trainer choices depend on."""
        offloads_all = arrangement.offloaded == "all"
        return arrangement.num_training, arrangement.num_scoring, offloads_all, self._list_rule_values(arrangement)

    def _list_rule_values(self, arrangement: Arrangement) -> Arranged:
        """List an arrangement's values for the framework's rules."""
        return tuple(_list_arrangement_values(arrangement).items()) if self.has_rules else ()

    def _list_offloads(self, arrangement: Arrangement) -> tuple[Offloaded, ...]:
        """List offload options: all roles under time sharing, or frozen ones only."""
        place = self.job.placement
        every: tuple[Offloaded, ...] = ("all",) if arrangement.placement is Placement.COLOCATED else ()
        frozen: tuple[Offloaded, ...] = ("frozen",) if self.job.frozen_roles and not arrangement.num_scoring else ()
        if place.offload == "none":
            return ("none",)
        wanted = {"auto": (*every, *frozen), "all": every, "frozen": frozen}[place.offload_roles]
        if place.offload == "auto":
            return ("none", *wanted)
        return wanted if place.offload_roles == "frozen" else wanted or ("none",)

    def _list_splits(self, placement: Placement) -> Iterator[tuple[int, int, int]]:
        """List (GPUs that train, that generate, that only score). Sizes that no trainer layout divides are left out."""
        wanted, num_generation = self.job.placement.num_scoring_devices, self.job.placement.num_generation_devices
        if placement is not Placement.DISAGGREGATED:
            if wanted in ("auto", 0):
                yield self.num_gpus, self.num_gpus, 0
            return
        if self.split is None and num_generation != "auto":
            alone = 0 if wanted == "auto" else int(wanted)
            if num_generation + alone < self.num_gpus:
                yield self.num_gpus - num_generation - alone, num_generation, alone
            return
        for training, alone in product(self._training_sizes, self._scoring_sizes):
            first_pool = training + alone
            if first_pool < self.num_gpus and (self.split is None or first_pool == self.split[0]):
                yield training, self.num_gpus - training - alone, alone

    @property
    def _scoring_sizes(self) -> list[int]:
        """Sizes of a separate scoring group."""
        wanted = self.job.placement.num_scoring_devices
        if wanted != "auto":
            return [int(wanted)]
        if not self.job.frozen_roles:
            return [0]
        smallest, largest = self.num_gpus // LEAST_SCORING, self.num_gpus // MOST_SCORING
        return [0, *(size for size in list_powers(largest) if size >= smallest)]

    @cached_property
    def _training_sizes(self) -> tuple[int, ...]:
        """Sizes of a training group.

        For rlplan's runtime: every size on up to two hosts or ANY_SIZE GPUs. Beyond that, whole hosts, and sizes where
        either side is a power of two. For other trainers: sizes that divide the mini-batch in some layout.
        """
        num_gpus, host = self.num_gpus, self.gpus_per_host
        if self.job.is_for_rlplan:
            if self.split is not None or num_gpus <= max(2 * host, ANY_SIZE):
                return tuple(range(1, num_gpus))
            few = {size for power in list_powers(num_gpus - 1) for size in (power, num_gpus - power)}
            step = host * ceil_div(num_gpus, MAX_STEPS * host)
            return tuple(sorted(few | set(range(step, num_gpus, step))))
        rollouts = self.job.workload.rollouts_per_mini_batch
        divisors = [size for size in range(1, min(rollouts, self.num_gpus) + 1) if rollouts % size == 0]
        group_sizes = {axes.ranks_per_sequence for axes in list_parallel_axes(self.job, self.models, self.num_gpus)}
        sizes = {divisor * group_size for divisor in divisors for group_size in group_sizes}
        return tuple(sorted(size for size in sizes if size < self.num_gpus))

    def _explain_impossible(self, placement: Placement) -> str:
        for broken in self.rules.find_broken({"placement.placement": placement.value}):
            if broken.key == "placement.placement":
                return f"{self.job.release.title} has {' and '.join(map(format_value, broken.tried))}: {broken.why}"
        if placement is Placement.DISAGGREGATED and self.num_gpus < 2:
            return "disaggregated needs at least 2 GPUs: some generate, the others train"
        job = self.job
        alone, generating = job.placement.num_scoring_devices, job.placement.num_generation_devices
        if placement is Placement.DISAGGREGATED and generating != "auto" and generating >= self.num_gpus:
            return f"placement.num_generation_devices {generating} leaves none of {self.num_gpus} GPUs for training"
        if alone not in ("auto", 0) and placement is not Placement.DISAGGREGATED:
            return f"placement.num_scoring_devices {alone}: all GPUs train, so none is left for scoring alone"
        if alone != "auto" and not any(self._list_splits(placement)):
            return (
                f"placement.num_scoring_devices {alone} leaves none of {self.num_gpus} GPUs for training and generation"
            )
        training, generation, _ = next(iter(self._list_splits(placement)), (self.num_gpus, self.num_gpus, 0))
        tp, dp = (job.rollout.tp, job.rollout.attention_dp) if job.has_rollouts else (1, 1)
        ranks = prod(int(size) for size in (tp, dp) if size != "auto")
        group_sizes = sorted({axes.ranks_per_sequence for axes in list_parallel_axes(job, self.models, training)})
        if all(training % group_size for group_size in group_sizes):
            return (
                f"{_join_numbers(group_sizes)} ranks that share a sequence do not divide the {training} GPUs that train"
            )
        if generation % ranks:
            key = "rollout.tp" if dp in ("auto", 1) else "rollout.tp x rollout.attention_dp"
            return f"{key} {ranks} does not divide the {generation} GPUs that generate"
        if job.has_rollouts and (wanted := job.rollout.num_engines) not in ("auto", generation // ranks):
            return f"rollout.num_engines {wanted} of {ranks} GPUs each do not fill the {generation} GPUs that generate"
        if alone not in ("auto", 0) and job.backend != "deepspeed" and all(alone % size for size in group_sizes):
            return (
                f"placement.num_scoring_devices {alone} does not divide by the {_join_numbers(group_sizes)} ranks that "
                "share a sequence: a frozen role is sharded like the policy"
            )
        groups = [training // group_size for group_size in group_sizes if training % group_size == 0]
        return self._explain_shares(training, groups)

    def _explain_shares(self, training: int, groups: list[int]) -> str:
        """The reason why no mini-batch can be split over groups of ranks, or no share into micro-batches."""
        rollouts = self.job.workload.rollouts_per_mini_batch
        if not any(map(self._can_distribute, groups)):
            if self.job.is_for_rlplan or self.job.release.splits_unevenly:
                return f"mini_batch_size {rollouts} gives some of the {_join_numbers(groups)} training ranks no rollout"
            return f"mini_batch_size {rollouts} does not divide by the {_join_numbers(groups)} training ranks"
        shares = sorted({ceil_div(rollouts, group) for group in groups if self._can_distribute(group)})
        axes, size = list_parallel_axes(self.job, self.models, training)[0], self.job.workload.micro_batch_size_per_gpu
        if not any(self._list_micro_batches(share, axes) for share in shares):
            return f"micro_batch_size_per_gpu {size} does not divide the {_join_numbers(shares)} rollouts of a rank"
        return "offloaded parameters need zero_stage 3, an offloaded optimizer zero_stage 1 or more"


def list_options(choice: str | bool) -> tuple[bool, ...]:
    """List the values of a switch that may be `auto`."""
    return (False, True) if choice == "auto" else (bool(choice),)


def _read_axes(choice: TrainerChoice) -> Axes:
    return Axes(choice.ulysses, choice.tp, choice.pp, choice.cp, choice.ep)


def _list_arrangement_values(arrangement: Arrangement) -> dict[str, object]:
    """An arrangement as job keys."""
    values: dict[str, object] = {
        "placement.placement": arrangement.placement.value,
        "placement.num_scoring_devices": arrangement.num_scoring,
        "placement.offload": "none" if arrangement.offloaded == "none" else "host",
    }
    return values if arrangement.offloaded == "none" else {**values, "placement.offload_roles": arrangement.offloaded}


def _list_trainer_values(axes: Axes, savings: MemorySavings) -> dict[str, object]:
    """A trainer's layout as job keys."""
    ranks = {f"training.{axis}": getattr(axes, axis) for axis in ("ulysses", "tp", "pp", "cp", "ep")}
    names = ("gradient_checkpointing", "offloads_optimizer", "offloads_parameters")
    return ranks | {f"training.{name}": value for name, value in zip(names, savings, strict=True)}


def _list_engine_values(engine: EngineChoice) -> dict[str, object]:
    """An engine as job keys."""
    return {
        "rollout.tp": engine.tp,
        "rollout.attention_dp": engine.attention_dp,
        "rollout.has_expert_parallel": engine.has_expert_parallel,
        "rollout.sleep_level": engine.sleep_level,
        "rollout.quantization": engine.quantization or "none",
    }


def _join_numbers(numbers: list[int]) -> str:
    return " or ".join(map(str, numbers))
