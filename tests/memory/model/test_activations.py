"""Activations: worked by hand, and against what live modules save for their backward pass (oracle: engine)."""

from typing import Any

import pytest
import torch

from rlplan.memory.model.activations import (
    block_saved_bytes,
    final_saved_bytes,
    forward_working_bytes,
    mlp_freed_bytes,
    working_bytes,
)
from rlplan.memory.model.block_families import LayerCut, cut_layers
from rlplan.memory.trainers.shape import MicroBatchShape
from rlplan.runtime.models.logprob_model import LogprobModel, make_batch
from rlplan.runtime.models.packed_attention import PACKED, register_packed_attention
from rlplan.runtime.rollout.experience import TrainSample
from rlplan.spec.model import model_from_config
from rlplan.vocabulary import Loss
from tests.factories import config_data, make_model
from tests.memory.model.passes import find_block, forward_end_bytes

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def test_a_layer_saves_what_is_worked_by_hand() -> None:
    # h=8, q=12, v=6, a=4, k=2, I=20: 48 + 4*12 + 4*6 + (2*4 + 2) + 4*20 + 2 = 212 elements
    assert block_saved_bytes(find_block(make_model()), 1, 4) == 212 * 4
    assert block_saved_bytes(find_block(make_model()), 1000, 4) == 212 * 4 * 1000
    # without norms of queries and keys: 48 + 2*12 + 2*6 + 4 + 80 + 2 = 170 elements
    llama = make_model(architecture="LlamaForCausalLM", has_qk_norm=False)
    assert block_saved_bytes(find_block(llama), 1, 4) == 170 * 4


def test_the_other_parts_are_what_is_worked_by_hand() -> None:
    model = make_model()
    block = find_block(model)
    # 5 tokens, 3 of them responses: 3*5*8 and 3*8 rows, 5 scales, rotary table 2*5*3: 144 + 5 + 30 elements
    assert final_saved_bytes(block, 5, 3, 4) == 179 * 4
    # 2*20 of the MLP and 2*8 of the residual a token
    assert working_bytes(block, 5, 4) == 5 * 56 * 4
    # 4*20 and 2*8 a token
    assert mlp_freed_bytes(block, 5, 4) == 5 * 96 * 4
    # 4*20 and 3*8 a token
    assert forward_working_bytes(model, 5) == 5 * 104 * 4


def test_what_the_mlp_frees_is_a_part_of_what_its_layer_saved() -> None:
    for model in (make_model(), make_model(has_qk_norm=False)):
        assert mlp_freed_bytes(find_block(model), 7, 4) < block_saved_bytes(find_block(model), 7, 4)


def saved_bytes(config: dict[str, Any], num_sequences: int, prompt_len: int, response_len: int) -> int:
    """Bytes of all storages that a log-prob pass of the runtime saves, parameters apart."""
    from transformers import AutoConfig, AutoModelForCausalLM

    parsed = AutoConfig.for_model(**config | {"model_type": FAMILIES[config["architectures"][0]]})
    register_packed_attention()
    module = AutoModelForCausalLM.from_config(parsed, attn_implementation=PACKED).train()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    storages: dict[int, int] = {}
    saved = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        saved.append(tensor)  # nothing may be freed and its address used again while we count
        return tensor

    sample = TrainSample((5,) * prompt_len, (6,) * response_len, (0.0,) * response_len, (), ())
    batch = make_batch([sample] * num_sequences)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        LogprobModel(module, 1.0, entropies="none")(batch)
    return sum(storages.values())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(4, 16), (2, 32), (1, 32)])
def test_each_layer_of_a_live_module_saves_what_the_formula_says(family: str, num_kv_heads: int, head_dim: int) -> None:
    overrides = {"num_key_value_heads": num_kv_heads, "head_dim": head_dim, "sliding_window": None}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 64}
    config = config_data(architectures=[family], **sizes, **overrides)
    model = model_from_config(config, where="config.json")
    two, five = (saved_bytes(config | {"num_hidden_layers": count}, 3, 8, 12) for count in (2, 5))
    predicted = block_saved_bytes(find_block(model), 3 * 20, 4)
    assert (five - two) / 3 == pytest.approx(predicted, rel=0.01)
    assert (five - two) / 3 <= predicted


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("num_sequences", "prompt_len", "response_len"), [(2, 8, 24), (8, 8, 12), (4, 2, 60)])
def test_a_whole_log_prob_pass_is_never_under_and_at_most_a_tenth_over(
    family: str, num_sequences: int, prompt_len: int, response_len: int
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 192, "vocab_size": 64, "head_dim": 16, "num_hidden_layers": 4}
    config = config_data(architectures=[family], sliding_window=None, **sizes)
    model = model_from_config(config, where="config.json")
    measured = saved_bytes(config, num_sequences, prompt_len, response_len)
    num_tokens, num_responses = num_sequences * (prompt_len + response_len), num_sequences * response_len
    (layers,) = cut_layers(model, None, LayerCut())
    shape = MicroBatchShape(
        layers.block,
        layers.num,
        model.vocab_size,
        num_tokens,
        num_responses,
        element_bytes=4,
        loss=Loss.BY_ROWS,
        selects_rows=True,
    )
    predicted = forward_end_bytes(shape)  # no logits: the normalizer of each row
    assert measured <= predicted <= 1.1 * measured
