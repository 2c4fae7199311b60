"""Logits: numbers worked by hand."""

import pytest

from rlplan.memory.model.block import Block
from rlplan.memory.model.logits import (
    ROWS_ON_CPU,
    ROWS_ON_GPU,
    loss_peak_bytes,
    rows_bytes,
    rows_on_cpu,
    saved_loss_bytes,
)
from rlplan.memory.trainers.micro_batch import MicroBatchBytes, Place
from rlplan.memory.trainers.shape import MicroBatchShape
from rlplan.vocabulary import Loss


def test_logits_are_fp32_for_at_most_so_many_rows_and_every_word_with_their_exponentials_as_large() -> None:
    assert (ROWS_ON_CPU, ROWS_ON_GPU) == ((256, 8), (1024, 1024))
    assert rows_bytes(3, 70, 4, rows_on_cpu(4)) == rows_bytes(3, 70, 4) == 2 * 3 * 70 * 4
    assert rows_bytes(3, 70, 4, rows_on_cpu(4), has_exponentials=False) == 3 * 70 * 4
    assert rows_bytes(1024, 70, 4) == rows_bytes(10_000, 70, 4) == 2 * 1024 * 70 * 4


def test_on_a_cpu_few_of_the_rows_that_a_matmul_makes_are_in_fp32() -> None:
    assert rows_bytes(300, 70, 4, rows_on_cpu(4)) == 70 * 4 * (128 + 8)
    assert rows_bytes(300, 70, 2, ROWS_ON_CPU) == 70 * (2 * 256 + 4 * 8 + 4 * 8)
    assert rows_bytes(300, 70, 2, ROWS_ON_CPU, has_exponentials=False) == 70 * (2 * 256 + 4 * 8)
    assert rows_bytes(0, 70, 4) == 0


def test_logits_of_16_bits_stand_beside_their_upcast() -> None:
    assert rows_bytes(3, 70, 2, has_exponentials=False) == 3 * 70 * (4 + 2)


@pytest.mark.parametrize(
    ("loss", "peak", "waits", "without_gradient"),
    [
        (Loss.UNCAST, 2 + 2, 2, 2 + 2),  # logits, and over the temperature, which becomes the gradient
        (Loss.COPIED, 4 + 4, 4, 4 + 4),  # fp32 logits and their softmax, which becomes the gradient
        (
            Loss.KEPT,
            4 + 4 + 2,
            4,
            2 + 4,
        ),  # fp32 logits, their gradient, its cast; before, logits and their upcast
    ],
)
def test_losses_of_other_stacks_are_what_their_code_makes(
    loss: Loss, peak: int, waits: int, without_gradient: int
) -> None:
    words = 30 * 1000
    assert loss_peak_bytes(loss, 30, 1000, 2) == peak * words
    assert saved_loss_bytes(loss, 30, 1000, 2) == waits * words
    assert loss_peak_bytes(loss, 30, 1000, 2, has_gradient=False) == without_gradient * words


def test_logits_that_openrlhf_keeps_stay_to_the_end_of_the_backward_pass() -> None:
    """16,384 tokens of 128,256 words: 8.4 GB in fp32 all through, 21.0 GB while their gradient is cast."""
    block = Block(64, 4, 4, 16, 256)
    sizes = MicroBatchBytes(MicroBatchShape(block, 2, 128_256, 16_384, 16_384, loss=Loss.KEPT))
    words = 16_384 * 128_256
    assert sizes.logits(Place.LOSS) == 10 * words == 21_013_463_040
    assert sizes.logits(Place.MLP) == sizes.logits(Place.ATTENTION) == 4 * words == 8_405_385_216
