"""ValueTrainer: one data-parallel rank of the value model on DeepSpeed.

In: the bundle's DeepSpeed config and samples. Out: values of response tokens; updated weights, in place.
It is the policy's trainer with another model, another loss, and nothing to hand over.
"""

from collections.abc import Sequence
from typing import Any

import torch

from rlplan.runtime.experience import SequencePair, TrainSample
from rlplan.runtime.logprob_model import judge_packed, make_batch
from rlplan.runtime.losses.value import clipped_value_loss
from rlplan.runtime.start_checkpoint import load_scalar_model
from rlplan.runtime.value_model import ValueModel
from rlplan.runtime.workers.deepspeed_engine import TORCH_DTYPES
from rlplan.runtime.workers.policy_trainer import PolicyTrainer
from rlplan.vocabulary import Role


class ValueTrainer(PolicyTrainer):
    """See the module docstring. Every rank runs the same calls with its own samples."""

    role = Role.VALUE

    def load(self, model_folder: str) -> Any:
        """The Hugging Face module that is trained."""
        return load_scalar_model(model_folder, TORCH_DTYPES[self.job.training.dtype])

    def wrap(self, language_model: Any) -> torch.nn.Module:
        """The module that DeepSpeed gets."""
        return ValueModel(language_model)

    @torch.no_grad()
    def score(self, pairs: Sequence[SequencePair]) -> list[tuple[float, ...]]:
        """What the state before each response token is worth, micro-batch by micro-batch."""
        return judge_packed(pairs, self.job.max_tokens_per_micro_batch, self.engine.module)

    def _micro_batch(self, samples: Sequence[TrainSample], token_weights: Sequence[float]) -> dict[str, float]:
        batch = make_batch(samples)
        values = self.engine(batch)
        returns = torch.tensor([value for sample in samples for value in sample.returns])
        old_values = torch.tensor([value for sample in samples for value in sample.values])
        spread = [weight for s, each in zip(samples, token_weights, strict=True) for weight in s.spread(each)]
        weights = torch.tensor(spread, dtype=torch.float32)
        loss, is_clipped = clipped_value_loss(values, old_values, returns, weights, self.job.algorithm.value_clip)
        self.engine.backward(loss * self.engine.dp_world_size, scale_wrt_gas=False)
        difference = (returns - values.detach()).double()
        return {
            "num_tokens": float(values.numel()),
            "loss": float(loss),
            "is_clipped_sum": float(is_clipped.double().sum()),
            "value_sum": float(values.detach().double().sum()),
            "squared_error_sum": float((difference**2).sum()),
            "return_sum": float(returns.double().sum()),
            "squared_return_sum": float((returns.double() ** 2).sum()),
        }
