"""The memory peak of one training step on one rank: snapshots at each place of the passes and of the optimizer's step.

During the backward pass activations shrink and gradients grow, both linearly except for buckets (backward.py). So the
peak is at the loss, at the head's gradient, in the top or the bottom layer (or where a bucket first fills), in the
embedding, or in the optimizer's step.

In: the rank's states and gradients (RankState), its micro-batch (MicroBatchShape). Out: bytes by kind at the largest
moment of each place. Trainers and machines differ only in RankState.
Left out: allocator effects (machine.py), pipeline schedules (the micro-batches in flight are a field of the shape).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rlplan.memory.trainers.backward import ZeroWalk
from rlplan.memory.trainers.micro_batch import CHUNKED_LOSSES, MicroBatchBytes, Moment, Place
from rlplan.memory.trainers.shape import MicroBatchShape
from rlplan.vocabulary import MemoryKind

MemorySnapshot = dict[MemoryKind, int]
UPDATE = (Place.REDUCE, Place.STEP)
"""Places in the optimizer's step; all others are in the passes."""


@dataclass(frozen=True)
class RankState:
    """Bytes of one rank that do not depend on the tokens."""

    resident: Mapping[MemoryKind, int]
    """Bytes between steps, by kind."""
    gradients: int = 0
    """Bytes of gradients at the end of the backward pass."""
    kept_gradients: int = 0
    """Bytes of gradients that are allocated all the time."""
    head_gradient: int = 0
    """Bytes of the head's gradient, the first to come, as far as it is part of `gradients`."""
    layer_gradient: int = 0
    """Bytes of one layer's gradient, as far as it is part of `gradients`."""
    table_gradient: int = 0
    """Bytes of the embedding's gradient, the last to come, as far as it is part of `gradients`."""
    is_tied: bool = False
    """Whether the embedding's gradient is added to the head's, which waits for it."""
    passing: int = 0
    """Bytes of gathered weights and buckets inside the passes."""
    layer_passing: int = 0
    """Additional bytes of gathered weights and buckets while layers go through their backward pass."""
    accumulates: bool = False
    """Whether gradients of an earlier micro-batch exist already."""
    walk: ZeroWalk | None = None
    """Gradients parameter by parameter, which replace the fields from `gradients` on."""
    kept_bucket: int = 0
    """Bytes of the reduction bucket that stays between the passes, as far as the machine counts it."""

    def moments(self, num_layers: int, *, is_first: bool = False) -> tuple[Moment, ...]:
        """The moments among which the peak is found."""
        if self.walk is not None:
            return self.walk.moments(accumulates=self.accumulates, is_first=is_first)
        resident = self.resident.get(MemoryKind.GRADIENTS, 0)
        # Gradients at the loss: those of earlier micro-batches, or buffers that are never freed.
        before = self.gradients if self.accumulates else self.kept_gradients
        # Gradients below the head. A tied head's gradient waits for the embedding's, beside the accumulated ones.
        below = max(before + self.head_gradient * self.is_tied, self.kept_gradients + self.head_gradient)
        # Gradients in the bottom layer: all except its own and the embedding's, which come later.
        late = self.layer_gradient + (0 if self.is_tied else self.table_gradient)
        bottom = below if self.accumulates else max(below, self.gradients - late)
        # The embedding's gradient is a second tensor until it is added to the one that exists.
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
        """The moments of the optimizer's step."""
        if self.walk is not None:
            return self.walk.update
        return tuple(moment for moment in self.moments(0) if moment.place in UPDATE)


def take_snapshots(
    rank_state: RankState,
    shape: MicroBatchShape,
    *,
    resident: Mapping[MemoryKind, int] | None = None,
    is_first: bool = False,
) -> dict[Place, MemorySnapshot]:
    """Bytes by kind at the largest moment of each place.

    resident: replaces the rank's own resident bytes. is_first: before the first optimizer step.
    """
    base = rank_state.resident if resident is None else resident
    return _take_snapshots(rank_state, shape, rank_state.moments(shape.total_layers, is_first=is_first), base)


def _take_snapshots(
    rank_state: RankState, shape: MicroBatchShape, moments: Iterable[Moment], base: Mapping[MemoryKind, int]
) -> dict[Place, MemorySnapshot]:
    sizes = MicroBatchBytes(shape)
    # A chunked loss computes the head's gradient once per chunk and adds it to the sum, so two exist.
    second_gradient = rank_state.head_gradient if shape.loss in CHUNKED_LOSSES else 0
    largest: dict[Place, tuple[int, int, int, int]] = {}
    for moment in moments:
        activations = sizes.activations(moment.place, moment.layers)
        gradients = moment.gradients + (second_gradient if moment.place is Place.HEAD else 0)
        total = activations + gradients + moment.buffers
        if moment.place not in largest or total > largest[moment.place][0]:
            largest[moment.place] = total, activations, gradients, moment.buffers
    return {
        place: _build_snapshot(base, activations, sizes.logits(place), gradients, buffers)
        for place, (_, activations, gradients, buffers) in largest.items()
    }


def _build_snapshot(
    resident: Mapping[MemoryKind, int], activations: int, logits: int, gradients: int, buffers: int
) -> MemorySnapshot:
    snapshot = dict(resident)
    snapshot[MemoryKind.ACTIVATIONS] = activations
    snapshot[MemoryKind.LOGITS] = logits
    snapshot[MemoryKind.GRADIENTS] = snapshot.get(MemoryKind.GRADIENTS, 0) + gradients
    snapshot[MemoryKind.COMM_BUFFERS] = snapshot.get(MemoryKind.COMM_BUFFERS, 0) + buffers
    return {kind: size for kind, size in snapshot.items() if size}


def find_largest(candidates: Iterable[MemorySnapshot]) -> MemorySnapshot:
    """The snapshot with the most bytes."""
    return max(candidates, key=lambda snapshot: sum(snapshot.values()))


def find_passes_peak(by_place: Mapping[Place, MemorySnapshot]) -> MemorySnapshot:
    """The largest snapshot of the forward and backward pass."""
    return find_largest(snapshot for place, snapshot in by_place.items() if place not in UPDATE)


def find_update_peak(rank_state: RankState, shape: MicroBatchShape) -> MemorySnapshot:
    """The largest snapshot of the optimizer's step."""
    return find_largest(_take_snapshots(rank_state, shape, rank_state.update, rank_state.resident).values())
