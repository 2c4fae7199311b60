"""A layer with adapters, replayed: what is there after a pass, and at its largest."""

import pytest

from rlplan.memory.machine.segments import Segments
from rlplan.memory.model.block import Block
from rlplan.memory.trainers.replay.layer import CUBLAS_WORKSPACE, LayerPasses, LayerSizes

BLOCK = Block(hidden=512, num_heads=8, num_kv_heads=2, head_dim=64, intermediate=2048)
TOKENS, RANK = 4096, 8
ADAPTERS = 4 * RANK * sum((2 * 512, 512 + 128, 512 + 128, 2 * 512, 3 * (512 + 2048)))
"""Bytes of A and B of queries, keys, values, output, gate, up and down."""


def passes(*, is_quantized: bool = False, has_bias: bool = False) -> LayerPasses:
    return LayerPasses(LayerSizes(BLOCK, TOKENS, RANK, is_quantized, has_bias), Segments())


@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("has_gradient", [False, True])
def test_a_forward_pass_leaves_its_output_alone(is_quantized: bool, has_gradient: bool) -> None:
    layer = passes(is_quantized=is_quantized)
    layer.forward(has_gradient=has_gradient)
    assert layer.segments.allocated == TOKENS * 512 * (4 if is_quantized else 2)


def test_autocast_keeps_the_adapters_in_sixteen_bits_until_it_ends() -> None:
    layer = passes()
    layer.copies = []
    output = layer.forward(has_gradient=True)
    layer.give(output)
    assert layer.segments.allocated == ADAPTERS // 2
    layer.give(*layer.copies)
    assert layer.segments.allocated == 0


def test_a_mask_is_held_in_sixteen_bits_with_keys_and_values_of_every_query_head() -> None:
    pairs = 8 * TOKENS * TOKENS
    layer = LayerPasses(LayerSizes(BLOCK, TOKENS, RANK, mask_pairs=pairs), Segments())
    layer.forward(has_gradient=False)
    token = 2 * 512 + 4 + 2 * 512 + 2 * 2 * 128  # normed rows, scales, queries, keys and values
    token += 2 * 2 * 512 + 2 * 512 + 4 * 8  # both for eight heads, what is attended, log-sums
    assert layer.segments.peak_allocated == TOKENS * token + 2 * pairs
    assert layer.segments.allocated == TOKENS * 2 * 512


def test_going_back_a_mask_lives_as_long_as_attention_s_gradient() -> None:
    plain, masked = (LayerPasses(LayerSizes(BLOCK, TOKENS, RANK, mask_pairs=pairs), Segments()) for pairs in (0, 4096))
    for layer in (plain, masked):
        layer.backward(layer.take(512, 2))
    assert plain.segments.allocated == masked.segments.allocated
    repeated = 2 * 2 * (512 - 128)  # keys and values of every head for those that were shared
    assert masked.segments.peak_allocated - plain.segments.peak_allocated == TOKENS * repeated + 2 * 4096


def test_a_forward_pass_peaks_where_the_adapter_beside_up_has_scaled_its_product() -> None:
    layer = passes()
    layer.forward(has_gradient=True)
    token = 2 * 512 * 2 + 2 * 4  # the residual stream, normed rows, scales of both norms
    token += 2 * 2048  # gate
    token += 2 * 2048 + 4 * 512 + 2 * 2 * 2048  # up's own product, its input in fp32, the adapter's product, scaled
    assert layer.segments.peak_allocated == TOKENS * token


@pytest.mark.parametrize("is_quantized", [False, True])
def test_a_backward_pass_leaves_the_adapters_gradients(is_quantized: bool) -> None:
    layer = passes(is_quantized=is_quantized)
    layer.backward(layer.take(512, 2))
    assert layer.segments.allocated == ADAPTERS
    assert len(layer.gradients) == 14


def test_the_first_product_with_a_bias_takes_a_workspace_for_good() -> None:
    layer = passes(has_bias=True)
    for _ in range(2):
        layer.backward(layer.take(512, 2))
    layer.give(*layer.gradients)
    assert layer.segments.allocated == CUBLAS_WORKSPACE
