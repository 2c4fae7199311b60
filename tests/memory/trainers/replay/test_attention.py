"""Attention over a tape: what is kept, and the largest moment, worked by hand."""

import pytest

from rlplan.memory.machine.segments import Segments
from rlplan.memory.model.block import Block
from rlplan.memory.trainers.replay.attention import SPLITS, Sequences, Way, attended
from rlplan.memory.trainers.replay.operators import Operators
from rlplan.memory.trainers.replay.tape import Tape

BLOCK = Block(hidden=1536, num_heads=8, num_kv_heads=1, head_dim=512, intermediate=6144)
"""Gemma 4 E2B's full layers."""
SEQUENCES = Sequences(2, 4096)
TOKENS, Q, K = 8192, 4096, 512
PAIRS = 2 * 4096**2 * 8
"""Pairs of tokens and heads."""


def run(way: Way, block: Block = BLOCK) -> tuple[int, int]:
    """Bytes kept beside queries, keys and values, and at most going back beside the same."""
    segments = Segments()
    o = Operators(Tape(segments, keeps=True), TOKENS)
    heads = o.rows(block.q), o.rows(block.k), o.rows(block.k)
    given = segments.allocated
    result = attended(o, block, SEQUENCES, way, heads)
    o.tape.drop(result)
    kept = segments.allocated - given
    segments.peak_allocated = 0
    result.gradient = o.rows(block.q)
    o.tape.backward()
    assert segments.allocated == 2 * given  # a gradient of each
    return kept, segments.peak_allocated - given


def test_scores_take_sixteen_bytes_a_pair_and_head_going_back() -> None:
    kept, most = run(Way.SCORES)
    heads = 4 * TOKENS * Q
    assert kept == 4 * PAIRS + 3 * heads  # what softmax gave; queries, keys and values of every head in fp32
    assert most == 16 * PAIRS + 3 * heads  # queries and keys; the gradient of values


def test_a_mask_is_read_in_sixteen_bits_of_every_sequence() -> None:
    (kept, most), (plain, less) = run(Way.MASKED), run(Way.EFFICIENT)
    assert kept - plain == most - less == 2 * 2 * 4096**2
    assert plain == TOKENS * (2 * Q + 4 * 8)  # the result and log-sums; one key head is read by all without a copy


def test_wide_heads_add_gradients_of_keys_and_values_by_blocks_of_keys() -> None:
    """Of 16 heads of two sequences 12 blocks of 64 keys each, 200 at most of all, in fp32."""
    most = run(Way.EFFICIENT)[1]
    blocks = 2 * 16 * (SPLITS // 16) * 64 * 512 * 4
    rows = TOKENS * (2 * Q + 4 * 8)  # the result and log-sums
    rows += TOKENS * (2 * Q + 3 * 2 * Q + 4 * 8)  # its gradient, those of queries, keys and values of every head, delta
    assert most == rows + 4 * TOKENS * Q + blocks


@pytest.mark.parametrize("heads", [2, 8])
def test_shared_keys_are_repeated_where_there_is_more_than_one(heads: int) -> None:
    block = Block(hidden=1536, num_heads=8, num_kv_heads=heads, head_dim=256, intermediate=6144)
    repeated = 2 * TOKENS * 2 * block.q if heads < 8 else 0
    assert run(Way.EFFICIENT, block)[0] == TOKENS * (2 * block.q + 4 * 8) + repeated


def test_flash_attention_keeps_its_result_alone() -> None:
    assert run(Way.FLASH)[0] == TOKENS * (2 * Q + 4 * 8)
