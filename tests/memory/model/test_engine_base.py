"""An engine's base in 4 bits: its bytes worked by hand, what is no format of it, and what is not the policy's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlplan.errors import SpecError
from rlplan.memory.model.engine_base import (
    find_base_mismatch,
    find_loaded_form,
    list_packed_tensors,
    read_base_quantization,
)
from rlplan.spec.model import load_model
from tests.memory.model.packed_base import SORTER, packed_base
from tests.runtime.live.four_bits import METHODS

ROWS, COLUMNS = 128, 384
"""Shape of the sorter's `down_proj`; 12 groups of 32 in a row."""
WEIGHTS, SCALES, ZEROS = 128 * 384 // 2, 2 * 128 * 12, 128 * 12 // 2


@pytest.mark.parametrize(
    ("method", "resident", "loaded"),
    [
        ("awq", WEIGHTS + SCALES + ZEROS, WEIGHTS + SCALES + ZEROS),
        ("gptq", WEIGHTS + SCALES, WEIGHTS + SCALES + ZEROS),
        ("compressed-tensors", WEIGHTS + SCALES + 16, WEIGHTS + SCALES + 16),
    ],
)
def test_a_matrix_has_the_bytes_worked_by_hand(tmp_path: Path, method: str, resident: int, loaded: int) -> None:
    scheme = read_base_quantization(str(packed_base(tmp_path / "base", method)))
    assert scheme.form.num_bytes((ROWS, COLUMNS)) == resident
    assert find_loaded_form(scheme).num_bytes((ROWS, COLUMNS)) == loaded


def test_whole_rows_behind_one_scale_are_a_format_too(tmp_path: Path) -> None:
    base = packed_base(tmp_path / "base", "gptq", {"group_size": -1})
    assert read_base_quantization(str(base)).form.num_bytes((ROWS, COLUMNS)) == WEIGHTS + 2 * ROWS


@pytest.mark.parametrize("method", METHODS)
def test_every_linear_layer_is_packed_and_nothing_else(tmp_path: Path, method: str) -> None:
    base, model = packed_base(tmp_path / "base", method), load_model(SORTER)
    assert find_base_mismatch(model, str(SORTER), str(base)) == ""
    names = {tensor.name.split(".")[-2] for tensor in list_packed_tensors(model, read_base_quantization(str(base)))}
    assert names == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}


def test_a_layer_that_the_checkpoint_leaves_plain_is_counted_so(tmp_path: Path) -> None:
    base = packed_base(tmp_path / "base")
    add_layer(base, "model.layers.3.mlp.down_proj.", {"weight": np.zeros((ROWS, COLUMNS), np.float16)})
    packed = list_packed_tensors(load_model(SORTER), read_base_quantization(str(base)))
    assert len(packed) == 4 * 4 - 1
    assert find_base_mismatch(load_model(SORTER), str(SORTER), str(base)) == ""


def add_layer(base: Path, stem: str, tensors: dict[str, Any]) -> None:
    """Others in place of a layer's tensors."""
    stored = load_file(base / "model.safetensors")
    kept = {name: tensor for name, tensor in stored.items() if not name.startswith(stem)}
    save_file(kept | {stem + key: tensor for key, tensor in tensors.items()}, base / "model.safetensors")


@pytest.mark.parametrize(
    ("method", "stated", "words"),
    [
        ("awq", {"bits": 8}, "its format is awq, 8 bits"),
        ("awq", {"quant_method": "fp8"}, "its format is fp8"),
        ("awq", {"quant_method": "bitsandbytes", "load_in_4bit": True}, "its format is bitsandbytes"),
        ("awq", {"zero_point": False}, "AWQ without zero_point"),
        ("awq", {"group_size": 16}, "groups have 16"),
        ("gptq", {"desc_act": True}, "desc_act"),
        ("gptq", {"sym": False}, "without sym"),
    ],
)
def test_formats_without_a_kernel_are_refused(tmp_path: Path, method: str, stated: dict[str, Any], words: str) -> None:
    base = packed_base(tmp_path / "base", method, stated)
    with pytest.raises(SpecError, match=words):
        read_base_quantization(str(base))


def test_plain_weights_are_no_base_in_4_bits() -> None:
    with pytest.raises(SpecError, match="not quantized"):
        read_base_quantization(str(SORTER))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"vocab_size": 128}, "vocab_size is 128 there and 64 in the policy"),
        ({"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}, "num_layers is 2 there and 4 in the policy"),
        ({"tie_word_embeddings": False}, "has_tied_embeddings is False there"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "architecture is Qwen2ForCausalLM there"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05 there and 1e-06 in the policy"),
    ],
)
def test_a_base_of_another_shape_is_named_with_both_values(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    base = packed_base(tmp_path / "base", **config)
    assert words in find_base_mismatch(load_model(SORTER), str(SORTER), str(base))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({}, "it has no model.layers.0.mlp.up_proj.qweight"),
        (
            {"qweight": np.zeros((128, 24), np.int32)},
            "up_proj.qweight has shape [128, 24]; model.layers.0.mlp.up_proj.weight of the policy needs [128, 48]",
        ),
    ],
)
def test_tensors_that_lack_or_have_another_shape_are_named(tmp_path: Path, tensors: dict[str, Any], words: str) -> None:
    base = packed_base(tmp_path / "base")
    add_layer(base, "model.layers.0.mlp.up_proj.", tensors)
    assert words in find_base_mismatch(load_model(SORTER), str(SORTER), str(base))
