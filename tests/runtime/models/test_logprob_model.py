"""Packed log-probs and their gradients against transformers' own model, one sequence at a time."""

from typing import Any

import pytest
import torch

from rlplan.memory.model.logits import RowsAtOnce
from rlplan.runtime.models.logprob_model import HeadLogprobs, LogprobModel, _head_forward, make_batch
from rlplan.runtime.models.packed_attention import PACKED, register_packed_attention
from rlplan.runtime.rollout.experience import SequencePair

TEMPERATURE = 0.7
FAMILIES = ("Qwen3", "Llama", "Qwen2")
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def models(family: str) -> tuple[Any, LogprobModel]:
    """transformers' model as it is, and ours with the same weights."""
    import transformers

    register_packed_attention()
    config_class, model_class = (getattr(transformers, f"{family}{kind}") for kind in ("Config", "ForCausalLM"))
    torch.manual_seed(1)
    plain = model_class._from_config(config_class(**SIZES), attn_implementation="eager").float().eval()
    packed = model_class._from_config(config_class(**SIZES), attn_implementation=PACKED).float().eval()
    packed.load_state_dict(plain.state_dict())
    return plain, LogprobModel(packed, TEMPERATURE, entropies="seen")


def sequences(seed: int = 0) -> list[SequencePair]:
    """Sequences of different lengths; one response is empty, and together they exceed the rows taken at once."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 300, (count,), generator=generator).tolist())

    return [SequencePair(tokens(prompt), tokens(response)) for prompt, response in ((3, 190), (9, 1), (1, 170), (4, 0))]


def compute_unpacked(model: Any, pair: SequencePair) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs, entropies) of one sequence alone, by log_softmax over whole logits."""
    tokens = torch.tensor([[*pair.prompt_tokens, *pair.response_tokens]])
    first = len(pair.prompt_tokens)
    table = torch.log_softmax(model(tokens).logits[0].float() / TEMPERATURE, -1)[first - 1 : -1]
    return table.gather(-1, tokens[0, first:, None])[:, 0], -(table.exp() * table).sum(-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_entropies_of_packed_sequences_are_those_of_each_alone(family: str) -> None:
    plain, packed = models(family)
    logprobs, entropies = packed(make_batch(sequences()))
    alone = [compute_unpacked(plain, pair) for pair in sequences()]
    torch.testing.assert_close(logprobs, torch.cat([value for value, _ in alone]), atol=1e-5, rtol=0)
    torch.testing.assert_close(entropies, torch.cat([value for _, value in alone]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_packed_sequences_are_those_of_each_alone(family: str) -> None:
    plain, packed = models(family)
    weights = torch.linspace(-1, 1, 361)
    (packed(make_batch(sequences()))[0] * weights).sum().backward()
    (torch.cat([compute_unpacked(plain, pair)[0] for pair in sequences()]) * weights).sum().backward()
    expected = dict(plain.named_parameters())
    for name, parameter in packed.language_model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, atol=1e-5, rtol=1e-4, msg=name)


def test_one_sequence_does_not_see_another() -> None:
    _, packed = models("Qwen3")
    first, others = sequences()[0], sequences(seed=7)[1:]
    together = packed(make_batch([first, *others]))[0][: len(first.response_tokens)]
    assert torch.equal(together, packed(make_batch([first, *sequences(seed=8)[1:]]))[0][: len(first.response_tokens)])


def test_a_dummy_gives_no_gradient() -> None:
    _, packed = models("Llama")
    logprobs, entropies = packed(make_batch([]))
    assert logprobs.shape == entropies.shape == (0,)
    logprobs.sum().backward()
    assert all(not parameter.grad.any() for parameter in packed.parameters() if parameter.grad is not None)


def test_each_response_token_is_scored_at_the_position_before_it() -> None:
    batch = make_batch([SequencePair((1, 2), (3, 4, 5)), SequencePair((6,), (7,))])
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1]]
    assert batch.positions.tolist() == [1, 2, 3, 5]
    assert batch.targets.tolist() == [3, 4, 5, 7]
    assert (batch.sequence_lens, batch.lengths) == ((5, 2), (3, 1))


def test_the_gradient_of_an_entropy_is_that_of_whole_logits() -> None:
    """The gradient of a weighted sum of log-probs and entropies, through more rows than are taken at once."""
    plain, _ = models(FAMILIES[0])
    head = plain.lm_head
    generator = torch.Generator().manual_seed(3)
    hidden, targets = torch.randn(300, 32, generator=generator), torch.randint(0, 300, (300,), generator=generator)
    of_logprob, of_entropy = torch.randn(2, 300, generator=generator)
    whole, ours = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    table = torch.log_softmax(head(whole) / TEMPERATURE, -1)
    expected = table.gather(-1, targets[:, None])[:, 0] @ of_logprob - (table.exp() * table).sum(-1) @ of_entropy
    gradients = torch.autograd.grad(expected, [whole, head.weight])
    logprobs, entropies = _head_forward(head, ours, targets, temperature=TEMPERATURE, entropies="learned")
    results = torch.autograd.grad(logprobs @ of_logprob + entropies @ of_entropy, [ours, head.weight])
    for own, other in zip(results, gradients, strict=True):
        assert torch.allclose(own, other, atol=1e-5)


def test_log_probs_and_rows_of_logits_are_fp32_whatever_torch_makes_by_default() -> None:
    hidden, weight = (torch.randn(*shape).bfloat16() for shape in ((5, 8), (32, 8)))
    targets = torch.arange(5)
    expected = HeadLogprobs.apply(hidden, weight, targets, 1.0, "seen", RowsAtOnce(4, 2))
    torch.set_default_dtype(torch.bfloat16)
    try:
        results = HeadLogprobs.apply(hidden, weight, targets, 1.0, "seen", RowsAtOnce(4, 2))
    finally:
        torch.set_default_dtype(torch.float32)
    for value, other in zip(results, expected, strict=True):
        assert value.dtype is torch.float32
        assert torch.equal(value, other)


def test_in_16_bits_neither_log_probs_nor_gradients_depend_on_how_many_rows_are_upcast_together() -> None:
    generator = torch.Generator().manual_seed(4)
    hidden, weight = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((11, 8), (32, 8)))
    targets, of_logprob = torch.randint(0, 32, (11,), generator=generator), torch.randn(11, generator=generator)

    def compute_gradients(rows: RowsAtOnce) -> list[torch.Tensor]:
        parts = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logprobs, entropies, _ = HeadLogprobs.apply(*parts, targets, 1.0, "seen", rows)
        return [logprobs, entropies, *torch.autograd.grad(logprobs @ of_logprob, parts)]

    for value, other in zip(compute_gradients(RowsAtOnce(5, 5)), compute_gradients(RowsAtOnce(5, 2)), strict=True):
        torch.testing.assert_close(value, other, atol=1e-6, rtol=0)
