"""ModelSpec against live Hugging Face modules on the meta device: names, shapes, order and count of every parameter.

Oracle: engine. The modules hold no bytes, so real sizes can be used.
"""

from typing import Any

import pytest
import torch

from rlplan.errors import SpecError
from rlplan.spec.model import load_model, model_from_config
from tests.factories import EXAMPLES, config_data

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
QWEN3_06B = {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
}
LLAMA = {"architectures": ["LlamaForCausalLM"]}
MISTRAL = {"architectures": ["MistralForCausalLM"], "sliding_window": None}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"]}
CASES: dict[str, dict[str, Any]] = {
    "llama tied": LLAMA,
    "llama untied": LLAMA | {"tie_word_embeddings": False},
    "llama without head_dim": LLAMA | {"head_dim": ...},
    "llama without kv heads": LLAMA | {"num_key_value_heads": ...},
    "llama without tie_word_embeddings": LLAMA | {"tie_word_embeddings": ...},
    "llama with attention bias": LLAMA | {"attention_bias": True},
    "llama 8B": LLAMA_8B,
    "mistral tied": MISTRAL,
    "mistral untied": MISTRAL | {"tie_word_embeddings": False, "head_dim": ...},
    "mistral ignores attention bias": MISTRAL | {"attention_bias": True},
    "qwen2 tied": QWEN2,
    "qwen2 untied": QWEN2 | {"tie_word_embeddings": False},
    "qwen2 without head_dim": QWEN2 | {"head_dim": ...},
    "qwen2 ignores attention bias": QWEN2 | {"attention_bias": False},
    "qwen3 tied": {},
    "qwen3 untied": {"tie_word_embeddings": False},
    "qwen3 without tie_word_embeddings": {"tie_word_embeddings": ...},
    "qwen3 with attention bias": {"attention_bias": True},
    "qwen3 0.6B": QWEN3_06B,
}


FAMILIES_TO_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def live_parameters(config: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    parsed = AutoConfig.for_model(**config | {"model_type": FAMILIES_TO_TYPES[config["architectures"][0]]})
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(parsed)
    return [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]


@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES)
def test_the_parameters_are_those_of_the_live_module(overrides: dict[str, Any]) -> None:
    config = config_data(**overrides)
    model = model_from_config(config, where="config.json")
    expected = live_parameters(config)
    assert [(parameter.name, parameter.shape) for parameter in model.parameters] == expected
    assert model.num_parameters == sum(torch.Size(shape).numel() for _, shape in expected)


@pytest.mark.parametrize("name", ["sorter", "decoder-160m"])
def test_the_shipped_models_have_the_parameters_of_the_live_module(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(EXAMPLES / "models" / name, local_files_only=True)
        )
    expected = [(parameter, tuple(tensor.shape)) for parameter, tensor in module.named_parameters()]
    model = load_model(EXAMPLES / "models" / name)
    assert [(parameter.name, parameter.shape) for parameter in model.parameters] == expected


@pytest.mark.parametrize("family", ["MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_a_key_that_transformers_would_fill_with_a_constant_is_required(family: str) -> None:
    from transformers import AutoConfig

    config = config_data(architectures=[family], sliding_window=None, num_key_value_heads=...)
    model_type = FAMILIES_TO_TYPES[family]
    assert AutoConfig.for_model(model_type).num_key_value_heads in (8, 32)
    with pytest.raises(SpecError, match="key 'num_key_value_heads' is missing"):
        model_from_config(config, where="config.json")


def test_a_qwen3_without_head_dim_would_be_128_wide_and_is_refused() -> None:
    from transformers import AutoConfig

    assert AutoConfig.for_model("qwen3", hidden_size=8, num_attention_heads=4).head_dim == 128
    with pytest.raises(SpecError, match="key 'head_dim' is missing"):
        model_from_config(config_data(head_dim=...), where="config.json")
