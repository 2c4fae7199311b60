"""Weights: numbers worked by hand on the model of the factories (h=8, L=2, q=12, v=6, I=20, V=70, P=2148)."""

from rlplan.memory.serving.generation import (
    engine_parameter_bytes,
    expert_bytes,
    fused_linear_shapes,
    largest_linear_bytes,
    packed_weight_bytes,
    unpacked_remainder_bytes,
)
from rlplan.spec.model import model_from_config
from tests.factories import config_data, make_model, make_profile


def test_tied_tables_count_once() -> None:
    # 560 + 2*790 + 8 = 2148 elements; untied 560 more
    assert make_model().num_parameters == 2148
    assert make_model(has_tied_embeddings=False).num_parameters == 2148 + 560


def test_the_engine_pads_the_vocabulary_to_a_multiple_of_64() -> None:
    # V=70 becomes 128: 58 rows of 8 more, once when tied, twice when not
    assert engine_parameter_bytes(make_model(), 4) == (2148 + 464) * 4 == 10_448
    assert engine_parameter_bytes(make_model(has_tied_embeddings=False), 4) == (2708 + 2 * 464) * 4 == 14_544


def test_the_engine_does_not_pad_a_vocabulary_that_fits() -> None:
    model = make_model(vocab_size=128)
    assert engine_parameter_bytes(model, 4) == 4 * model.num_parameters


def test_the_engine_fuses_projections_and_packs_both_uses_of_a_table() -> None:
    # q, k, v: 12 + 2*6 rows; o: 8 x 12; gate and up: 2*20; down: 8 x 20; embedding and head: 128 padded rows
    layer = [(24, 8), (8, 12), (40, 8), (8, 20)]
    assert fused_linear_shapes(make_model()) == [*layer, *layer, (128, 8), (128, 8)]


def test_the_largest_linear_weight_may_be_the_table_or_the_mlp() -> None:
    assert largest_linear_bytes(make_model(), 4) == 128 * 8 * 4
    assert largest_linear_bytes(make_model(intermediate_size=100), 4) == 200 * 8 * 4


def test_packed_weights_are_blocks_plus_a_handler_each_plus_code_a_shape() -> None:
    # blocks of 64 x 16: a layer 64*16 three times and 64*32, 5120 elements; tables 128*16 twice, 4096 elements;
    # 2*5120 + 4096 = 14336 elements of 4 bytes; 10 weights at 1000 bytes; 5 different shapes at 100,000 bytes
    packing = make_profile().weight_packing
    assert packed_weight_bytes(make_model(), 4, packing) == 14_336 * 4 + 10 * 1000 + 5 * 100_000 == 567_344


def test_beside_the_packs_stay_the_tables_and_the_norms() -> None:
    # padded table 1024, per layer norms 16 and q/k norms 6, last norm 8: 1024 + 2*22 + 8 = 1076 elements
    assert unpacked_remainder_bytes(make_model(), 4) == 1076 * 4
    # untied: the head's table stays as well
    assert unpacked_remainder_bytes(make_model(has_tied_embeddings=False), 4) == (1076 + 1024) * 4


def test_a_block_s_columns_take_64_bytes_in_either_dtype() -> None:
    # in bf16 K = 8, 12 and 20 become 32: a layer 64*32 four times, tables 128*32 twice: 2*8192 + 8192 elements
    packing = make_profile().weight_packing
    assert packed_weight_bytes(make_model(), 2, packing) == 24_576 * 2 + 10 * 1000 + 5 * 100_000


def test_the_experts_of_a_layer_are_packed_two_tensors_at_a_time() -> None:
    # 4 experts: gate and up 2*20 x 8, down 8 x 20, in fp32
    config = config_data(architectures=["MixtralForCausalLM"], num_local_experts=4, num_experts_per_tok=2)
    model = model_from_config(config | {"sliding_window": None}, where="config.json")
    assert expert_bytes(model, 4) == (4 * 2 * 20 * 8 * 4, 4 * 8 * 20 * 4)
    assert expert_bytes(make_model(), 4) == (0, 0)
