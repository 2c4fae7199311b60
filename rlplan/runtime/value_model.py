"""A decoder with a scalar head: a value for every response token, or a reward for a whole sequence.

In: a TokenBatch. Out: one number for each of its response tokens: what the state before that token is worth.
"""

from collections.abc import Sequence

import torch
from torch import nn

from rlplan.runtime.experience import SequencePair
from rlplan.runtime.logprob_model import TokenBatch, make_batch


class ValueModel(nn.Module):
    """Wraps a Hugging Face sequence classifier with one label. `forward` gives values, fp32 of shape [tokens]."""

    def __init__(self, language_model: nn.Module) -> None:
        super().__init__()
        self.language_model = language_model

    def forward(self, batch: TokenBatch) -> torch.Tensor:
        """The head on the hidden states that predict response tokens."""
        hidden = self.language_model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        rows = hidden.reshape(-1, hidden.shape[-1])[batch.positions]
        values: torch.Tensor = self.language_model.score(rows).squeeze(-1).float()
        return values


def whole_sequences(pairs: Sequence[SequencePair], pad_token: int) -> TokenBatch:
    """A batch whose only value a sequence is the one after its last token: one token more stands there, unseen."""
    return make_batch(
        [SequencePair((*pair.prompt_tokens, *pair.response_tokens), (pad_token,)) for pair in pairs], pad_token
    )
