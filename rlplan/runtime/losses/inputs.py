"""Inputs of policy losses, and the terms that all of them share: KL, teacher, entropy, importance correction.

In: log-probs of sampled tokens, shape [tokens], fp32. Out: the summed loss and details for the log.
Left out: the losses of the algorithms (policy_losses.py).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch

from rlplan.runtime.losses.advantages import kl_estimate
from rlplan.spec.parts.algorithm import AlgorithmSpec

Details = dict[str, torch.Tensor]


@dataclass(frozen=True)
class LossInputs:
    """Tensors of one micro-batch: T tokens that the policy chose, in S consecutive sequences."""

    logprobs: torch.Tensor
    """The policy's log-probs, [T], with gradient."""

    behaviour_logprobs: torch.Tensor
    """The engine's log-probs at sampling time, [T]."""

    reference_logprobs: torch.Tensor | None
    """The reference's log-probs, [T]; None without a reference."""

    advantages: torch.Tensor
    """Advantages of the tokens, [T]."""

    weights: torch.Tensor
    """Weights of the tokens in the loss, [T]. Their sum over a mini-batch is 1, or less with `constant` weights."""

    teacher_logprobs: torch.Tensor | None = None
    """The teacher's log-probs, [T]; None without a teacher."""

    teacher_divergences: torch.Tensor | None = None
    """KL(policy || teacher) at each token, summed over the vocabulary, [T], with gradient; None for the estimate from
    `teacher_logprobs`."""

    lengths: tuple[int, ...] = ()
    """Number of chosen tokens of each sequence, [S]; the sum is T."""

    num_learned: tuple[int, ...] = ()
    """Number of first tokens of each sequence that the loss learns from, [S]; empty for all tokens."""

    sequence_weights: torch.Tensor | None = None
    """Weights of the answers, [S], for losses over answers."""

    sequence_advantages: torch.Tensor | None = None
    """Advantages of the answers as one action, [S]."""

    groups: tuple[int, ...] = ()
    """Index of each sequence's prompt, [S]."""

    old_logprobs: torch.Tensor | None = None
    """The trainer's log-probs before the step's first update, [T]; None in that update, where they equal `logprobs`."""

    entropies: torch.Tensor | None = None
    """Entropies of the tokens, [T], with gradient if there is an entropy bonus."""

    baseline: float = 0.0
    """Baseline over the entire mini-batch, all passes of all ranks (`policy_losses.estimate_kl_baseline`). A loss sees
    only one pass, so a mean over its own inputs would depend on how the mini-batch is packed."""

    @property
    def log_ratio(self) -> torch.Tensor:
        """Log-probs minus the trainer's log-probs before the step, [T]; exactly 0 in the first update.

        The engine's log-probs are not used: they differ by rounding, which in bf16 exceeds GSPO's clip range.
        """
        return self.logprobs - self.logprobs_before_step

    @property
    def logprobs_before_step(self) -> torch.Tensor:
        """The trainer's log-probs before the step's first update, [T], without gradient."""
        return self.logprobs.detach() if self.old_logprobs is None else self.old_logprobs

    def per_sequence(self, values: torch.Tensor) -> torch.Tensor:
        """Sums over the learned tokens of each sequence, [S]; 0 for a sequence without learned tokens."""
        sums, places = values.new_zeros(len(self.lengths)), self._sequence_of_each_token
        if not self.num_learned:
            return sums.index_add(0, places, values)
        spans = zip(self._firsts, self.num_learned, strict=True)
        learned = [index for first, count in spans for index in range(first, first + count)]
        indices = torch.tensor(learned, dtype=torch.long, device=values.device)
        return sums.index_add(0, places[indices], values[indices])

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Repeat each sequence's value for all of its tokens, [T]."""
        return values[self._sequence_of_each_token]

    @property
    def num_averaged(self) -> torch.Tensor:
        """Learned tokens of each sequence, at least 1, [S]."""
        return torch.tensor(self.num_learned or self.lengths, device=self.logprobs.device).clamp(min=1)

    @property
    def _firsts(self) -> list[int]:
        return [0, *accumulate(self.lengths)][:-1]

    @property
    def _sequence_of_each_token(self) -> torch.Tensor:
        lengths = torch.tensor(self.lengths, dtype=torch.long, device=self.logprobs.device)
        return torch.arange(len(self.lengths), device=lengths.device).repeat_interleave(lengths)


PolicyLoss = Callable[[LossInputs, AlgorithmSpec], tuple[torch.Tensor, Details]]
"""Computes the loss (a scalar), and details for the log: `ratio` and `is_clipped` per token, and others."""


def sum_token_losses(
    inputs: LossInputs, spec: AlgorithmSpec, token_loss: torch.Tensor, details: Details
) -> tuple[torch.Tensor, Details]:
    """Sum over tokens of weight * importance * token loss, plus the terms for KL, teacher and entropy."""
    importance = importance_weights(inputs, spec, details)
    losses = token_loss if importance is None else importance * token_loss
    return add_common_terms(inputs, spec, (inputs.weights * losses).sum(), details)


def sum_answer_losses(
    inputs: LossInputs, spec: AlgorithmSpec, losses: torch.Tensor, details: Details
) -> tuple[torch.Tensor, Details]:
    """Sum over sequences of weight * loss, plus the common terms; importance is already part of the log-ratio."""
    assert inputs.sequence_weights is not None
    return add_common_terms(inputs, spec, (inputs.sequence_weights * losses).sum(), details)


def corrected_log_ratio(inputs: LossInputs, spec: AlgorithmSpec, details: Details) -> torch.Tensor:
    """`log_ratio` with each token's gradient multiplied by its importance weight, for losses over sequences.

    The default is a weight per token here too. With `importance_level: sequence` an answer's weight is the product over
    its tokens. Over thousands of tokens that is close to 0 or at the cap, so rounding would remove the gradient.
    """
    importance = importance_weights(inputs, spec, details)
    if importance is None:
        return inputs.log_ratio
    value = inputs.log_ratio.detach()
    return value + importance * (inputs.log_ratio - value)


def importance_weights(inputs: LossInputs, spec: AlgorithmSpec, details: Details) -> torch.Tensor | None:
    """Ratio of trainer to engine probabilities before the step, [T]; None without importance correction.

    `importance_level`: each token's own ratio, the product over its response's learned tokens, or their geometric mean.
    It is truncated to [importance_low, importance_high], or masked (0) outside of it. It is 0 for a whole response with
    a learned token whose own ratio is below `importance_veto`. Masked tokens still count in the loss's denominators, as
    in TRL; verl leaves them out. Details cover only tokens with a nonzero weight in the loss.

    Source: for truncated tokens (min(ratio, C)) Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training". For masked tokens IcePop, Ring-1T, arXiv:2510.18855, equation 3. For responses and the veto
    Liu et al. 2025, "When Speed Kills Stability", and verl docs/algo/rollout_corr_math.md. For stale rollouts it is the
    decoupled objective of Hilton et al. 2021, arXiv:2110.00641, as in AReaL (Fu et al. 2025, arXiv:2505.24298,
    equation 5).
    """
    if not spec.corrects_importance:
        return None
    own = inputs.logprobs_before_step - inputs.behaviour_logprobs
    log_ratio = own
    if spec.importance_level != "token":
        sums = inputs.per_sequence(own)
        log_ratio = inputs.spread(sums if spec.importance_level == "sequence" else sums / inputs.num_averaged)
    raw = torch.exp(log_ratio)
    within = (raw >= spec.importance_low) & (raw <= spec.importance_high)
    if spec.importance == "truncate":
        importance = raw.clamp(spec.importance_low, spec.importance_high)
    else:
        importance = torch.where(within, raw, 0.0)  # a product with an infinite ratio would be NaN
    if spec.importance_veto:
        is_vetoed = inputs.spread(inputs.per_sequence((own < math.log(spec.importance_veto)).to(raw.dtype))) > 0
        importance = torch.where(is_vetoed, 0.0, importance)
    counted = inputs.weights != 0
    details["importance"], details["is_corrected"] = importance[counted], ~within[counted]
    details["is_masked"] = importance[counted] == 0
    return importance


def reverse_kl(
    logprobs: torch.Tensor, teacher_logprobs: torch.Tensor, log_ratio: torch.Tensor, highest_ratio: float
) -> torch.Tensor:
    """Loss per sampled token whose expected gradient is that of KL(policy || teacher), [T].

    Counts: a policy gradient with the advantage -(log p - log q), times min(r, highest_ratio), where the ratio r
    corrects for samples of older weights. Differentiating the k3 estimate of the same divergence would instead give the
    gradient of KL(teacher || policy).
    Source: Agarwal et al. 2024 (GKD), arXiv:2306.13649, with the reverse KL; Lu and Thinking Machines Lab 2025,
    "On-Policy Distillation". Assumes: tokens are samples of the policy; effects on later tokens are ignored, as there.
    """
    weighted = torch.exp(log_ratio.detach()).clamp(max=highest_ratio) * (logprobs - teacher_logprobs).detach()
    return weighted * (1 + logprobs - logprobs.detach())


def _weigh_kl(inputs: LossInputs, spec: AlgorithmSpec) -> torch.Tensor:
    """Factor of each token's KL estimate, [T]: its ratio to the weights before the step, times its importance weight.

    With d = log p/q, the gradient in expectation is ratio * d * grad log p, that of KL(policy || reference). k1 and k3
    need the ratio's own gradient for it. The gradient of k2 is d * grad log p already, so its ratio is detached.
    Source: DeepSeek-V3.2, arXiv:2512.02556, section 3.1, "Unbiased KL Estimate" (k3). Differs: there the denominator is
    the sampling policy; here it is the trainer before the step, and the bounded importance weight covers the rest.
    """
    ratio = torch.exp(inputs.log_ratio.detach() if spec.kl_estimator == "k2" else inputs.log_ratio)
    importance = importance_weights(inputs, spec, {})
    return ratio if importance is None else ratio * importance


def add_common_terms(
    inputs: LossInputs, spec: AlgorithmSpec, loss: torch.Tensor, details: Details
) -> tuple[torch.Tensor, Details]:
    """Add the terms that all losses share: KL to the reference (if `kl_in` is loss), distillation, entropy bonus."""
    if inputs.reference_logprobs is not None:
        kl = kl_estimate(inputs.logprobs - inputs.reference_logprobs, spec.kl_estimator, torch.exp)
        details["kl"] = kl.detach()
        if spec.has_unbiased_kl:
            kl = kl * _weigh_kl(inputs, spec)
        if spec.kl_in == "loss":
            loss = loss + spec.kl_coef * (inputs.weights * kl).sum()
    if inputs.teacher_divergences is not None:  # a sum over tokens, not an estimate from the sampled one: no ratio
        details["teacher_reverse_kl"] = inputs.teacher_divergences.detach()
        loss = loss + spec.teacher_coef * (inputs.weights * inputs.teacher_divergences).sum()
    elif inputs.teacher_logprobs is not None:
        details["teacher_reverse_kl"] = (inputs.logprobs - inputs.teacher_logprobs).detach()
        losses = reverse_kl(inputs.logprobs, inputs.teacher_logprobs, inputs.log_ratio, 1 + spec.clip_high)
        importance = importance_weights(inputs, spec, {})
        losses = losses if importance is None else importance * losses
        loss = loss + spec.teacher_coef * (inputs.weights * losses).sum()
    if spec.entropy_coef and inputs.entropies is not None:
        loss = loss - spec.entropy_coef * (inputs.weights * inputs.entropies).sum()
    return loss, details
