"""A causal language model that gives log-probs of the response tokens instead of logits.

In: padded token ids. Out: log-prob and entropy of every response token.
The head runs on response positions only, so logits of prompts and padding never exist.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlplan.memory.logits import ROWS_AT_ONCE
from rlplan.runtime.experience import SequencePair, TrainSample


@dataclass(frozen=True)
class TokenBatch:
    """Right-padded sequences. input_ids: [batch, length]. positions: flat indices into [batch * length] whose hidden
    state predicts a response token. targets: those tokens, [tokens]. lengths: response length of each sequence."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    lengths: tuple[int, ...]


def make_batch(sequences: Sequence[TrainSample | SequencePair], pad_token: int) -> TokenBatch:
    """Pad sequences to the longest of them.

    Padding stands on the right and attention is causal, so no position that counts ever sees it: no mask is needed.
    """
    lengths = [len(sequence.prompt_tokens) + len(sequence.response_tokens) for sequence in sequences]
    width = max(lengths)
    rows = [
        [*sequence.prompt_tokens, *sequence.response_tokens] + [pad_token] * (width - length)
        for sequence, length in zip(sequences, lengths, strict=True)
    ]
    positions, targets = [], []
    for row, sequence in enumerate(sequences):
        first = row * width + len(sequence.prompt_tokens) - 1
        positions += range(first, first + len(sequence.response_tokens))
        targets += sequence.response_tokens
    return TokenBatch(
        input_ids=torch.tensor(rows),
        positions=torch.tensor(positions, dtype=torch.long),
        targets=torch.tensor(targets, dtype=torch.long),
        lengths=tuple(len(sequence.response_tokens) for sequence in sequences),
    )


class LogprobModel(nn.Module):
    """Wraps a Hugging Face causal LM. `forward` gives (log-probs, entropies), both fp32 of shape [tokens]."""

    def __init__(self, language_model: nn.Module, temperature: float, *, computes_entropy: bool) -> None:
        super().__init__()
        self.computes_entropy = computes_entropy
        self.language_model = language_model
        self.temperature = temperature

    def forward(self, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of the response tokens at the sampling temperature, and the entropies there (without gradient)."""
        hidden = self.language_model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        hidden = hidden.reshape(-1, hidden.shape[-1])[batch.positions]
        logits = self.language_model.lm_head(hidden).float()
        logits.detach().div_(self.temperature)  # in place; the backward pass below makes up for it
        entropies = _entropy(logits.detach()) if self.computes_entropy else logits.new_empty(0)
        logprobs: torch.Tensor = _SelectedLogprobs.apply(logits, batch.targets, self.temperature)
        return logprobs, entropies


class _SelectedLogprobs(torch.autograd.Function):
    """log softmax(logits)[target], one a row, without a second tensor of the logits' size.

    The logits were divided by the temperature in place, unseen by autograd. The backward pass turns them into their own
    gradient in place: g * (one_hot(target) - softmax(logits)) / temperature.
    Nothing else may read the logits after this, which is why the entropy is taken before.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
        ctx.temperature = temperature
        normalizer = torch.cat([part.logsumexp(-1) for part in logits.split(ROWS_AT_ONCE)])
        ctx.save_for_backward(logits, targets, normalizer)
        return logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - normalizer

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, targets, normalizer = ctx.saved_tensors
        scale = gradient.unsqueeze(-1) / ctx.temperature
        result = logits.detach().sub_(normalizer.unsqueeze(-1)).exp_().mul_(-scale)
        result.scatter_add_(-1, targets.unsqueeze(-1), scale)
        return result, None, None


@torch.no_grad()
def _entropy(logits: torch.Tensor) -> torch.Tensor:
    """Entropy a row, in slices so that no second tensor of the logits' size appears."""
    entropies = []
    for part in logits.split(ROWS_AT_ONCE):
        normalizer = part.logsumexp(-1, keepdim=True)
        entropies.append(normalizer.squeeze(-1) - (torch.exp(part - normalizer) * part).sum(-1))
    return torch.cat(entropies)
