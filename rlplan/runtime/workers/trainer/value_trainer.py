"""ValueTrainer: one rank of the value model on DeepSpeed.

In: the bundle's DeepSpeed configuration and samples. Out: values of response tokens; updated weights, in place.
It is the policy trainer with another model and loss, and without weight sync.
"""

from collections.abc import Sequence

import torch

from rlplan.runtime.losses.value import value_loss_and_sums
from rlplan.runtime.models.logprob_model import make_batch
from rlplan.runtime.rollout.experience import SequencePair, TrainSample
from rlplan.runtime.workers.trainer.policy_trainer import PolicyTrainer, concatenate
from rlplan.vocabulary import Role


class ValueTrainer(PolicyTrainer):
    """See the module docstring. All ranks run the same calls, each with its own samples."""

    role = Role.VALUE
    is_scalar = True

    @torch.no_grad()
    def score(self, pairs: Sequence[SequencePair], role: str) -> list[tuple[float, ...]]:
        """Predict the return at each response token, from the state before it."""
        return self._score_pairs(pairs, self.engine.module)

    def _micro_batch(self, samples: Sequence[TrainSample], token_weights: Sequence[float]) -> dict[str, float]:
        values = self.engine(make_batch(samples))
        returns, old_values = concatenate(s.returns for s in samples), concatenate(s.values for s in samples)
        weights = concatenate(sample.spread(weight) for sample, weight in zip(samples, token_weights, strict=True))
        loss, sums = value_loss_and_sums(values, old_values, returns, weights, self.job.algorithm)
        self.backward(loss)
        return sums
