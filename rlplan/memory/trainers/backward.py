"""Gradients of a backward pass under DeepSpeed's ZeRO, parameter by parameter from the loss to the embedding.

Gradients appear as they are (stages 0 and 1), or pass through the reduction bucket, a flat copy while it is reduced,
and the rank's own accumulator (stages 2 and 3). All bytes count in addition to those that are resident.

In: a rank's states, the machine. Out: the moments among which the peak is found, for any number of tokens.
Left out: activations and logits (micro_batch.py), overlapped communication except its second bucket.
Source: DeepSpeed 0.19.8, stage_1_and_2.py (`reduce_independent_p_g_buckets_and_remove_grads`, `reduce_ipg_grads`),
stage3.py (`__add_grad_to_ipg_bucket`, `__avg_scatter_grads`), partition_parameters.py (`_all_gather_dtype`).
"""

from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache

from rlplan.memory.machine.machine import Machine
from rlplan.memory.trainers.micro_batch import Moment, Place
from rlplan.memory.trainers.optimizers import eight_bit_step_bytes
from rlplan.memory.trainers.zero import ZeroStates
from rlplan.spec.model import Component, Parameter
from rlplan.units import ceil_div

ALL_REDUCE_NUMEL = 500_000_000
"""Elements that stage 0 reduces at a time. Source: DeepSpeed 0.19.8, engine.py, `MEMORY_OPT_ALLREDUCE_SIZE`."""
IN_MLP = (Component.MLP, Component.EXPERTS, Component.SHARED_EXPERTS, Component.ROUTER)


class ZeroWalk:
    """The gradients of one rank. reduces_in_step: rlplan's runtime reduces stage 1 in the step, not in the passes."""

    def __init__(self, states: ZeroStates, machine: Machine, *, reduces_in_step: bool = True) -> None:
        self.states, self.settings, self.machine = states, states.settings, machine
        self.reduces_in_step = reduces_in_step
        self.element_bytes = states.settings.weight_bytes
        self.has_adapters = bool(states.frozen)
        self._moments: dict[tuple[bool, bool], tuple[Moment, ...]] = {}

    def moments(self, *, accumulates: bool, is_first: bool) -> tuple[Moment, ...]:
        """The moments that may be the largest.

        accumulates: gradients of an earlier micro-batch exist already. is_first: before the first optimizer step.
        """
        key = accumulates, is_first
        if key not in self._moments:
            passes = self._walk_passes(_start_reduction(self, accumulates=accumulates, is_first=is_first))
            self._moments[key] = (*_keep_outermost(passes), *self.update)
        return self._moments[key]

    @property
    def table_bytes(self) -> int:
        """Bytes of the gradient of the head, or of the embedding that is tied to it."""
        return self.element_bytes * self._table.numel if self._table else 0

    @cached_property
    def kept_bucket_bytes(self) -> int:
        """Bytes of the reduction bucket that stage 3 keeps between passes.

        On a CPU host only the part that a whole backward pass fills counts. Source: stage3.py,
        `_setup_for_real_optimizer`.
        """
        if self.settings.stage < 3:
            return 0
        limit = self.settings.reduce_bucket_size
        if not self.machine.counts_written:
            return self.states.bucket_bytes()
        return self.element_bytes * min(limit, sum(p.numel for p in self.states.trainable if p.numel <= limit))

    def gathered_bytes(self, parameter: Parameter | None) -> int:
        """Bytes of gathered weights while a tensor is in use in stage 3, a collective's copies included.

        Counts: the tensor; with adapters the largest frozen one in or outside the layers; a whole layer where ZeRO
        prefetches; tensors that ZeRO keeps for reuse (`ZeroStates.gathered_bytes`).
        """
        if parameter is None or self.settings.stage < 3:
            return 0
        in_layer = parse_layer(parameter.name) is not None
        used = self._largest_frozen[in_layer] if self.has_adapters else parameter.numel
        if in_layer and self.settings.prefetch_bucket_size:
            used = self._layer_numel
        return self._sum_gathered(used if used > self.settings.persistence_threshold else 0)

    @cached_property
    def fetched_ahead(self) -> int:
        """Bytes of gathered weights while no tensor is in use."""
        return self._sum_gathered(0)

    def _sum_gathered(self, used_numel: int) -> int:
        return self.machine.collective_copies * self.states.gathered_bytes(used_numel)

    @cached_property
    def _largest_frozen(self) -> dict[bool, int]:
        """Elements of the largest frozen tensor, by whether it is in a layer."""
        largest = {True: 0, False: 0}
        for parameter in self.states.frozen:
            in_layer = parse_layer(parameter.name) is not None
            largest[in_layer] = max(largest[in_layer], parameter.numel)
        return largest

    @cached_property
    def _layer_numel(self) -> int:
        """Mean elements of a layer, frozen tensors included."""
        parameters = (*self.states.trainable, *self.states.frozen)
        numels = [(parse_layer(parameter.name), parameter.numel) for parameter in parameters]
        inside = [(layer, numel) for layer, numel in numels if layer is not None]
        return sum(numel for _, numel in inside) // max(1, len(dict(inside)))

    @cached_property
    def _trained(self) -> list[tuple[Parameter, int | None]]:
        return [(parameter, parse_layer(parameter.name)) for parameter in self.states.trainable]

    @cached_property
    def _table(self) -> Parameter | None:
        """The vocabulary table whose gradient comes first; None with frozen weights."""
        outside = [] if self.has_adapters else [parameter for parameter, layer in self._trained if layer is None]
        heads = [parameter for parameter in outside if parameter.component is Component.HEAD]
        return max(heads or outside, key=lambda parameter: parameter.numel, default=None)

    def _walk_passes(self, reduction: "_WholeGradients") -> Iterator[Moment]:
        """The moments of a backward pass, parameter by parameter from the head to the embedding."""
        num_layers = max((layer for _, layer in self._trained if layer is not None), default=0) + 1
        table, waiting = self._table, self.table_bytes
        is_tied = table is not None and table.component is not Component.HEAD
        gathered = self.gathered_bytes(table or next(iter(self.states.frozen), None))
        yield Moment(Place.LOSS, num_layers, reduction.accumulated, reduction.buffers + gathered)
        yield Moment(Place.HEAD, num_layers, reduction.accumulated + waiting, reduction.buffers + gathered)
        waiting = waiting if is_tied else 0  # the gradient of an untied head is reduced at once
        is_before_layers = True
        for parameter, layer in reversed(self._trained):  # autograd visits parameters in reverse
            if layer is not None:
                is_before_layers = False
                in_mlp = self.has_adapters or parameter.component in IN_MLP
                place = Place.MLP if in_mlp else Place.ATTENTION
                yield from reduction.add(parameter, place, layer + 1, waiting)
            elif is_before_layers:
                yield from reduction.add(parameter, Place.BELOW_HEAD, num_layers, waiting)
            elif parameter is table:
                # The embedding's own gradient is dense too. Autograd adds it to the waiting one, into a third tensor.
                yield Moment(Place.TABLE, 0, reduction.accumulated + 3 * waiting, reduction.buffers)
                waiting = 0
                yield from reduction.add(parameter, Place.TABLE, 0, 0)
            else:
                yield from reduction.add(parameter, Place.TABLE, 0, waiting)
        yield from reduction.flush(Place.TABLE, 0, 0)

    @cached_property
    def update(self) -> tuple[Moment, ...]:
        """The moments of the optimizer's step, in order; they need no walk through the layers.

        Reduction: stages 0 and 1 reduce all gradients here, through flat copies.
        Flattening: the gradients and copies of this rank's partition, before Adam's moments first appear.
        Step: the copy in the master's type, beside the moments.
        Gathering: gloo gathers all partitions into a buffer of the parameters' size before it copies them out.
        """
        states, settings = self.states, self.settings
        if settings.offloads_optimizer:
            return (Moment(Place.STEP, 0, 0, self._gathered_at_once()),)
        kept_gradients, copies = states.kept_gradient_bytes(), states.step_copy_bytes()
        stepped_numel = (
            min(states.partition_numel, settings.sub_group_size) if settings.stage == 3 else states.partition_numel
        )
        step_bytes = settings.master_bytes * stepped_numel if copies else 0
        if not self.machine.steps_in_place:
            step_bytes += eight_bit_step_bytes(settings.optimizer, states.stepped_numels())
        flat = states.gradient_bytes() - kept_gradients
        return (
            Moment(Place.REDUCE, 0, states.backward_gradient_bytes() - kept_gradients, self._reduced_at_once()),
            Moment(Place.REDUCE, 0, flat, copies),
            Moment(Place.STEP, 0, flat if settings.stage == 0 else 0, step_bytes),
            Moment(Place.STEP, 0, 0, self._gathered_at_once()),
        )

    def _reduced_at_once(self) -> int:
        """Bytes of the copies in which stages 0 and 1 reduce their gradients, inside the step.

        Stage 1's bucket replaces the gradients that it has copied, so only the flat copy of the bucket is additional.
        """
        settings, e = self.settings, self.element_bytes
        if settings.stage == 0:
            return e * min(self.states.num_trainable, ALL_REDUCE_NUMEL)
        if settings.stage > 1 or not self.reduces_in_step:
            return 0
        if not self.machine.counts_written:
            return self.states.bucket_bytes()
        return e * min(self.states.num_trainable, settings.reduce_bucket_size)

    def _gathered_at_once(self) -> int:
        """Bytes in addition to the new weights of stages 1 and 2 while these are gathered."""
        settings = self.settings
        if settings.stage not in (1, 2) or settings.num_ranks == 1:
            return 0
        copies = self.machine.collective_copies - 1
        return copies * self.element_bytes * self.states.partition_numel * settings.num_ranks


class _WholeGradients:
    """Stages 0 and 1: gradients stay whole until the step, and those of later micro-batches are added in place.

    On a GPU stage 1 keeps its bucket allocated. Trainers other than rlplan's runtime reduce it in the passes, through
    a copy.
    """

    def __init__(self, walk: ZeroWalk, *, accumulates: bool) -> None:
        self.walk, self.element_bytes, self.accumulates = walk, walk.element_bytes, accumulates
        states, offloads = walk.states, walk.settings.offloads_optimizer
        self.accumulated = 0
        if accumulates and not offloads:
            self.accumulated = states.backward_gradient_bytes() - states.kept_gradient_bytes()
        self.buffers = 0 if walk.machine.counts_written else states.bucket_bytes() * (1 if walk.reduces_in_step else 2)

    def add(self, parameter: Parameter, place: Place, layers: int, waiting: int) -> Iterator[Moment]:
        """The moments while one parameter's gradient arrives. waiting: bytes of a tied table's waiting gradient."""
        own = parameter.numel * self.element_bytes
        yield Moment(place, layers, self.accumulated + own + waiting, self.buffers)
        if not self.accumulates:
            self.accumulated += own

    def flush(self, place: Place, layers: int, waiting: int) -> Iterator[Moment]:
        """The moment at the end of the pass. Nothing is reduced before the step."""
        yield Moment(place, layers, self.accumulated + waiting, self.buffers)


class _BucketedGradients(_WholeGradients):
    """Stages 2 and 3: gradients pass through the bucket and its flat copy into the accumulator.

    Stage 3 accumulates in a flat buffer that it keeps, and gathers a layer's tensors one after the other.
    """

    def __init__(self, walk: ZeroWalk, *, accumulates: bool, is_first: bool) -> None:
        super().__init__(walk, accumulates=accumulates)
        self.limit, self.is_flat = walk.settings.reduce_bucket_size, walk.settings.stage == 3
        accumulates_here = not (self.is_flat or walk.settings.offloads_optimizer)
        self.owned = {parameter.name for parameter in walk.states.owned} if accumulates_here else set[str]()
        self.used, self.owned_in_bucket, self.oversized = 0, 0, 0
        self.overlaps, self.in_flight = self.is_flat and walk.settings.overlaps, 0
        self.resident = walk.kept_bucket_bytes
        self.touched = self.resident if accumulates or not is_first else 0
        if not walk.machine.counts_written:
            self.touched = walk.states.bucket_bytes()
        self.buffers = self.touched - self.resident

    def add(self, parameter: Parameter, place: Place, layers: int, waiting: int) -> Iterator[Moment]:
        """The moments while one parameter's gradient arrives. waiting: bytes of a tied table's waiting gradient."""
        own = parameter.numel * self.element_bytes
        if self.used and self.used + parameter.numel > self.limit:
            yield from self.flush(place, layers, waiting + own)
        self.used += parameter.numel
        self.owned_in_bucket += own if parameter.name in self.owned else 0
        if parameter.numel <= self.limit:
            self.touched = max(self.touched, self.used * self.element_bytes)
        else:
            self.oversized += own
        self.buffers = self.touched - self.resident
        gathered = self.walk.gathered_bytes(parameter)
        yield Moment(place, layers, self.accumulated + own + waiting, self.buffers + gathered + self.in_flight)

    def flush(self, place: Place, layers: int, waiting: int) -> Iterator[Moment]:
        """The moments while the bucket is reduced through a flat copy, and after its owned part was accumulated.

        Stage 3 scatters the flat copy into parts, for which gloo needs another copy. With overlapped communication all
        of them stay while the next gradients arrive. Source: DeepSpeed 0.19.8, stage3.py (`param_reduce_events`).
        """
        flat, ranks = self.used * self.element_bytes, self.walk.settings.num_ranks
        copies = (self.walk.machine.collective_copies - 1) * (ranks > 1)
        parts = ceil_div(flat, ranks) + flat * copies if self.is_flat else 0
        beside = self.buffers + self.walk.fetched_ahead + self.in_flight
        yield Moment(place, layers, self.accumulated + waiting + self.oversized, beside + flat + parts)
        self.accumulated += self.owned_in_bucket
        yield Moment(place, layers, self.accumulated + waiting + self.oversized, beside)
        self.in_flight = flat + parts + self.oversized if self.overlaps else 0
        self.used, self.owned_in_bucket, self.oversized = 0, 0, 0


def _start_reduction(walk: ZeroWalk, *, accumulates: bool, is_first: bool) -> _WholeGradients:
    if walk.settings.stage >= 2:
        return _BucketedGradients(walk, accumulates=accumulates, is_first=is_first)
    return _WholeGradients(walk, accumulates=accumulates)


def _keep_outermost(moments: Iterable[Moment]) -> Iterator[Moment]:
    """The moments that can be the largest of their place, whatever one layer's activations take.

    Activations are linear in the number of saved layers, so only the upper convex hull of bytes over layers counts.
    """
    by_place: dict[Place, dict[int, tuple[int, Moment]]] = {}
    for moment in moments:
        place, layers, gradients, buffers = moment
        total = gradients + buffers
        at_layer = by_place.setdefault(place, {})
        if layers not in at_layer or total > at_layer[layers][0]:
            at_layer[layers] = total, moment
    for at_layer in by_place.values():
        hull: list[tuple[int, int, Moment]] = []
        for layers in sorted(at_layer):
            right = layers, *at_layer[layers]
            while len(hull) > 1 and not _is_above(hull[-2], hull[-1], right):
                hull.pop()
            hull.append(right)
        yield from (moment for _, _, moment in hull)


def _is_above(left: tuple[int, int, Moment], middle: tuple[int, int, Moment], right: tuple[int, int, Moment]) -> bool:
    """Whether the middle moment lies above the line between the others. Each is (layers, bytes, moment)."""
    return (middle[1] - left[1]) * (right[0] - left[0]) > (right[1] - left[1]) * (middle[0] - left[0])


@lru_cache(maxsize=1 << 16)
def parse_layer(name: str) -> int | None:
    """The index of a parameter's layer, from its name; None outside the layers.

    >>> parse_layer("model.layers.3.mlp.up_proj.weight"), parse_layer("lm_head.weight")
    (3, None)
    """
    return next((int(part) for part in name.split(".") if part.isdigit()), None)
