"""The model of a training point: a bundled one (named_models.py), or a shape that a trainer's own example brings along.

In: a point. Out: a ModelSpec. Raises CannotPredict for what is not known: nothing is guessed.
"""

from typing import Any

from rlplan.accuracy.named_models import model_of
from rlplan.accuracy.points import MeasuredPoint
from rlplan.spec.model import ModelSpec, model_from_config

_GPT: dict[str, Any] = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
_NEOX: dict[str, Any] = {
    "architectures": ["GPTNeoXForCausalLM"],
    "model_type": "gpt_neox",
    "max_position_embeddings": 4096,
}
_NEOX |= {"tie_word_embeddings": False}
_FALCON: dict[str, Any] = {
    "architectures": ["FalconForCausalLM"],
    "model_type": "falcon",
    "vocab_size": 65024,
    "bias": False,
}
_FALCON |= {"new_decoder_architecture": True, "multi_query": True, "parallel_attn": True, "alibi": False}
SHAPES: dict[str, dict[str, Any]] = {
    "deepspeed-example/simple-transformer-6.86B": _GPT
    | {"n_embd": 4096, "n_layer": 32, "n_head": 32, "vocab_size": 50257, "n_positions": 512}
    | {"tie_word_embeddings": False},
    "gpt 7b (megatron-deepspeed)": _GPT
    | {"n_embd": 4096, "n_layer": 32, "n_head": 32, "vocab_size": 50304, "n_positions": 2048},
    "stabilityai/stablelm-base-alpha-3b": _NEOX
    | {"hidden_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 32, "vocab_size": 50688}
    | {"intermediate_size": 16384},
    "stabilityai/stablelm-base-alpha-7b": _NEOX
    | {"hidden_size": 6144, "num_hidden_layers": 16, "num_attention_heads": 48, "vocab_size": 50432}
    | {"intermediate_size": 24576},
    "tiiuae/falcon-40b": _FALCON
    | {"hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128, "num_kv_heads": 8},
    "tiiuae/falcon-180B": _FALCON
    | {"hidden_size": 14848, "num_hidden_layers": 80, "num_attention_heads": 232, "num_kv_heads": 8},
}
"""Shapes that the catalogue has not. DeepSpeed's example: 6,858,007,633 parameters are 32 layers of 12h^2 + 13h at
h = 4096, two tables of 50,257 rows (the head with a bias) and 512 positions. Megatron's 7B is GPT-3's 6.7B (Brown et
al. 2020, table 2.1) with the vocabulary padded to 128. StableLM alpha and Falcon: their hub pages' config.json."""


def trained_model(point: MeasuredPoint) -> ModelSpec:
    """The model that a point trains. Raises: CannotPredict.

    >>> measured = {"value": 1, "unit": "GiB"}
    >>> trained_model(MeasuredPoint(id="a", kind="k", model="llama-2-7b", measured=measured)).num_layers
    32
    """
    shape = next((config for name, config in SHAPES.items() if name.lower() == (point.model or "").lower()), None)
    return model_from_config(dict(shape), where=point.id) if shape else model_of(point)
