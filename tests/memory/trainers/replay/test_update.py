"""An update, replayed: parts of it worked by hand."""

from dataclasses import replace

from rlplan.memory.model.block import Block
from rlplan.memory.trainers.replay.layer import CUBLAS_WORKSPACE, LayerSizes
from rlplan.memory.trainers.replay.update import ReplayedUpdate, replayed_peak
from rlplan.units import MIB

BLOCK = Block(hidden=512, num_heads=8, num_kv_heads=2, head_dim=64, intermediate=2048)
HEAD_ALONE = ReplayedUpdate(LayerSizes(BLOCK, 4096, 8), 0, 32_768, 1, (32 * MIB,), 1, 1024)
"""No layer: a table, hidden states, and logits of 4,095 rows in tiles of 1,024."""
SMALL = replace(HEAD_ALONE, num_layers=4, num_micro_batches=2)


def test_a_head_alone_peaks_in_its_backward_pass() -> None:
    rows = 4096 * 512 * 2
    of_rows = 4095 * 512 * 2
    tile = 1024 * 32_768
    tables = 2 * 4096 * 64 * 2  # cosine and sine of every token, in bf16
    expected = 32 * MIB + tables + 2 * rows + of_rows + tile * 2 + CUBLAS_WORKSPACE + tile * 4
    assert replayed_peak(HEAD_ALONE).allocated == expected


def test_several_sequences_copy_the_rows_that_the_head_reads() -> None:
    alone, two = replayed_peak(HEAD_ALONE), replayed_peak(replace(HEAD_ALONE, sequences=2))
    assert two.allocated - alone.allocated == 4094 * 512 * 2 - 512 * 2


def test_tables_of_rotary_positions_are_a_row_for_each_token_and_head_width() -> None:
    wider = replace(HEAD_ALONE.layer, block=replace(BLOCK, head_dim=128, num_heads=4, num_kv_heads=1))
    grown = replayed_peak(replace(HEAD_ALONE, layer=wider)).allocated - replayed_peak(HEAD_ALONE).allocated
    assert grown == 2 * 4096 * (128 - 64) * 2


def test_the_second_micro_batch_finds_the_moments_in_its_way_and_a_third_no_more() -> None:
    one, two, three = (replayed_peak(replace(SMALL, num_micro_batches=num)) for num in (1, 2, 3))
    assert one.allocated < two.allocated
    assert one.reserved < two.reserved
    assert two == three


def test_reserved_is_never_less_than_allocated() -> None:
    for update in (HEAD_ALONE, SMALL, replace(SMALL, sequences=4)):
        peak = replayed_peak(update)
        assert peak.reserved >= peak.allocated
        assert peak.reserved % (2 * MIB) == 0
