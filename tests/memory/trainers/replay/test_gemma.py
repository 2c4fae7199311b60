"""Layers of Gemma 4, replayed: what is there after a pass, what differs by kind."""

from dataclasses import replace

import pytest

from rlplan.memory.machine.segments import Segments
from rlplan.memory.model.block import Block
from rlplan.memory.trainers.replay.attention import Sequences, Way
from rlplan.memory.trainers.replay.gemma import GemmaPasses, Kind, Kinds, module_widths
from rlplan.memory.trainers.replay.layer import LayerSizes
from rlplan.memory.trainers.replay.update import ReplayedUpdate, replayed_peak
from rlplan.units import MIB

NARROW = Block(hidden=512, num_heads=8, num_kv_heads=1, head_dim=64, intermediate=2048, per_layer_width=64)
WIDE = replace(NARROW, head_dim=512)
SEQUENCES = Sequences(2, 1024)
TOKENS, RANK = 2048, 8
ATTENTION = frozenset("qkvo")
KINDS = Kinds(
    (
        Kind(NARROW, Way.FLASH, ATTENTION),
        Kind(WIDE, Way.SCORES, ATTENTION),
        Kind(NARROW, Way.FLASH, ATTENTION, 0),
        Kind(WIDE, Way.SCORES, ATTENTION, 1),
    ),
    SEQUENCES,
    RANK,
)


def adapters() -> int:
    """Bytes of the adapters in fp32; layers that take keys have none for them."""
    pairs = sum(512 + 8 * d + 2 * (512 + d) + 8 * d + 512 + 512 + 8 * d + 8 * d + 512 for d in (64, 512))
    return 4 * RANK * pairs


def test_the_numbers_of_all_adapters_are_those_of_layers_with_their_own_keys_and_without() -> None:
    assert 4 * RANK * sum(KINDS.adapter_widths()) == adapters()


@pytest.mark.parametrize("has_liger", [False, True])
def test_a_pass_that_goes_back_leaves_the_adapters_gradients_alone(has_liger: bool) -> None:
    passes = GemmaPasses(replace(KINDS, has_liger=has_liger), Segments())
    for _ in range(2):
        hidden = passes.forward(has_gradient=True)
        passes.segments.give(hidden)
        passes.backward(passes.segments.take(2 * TOKENS * 512))
        assert passes.segments.allocated == adapters()
        passes.segments.give(*passes.take_gradients())


@pytest.mark.parametrize("has_liger", [False, True])
def test_a_pass_without_gradient_leaves_its_result(has_liger: bool) -> None:
    passes = GemmaPasses(replace(KINDS, has_liger=has_liger), Segments())
    passes.forward(has_gradient=False)
    assert passes.segments.allocated == 2 * TOKENS * 512


def test_what_waits_is_every_layer_s_input_and_what_layers_read_of_their_own() -> None:
    passes = GemmaPasses(replace(KINDS, has_liger=True), Segments())
    passes.forward(has_gradient=True)
    own = 4 * 64
    token = (
        4 * 2 * 512 + 2 * own + 4 * own + 2 * 4 * 4
    )  # inputs; the layers' own, and their norm's fp32 copy and scales
    token += 2 * 2 * (64 + 512)  # keys and values of the layers that others take them from
    token += 2 * 512 + 2 * 512 + 4  # the last hidden states, and what the last norm keeps
    assert passes.segments.allocated == TOKENS * token


def test_models_without_inputs_of_layers_end_a_layer_with_the_mlp() -> None:
    plain = replace(NARROW, per_layer_width=0)
    assert set(module_widths(plain)) == {"q", "k", "v", "o", "gate", "up", "down"}
    passes = GemmaPasses(Kinds((Kind(plain, Way.FLASH, ATTENTION),), SEQUENCES, RANK), Segments())
    passes.segments.give(passes.forward(has_gradient=True))
    passes.backward(passes.segments.take(2 * TOKENS * 512))
    assert len(passes.take_gradients()) == 8


def test_stored_scores_and_modules_of_torch_alone_take_more_than_kernels() -> None:
    sizes = LayerSizes(NARROW, TOKENS, RANK)
    update = ReplayedUpdate(sizes, 4, 4096, 2, (32 * MIB,), 2, 1024, KINDS)
    scores = replayed_peak(update).allocated
    fused = replace(KINDS, layers=tuple(replace(kind, way=Way.FLASH) for kind in KINDS.layers))
    kernels = replayed_peak(replace(update, kinds=fused)).allocated
    assert scores - kernels > 10 * 2 * 1024**2 * 8
    liger = replace(fused, has_liger=True)
    assert replayed_peak(replace(update, kinds=liger)).allocated < kernels
