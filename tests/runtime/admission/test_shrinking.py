"""Small configs keep everything but layers and widths."""

from typing import Any

import pytest

from rlplan.runtime.admission.shrinking import MAX_LAYERS, WINDOW, shrink_config
from rlplan.spec.model import model_from_config
from rlplan.spec.models.catalogue import load_catalogue

RUN_BY_RULES = [
    *("Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "google/gemma-2-9b", "mistralai/Mixtral-8x7B-v0.1"),
    *("mistralai/Mistral-7B-v0.1", "openai/gpt-oss-20b", "microsoft/phi-4"),
]


def read_config(name: str) -> dict[str, Any]:
    return dict(load_catalogue()[name].config)


@pytest.mark.parametrize("name", [name for name in RUN_BY_RULES if name in load_catalogue()])
def test_a_small_model_has_every_kind_of_layer_and_the_heads_of_the_large_one(name: str) -> None:
    large, small = (model_from_config(c, where=name) for c in (read_config(name), shrink_config(read_config(name))))
    assert small.num_parameters < 5_000_000
    assert small.num_layers <= MAX_LAYERS
    assert set(small.attention_kinds) == set(large.attention_kinds)
    assert (small.head_dim, small.options) == (large.head_dim, large.options)
    assert (small.experts is None) == (large.experts is None)
    assert small.window == (WINDOW if large.window else None)


def test_models_of_one_kind_and_other_sizes_have_one_small_model() -> None:
    eight_b = read_config("Qwen/Qwen3-8B")
    other = eight_b | {"hidden_size": 2048, "num_hidden_layers": 40, "intermediate_size": 4096, "vocab_size": 999}
    assert shrink_config(eight_b) == shrink_config(other)
    assert shrink_config(eight_b) != shrink_config(eight_b | {"rope_theta": 1.0})
