"""The peak of one training step of one rank: what it holds at each place of the passes and of the optimizer's step.

In: what the rank holds and how its gradients come (RankState), its micro-batch (MicroBatchShape). Out: bytes by kind at
the worst moment of each place. One model for every trainer and machine; what differs is in RankState.
Left out: allocator effects (machine.py), pipelines (tokens in flight are a field of the shape).

Going back through the layers, activations go and gradients come: both linearly, but for buckets (backward.py). So the
peak is at the loss, at the head's gradient, in the top or the bottom layer (or where a bucket is first full), in the
embedding, or in the optimizer's step.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rlplan.memory.trainers.micro_batch import CHUNKED_LOSSES, HeldAt, Place
from rlplan.memory.trainers.shape import MicroBatchShape
from rlplan.vocabulary import MemoryKind

MemorySnapshot = dict[MemoryKind, int]
UPDATE = (Place.REDUCE, Place.STEP)
"""Places in the optimizer's step; all others are in the passes."""


class Moment(NamedTuple):
    """One moment of a step, without what depends on the tokens. A search makes hundreds of thousands."""

    place: Place
    layers: int
    """Whose activations still wait, the one that the moment is in included."""
    gradients: int
    """Bytes beside what is resident."""
    buffers: int
    """Bytes of gathered weights, buckets and copies, beside what is resident; below zero where less than usual is."""


class GradientWalk(Protocol):
    """How a trainer's gradients come, where that is not in equal steps."""

    def moments(self, *, accumulates: bool, is_first: bool) -> tuple[Moment, ...]:
        """The moments that may be the largest. accumulates: gradients of an earlier micro-batch are there already.
        is_first: before the first step.
        """
        ...

    @property
    def update(self) -> tuple[Moment, ...]:
        """Those of the optimizer's step, for which no gradient is followed."""
        ...


@dataclass(frozen=True)
class RankState:
    """Bytes of one rank that do not depend on the tokens."""

    resident: Mapping[MemoryKind, int]
    """Between steps, by kind."""
    gradients: int = 0
    """When the backward pass ends."""
    kept_gradients: int = 0
    """The part of them that is there all the time."""
    head_gradient: int = 0
    """Of the vocabulary table, the first to come, as far as it is part of `gradients`."""
    layer_gradient: int = 0
    """Of one layer, as far as it is part of `gradients`."""
    table_gradient: int = 0
    """Of the embedding, the last to come, as far as it is part of `gradients`."""
    is_tied: bool = False
    """The embedding's gradient is added to the head's, which has waited for it."""
    passing: int = 0
    """Gathered weights and buckets inside the passes."""
    layer_passing: int = 0
    """The same that comes with the layers' backward."""
    accumulates: bool = False
    """This micro-batch is not the first, so that all gradients are there before it."""
    walk: GradientWalk | None = None
    """How gradients come, instead of the fields from `gradients` on."""
    kept_bucket: int = 0
    """Bytes of the reduction bucket that stays between the passes, as far as they count on the machine."""

    def moments(self, num_layers: int, *, is_first: bool = False) -> tuple[Moment, ...]:
        """The moments of which one is the peak."""
        if self.walk is not None:
            return self.walk.moments(accumulates=self.accumulates, is_first=is_first)
        resident = self.resident.get(MemoryKind.GRADIENTS, 0)
        before = self.gradients if self.accumulates else self.kept_gradients
        below = max(before + self.head_gradient * self.is_tied, self.kept_gradients + self.head_gradient)
        late = self.layer_gradient + (0 if self.is_tied else self.table_gradient)
        bottom = below if self.accumulates else max(below, self.gradients - late)
        meeting = self.table_gradient if self.is_tied or self.accumulates else 0
        inside = self.passing + self.layer_passing
        return tuple(
            Moment(place, layers, max(0, gradients - resident), buffers)
            for place, layers, gradients, buffers in (
                (Place.LOSS, num_layers, before, self.passing),
                (Place.HEAD, num_layers, before + self.head_gradient, self.passing),
                (Place.MLP, num_layers, below, inside),
                (Place.MLP, 1, bottom, inside),
                (Place.TABLE, 0, self.gradients + meeting, self.passing),
                (Place.STEP, 0, self.gradients, 0),
            )
        )

    @property
    def update(self) -> tuple[Moment, ...]:
        """The moments of the optimizer's step alone."""
        if self.walk is not None:
            return self.walk.update
        return tuple(moment for moment in self.moments(0) if moment.place in UPDATE)


def snapshots(
    rank_state: RankState,
    shape: MicroBatchShape,
    *,
    resident: Mapping[MemoryKind, int] | None = None,
    is_first: bool = False,
) -> dict[Place, MemorySnapshot]:
    """Bytes by kind at the largest moment of each place. resident: instead of the rank's own. is_first: before the
    first step.
    """
    base = rank_state.resident if resident is None else resident
    return _snapshots(rank_state, shape, rank_state.moments(shape.total_layers, is_first=is_first), base)


def _snapshots(
    rank_state: RankState, shape: MicroBatchShape, moments: Iterable[Moment], base: Mapping[MemoryKind, int]
) -> dict[Place, MemorySnapshot]:
    held = HeldAt(shape)
    again = rank_state.head_gradient if shape.loss in CHUNKED_LOSSES else 0  # each chunk's is added to the sum
    largest: dict[Place, tuple[int, int, int, int]] = {}
    for moment in moments:
        activations = held.activations(moment.place, moment.layers)
        gradients = moment.gradients + (again if moment.place is Place.HEAD else 0)
        total = activations + gradients + moment.buffers
        if moment.place not in largest or total > largest[moment.place][0]:
            largest[moment.place] = total, activations, gradients, moment.buffers
    return {
        place: _snapshot(base, activations, held.logits(place), gradients, buffers)
        for place, (_, activations, gradients, buffers) in largest.items()
    }


def _snapshot(
    resident: Mapping[MemoryKind, int], activations: int, logits: int, gradients: int, buffers: int
) -> MemorySnapshot:
    snapshot = dict(resident)
    snapshot[MemoryKind.ACTIVATIONS] = activations
    snapshot[MemoryKind.LOGITS] = logits
    snapshot[MemoryKind.GRADIENTS] = snapshot.get(MemoryKind.GRADIENTS, 0) + gradients
    snapshot[MemoryKind.COMM_BUFFERS] = snapshot.get(MemoryKind.COMM_BUFFERS, 0) + buffers
    return {kind: size for kind, size in snapshot.items() if size}


def largest_of(found: Iterable[MemorySnapshot]) -> MemorySnapshot:
    """The largest of some snapshots."""
    return max(found, key=lambda snapshot: sum(snapshot.values()))


def passes_peak(found: Mapping[Place, MemorySnapshot]) -> MemorySnapshot:
    """The largest snapshot of the forward and backward pass."""
    return largest_of(snapshot for place, snapshot in found.items() if place not in UPDATE)


def update_peak(rank_state: RankState, shape: MicroBatchShape) -> MemorySnapshot:
    """The largest snapshot of the optimizer's step."""
    return largest_of(_snapshots(rank_state, shape, rank_state.update, rank_state.resident).values())
