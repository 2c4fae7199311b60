"""RewardTrainer: one rank of a reward model on DeepSpeed.

In: the bundle's DeepSpeed configuration, and pairs of answers. Out: a score per answer; updated weights, in place.
It is the policy trainer with a scalar head, read at the last token.
"""

from collections.abc import Sequence

import torch

from rlplan.runtime.losses.inputs import LossInputs
from rlplan.runtime.losses.registry import find_loss
from rlplan.runtime.models.logprob_model import make_batch
from rlplan.runtime.models.value_model import append_dummy_tokens
from rlplan.runtime.rollout.experience import SequencePair, TrainSample
from rlplan.runtime.workers.trainer.policy_trainer import PolicyTrainer, concatenate


class RewardTrainer(PolicyTrainer):
    """See the module docstring. All ranks run the same calls, each with its own samples."""

    is_scalar = True

    @torch.no_grad()
    def score(self, pairs: Sequence[SequencePair], role: str) -> list[tuple[float, ...]]:
        """Compute the reward of each full sequence."""
        return self._score_pairs(append_dummy_tokens(pairs), self.engine.module)

    def _micro_batch(self, samples: Sequence[TrainSample], token_weights: Sequence[float]) -> dict[str, float]:
        scores = self.engine(make_batch(append_dummy_tokens(samples)))
        weights = concatenate(
            (sample.weigh_response(weight),) for sample, weight in zip(samples, token_weights, strict=True)
        )
        signs = concatenate((sample.advantage,) for sample in samples)
        inputs = LossInputs(
            logprobs=scores,
            behaviour_logprobs=scores.detach(),
            reference_logprobs=None,
            advantages=signs,
            weights=weights,
            lengths=(1,) * len(samples),
            sequence_weights=weights,
            sequence_advantages=signs,
            groups=tuple(sample.group for sample in samples),
        )
        loss, details = find_loss(self.job.algorithm)(inputs, self.job.algorithm)
        self.backward(loss)
        ranked, seen = details["is_ranked_right"], scores.detach()
        return {
            "loss": float(loss.detach()),
            "is_ranked_right_sum": float(ranked.double().sum()),
            "is_ranked_right_count": float(ranked.numel()),
            "margin_sum": float((signs * seen).double().sum()),
            "margin_count": float(ranked.numel()),
        }
