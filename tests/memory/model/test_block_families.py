"""Every family's block against what the layers of its own Hugging Face module save (oracle: engine, fake tensors)."""

import json
from typing import Any

import pytest

from rlplan.errors import SpecError
from rlplan.memory.model.activations import block_saved_bytes
from rlplan.memory.model.block_families import REFUSED, TRAITS, list_blocks
from rlplan.spec.model import FAMILIES, ModelSpec, model_from_config
from tests.memory.model.traced_layers import saved_by_layer
from tests.repository.at_night import mark_nightly
from tests.spec.models.test_families import ALIASES, CASES

TOKENS = 1024
SIZES = {"DeepseekV2ForCausalLM": {"moe_intermediate_size": 1408}}
"""Where the library's default is nothing that its kernels take."""
FEW = {"num_hidden_layers": 4}
GROUPED_FALCON = FEW | {
    "new_decoder_architecture": True,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_kv_heads": 8,
}
FALCONS = (
    GROUPED_FALCON,
    GROUPED_FALCON | {"num_ln_in_parallel_attn": 1},
    FEW | {"multi_query": False},
    FEW | {"multi_query": False, "parallel_attn": False},
)
"""Falcons with more than one key head. With one, SDPA has no fused attention for them, so rlplan refuses the model."""
CHECKED = {name: overrides for name, overrides in reversed(CASES) if name in TRAITS} | {"FalconForCausalLM": FALCONS[0]}
VARIANTS = [(name, overrides) for name, overrides in CASES if name in TRAITS and name != "FalconForCausalLM"]
VARIANTS += [("FalconForCausalLM", overrides) for overrides in FALCONS]


def build_config(name: str, overrides: dict[str, Any]) -> dict[str, Any]:
    import transformers

    kind = getattr(transformers, name)
    config = kind.config_class(**overrides, **SIZES.get(name, {})).to_dict()
    return json.loads(json.dumps(config | {"architectures": [name]}))


def layer_errors(config: dict[str, Any]) -> list[float]:
    """Relative error of each layer but the first, which makes what all share, and of all together."""
    model = model_from_config(config, where="config.json")
    predicted = [(kind.num, block_saved_bytes(kind.block, TOKENS, 2)) for kind in list_blocks(model)]
    measured = saved_by_layer(config, TOKENS)[:-1]
    each = [min((size / saved - 1 for _, size in predicted), key=abs) for saved in measured[1:]]
    return [*each, sum(num * size for num, size in predicted) / sum(measured) - 1]


@pytest.mark.parametrize("name", mark_nightly(CHECKED, but=[*CHECKED][::4]))
def test_each_layer_of_a_family_saves_what_its_block_says(name: str) -> None:
    errors = layer_errors(build_config(name, CHECKED[name]))
    assert max(map(abs, errors)) <= 0.01, errors


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "overrides"), VARIANTS, ids=[f"{name}-{i}" for i, (name, _) in enumerate(VARIANTS)])
def test_each_variant_of_a_family_saves_what_its_block_says(name: str, overrides: dict[str, Any]) -> None:
    errors = layer_errors(build_config(name, overrides))
    assert max(map(abs, errors)) <= 0.01, errors


def test_every_family_is_described_or_refused() -> None:
    assert TRAITS.keys() | REFUSED.keys() == FAMILIES.keys()
    assert not TRAITS.keys() & REFUSED.keys()
    assert CHECKED.keys() | ALIASES.keys() >= TRAITS.keys()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_family_without_a_formula_is_refused_by_name(name: str) -> None:
    overrides = next(overrides for known, overrides in CASES if known == ALIASES.get(name, name))
    config = build_config(ALIASES.get(name, name), overrides) | {"architectures": [name]}
    with pytest.raises(SpecError, match=rf"{name} are not modelled(.|\n)*--trace"):
        list_blocks(model_from_config(config, where="config.json"))


def test_layers_of_different_kinds_are_counted_apart() -> None:
    config = build_config("Qwen3NextForCausalLM", {"num_hidden_layers": 8})
    kinds = list_blocks(model_from_config(config, where="config.json"))
    assert [(kind.num, kind.block.delta_rule is None) for kind in kinds] == [(6, False), (2, True)]
    assert isinstance(model_from_config(config, where="config.json"), ModelSpec)


def test_falcon_with_one_key_head_is_refused_for_no_fused_kernel_takes_it() -> None:
    with pytest.raises(SpecError, match="no fused kernel shares one key head among 71"):
        list_blocks(model_from_config(build_config("FalconForCausalLM", FEW), where="config.json"))
