"""Candidates on GPUs: every combination of choices that a budget leaves open and that the numbers allow.

In: a BudgetSpec, the number of GPUs, the policy's shape. Out: candidates with a handicap each; what cannot be built.
Left out: bytes (gpu_search.py). The handicap stands in for time until there is a timing model: it orders what is known
to cost time, and nothing else may be read from it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from rlplan.dataflow.gpu_step import GpuStep
from rlplan.memory.gpu.engine import EngineChoice
from rlplan.memory.gpu.states import TrainerChoice
from rlplan.spec.budget import BudgetSpec, fixed_ways
from rlplan.spec.model import ModelSpec
from rlplan.vocabulary import Placement, Role

MAX_AUTO_TOKENS = 32_768
"""Tokens of a micro-batch beyond which `auto` does not go: kernels are long saturated."""
MAX_TP = 32
GPUS_IN_A_NODE = 8
"""Beyond so many ranks tensor parallelism leaves the node, which costs more than it gains while anything else fits."""


@dataclass(frozen=True)
class GpuCandidate:
    """One combination. step: placement and devices. handicap: what it is known to cost in time, without unit."""

    step: GpuStep
    trainer: TrainerChoice
    engine: EngineChoice
    handicap: float


@dataclass(frozen=True)
class Impossible:
    """A placement that cannot be built, and why."""

    placement: Placement
    reason: str


def list_gpu_candidates(
    budget: BudgetSpec, num_gpus: int, model: ModelSpec, split: tuple[int, int] | None = None
) -> tuple[list[GpuCandidate], list[Impossible]]:
    """(candidates by handicap, placements that cannot be built). split: GPUs that train and generate, where given."""
    candidates: list[GpuCandidate] = []
    impossible = []
    for placement in _placements(budget) if split is None else (Placement.DISAGGREGATED,):
        training, generation = split or _split(budget, num_gpus, placement)
        reason = _cannot(budget, training, generation)
        if reason:
            impossible.append(Impossible(placement, reason))
            continue
        candidates += _of_placement(budget, model, placement, training, generation)
    return sorted(candidates, key=lambda candidate: candidate.handicap), impossible


def _placements(budget: BudgetSpec) -> tuple[Placement, ...]:
    if not budget.declaration.has_rollouts:
        return (Placement.HYBRID,)
    wanted = budget.placement.placement
    return tuple(Placement) if wanted == "auto" else (Placement(wanted),)


def _split(budget: BudgetSpec, num_gpus: int, placement: Placement) -> tuple[int, int]:
    """GPUs that train, and that generate."""
    if placement is not Placement.DISAGGREGATED:
        return num_gpus, num_gpus
    generation = min(num_gpus - 1, max(1, round(num_gpus * _share(budget))))
    return num_gpus - generation, generation


def _share(budget: BudgetSpec) -> float:
    share = budget.placement.generation_share
    return 0.5 if share == "auto" else share


def _cannot(budget: BudgetSpec, training: int, generation: int) -> str:
    if training < 1 or generation < 1:
        return "disaggregated needs at least 2 GPUs: some generate, the others train"
    tp = 1 if budget.rollout.tp == "auto" or not budget.declaration.has_rollouts else int(budget.rollout.tp)
    ways, rollouts = _ranks_per_sequence(budget), budget.workload.rollouts_per_mini_batch
    if training % ways:
        key = "training.ulysses" if ways == fixed_ways(budget.training.ulysses) else "training: tp x pp x cp x ulysses"
        return f"{key} {ways} does not divide the {training} GPUs that train"
    if generation % tp:
        return f"rollout.tp {tp} does not divide the {generation} GPUs that generate"
    if rollouts % (training // ways):
        return f"mini_batch_size {rollouts} does not divide by the {training // ways} ranks that train"
    return ""


def _ranks_per_sequence(budget: BudgetSpec) -> int:
    training = budget.training
    return prod(map(fixed_ways, (training.ulysses, training.tp, training.pp, training.cp)))


def _of_placement(
    budget: BudgetSpec, model: ModelSpec, placement: Placement, training: int, generation: int
) -> Iterator[GpuCandidate]:
    share = budget.workload.rollouts_per_mini_batch // (training // _ranks_per_sequence(budget))
    sleeps = _sleep_levels(budget, placement)
    waits = _options(budget.placement.parks) if placement is Placement.COLOCATED else (False,)
    for tp, level, parks, trainer in product(
        _tensor_parallel(budget, model, generation), sleeps, waits, _trainers(budget, training, share)
    ):
        if parks and trainer.offloads_parameters:
            continue  # DeepSpeed's `offload_states` refuses weights that are offloaded already
        step = GpuStep(
            placement=placement,
            num_training=training,
            num_generation=generation,
            trained_roles=budget.declaration.trained_roles,
            frozen_roles=frozen_roles(budget),
            has_rollouts=budget.declaration.has_rollouts,
            num_mini_batches=min(2, budget.workload.num_mini_batches),
            zero_stage=trainer.zero_stage,
            tp=tp,
            scores_base=scores_base(budget),
            sleeps=level > 0,
            parks=parks,
        )
        yield GpuCandidate(step, trainer, _engine(budget, tp, level), _handicap(budget, step, trainer))


def _engine(budget: BudgetSpec, tp: int, level: int) -> EngineChoice:
    """An engine whose open choices are as vLLM has them by default."""
    rollout = budget.rollout
    num_seqs = 256 if rollout.max_num_seqs == "auto" else rollout.max_num_seqs
    quantization = None if rollout.quantization == "auto" else rollout.quantization
    return EngineChoice(tp, level, num_seqs, quantization, rollout.has_expert_parallel is True)


def frozen_roles(budget: BudgetSpec) -> tuple[Role, ...]:
    """Models that are only read."""
    return ((Role.REFERENCE,) if budget.has_reference else ()) + ((Role.REWARD,) if budget.reward_model else ())


def scores_base(budget: BudgetSpec) -> bool:
    """Whether the policy's frozen base, without its adapters, stands in for a reference model."""
    wanted = budget.declaration.has_reference if budget.kl_coef is None else budget.kl_coef > 0
    return wanted and budget.training.lora is not None


def _sleep_levels(budget: BudgetSpec, placement: Placement) -> tuple[int, ...]:
    """An engine that shares devices and hands over by turns sleeps: level 2, for the hand-over brings new weights."""
    if not budget.declaration.has_rollouts or placement is not Placement.COLOCATED:
        return (0,)
    wanted = budget.rollout.sleep_level
    return (2,) if wanted == "auto" else (wanted,)


def _options(choice: str | bool) -> tuple[bool, ...]:
    return (False, True) if choice == "auto" else (bool(choice),)


def _tensor_parallel(budget: BudgetSpec, model: ModelSpec, generation: int) -> tuple[int, ...]:
    if not budget.declaration.has_rollouts:
        return (1,)
    if budget.rollout.tp != "auto":
        return (int(budget.rollout.tp),)
    sizes = (2**power for power in range(MAX_TP.bit_length()))
    return tuple(size for size in sizes if not generation % size and not model.num_heads % size)


def usual_stages(budget: BudgetSpec, training: int) -> tuple[int, ...]:
    """ZeRO stages to try where that is open: FSDP2 shards everything, Megatron's distributed optimizer its states."""
    if budget.target != "rlplan":
        return (3,) if budget.target == "fsdp2" else (1,)
    if fixed_ways(budget.training.tp) > 1:
        return (2,)
    return (2, 3) if training > 1 else (0, 3)


def _trainers(budget: BudgetSpec, training: int, share: int) -> Iterator[TrainerChoice]:
    wanted = budget.training
    stages = usual_stages(budget, training) if wanted.zero_stage == "auto" else (int(wanted.zero_stage),)
    recomputes = (False, True) if wanted.recompute == "auto" else (wanted.recompute == "full",)
    for stage, recompute, optimizer, parameters, micro_batch in product(
        stages,
        recomputes,
        _options(wanted.offloads_optimizer),
        _options(wanted.offloads_parameters),
        _micro_batches(budget, share),
    ):
        needs_three = parameters or (optimizer and wanted.offload_device == "nvme")
        is_packed = wanted.lora is not None and wanted.lora.base == "nf4"
        if (needs_three and stage < 3) or (is_packed and stage == 3) or (optimizer and stage == 0):
            continue
        axes = (wanted.ulysses, wanted.tp, wanted.pp, wanted.cp, wanted.ep)
        yield TrainerChoice(stage, recompute, optimizer, parameters, micro_batch, *map(fixed_ways, axes))


def _micro_batches(budget: BudgetSpec, share: int) -> tuple[int, ...]:
    workload = budget.workload
    if workload.max_tokens_per_micro_batch is not None:
        return (max(1, workload.max_tokens_per_micro_batch // workload.max_seq_len),)
    if workload.micro_batch_size_per_gpu != "auto":
        return (min(share, int(workload.micro_batch_size_per_gpu)),)
    largest = max(1, min(share, MAX_AUTO_TOKENS * fixed_ways(budget.training.ulysses) // workload.max_seq_len))
    sizes = (2**power for power in reversed(range(largest.bit_length())))
    return tuple(size for size in sizes if size <= largest) or (1,)


def _handicap(budget: BudgetSpec, step: GpuStep, trainer: TrainerChoice) -> float:
    """What is known to cost time: a third more FLOPs, PCIe traffic, gathers, switches, idle devices, small passes."""
    tokens = trainer.micro_batch * budget.workload.max_seq_len
    return (
        3.0 * trainer.recomputes
        + 6.0 * trainer.offloads_optimizer
        + 8.0 * trainer.offloads_parameters
        + 1.0 * (trainer.zero_stage == 3)
        + 1.5 * step.parks
        + 0.5 * step.sleeps
        + 4.0 * (step.placement is Placement.DISAGGREGATED)
        + 0.5 * (step.tp.bit_length() - 1)
        + 4.0 * (step.tp > GPUS_IN_A_NODE)
        + max(0.0, 3.0 - 0.001 * tokens)
        - 1e-7 * tokens
    )
