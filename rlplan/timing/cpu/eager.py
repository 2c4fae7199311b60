"""Eager passes: FLOPs, fresh bytes and operations of a transformers decoder as the CPU runtime trains and scores it.

Making a result costs a fresh tensor, whose first touch takes ten times as long as the operation itself. Reading its
operands costs memory traffic too, because a pass over thousands of tokens has evicted them from the cache.

In: a ModelSpec and a micro-batch. Out: PassCounts, by forward and backward pass. Left out: recomputation, 16 bits, and
architectures that the CPU runtime lacks (it has dense models with rotary positions and a gated MLP).
Source: transformers 5.19, models/qwen3/modeling_qwen3.py and similar ones, with rlplan's packed attention, operation by
operation. A test compares the bytes with those that torch allocates and reads.

Symbols: T tokens of a micro-batch with padding, s tokens of a sequence, R response tokens of the micro-batch, h hidden,
q = a*d query width, k = kv heads * d, I MLP width, V vocabulary, n widths of a layer's norms, u norms per token.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rlplan.memory.model.logits import ROWS_ON_CPU
from rlplan.spec.model import Component, ModelSpec
from rlplan.units import KIB

FLOAT_BYTES = 4
MMAP_THRESHOLD = 128 * KIB
"""Tensors of at least this size are mapped afresh each time and unmapped when freed (emit/ray.py,
MALLOC_MMAP_THRESHOLD_)."""
FORWARD_OPS, BACKWARD_OPS = 107, 218
"""Operations that torch dispatches per layer, views included: counted for Qwen3; Llama has fewer."""
HEAD_OPS, HEAD_BACKWARD_OPS = 55, 43
"""Operations outside the layers: embedding, rotary table, last norm, head, log-probs, entropy."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences of one pass, padded to the longest."""

    num_sequences: int
    seq_len: int
    """Tokens per sequence, prompt and response."""
    response_len: int
    """Response tokens per sequence."""

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return self.num_sequences * self.seq_len

    @property
    def num_response_tokens(self) -> int:
        """R: rows of the logits."""
        return self.num_sequences * self.response_len


@dataclass(frozen=True, slots=True)
class PassCounts:
    """FLOPs, bytes and operations of a pass."""

    flops: float
    fresh_bytes: float
    """Bytes of new tensors, which are touched for the first time."""
    read_bytes: float
    """Bytes of weights and operands."""
    num_ops: int

    def __add__(self, other: "PassCounts") -> "PassCounts":
        return PassCounts(
            self.flops + other.flops,
            self.fresh_bytes + other.fresh_bytes,
            self.read_bytes + other.read_bytes,
            self.num_ops + other.num_ops,
        )


def matrix_numel(model: ModelSpec) -> int:
    """Elements of the matrices of all layers; each token is multiplied with each of them once.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> matrix_numel(find_model("Qwen/Qwen3-0.6B"))  # 28 * (1024 * (2048 + 2 * 1024) + 2048 * 1024 + 3 * 1024 * 3072)
    440401920
    """
    tables = (Component.EMBEDDINGS, Component.HEAD)
    return sum(t.numel for t in model.parameters if len(t.shape) > 1 and t.component not in tables)


def forward_counts(model: ModelSpec, batch: MicroBatch, *, computes_entropy: bool = False) -> PassCounts:
    """FLOPs, bytes and operations of a forward pass to log-probs.

    Counts: FLOPs 2 T matrices + 2 R V h + attention 2 s q per token and layer (half of 4 s q: causal). Fresh floats per
    token and layer: `forward_floats`; embedding and last norm 4h. Logits once. Temporaries exist for a slice of the
    rows: one for the logsumexp, four more for the entropy. Weights are read once, operands by `forward_operands`.
    """
    tokens, rows = batch.num_tokens, batch.num_response_tokens
    multiplied = tokens * matrix_numel(model) + rows * model.head_width * model.hidden_size
    flops = 2 * multiplied + _attention_flops(model, batch)
    fresh = model.num_layers * fresh_bytes(forward_floats(model), tokens)
    fresh += fresh_bytes({model.hidden_size: 4}, tokens) + fresh_bytes(
        {model.hidden_size: 1, model.head_width: 1}, rows
    )
    slice_bytes = fresh_bytes({model.head_width: 5 if computes_entropy else 1}, min(rows, ROWS_ON_CPU.upcast))
    fresh += slice_bytes * rows / min(rows, ROWS_ON_CPU.upcast)
    read = _weights_read(model) + model.num_layers * fresh_bytes(forward_operands(model), tokens)
    return PassCounts(flops, fresh, read, FORWARD_OPS * model.num_layers + HEAD_OPS)


def backward_counts(model: ModelSpec, batch: MicroBatch) -> PassCounts:
    """FLOPs, bytes and operations of a backward pass, with the gradients of all parameters as new tensors.

    Counts: twice the forward pass's FLOPs; fresh floats per token and layer by `backward_floats`; a gradient of every
    parameter; a tied table has two gradients and their sum. Logits become their own gradient in place.
    Differs: attention's backward pass counts as 2 forward passes here; flash attention needs 2.5.
    """
    tokens, h, vocab = batch.num_tokens, model.hidden_size, model.vocab_size
    flops = 2 * forward_counts(model, batch).flops
    fresh = model.num_layers * fresh_bytes(backward_floats(model), tokens) + fresh_bytes({h: 11}, tokens)
    fresh += fresh_bytes({h: 1}, batch.num_response_tokens)
    fresh += sum(fresh_bytes({tensor.numel: 1}, 1) for tensor in model.parameters)
    fresh += fresh_bytes({vocab * h: 2}, 1) if model.has_tied_embeddings else 0
    read = _weights_read(model) + model.num_layers * fresh_bytes(backward_operands(model), tokens)
    return PassCounts(flops, fresh, read, BACKWARD_OPS * model.num_layers + HEAD_BACKWARD_OPS)


def forward_floats(model: ModelSpec) -> Mapping[int, float]:
    """Tensors that a layer makes in the forward pass: their number per token, by width.

    Counts: each norm of width w makes 3w (power, scaled, weighted); projections q + 2k + h; rotary 4.5 (q + k);
    attention 2q (the kernel's result and the rows'), and 2q more where keys and values are repeated for the query
    heads; MLP 4 I + h; two residual sums 2h. Left out: single floats per head or norm (0.5 %).

    >>> from rlplan.spec.models.catalogue import find_model
    >>> sorted(forward_floats(find_model("Qwen/Qwen3-0.6B")).items())  # h, k 1024: 10 + 9.5, q 2048: 3 + 9.5, I 3072
    [(1024, 19.5), (2048, 12.5), (3072, 4)]
    """
    h, q, k, mlp = _widths(model)
    normed = 3 if model.has_qk_norm else 0
    repeated = 2 if k < q else 0
    return _sum_by_width((h, 6 + 4), (q, normed + 5.5 + 2 + repeated), (k, normed + 6.5), (mlp, 4))


def backward_floats(model: ModelSpec) -> Mapping[int, float]:
    """Tensors that a layer makes in the backward pass: their number per token, by width; parameter gradients excluded.

    Counts: each norm of width w makes 9w (five products, a power, two scalings, a quotient less the reduced sums);
    inputs of matrices 5h + q + I; rotary 7.5 (q + k); attention q + 2k, and the kernel's 3q; 2q + 4k more where keys
    and values are repeated and their gradients summed and laid out again; MLP 3 I; sums of branches 5h.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> sorted(backward_floats(find_model("Qwen/Qwen3-0.6B")).items())  # 28 + 22.5, 9 + 14.5, 4
    [(1024, 50.5), (2048, 23.5), (3072, 4)]
    """
    h, q, k, mlp = _widths(model)
    normed = 9 if model.has_qk_norm else 0
    repeated = 2 if k < q else 0
    return _sum_by_width((h, 18 + 10), (q, normed + 9.5 + 3 + repeated), (k, normed + 9.5 + 2 * repeated), (mlp, 4))


def forward_operands(model: ModelSpec) -> Mapping[int, float]:
    """Tensors that a layer reads in the forward pass: their number per token, by width; weights excluded.

    Counts: each norm of width w reads 4w; projections 5h + q + I; rotary 5.5 (q + k); attention 3q, its result twice
    more, and 2k where keys and values are repeated; MLP 3 I; residual sums 4h.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> sorted(forward_operands(find_model("Qwen/Qwen3-0.6B")).items())  # 17 + 11.5, 4 + 11.5, 4
    [(1024, 28.5), (2048, 15.5), (3072, 4)]
    """
    h, q, k, mlp = _widths(model)
    normed = 4 if model.has_qk_norm else 0
    repeated = 2 if k < q else 0
    return _sum_by_width((h, 8 + 9), (q, normed + 6.5 + 5), (k, normed + 5.5 + repeated), (mlp, 4))


def backward_operands(model: ModelSpec) -> Mapping[int, float]:
    """Tensors that a layer reads in the backward pass: their number per token, by width; weights excluded.

    Counts: each norm of width w reads 14w (eight by products, a power, a scaling, sums of two and of one); matrices
    9h + 3q + 4k + 5 I, for weights and inputs; rotary 7.5 (q + k); attention 9q + 2k, and 2q + 3k more where keys and
    values are repeated; MLP 6 I; sums of branches 10h.

    >>> from rlplan.spec.models.catalogue import find_model
    >>> sorted(backward_operands(find_model("Qwen/Qwen3-0.6B")).items())  # 47 + 30.5, 14 + 21.5, 11
    [(1024, 77.5), (2048, 35.5), (3072, 11)]
    """
    h, q, k, mlp = _widths(model)
    normed = 14 if model.has_qk_norm else 0
    repeated = 2 if k < q else 0
    return _sum_by_width(
        (h, 28 + 19), (q, normed + 10.5 + 9 + repeated), (k, normed + 11.5 + 2 + 1.5 * repeated), (mlp, 11)
    )


def fresh_bytes(floats: Mapping[int, float], num_tokens: int) -> float:
    """Bytes of tensors that are large enough to be mapped afresh. Smaller ones come from the warm heap.

    >>> fresh_bytes({1000: 2, 10: 5}, 100)  # two of 400,000 bytes; five of 4,000 are not fresh
    800000.0
    """
    sizes = {width * num_tokens * FLOAT_BYTES: count for width, count in floats.items()}
    return float(sum(size * count for size, count in sizes.items() if size >= MMAP_THRESHOLD))


def _widths(model: ModelSpec) -> tuple[int, int, int, int]:
    heads, kv_heads, dim = model.num_heads, model.num_kv_heads, model.head_dim
    return model.hidden_size, heads * dim, kv_heads * dim, model.intermediate_size


def _sum_by_width(*pairs: tuple[int, float]) -> dict[int, float]:
    counts: dict[int, float] = {}
    for width, count in pairs:
        counts[width] = counts.get(width, 0) + count
    return counts


def _attention_flops(model: ModelSpec, batch: MicroBatch) -> float:
    return 2 * batch.seq_len * batch.num_tokens * model.num_heads * model.head_dim * model.num_layers


def _weights_read(model: ModelSpec) -> float:
    return FLOAT_BYTES * (matrix_numel(model) + model.vocab_size * model.hidden_size)
