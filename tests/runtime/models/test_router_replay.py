"""Router replay, beside a plain computation of Qwen3-MoE's block with the same experts."""

from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from rlplan.runtime.models.logprob_model import make_batch
from rlplan.runtime.models.router_replay import RouterReplay
from rlplan.runtime.rollout.experience import SequencePair

CONFIG = Qwen3MoeConfig(
    vocab_size=32,
    hidden_size=16,
    moe_intermediate_size=8,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=8,
    num_experts=6,
    num_experts_per_tok=2,
    norm_topk_prob=True,
)


def compute_plainly(block: Any, hidden: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Sum of the chosen experts' outputs, weighed by their probabilities, which are normalized among them."""
    probabilities = (hidden @ block.gate.weight.T).softmax(-1).gather(-1, chosen)
    weights = probabilities / probabilities.sum(-1, keepdim=True)
    rows = []
    for token, experts, weight in zip(hidden, chosen, weights, strict=True):
        outputs = []
        for expert in experts.tolist():
            gate, up = (block.experts.gate_up_proj[expert] @ token).chunk(2)
            outputs.append(block.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up))
        rows.append(sum(w * output for w, output in zip(weight, outputs, strict=True)))
    return torch.stack(rows)


@pytest.fixture
def block() -> Any:
    torch.manual_seed(0)
    block = Qwen3MoeSparseMoeBlock(CONFIG)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return block


def test_output_and_gradients_are_those_of_the_replayed_experts(block: Any) -> None:
    hidden = torch.randn(5, 16)
    chosen = torch.tensor([[0, 1], [5, 2], [3, 4], [1, 0], [2, 3]])
    replay = RouterReplay(block)
    replay.experts = chosen[:, None].to(torch.int16)
    output, expected = block(hidden[None])[0], compute_plainly(block, hidden, chosen)
    assert torch.allclose(output, expected, atol=1e-6)
    parameters = list(block.parameters())
    gradients = torch.autograd.grad(output.square().sum(), parameters)
    others = torch.autograd.grad(expected.square().sum(), parameters)
    for gradient, other in zip(gradients, others, strict=True):
        assert torch.allclose(gradient, other, atol=1e-5)


def test_without_recorded_experts_the_router_chooses_to_the_bit(block: Any) -> None:
    hidden = torch.randn(1, 4, 16)
    before = block(hidden)
    replay = RouterReplay(block)
    assert torch.equal(block(hidden), before)
    replay.experts = torch.full((4, 1, 2), -1, dtype=torch.int16)
    assert torch.equal(block(hidden), before), "-1 leaves the choice to the router"


def test_layers_replay_their_own_experts() -> None:
    """Replaying what a model chose itself changes nothing; another layer's experts do."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(CONFIG).eval()
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, output: chosen.append(output[2]))
    tokens, replay = torch.arange(3, 19)[None], RouterReplay(model)
    with torch.no_grad():
        before = model(tokens).logits
        own = torch.stack(chosen, 1)
        replay.experts = own
        assert torch.allclose(model(tokens).logits, before, atol=1e-6)
        replay.experts = own.flip(1)
        assert not torch.allclose(model(tokens).logits, before, atol=1e-4)


def test_a_pack_has_experts_at_the_rows_of_their_sequences() -> None:
    """The last token, which the engine never computed, and sequences without a record choose themselves."""
    first, last = torch.arange(8).view(4, 1, 2).numpy(), torch.arange(4).view(2, 1, 2).numpy()
    pairs = [
        SequencePair((1, 2), (3, 4, 5), experts=first),
        SequencePair((1,), (2,)),
        SequencePair((1, 2), (3,), experts=last),
    ]
    experts = make_batch(pairs).experts
    assert experts is not None
    assert experts[:, 0, 0].tolist() == [0, 2, 4, 6, -1, -1, -1, 0, 2, -1]
