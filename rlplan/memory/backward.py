"""The peak inside one mini-batch's forward and backward passes under ZeRO-2: a walk from the loss to the embedding.

In: the persistent tensors of a rank and the sizes of its largest micro-batch. Out: bytes by kind at the largest moment.
Left out: anything that overlaps.

As the backward pass goes down the layers, activations are freed and gradients appear: in the reduction bucket, in a
flat copy while it is reduced, and in this rank's own accumulator. With several micro-batches the last one holds the
accumulated gradients beside the new ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from rlplan.memory.activations import head_saved_bytes, layer_backward_bytes, layer_saved_bytes, mlp_freed_bytes
from rlplan.memory.logits import logits_bytes, probability_slice_bytes
from rlplan.memory.training import FLOAT_BYTES, ZeroTwo
from rlplan.spec.model import ModelSpec, Parameter
from rlplan.vocabulary import MemoryKind


@dataclass(frozen=True)
class MicroBatch:
    """Sizes of the largest micro-batch in tokens, and how many micro-batches a rank's share has."""

    num_tokens: int
    num_response_tokens: int
    count: int


Moment = dict[MemoryKind, int]


def forward_backward_peak(zero: ZeroTwo, micro: MicroBatch) -> Moment:
    """Bytes by kind, beside weights, master weights and optimizer, at the largest moment of the passes.

    Source: DeepSpeed 0.19.8, stage_1_and_2.py (`reduce_independent_p_g_buckets_and_remove_grads`, `reduce_ipg_grads`).
    """
    return max(_walk(zero, micro), key=lambda moment: sum(moment.values()))


def _walk(zero: ZeroTwo, micro: MicroBatch) -> Iterator[Moment]:
    model = zero.model
    accumulated = zero.gradient_bytes() if micro.count > 1 else 0
    saved = layer_saved_bytes(model, micro.num_tokens)
    head = head_saved_bytes(model, micro.num_tokens, micro.num_response_tokens)
    logits = logits_bytes(micro.num_response_tokens, model.head_width)
    slices = probability_slice_bytes(micro.num_response_tokens, model.head_width)
    reduction = _Reduction(zero)
    # End of the forward pass: everything saved, the last rows of logits and their exponentials.
    yield _moment(saved * model.num_layers + head, logits + slices, accumulated, 0)
    table = _vocabulary_table(model)
    # The head's gradient. A tied table waits for the embedding's share; an untied one is reduced at once.
    waiting = table.numel * FLOAT_BYTES
    yield _moment(saved * model.num_layers + head, logits, accumulated + waiting, 0)
    if not model.has_tied_embeddings:
        yield from _with_activations(reduction.add(table), saved * model.num_layers, 0, accumulated)
        waiting = 0
    last_norm = next(parameter for parameter in model.parameters if parameter.name == "model.norm.weight")
    yield from _with_activations(reduction.add(last_norm), saved * model.num_layers, waiting, accumulated)
    for layer in reversed(range(model.num_layers)):
        for parameter in reversed(_layer_parameters(model, layer)):
            attention_only = ".mlp." not in parameter.name
            activations = saved * (layer + 1) + _in_flight(model, micro.num_tokens, attention_only=attention_only)
            yield from _with_activations(reduction.add(parameter), activations, waiting, accumulated)
    table_bytes = _embedding(model).numel * FLOAT_BYTES
    if model.has_tied_embeddings:
        # The embedding's own gradient is dense too; autograd adds it to the one that waits, into a third tensor.
        held = reduction.accumulator + accumulated + 3 * table_bytes
        yield _moment(0, 0, held, reduction.touched)
    yield from _with_activations(reduction.add(_embedding(model)), 0, 0, accumulated)
    yield from _with_activations(reduction.flush(), 0, 0, accumulated)


def _in_flight(model: ModelSpec, num_tokens: int, *, attention_only: bool) -> int:
    """What the backward pass of the topmost live layer adds to its saved tensors, or takes off once its MLP is done."""
    if attention_only:
        return layer_backward_bytes(model, num_tokens) - mlp_freed_bytes(model, num_tokens)
    return layer_backward_bytes(model, num_tokens)


class _Reduction:
    """What DeepSpeed holds while gradients arrive: bucket, flat copy, accumulator. Bytes that were ever touched."""

    def __init__(self, zero: ZeroTwo) -> None:
        self.limit = zero.bucket_size
        self.owned = {parameter.name for parameter in zero.owned}
        self.in_bucket: list[Parameter] = []
        self.touched = 0
        self.accumulator = 0

    def add(self, parameter: Parameter) -> Iterator[tuple[int, int]]:
        """(gradient bytes, communication bytes) at each moment while one parameter's gradient arrives."""
        own = parameter.numel * FLOAT_BYTES
        if self._used() + parameter.numel > self.limit:
            yield from self.flush(own)
        self.in_bucket.append(parameter)
        if parameter.numel <= self.limit:
            self.touched = max(self.touched, self._used() * FLOAT_BYTES)
        yield self.accumulator + own, self.touched

    def flush(self, arriving: int = 0) -> Iterator[tuple[int, int]]:
        """Reduce what is in the bucket: a flat copy of it exists beside it, then the owned part is kept."""
        flat = self._used() * FLOAT_BYTES
        oversized = sum(p.numel for p in self.in_bucket if p.numel > self.limit) * FLOAT_BYTES
        yield self.accumulator + arriving + oversized, self.touched + flat
        self.accumulator += sum(p.numel for p in self.in_bucket if p.name in self.owned) * FLOAT_BYTES
        yield self.accumulator + arriving + oversized, self.touched
        self.in_bucket = []

    def _used(self) -> int:
        return sum(parameter.numel for parameter in self.in_bucket)


def _with_activations(
    moments: Iterator[tuple[int, int]], activations: int, waiting: int, accumulated: int
) -> Iterator[Moment]:
    for gradients, buffers in moments:
        yield _moment(activations, 0, gradients + waiting + accumulated, buffers)


def _moment(activations: int, logits: int, gradients: int, buffers: int) -> Moment:
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
