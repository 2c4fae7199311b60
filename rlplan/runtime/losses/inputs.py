"""What every policy loss gets, and what all of them have in common: KL, teacher, entropy, correction of importance.

In: log-probs of sampled tokens, shape [tokens], fp32. Out: the summed loss and what is worth logging.
Left out: what makes a loss its algorithm's own (the files beside this one).
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch

from rlplan.runtime.losses.advantages import kl_estimate
from rlplan.spec.parts.algorithm import AlgorithmSpec

Details = dict[str, torch.Tensor]


@dataclass(frozen=True)
class LossInputs:
    """Tensors of one micro-batch: T tokens that the policy chose, of S sequences, one sequence after the other."""

    logprobs: torch.Tensor
    """The policy's, [T], with gradient."""

    behaviour_logprobs: torch.Tensor
    """The engine's at sampling time, [T]."""

    reference_logprobs: torch.Tensor | None
    """[T]; None without a reference."""

    advantages: torch.Tensor
    """[T]."""

    weights: torch.Tensor
    """What a token counts, [T]: they add up to 1 over a mini-batch, or to less where tokens count a constant."""

    teacher_logprobs: torch.Tensor | None = None
    """[T]; None without a teacher."""

    lengths: tuple[int, ...] = ()
    """Chosen tokens of each sequence, [S], T together."""

    num_learned: tuple[int, ...] = ()
    """So many first tokens of each sequence are learned from, [S]; empty: all of them."""

    sequence_weights: torch.Tensor | None = None
    """What a whole answer counts, [S], for losses that judge whole answers."""

    sequence_advantages: torch.Tensor | None = None
    """Of whole answers, [S]."""

    groups: tuple[int, ...] = ()
    """The prompt of each sequence, [S]."""

    old_logprobs: torch.Tensor | None = None
    """The trainer's own before the step's first update, [T]; None before that update: they are what they are now."""

    entropies: torch.Tensor | None = None
    """[T], with gradient where there is an entropy bonus."""

    baseline: float = 0.0
    """The loss's baseline over the whole mini-batch, all passes of all ranks (`policy_losses.kl_baseline`). A loss sees
    one pass, so a mean or a bound over its own inputs would depend on how the mini-batch is packed."""

    @property
    def log_ratio(self) -> torch.Tensor:
        """Log-probs less the trainer's own before the step, [T]: 0 in its first update, to the bit.

        Never less the engine's: their difference is no move of the policy, and in bf16 it is larger than GSPO's clip.
        """
        return self.logprobs - self.logprobs_before_step

    @property
    def logprobs_before_step(self) -> torch.Tensor:
        """The trainer's own before the step's first update, [T], without gradient."""
        return self.logprobs.detach() if self.old_logprobs is None else self.old_logprobs

    def per_sequence(self, values: torch.Tensor) -> torch.Tensor:
        """Sums over the learned tokens of each sequence, [sequences]; 0 for one without any."""
        sums, places = values.new_zeros(len(self.lengths)), self._sequence_of_each_token
        if not self.num_learned:
            return sums.index_add(0, places, values)
        spans = zip(self._firsts, self.num_learned, strict=True)
        learned = [index for first, count in spans for index in range(first, first + count)]
        kept = torch.tensor(learned, dtype=torch.long, device=values.device)
        return sums.index_add(0, places[kept], values[kept])

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """A sequence's value for each of its tokens."""
        return values[self._sequence_of_each_token]

    @property
    def _firsts(self) -> list[int]:
        return [0, *accumulate(self.lengths)][:-1]

    @property
    def _sequence_of_each_token(self) -> torch.Tensor:
        lengths = torch.tensor(self.lengths, dtype=torch.long, device=self.logprobs.device)
        return torch.arange(len(self.lengths), device=lengths.device).repeat_interleave(lengths)


PolicyLoss = Callable[[LossInputs, AlgorithmSpec], tuple[torch.Tensor, Details]]
"""Returns: the loss (a scalar), and `ratio` and `is_clipped` for each token with whatever else is logged."""


def total(
    inputs: LossInputs, spec: AlgorithmSpec, token_loss: torch.Tensor, details: Details
) -> tuple[torch.Tensor, Details]:
    """Sum over tokens of weight * (importance * token loss), with KL, teacher and entropy beside it."""
    importance = importance_weights(inputs, spec, details)
    losses = token_loss if importance is None else importance * token_loss
    return add_common_terms(inputs, spec, (inputs.weights * losses).sum(), details)


def total_of_answers(
    inputs: LossInputs, spec: AlgorithmSpec, losses: torch.Tensor, details: Details
) -> tuple[torch.Tensor, Details]:
    """The same of a loss for each sequence; where importance is corrected, its log-ratio has the weights already."""
    assert inputs.sequence_weights is not None
    return add_common_terms(inputs, spec, (inputs.sequence_weights * losses).sum(), details)


def corrected_log_ratio(inputs: LossInputs, spec: AlgorithmSpec, details: Details) -> torch.Tensor:
    """`log_ratio` with each token's gradient times its importance weight, for losses of whole sequences.

    An answer's own weight would be the product of its tokens'. Over thousands of tokens that is near 0 or at the cap,
    so that answers would lose their gradient to rounding. Differs: verl's `rollout_is: sequence` is this product; its
    `token`, which it recommends, weighs each token.
    """
    importance = importance_weights(inputs, spec, details)
    if importance is None:
        return inputs.log_ratio
    value = inputs.log_ratio.detach()
    return value + importance * (inputs.log_ratio - value)


def importance_weights(inputs: LossInputs, spec: AlgorithmSpec, details: Details) -> torch.Tensor | None:
    """Trainer over engine before the step, truncated to or masked outside of [importance_low, importance_high], [T].

    None where nothing is corrected. Only tokens that count are logged.

    Source: truncated: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"
    (min(ratio, C)); masked: IcePop, Ring-1T, arXiv:2510.18855, equation 3. Against older weights it is the decoupled
    objective of Hilton et al. 2021, arXiv:2110.00641, as AReaL has it (Fu et al. 2025, arXiv:2505.24298, equation 5).
    """
    if not spec.corrects_importance:
        return None
    raw = torch.exp(inputs.logprobs_before_step - inputs.behaviour_logprobs)
    within = (raw >= spec.importance_low) & (raw <= spec.importance_high)
    if spec.importance == "truncate":
        kept = raw.clamp(spec.importance_low, spec.importance_high)
    else:
        kept = torch.where(within, raw, 0.0)  # where raw is infinite, a product would be no number
    counted = inputs.weights != 0
    details["importance"], details["is_corrected"] = kept[counted], ~within[counted]
    return kept


def reverse_kl(
    logprobs: torch.Tensor, teacher_logprobs: torch.Tensor, log_ratio: torch.Tensor, highest_ratio: float
) -> torch.Tensor:
    """A loss for each sampled token whose gradient is that of KL(policy || teacher) in expectation, [T].

    Counts: min(r, highest_ratio) * (log p - log q), all without gradient, times the gradient of log p: a policy
    gradient with the advantage -(log p - log q). r weighs samples of older weights. While p is differentiated in the
    log ratio alone, the k3 estimate of the same divergence has the gradient of KL(teacher || policy), with weights q/p.
    Source: Agarwal et al. 2024 (GKD), arXiv:2306.13649, with the reverse KL; Lu and Thinking Machines Lab 2025,
    "On-Policy Distillation". Assumes: tokens are the policy's samples; what a token does to later ones is left out, as
    there.
    """
    weighted = torch.exp(log_ratio.detach()).clamp(max=highest_ratio) * (logprobs - teacher_logprobs).detach()
    return weighted * (1 + logprobs - logprobs.detach())


def add_common_terms(
    inputs: LossInputs, spec: AlgorithmSpec, loss: torch.Tensor, details: Details
) -> tuple[torch.Tensor, Details]:
    """The loss with kl_coef * KL(policy || reference) of each token where it belongs there, a teacher's and entropy."""
    if inputs.reference_logprobs is not None:
        kl = kl_estimate(inputs.logprobs - inputs.reference_logprobs, spec.kl_estimator, torch.exp)
        details["kl"] = kl.detach()
        if spec.kl_in == "loss":
            loss = loss + spec.kl_coef * (inputs.weights * kl).sum()
    if inputs.teacher_logprobs is not None:
        details["teacher_reverse_kl"] = (inputs.logprobs - inputs.teacher_logprobs).detach()
        losses = reverse_kl(inputs.logprobs, inputs.teacher_logprobs, inputs.log_ratio, 1 + spec.clip_high)
        importance = importance_weights(inputs, spec, {})
        losses = losses if importance is None else importance * losses
        loss = loss + spec.teacher_coef * (inputs.weights * losses).sum()
    if spec.entropy_coef and inputs.entropies is not None:
        loss = loss - spec.entropy_coef * (inputs.weights * inputs.entropies).sum()
    return loss, details
