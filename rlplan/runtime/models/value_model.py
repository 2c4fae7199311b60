"""A decoder with a scalar head: a value for every response token, or a reward for a whole sequence.

In: a TokenBatch. Out: one number per response token: the value of the state before that token.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rlplan.runtime.models.logprob_model import Entropies, LogprobModel, PackedModel, TokenBatch
from rlplan.runtime.models.sequence_parallel import Sharing
from rlplan.runtime.rollout.experience import SequencePair, TrainSample


class ValueModel(PackedModel):
    """A Hugging Face sequence classifier with one label; `forward` returns values, fp32 of shape [tokens]."""

    def forward(self, batch: TokenBatch) -> torch.Tensor:
        _, rows = self.compute_own_states(batch)
        return self.gather_all(self.language_model.score(rows).squeeze(-1).float(), batch)


class PolicyValueModel(LogprobModel):
    """A policy with a value head on its backbone; `forward` returns (log-probs, entropies, values), each [tokens]."""

    def __init__(
        self, language_model: Any, temperature: float, entropies: Entropies = "seen", sharing: Sharing | None = None
    ) -> None:
        super().__init__(language_model, temperature, entropies=entropies, sharing=sharing)
        weight = language_model.get_input_embeddings().weight
        self.value_head = nn.Linear(language_model.config.hidden_size, 1, bias=False, dtype=weight.dtype)
        nn.init.zeros_(self.value_head.weight)

    def forward(self, batch: TokenBatch, top_k: int = 0) -> tuple[torch.Tensor, ...]:
        part, rows = self.compute_own_states(batch)
        numbers: tuple[torch.Tensor, ...] = self.language_model.lm_head(rows, part.targets, part.teacher, top_k)
        if top_k:
            return numbers
        values = self.value_head(rows).squeeze(-1).float()
        return tuple(self.gather_all(part_values, batch) for part_values in (*numbers[:2], values, *numbers[2:]))


def append_dummy_tokens(pairs: Sequence[SequencePair | TrainSample]) -> list[SequencePair]:
    """Append one dummy response token to each sequence. Its value is that of the state after the last real token."""
    return [SequencePair((*pair.prompt_tokens, *pair.response_tokens), (0,)) for pair in pairs]
