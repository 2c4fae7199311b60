"""The model of a training point: a bundled one (named_models.py), or a shape that a trainer's own example brings along.

In: a point. Out: a ModelSpec. Raises CannotPredict for what is not known: nothing is guessed.
"""

from rlplan.accuracy.named_models import model_of
from rlplan.accuracy.points import MeasuredPoint
from rlplan.spec.model import ModelSpec, model_from_config

_GPT = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
SHAPES = {
    "deepspeed-example/simple-transformer-6.86B": _GPT
    | {"n_embd": 4096, "n_layer": 32, "n_head": 32, "vocab_size": 50257, "n_positions": 512}
    | {"tie_word_embeddings": False},
    "gpt 7b (megatron-deepspeed)": _GPT
    | {"n_embd": 4096, "n_layer": 32, "n_head": 32, "vocab_size": 50304, "n_positions": 2048},
}
"""Shapes that no hub has. DeepSpeed's example: 6,858,007,633 parameters are 32 layers of 12h^2 + 13h at h = 4096, two
tables of 50,257 rows (the head with a bias) and 512 positions. Megatron's 7B is GPT-3's 6.7B (Brown et al. 2020,
table 2.1) with the vocabulary padded to 128."""


def trained_model(point: MeasuredPoint) -> ModelSpec:
    """The model that a point trains. Raises: CannotPredict.

    >>> measured = {"value": 1, "unit": "GiB"}
    >>> trained_model(MeasuredPoint(id="a", kind="k", model="llama-2-7b", measured=measured)).num_layers
    32
    """
    shape = next((config for name, config in SHAPES.items() if name.lower() == (point.model or "").lower()), None)
    return model_from_config(dict(shape), where=point.id) if shape else model_of(point)
