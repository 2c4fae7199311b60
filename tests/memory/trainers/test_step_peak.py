"""Peaks of a step by hand: which moment binds, and what is there then."""

from dataclasses import replace

from rlplan.memory.machine.machine import reserved_bytes
from rlplan.memory.model.block import Block, Layers
from rlplan.memory.model.frozen import Frozen
from rlplan.memory.trainers.micro_batch import Place, entry_bytes, kept_layer_bytes, layer_bytes
from rlplan.memory.trainers.shape import MicroBatchShape, Recompute
from rlplan.memory.trainers.step_peak import RankState, find_largest, take_snapshots
from rlplan.units import MIB
from rlplan.vocabulary import Loss, MemoryKind

BLOCK = Block(hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate=128)
SHAPE = MicroBatchShape(BLOCK, num_layers=3, vocab_size=1000, num_tokens=10, num_head_tokens=10)
LAYER = 10 * (16 * 64 + 8 + 4 * 64 + 4 * 32 + 16 + 8 * 128)
"""Ten tokens: two norms, attention with half as many key heads, a gated MLP, all in bf16."""
RANK_STATE = RankState({MemoryKind.WEIGHTS: 5000}, gradients=4000, head_gradient=600, table_gradient=600)


def total(rank_state: RankState, shape: MicroBatchShape, snapshot: Place) -> int:
    return sum(take_snapshots(rank_state, shape)[snapshot].values())


def test_a_layer_saves_what_a_hand_counts() -> None:
    assert layer_bytes(SHAPE) == LAYER == 24560


def test_a_loss_by_rows_holds_1024_rows_and_then_the_gradients_of_the_rows_that_the_head_read() -> None:
    shape = replace(SHAPE, num_tokens=3000, num_head_tokens=2000, loss=Loss.BY_ROWS)
    by_place = take_snapshots(RANK_STATE, shape)
    assert by_place[Place.LOSS][MemoryKind.LOGITS] == 1024 * 1000 * (4 + 2 + 4) + 4 * 2000
    assert by_place[Place.HEAD][MemoryKind.LOGITS] == 1024 * 1000 * (4 + 2) + 2000 * (4 + 2 * 64)
    assert MemoryKind.LOGITS not in by_place[Place.MLP]


def test_ulysses_adds_a_copy_of_attentions_output() -> None:
    assert layer_bytes(replace(SHAPE, ulysses=2)) - LAYER == 10 * 2 * 64


def test_sequence_parallelism_shares_the_rows_between_the_products() -> None:
    shared = replace(SHAPE, sequence_shards=2)
    assert entry_bytes(shared) == 10 * 2 * 64 // 2
    assert LAYER - layer_bytes(shared) == 10 * (2 * (6 * 64 + 4)) // 2


def test_selective_recomputation_keeps_every_second_matmul_and_attention() -> None:
    kept = kept_layer_bytes(replace(SHAPE, recompute=Recompute.SELECTIVE))
    assert kept == 10 * (2 * (64 + 64 + 64 + 32 + 128 + 64) + 4 * 4)
    compiled = replace(SHAPE, recompute=Recompute.SELECTIVE, is_compiled=True)
    assert kept - kept_layer_bytes(compiled) == 10 * 2 * 64


def test_the_loss_binds_where_the_vocabulary_is_large() -> None:
    snapshot = find_largest(take_snapshots(RANK_STATE, SHAPE).values())
    assert snapshot == take_snapshots(RANK_STATE, SHAPE)[Place.LOSS]
    assert snapshot[MemoryKind.LOGITS] == 12 * 10 * 1000
    assert snapshot[MemoryKind.ACTIVATIONS] - 3 * LAYER == 10 * (8 * 64 + 4 + 2 * 2 * 16)


def test_a_tied_table_has_two_gradients_when_the_backward_pass_ends() -> None:
    assert total(replace(RANK_STATE, is_tied=True), SHAPE, Place.TABLE) - total(RANK_STATE, SHAPE, Place.TABLE) == 600


def test_chunks_add_the_heads_gradient_to_what_came_before() -> None:
    chunked = replace(SHAPE, loss=Loss.COMPILED_CHUNKED)
    snapshot = take_snapshots(RANK_STATE, chunked)[Place.HEAD]
    assert snapshot[MemoryKind.GRADIENTS] == 2 * 600
    assert snapshot[MemoryKind.LOGITS] == 2 * 10 * 1000 * 7 // 8


def test_what_comes_with_the_layers_is_there_in_the_layers_alone() -> None:
    rank_state = replace(RANK_STATE, passing=1, layer_passing=100)
    by_place = {
        name: snapshot.get(MemoryKind.COMM_BUFFERS, 0) for name, snapshot in take_snapshots(rank_state, SHAPE).items()
    }
    assert by_place == {"loss": 1, "head": 1, "mlp": 101, "table": 1, "step": 0}


def test_layers_of_two_kinds_are_added_up_and_the_larger_one_binds() -> None:
    wide = Layers(2, replace(BLOCK, intermediate=256))
    both = replace(SHAPE, more=(wide,))
    assert (
        take_snapshots(RANK_STATE, both)[Place.LOSS][MemoryKind.ACTIVATIONS]
        > take_snapshots(RANK_STATE, SHAPE)[Place.LOSS][MemoryKind.ACTIVATIONS]
    )
    full = replace(both, recompute=Recompute.FULL)
    last = take_snapshots(RANK_STATE, replace(full, block=wide.block, num_layers=2, more=(Layers(3, BLOCK),)))[
        Place.MLP
    ]
    assert take_snapshots(RANK_STATE, full)[Place.MLP] == last


def test_a_first_pipeline_stage_holds_several_micro_batches_and_no_logits() -> None:
    stage = replace(SHAPE, num_head_tokens=0, loss=Loss.NONE, micro_batches_in_flight=4)
    snapshot = take_snapshots(RANK_STATE, stage)[Place.LOSS]
    assert snapshot[MemoryKind.ACTIVATIONS] == 4 * 3 * LAYER
    assert MemoryKind.LOGITS not in snapshot


def test_frozen_layers_save_less_than_trained_ones() -> None:
    assert layer_bytes(replace(SHAPE, frozen=Frozen())) < LAYER


def test_reserved_bytes_add_what_is_too_small_for_the_logits() -> None:
    assert reserved_bytes(100 * MIB, 3 * MIB, 4 * MIB) == 108 * MIB
