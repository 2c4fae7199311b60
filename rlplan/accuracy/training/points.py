"""Peaks and steady states of published training runs: `train_peak` and `train_steady`.

In: a point. Out: what the formulas of rlplan/memory say of it, by the statistic that was measured, in its own unit.
Left out: how settings are read (settings.py), trainers' defaults (trainers.py), what a rank holds
(states.py), the largest model that trains (limits.py).
"""

import re
from dataclasses import replace

from rlplan.accuracy.named_models import model_of
from rlplan.accuracy.points import MeasuredPoint, Statistic
from rlplan.accuracy.registry import CannotPredict, Prediction, predicts
from rlplan.accuracy.settings import gpu_of, unit_bytes
from rlplan.accuracy.training.colocated import (
    RESIDUAL,
    num_updates,
    outside_tensors,
    passes_mask,
    unfused_pairs,
)
from rlplan.accuracy.training.run import Run, read_run
from rlplan.accuracy.training.settings import RunSettings
from rlplan.accuracy.training.states import expert_shards, rank_state_of
from rlplan.accuracy.training.trainers import MEGATRON
from rlplan.accuracy.training.zero import steady_bytes_by_count
from rlplan.memory.machine.allocator import reserved_bytes
from rlplan.memory.model.layer_cut import layer_cut
from rlplan.memory.model.logits import ROWS_ON_GPU, RowsAtOnce
from rlplan.memory.roles.gpu.process import add
from rlplan.memory.roles.gpu.rank import CAPPED
from rlplan.memory.trainers.micro_batch import IN_A_LAYER, Place, gather_buffer_bytes, layer_bytes
from rlplan.memory.trainers.shape import MicroBatchShape
from rlplan.memory.trainers.step_peak import UPDATE, MemorySnapshot, RankState, snapshots
from rlplan.units import GIB, ceil_div
from rlplan.vocabulary import Loss, MemoryKind

TYPICAL_RESERVED = re.compile(r"(?=.*\breserved\b).*\b(average|avg|mean|median|p\d\d)\b")
"""Units of a statistic over steps that is no peak."""


SCORE_BYTES = 4 * 4
"""In fp32 what softmax gave, both gradients, and their product."""


@predicts("train_peak")
def predict_peak(point: MeasuredPoint) -> Prediction:
    """The peak of a training step on one GPU; a mean over log points is what is there when a step ends."""
    if TYPICAL_RESERVED.search(point.measured.unit.lower()):
        raise CannotPredict("reserved memory of typical batches depends on their lengths, which are not stated")
    run = read_run(point)
    rank_state = rank_state_of(run)
    headless = replace(rank_state, head_gradient=0) if run.trainer is MEGATRON else rank_state
    found = [
        snapshot
        for shape in shapes_of(run)
        for snapshot in _snapshots(run, rank_state if shape.num_head_tokens else headless, shape)
    ]
    snapshot = max(found, key=lambda snapshot: sum(snapshot.values()))
    if run.trainer.holds_engine and run.statistic is Statistic.PROCESS:
        snapshot = snapshot | outside_tensors(point, run, run.layers[0].block)
    elif run.statistic is Statistic.PROCESS:
        asleep = int(run.settings.number(RESIDUAL, 0.0) * GIB)
        snapshot = snapshot | {MemoryKind.CONTEXT: context_bytes(point, run), MemoryKind.PROCESS: asleep}
    return in_its_unit(point, snapshot)


@predicts("train_steady")
def predict_steady(point: MeasuredPoint) -> Prediction:
    """What a rank holds between two steps, of a model that has no known shape by its number of parameters alone."""
    settings = RunSettings(point)
    try:
        model_of(point)
    except CannotPredict:
        if "params" not in settings:
            raise
        return in_its_unit(point, {MemoryKind.WEIGHTS: steady_bytes_by_count(settings)})
    return in_its_unit(point, dict(rank_state_of(read_run(point, has_passes=False)).resident))


def _snapshots(run: Run, rank_state: RankState, shape: MicroBatchShape) -> list[MemorySnapshot]:
    """The snapshots of a step by the statistic that was measured."""
    named = snapshots(rank_state, shape)
    for place in named.keys() & set(IN_A_LAYER):
        pairs = SCORE_BYTES * unfused_pairs(run) + mask_bytes(run)
        named[place] |= {MemoryKind.ACTIVATIONS: named[place].get(MemoryKind.ACTIVATIONS, 0) + pairs}
    if run.statistic is Statistic.MEAN_ALLOCATED:
        return [named[Place.STEP] | {MemoryKind.COMM_BUFFERS: 0, MemoryKind.LOGITS: 0}]
    if kept := gather_buffer_bytes(shape):
        named = {place: add(found, {MemoryKind.COMM_BUFFERS: kept}) for place, found in named.items()}
    if run.trainer.holds_engine:
        if num_updates(run.settings) == 1:  # moments come with the only step
            named |= {place: named[place] | {MemoryKind.OPTIMIZER: 0} for place in named.keys() - set(UPDATE)}
    elif run.statistic in (Statistic.RESERVED, Statistic.PROCESS):
        named[Place.LOSS] |= {MemoryKind.FRAGMENTATION: idle_bytes(named[Place.LOSS], shape)}
    return list(named.values())


def mask_bytes(run: Run) -> int:
    """Bytes of masks: of each kind of layer one of a byte a pair, and one layer's in 16 bits for its kernel.

    Source: transformers 5.11 masking_utils.py; torch's attention.cpp (`convert_boolean_attn_mask`).
    """
    if not passes_mask(run):
        return 0
    kinds = len({kind.block.head_dim for kind in run.layers})
    return (kinds + run.precision.compute) * run.tokens.sequences * run.tokens.length**2


def context_bytes(point: MeasuredPoint, run: Run) -> int:
    """What the driver shows beside torch's segments: the context, communicators. Raises: CannotPredict."""
    profile = gpu_of(point)
    if profile is None:
        raise CannotPredict("the GPU is not known, and with it the context that nvidia-smi counts")
    groups = profile.overheads.communicator_of_many.value if run.num_ranks > 1 else 0
    return profile.overheads.context.value + groups


def idle_bytes(snapshot: MemorySnapshot, shape: MicroBatchShape) -> int:
    """Bytes that torch has reserved and the loss does not use, when the peak is the loss's snapshot; later ones use
    them.
    """
    total = sum(snapshot.values())
    casts = shape.loss in UPCASTING and not shape.held_logit_bytes
    uncast = shape.element_bytes * shape.num_head_tokens * shape.vocab_size if casts else 0
    return reserved_bytes(total, max(layer_bytes(kind) for kind in shape.kinds), uncast) - total


UPCASTING = (Loss.PLAIN, Loss.SHIFTED, Loss.PARALLEL, Loss.MEGATRON)
"""Losses that make fp32 logits beside those of the model."""


def shapes_of(run: Run) -> tuple[MicroBatchShape, ...]:
    """What a rank computes in one micro-batch: of a pipeline its first stage, which holds the most micro-batches, and
    its last, which has the head."""
    trainer, num_tokens = run.trainer, run.tokens.num // (run.cp * run.ulysses)
    cut = layer_cut(
        run.tp, expert_shards(run), is_megatron=trainer is MEGATRON, has_sequence_parallel=run.splits_sequence
    )
    first, *others = cut.layers_of(replace(kind, num=ceil_div(kind.num, run.pp)) for kind in run.layers)
    shape = MicroBatchShape(
        block=first.block,
        num_layers=first.num,
        more=tuple(others),
        vocab_size=ceil_div(run.model.vocab_size, run.tp),
        num_tokens=num_tokens,
        num_head_tokens=num_tokens,
        element_bytes=run.precision.compute,
        recompute=run.recompute,
        modules=run.modules,
        loss=run.loss,
        offloads_activations=run.offloads_activations,
        frozen=run.adapters.frozen if run.adapters else None,
        repeats_keys=trainer.repeats_keys or passes_mask(run) or unfused_pairs(run) > 0,
        views_fused=trainer.views_fused,
        is_compiled=run.is_compiled,
        held_logit_bytes=trainer.held_logit_bytes,
        sequence_shards=cut.sequence_shards,
        gathers_again=cut.gathers_again,
        has_dropout=run.has_dropout,
        ulysses=run.ulysses,
        softcaps_logits=run.model.architecture in CAPPED,
        rows_at_once=_rows_at_once(run),
        residual_bytes=4 if trainer.upcasts_rest and run.quantization else 0,
    )
    if run.pp == 1:
        return (shape,)
    return replace(shape, num_head_tokens=0, loss=Loss.NONE, micro_batches_in_flight=run.num_in_flight), shape


def _rows_at_once(run: Run) -> RowsAtOnce:
    """Rows of logits in a chunk: as many as the trainer's tile holds in fp32; or as many as a chunk of words has."""
    if run.trainer.vocab_chunk:
        rows = ceil_div(run.tokens.num * run.trainer.vocab_chunk, run.model.vocab_size)
    elif run.trainer.logit_tile:
        rows = min(max(run.trainer.logit_tile // (4 * run.model.vocab_size), 128), 4096)
    else:
        return ROWS_ON_GPU
    return RowsAtOnce(rows, rows)


def in_its_unit(point: MeasuredPoint, snapshot: MemorySnapshot) -> Prediction:
    """A snapshot as the point's source would print it."""
    unit = unit_bytes(point)
    parts = {kind.value: size / unit for kind, size in snapshot.items() if size}
    return Prediction(sum(snapshot.values()) / unit, parts=parts)
