"""Attention over a tape, tensor by tensor: with scores of every pair, or by one of torch's kernels.

In: a tape, a layer's heads, how it attends, queries, keys and values. Out: what is attended; the allocator, used.
Left out: projections, masks as booleans, which all layers share (gemma.py).

Scores: heads wider than 256 that share keys have no kernel. Softmax gives them in fp32, checks each for minus infinity
and copies them; going back torch's CUDA kernel makes a product of both for itself: 16 bytes a pair and head.
Masked: the memory-efficient kernel reads a mask in 16 bits, of every sequence, and adds the gradient of queries in
fp32. Flash: as in layer.py.
Source: transformers 5.11 integrations/sdpa_attention.py; torch 2.11 native/transformers/attention.cpp
(`_scaled_dot_product_attention_math`, `_safe_softmax`), cuda/SoftMax.cu (`SoftMaxBackwardEpilogue`, which is handed
`grad * output`), cuda/mem_eff_attention/kernel_backward.h (`workspace_elements_gk`, `kOutputInRF`),
cuda/attention_backward.cu (`num_splits_key`), cuda/flash_attn/flash_api.cpp (`mha_bwd`).
"""

from enum import StrEnum

from rlplan.memory.model.block import FLOAT_BYTES, Block
from rlplan.memory.trainers.replay.operators import HALF_BYTES, Operators
from rlplan.memory.trainers.replay.tape import Back, Value
from rlplan.records import dataclass
from rlplan.units import ceil_div

REGISTER_HEAD_DIM = 128
"""The widest head whose gradients of keys and values the memory-efficient kernel adds in registers; of wider ones it
has a block of keys in fp32 for each of `splits` and head."""
KEYS_OF_A_BLOCK = 64
SPLITS = 200
"""Of all heads of all sequences, at most, unless they are more themselves."""


class Way(StrEnum):
    """How a layer attends."""

    SCORES = "scores"
    MASKED = "masked"
    EFFICIENT = "efficient"
    """As masked, and nothing is masked but what comes later."""
    FLASH = "flash"


@dataclass(frozen=True)
class Sequences:
    """A micro-batch."""

    num: int
    length: int

    @property
    def num_tokens(self) -> int:
        """Of all sequences."""
        return self.num * self.length

    @property
    def pairs(self) -> int:
        """Pairs of tokens of all sequences."""
        return self.num * self.length**2


Heads = tuple[Value, Value, Value]
"""Queries, keys and values."""


def attended(operators: Operators, block: Block, sequences: Sequences, way: Way, heads: Heads) -> Value:
    """What a layer attends to, in the model's type."""
    if way is Way.SCORES:
        return _by_scores(operators, block, sequences, heads)
    return _by_kernel(operators, block, sequences, way, heads)


def _by_scores(operators: Operators, block: Block, sequences: Sequences, heads: Heads) -> Value:
    tape, rows, q, k = operators.tape, operators.rows, block.q, block.k
    scores = sequences.pairs * block.num_heads
    wide = [rows(width, FLOAT_BYTES) for width in (q, k, k)]
    scaled = rows(q, FLOAT_BYTES)
    ones, lower = (tape.new(sequences.length**2) for _ in range(2))
    tape.drop(ones)
    bias = tape.new(FLOAT_BYTES * sequences.length**2)
    tape.drop(lower)
    every = [rows(q, FLOAT_BYTES) for _ in range(2)] if k < q else []
    keys, values = rows(q, FLOAT_BYTES), every[1] if every else wide[2]
    tape.then(keys, (), _back_to_heads(operators, block, heads, scaled, values))
    copied = rows(q, FLOAT_BYTES) if sequences.num > 1 else None
    products = tape.new(FLOAT_BYTES * scores)
    tape.then(products, tape.keep(copied or scaled, keys), _back_from_products(operators, q, scaled, keys))
    softmax, infinite = tape.new(FLOAT_BYTES * scores), tape.new(scores)
    weights = tape.new(FLOAT_BYTES * scores)
    tape.then(weights, tape.keep(weights), _back_through_softmax(operators, scores, products))
    tape.drop(softmax, infinite, products)
    half = tape.new(HALF_BYTES * scores)
    upcast, result = rows(q, FLOAT_BYTES), rows(q)
    kept = tape.keep(weights, values)
    tape.drop(upcast, *every, keys, copied, scaled, bias, *reversed(wide), weights, half)
    in_order = rows(q)
    tape.drop(result)
    return tape.then(in_order, kept, _back_to_weights(operators, q, scores, weights, values))


def _back_to_weights(operators: Operators, q: int, scores: int, weights: Value, values: Value) -> Back:
    def back(gradient: Value) -> None:
        tape, rows = operators.tape, operators.rows
        upcast = rows(q, FLOAT_BYTES)
        tape.drop(gradient)
        in_order = rows(q, FLOAT_BYTES)
        tape.drop(upcast)
        tape.flow(values, rows(q, FLOAT_BYTES))
        tape.flow(weights, tape.new(FLOAT_BYTES * scores))
        tape.drop(in_order)

    return back


def _back_through_softmax(operators: Operators, scores: int, products: Value) -> Back:
    def back(gradient: Value) -> None:
        tape = operators.tape
        result = tape.new(FLOAT_BYTES * scores)
        tape.drop(tape.new(FLOAT_BYTES * scores), gradient)
        tape.flow(products, result)

    return back


def _back_from_products(operators: Operators, q: int, scaled: Value, keys: Value) -> Back:
    def back(gradient: Value) -> None:
        tape = operators.tape
        tape.flow(scaled, operators.rows(q, FLOAT_BYTES))
        tape.flow(keys, operators.rows(q, FLOAT_BYTES))
        tape.drop(gradient)

    return back


def _back_to_heads(operators: Operators, block: Block, heads: Heads, scaled: Value, values: Value) -> Back:
    """From what the products read to queries, keys and values: scaled, summed over query heads, in 16 bits."""

    def back(gradient: Value) -> None:
        tape, rows, q, k = operators.tape, operators.rows, block.q, block.k
        of_keys = rows(q, FLOAT_BYTES)
        tape.drop(gradient)
        of_values, of_queries = values.gradient, scaled.gradient
        if k < q:
            summed = rows(k, FLOAT_BYTES)
            tape.drop(of_values)
            of_values, summed = summed, rows(k, FLOAT_BYTES)
            tape.drop(of_keys)
            of_keys = summed
        unscaled = rows(q, FLOAT_BYTES)
        tape.drop(of_queries)
        for value, found, width in zip(reversed(heads), (of_values, of_keys, unscaled), (k, k, q), strict=True):
            half = rows(width)
            tape.drop(found)
            tape.flow(value, half)
        scaled.gradient = values.gradient = None

    return back


def _by_kernel(operators: Operators, block: Block, sequences: Sequences, way: Way, heads: Heads) -> Value:
    tape, rows, q = operators.tape, operators.rows, block.q
    bias, repeated = None, []
    if way is not Way.FLASH and 1 < block.num_kv_heads < block.num_heads:
        repeated = [rows(q) for _ in range(2)]
    if way is Way.MASKED:
        negated = tape.new(sequences.pairs)
        bias = tape.new(HALF_BYTES * sequences.pairs)
        tape.drop(negated)
    result, log_sums = rows(q), rows(block.num_heads, FLOAT_BYTES)
    read = (heads[0], *repeated) if repeated else heads
    kept = tape.keep(*read, result, log_sums, *([bias] if bias else []))
    tape.drop(log_sums, bias, *repeated)
    return tape.then(result, kept, _back_through_kernel(operators, block, sequences, way, heads))


def _in_blocks(block: Block, sequences: Sequences) -> int:
    """Numbers of the blocks in which wide heads' gradients of keys and values are added."""
    if block.head_dim <= REGISTER_HEAD_DIM:
        return 0
    num = sequences.num * block.num_heads
    splits = max(1, min(ceil_div(sequences.length, KEYS_OF_A_BLOCK), SPLITS // num))
    return 2 * num * splits * KEYS_OF_A_BLOCK * block.head_dim


def _back_through_kernel(operators: Operators, block: Block, sequences: Sequences, way: Way, heads: Heads) -> Back:
    def back(gradient: Value) -> None:
        tape, rows, q, k = operators.tape, operators.rows, block.q, block.k
        of_queries, delta = rows(q), rows(block.num_heads, FLOAT_BYTES)
        is_shared, is_flash = k < q, way is Way.FLASH
        every = [rows(k if is_flash else q) for _ in range(2)]
        in_blocks = 0 if is_flash else _in_blocks(block, sequences)
        working = tape.new(FLOAT_BYTES * (operators.num_tokens * q + in_blocks))
        expanded = [rows(q) for _ in range(2)] if is_flash and is_shared else []
        tape.drop(*expanded, working, delta, gradient)
        for place, value in enumerate(heads[1:]):
            if is_shared and not is_flash:
                summed = rows(k)
                tape.drop(every[place])
                every[place] = summed
            tape.flow(value, every[place])
        tape.flow(heads[0], of_queries)

    return back
