"""KV demand of rollouts whose lengths are random: hand-worked blocks and probabilities."""

import pytest

from rlplan.memory.serving.kv import CacheGroup, CachePool, KvDemand
from rlplan.spec.parts.lengths import ConstantLengths, Lengths, UniformLengths

POOL = CachePool(1000, (CacheGroup("full", 4, 16),))


def demand(lengths: Lengths, num_seqs: int = 64) -> KvDemand:
    return KvDemand(POOL, num_seqs, 160, 320, 8, lengths)


def test_the_prompt_of_a_group_is_held_once() -> None:
    required = demand(Lengths(ConstantLengths(value=160), 640))
    assert required.prompt_blocks == 8 * 10  # 64 sequences in 8 groups, 10 blocks a prompt
    assert (
        required.predict_bytes(0.5) == (80 + 640 + 32) * 1000
    )  # 64 responses of 10 blocks, half a block each left over


def test_constant_lengths_are_no_risk_where_they_fit_and_a_certain_one_where_they_do_not() -> None:
    required = demand(Lengths(ConstantLengths(value=160), 640))
    assert required.preemption_risk(required.predict_bytes(0.99)) == 0.0
    assert required.preemption_risk(required.predict_bytes(0.99) // 2) == 1.0


def test_a_cache_of_the_median_demand_is_too_small_half_of_the_time() -> None:
    required = demand(Lengths(UniformLengths(kind="uniform", low=64, high=576), 640))
    assert required.predict_bytes(0.5) < required.predict_bytes(0.99)
    assert required.preemption_risk(required.predict_bytes(0.5)) == pytest.approx(0.5, abs=0.05)
    assert required.preemption_risk(required.predict_bytes(0.99)) == pytest.approx(0.01, abs=0.01)


def test_one_longest_sequence_is_the_least() -> None:
    required = demand(Lengths(ConstantLengths(value=160), 640))
    assert required.least_bytes == ((320 + 640) // 16 + 1) * 1000


def test_windows_do_not_grow_with_the_responses() -> None:
    pool = CachePool(1000, (CacheGroup("full", 4, 16), CacheGroup("sliding", 4, 16, window=64)))
    short = KvDemand(pool, 64, 160, 320, 8, Lengths(ConstantLengths(value=160), 6400))
    long = KvDemand(pool, 64, 160, 320, 8, Lengths(ConstantLengths(value=1600), 6400))
    assert short.fixed_blocks(0.5) == long.fixed_blocks(0.5) == 64 * 5  # ceil(63 / 16) + 1
    assert long.predict_bytes(0.5) == (80 + 6400 + 32 + 64 * 5) * 1000
    assert long.preemption_risk(long.predict_bytes(0.99)) == 0.0
