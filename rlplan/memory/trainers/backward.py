"""The peak inside one mini-batch's forward and backward passes: a walk from the loss to the embedding.

In: a rank's states and the sizes of its largest micro-batch. Out: bytes by kind at the largest moment.
Left out: anything that overlaps.

As the backward pass goes down the layers, activations are freed and gradients appear: as they are (stages 0 and 1), or
in the reduction bucket, in a flat copy while it is reduced, and in this rank's own accumulator (stages 2 and 3). With
several micro-batches the last one holds the accumulated gradients beside the new ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlplan.memory.model.activations import (
    checkpoint_bytes,
    exchanged_bytes,
    head_saved_bytes,
    layer_backward_bytes,
    layer_saved_bytes,
    mlp_freed_bytes,
)
from rlplan.memory.model.block_families import block_of
from rlplan.memory.model.frozen import frozen_layer_bytes
from rlplan.memory.model.logits import logits_bytes, probability_slice_bytes
from rlplan.memory.roles.gpu.states import frozen_of
from rlplan.memory.trainers.training import TrainedRank
from rlplan.spec.model import ModelSpec, Parameter
from rlplan.units import ceil_div
from rlplan.vocabulary import MemoryKind


@dataclass(frozen=True)
class MicroBatch:
    """Sizes of the largest micro-batch in tokens, and how many micro-batches a rank's share has.

    has_entropy_gradient: the backward pass holds some rows' probabilities beside their logits.
    """

    num_tokens: int
    num_response_tokens: int
    count: int
    has_entropy_gradient: bool = False


MemorySnapshot = dict[MemoryKind, int]


def forward_backward_peak(rank: TrainedRank, micro: MicroBatch, *, is_first: bool = False) -> MemorySnapshot:
    """Bytes by kind, beside weights, master weights and optimizer, at the largest moment of the passes.

    is_first: before the first step, when stage 3's bucket is not touched yet.
    Source: DeepSpeed 0.19.8, stage_1_and_2.py (`reduce_independent_p_g_buckets_and_remove_grads`, `reduce_ipg_grads`).
    """
    return max(_walk(rank, micro, is_first=is_first and micro.count == 1), key=lambda snapshot: sum(snapshot.values()))


def _walk(rank: TrainedRank, micro: MicroBatch, *, is_first: bool) -> Iterator[MemorySnapshot]:
    if rank.adapters:
        yield from _walk_adapters(rank, micro)
        return
    model, e = rank.model, rank.element_bytes
    accumulated = rank.states.backward_gradient_bytes() if micro.count > 1 else rank.states.kept_gradient_bytes()
    layers = _Layers(rank, micro.num_tokens)
    head = head_saved_bytes(model, micro.num_tokens, micro.num_response_tokens, e)
    logits = logits_bytes(micro.num_response_tokens, model.head_width, e)
    slices = probability_slice_bytes(micro.num_response_tokens, model.head_width)
    reduction = _reduction_of(rank, accumulates=micro.count > 1)
    if is_first:
        reduction.touched = 0
    table = _vocabulary_table(model)
    whole = gathered_tensor_bytes(rank, table)
    # End of the forward pass: everything saved, the last rows of logits and their exponentials.
    yield _snapshot(layers.saved + head, logits + slices, accumulated, whole + reduction.touched)
    # The head's gradient. A tied table waits for the embedding's share; an untied one is reduced at once.
    waiting = table.numel * e
    beside = slices if micro.has_entropy_gradient else 0
    yield _snapshot(layers.saved + head, logits + beside, accumulated + waiting, whole + reduction.touched)
    if not model.has_tied_embeddings:
        yield from _with_activations(reduction.add(table), layers.saved, 0, accumulated)
        waiting = 0
    last_norm = next(parameter for parameter in model.parameters if parameter.name == "model.norm.weight")
    yield from _with_activations(reduction.add(last_norm), layers.saved, waiting, accumulated)
    for layer in reversed(range(model.num_layers)):
        for parameter in reversed(_layer_parameters(model, layer)):
            activations = layers.at(layer, attention_only=".mlp." not in parameter.name)
            yield from _with_activations(reduction.add(rank.held(parameter)), activations, waiting, accumulated)
    table_bytes = _embedding(model).numel * e
    if model.has_tied_embeddings:
        # The embedding's own gradient is dense too; autograd adds it to the one that waits, into a third tensor.
        held = reduction.accumulator + accumulated + 3 * table_bytes
        yield _snapshot(0, 0, held, reduction.touched)
    yield from _with_activations(reduction.add(_embedding(model)), 0, 0, accumulated)
    yield from _with_activations(reduction.flush(), 0, 0, accumulated)


def _walk_adapters(rank: TrainedRank, micro: MicroBatch) -> Iterator[MemorySnapshot]:
    """The same where adapters alone are trained: no table has a gradient, and only adapters' are reduced."""
    model, e = rank.model, rank.element_bytes
    accumulated = rank.states.backward_gradient_bytes() if micro.count > 1 else rank.states.kept_gradient_bytes()
    layers = _Layers(rank, micro.num_tokens)
    head = head_saved_bytes(model, micro.num_tokens, micro.num_response_tokens, e)
    logits = logits_bytes(micro.num_response_tokens, model.head_width, e)
    slices = probability_slice_bytes(micro.num_response_tokens, model.head_width)
    reduction = _reduction_of(rank, accumulates=micro.count > 1)
    yield _snapshot(layers.saved + head, logits + slices, accumulated, reduction.touched)
    for layer in reversed(range(model.num_layers)):
        prefix = f"model.layers.{layer}."
        for parameter in reversed([adapter for adapter in rank.adapters if adapter.name.startswith(prefix)]):
            activations = layers.at(layer, attention_only=False)
            yield from _with_activations(reduction.add(parameter), activations, 0, accumulated)
    yield from _with_activations(reduction.flush(), 0, 0, accumulated)


def _adapted_layer_bytes(rank: TrainedRank, num_tokens: int) -> int:
    """Bytes that a frozen layer with adapters saves: inputs of A in the model's type, and what A gives B, e*r each."""
    model, e = rank.model, rank.element_bytes
    first = [a for a in rank.adapters if a.name.startswith("model.layers.0.") and ".lora_A." in a.name]
    beside = replace(frozen_of(rank.adapters), adapter_bytes=e, more_token_bytes=e * sum(a.shape[0] for a in first))
    return frozen_layer_bytes(block_of(model), beside, num_tokens, e)


def gathered_tensor_bytes(rank: TrainedRank, parameter: Parameter) -> int:
    """Bytes of one tensor while ZeRO-3 has it whole, and of what gloo receives it in.

    Counts: 2 * e * its elements; nothing in other stages, on one rank, or for what stays gathered anyway.
    Source: DeepSpeed 0.19.8, partition_parameters.py (`_all_gather_dtype`); gloo's all-gather copies out of a buffer.
    """
    settings = rank.states.settings
    if settings.stage < 3 or settings.num_ranks == 1 or parameter.numel <= settings.persistence_threshold:
        return 0
    return 2 * rank.element_bytes * parameter.numel


def kept_bucket_bytes(rank: TrainedRank) -> int:
    """Bytes of the reduction bucket that stage 3 keeps between passes, as far as they were ever touched.

    Counts: e * the elements of it that a whole backward pass fills. Source: stage3.py, `_setup_for_real_optimizer`.
    """
    settings = rank.states.settings
    if settings.stage < 3:
        return 0
    fitting = sum(p.numel for p in rank.states.trainable if p.numel <= settings.reduce_bucket_size)
    return rank.element_bytes * min(settings.reduce_bucket_size, fitting)


class _Layers:
    """What the decoder layers keep for the backward pass, and what is in flight inside it."""

    def __init__(self, rank: TrainedRank, num_tokens: int) -> None:
        model, e = rank.model, rank.element_bytes
        self.num_layers = model.num_layers
        adapted = _adapted_layer_bytes(rank, num_tokens) if rank.adapters else 0
        self.one = adapted or layer_saved_bytes(model, num_tokens, e, rank.tp)
        self.one += exchanged_bytes(block_of(model), rank.ulysses, num_tokens, e)
        self.kept = checkpoint_bytes(block_of(model), num_tokens, e) if rank.recomputes_layers else self.one
        self.saved = self.kept * model.num_layers
        self.in_flight = layer_backward_bytes(model, num_tokens, e, rank.tp)
        if rank.adapters:  # its output and a scaled copy, at most as wide as the MLP
            self.in_flight += 2 * e * num_tokens * model.intermediate_size
        if rank.dequantised:  # a weight of the base as the matmul needs it, and a copy of the output
            self.in_flight += e * (rank.dequantised + num_tokens * model.intermediate_size)
        self.freed = mlp_freed_bytes(model, num_tokens, e, rank.tp)

    def at(self, layer: int, *, attention_only: bool) -> int:
        """Bytes while the backward pass is inside a layer: the lower ones, its own, less its MLP once that is done."""
        return self.kept * layer + self.one + self.in_flight - (self.freed if attention_only else 0)


class _Kept:
    """Stages 0 and 1: gradients stay as they come until the step; later ones are added to them in place."""

    def __init__(self, rank: TrainedRank) -> None:
        self.element_bytes = rank.element_bytes
        self.accumulator, self.touched = 0, 0

    def add(self, parameter: Parameter) -> Iterator[tuple[int, int]]:
        """(gradient bytes, communication bytes) while one parameter's gradient arrives."""
        self.accumulator += parameter.numel * self.element_bytes
        yield self.accumulator, 0

    def flush(self) -> Iterator[tuple[int, int]]:
        """Nothing is reduced before the step."""
        yield self.accumulator, 0


class _AddedInPlace(_Kept):
    """The same from the second micro-batch on: a gradient lives until it is added."""

    def add(self, parameter: Parameter) -> Iterator[tuple[int, int]]:
        """(gradient bytes, communication bytes) while one parameter's gradient arrives."""
        yield parameter.numel * self.element_bytes, 0


class _Reduction:
    """Stages 2 and 3, while gradients arrive: bucket, flat copy, accumulator. Bytes that were ever touched.

    Stage 3 accumulates in the flat buffer that it keeps, and gathers a layer's tensors one after the other.
    """

    def __init__(self, rank: TrainedRank) -> None:
        self.rank, self.element_bytes = rank, rank.element_bytes
        self.limit = rank.states.settings.reduce_bucket_size
        self.is_flat = rank.states.settings.stage == 3
        self.owned = set() if self.is_flat else {parameter.name for parameter in rank.states.owned}
        self.in_bucket: list[Parameter] = []
        self.touched = kept_bucket_bytes(rank)
        self.accumulator = 0

    def add(self, parameter: Parameter) -> Iterator[tuple[int, int]]:
        """(gradient bytes, communication bytes) at each moment while one parameter's gradient arrives."""
        own = parameter.numel * self.element_bytes
        if self._used() + parameter.numel > self.limit:
            yield from self.flush(own)
        self.in_bucket.append(parameter)
        if parameter.numel <= self.limit:
            self.touched = max(self.touched, self._used() * self.element_bytes)
        yield self.accumulator + own, self.touched + gathered_tensor_bytes(self.rank, parameter)

    def flush(self, arriving: int = 0) -> Iterator[tuple[int, int]]:
        """Reduce what is in the bucket: a flat copy of it exists beside it, then the owned part is kept.

        Stage 3 scatters the flat copy into parts, which gloo does through a copy of its own.
        """
        flat = self._used() * self.element_bytes
        oversized = sum(p.numel for p in self.in_bucket if p.numel > self.limit) * self.element_bytes
        ranks = self.rank.states.settings.num_ranks
        parts = ceil_div(flat, ranks) + flat * (ranks > 1) if self.is_flat else 0
        yield self.accumulator + arriving + oversized, self.touched + flat + parts
        self.accumulator += sum(p.numel for p in self.in_bucket if p.name in self.owned) * self.element_bytes
        yield self.accumulator + arriving + oversized, self.touched
        self.in_bucket = []

    def _used(self) -> int:
        return sum(parameter.numel for parameter in self.in_bucket)


def _reduction_of(rank: TrainedRank, *, accumulates: bool) -> _Kept | _Reduction:
    if rank.states.settings.stage >= 2:
        return _Reduction(rank)
    return _AddedInPlace(rank) if accumulates else _Kept(rank)


def _with_activations(
    snapshots: Iterator[tuple[int, int]], activations: int, waiting: int, accumulated: int
) -> Iterator[MemorySnapshot]:
    for gradients, buffers in snapshots:
        yield _snapshot(activations, 0, gradients + waiting + accumulated, buffers)


def _snapshot(activations: int, logits: int, gradients: int, buffers: int) -> MemorySnapshot:
    return {
        MemoryKind.ACTIVATIONS: activations,
        MemoryKind.LOGITS: logits,
        MemoryKind.GRADIENTS: gradients,
        MemoryKind.COMM_BUFFERS: buffers,
    }


def _vocabulary_table(model: ModelSpec) -> Parameter:
    return model.parameters[0] if model.has_tied_embeddings else model.parameters[-1]


def _embedding(model: ModelSpec) -> Parameter:
    return model.parameters[0]


def _layer_parameters(model: ModelSpec, layer: int) -> list[Parameter]:
    prefix = f"model.layers.{layer}."
    return [parameter for parameter in model.parameters if parameter.name.startswith(prefix)]
