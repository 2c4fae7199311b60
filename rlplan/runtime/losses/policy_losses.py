"""The losses of policies: of a clipped ratio, of weighed log-probs, and of preferences between pairs of answers.

In: log-probs of sampled tokens, shape [tokens], fp32; of preferences both answers of every pair, in one micro-batch.
Out: the summed loss and what is worth logging.
"""

import torch

from rlplan.runtime.losses.inputs import (
    Details,
    LossInputs,
    add_common_terms,
    corrected_log_ratio,
    total,
    total_of_answers,
)
from rlplan.spec.parts.algorithm import AlgorithmSpec


def clipped_ratio(inputs: LossInputs, spec: AlgorithmSpec) -> tuple[torch.Tensor, Details]:
    """Sum over tokens of weight * -min(r A, clip(r) A), r = exp(logprob - the trainer's own before the step).

    Source: Schulman et al. 2017, arXiv:1707.06347, equation 7.
    """
    loss, details = _surrogate(torch.exp(inputs.log_ratio), inputs.advantages, spec)
    return total(inputs, spec, loss, details)


def sequence_ratio(inputs: LossInputs, spec: AlgorithmSpec) -> tuple[torch.Tensor, Details]:
    """The same with one ratio a sequence: the geometric mean of its tokens'.

    Source: GSPO, Zheng et al. 2025, arXiv:2507.18071, equations 5 and 7.
    """
    lengths = torch.tensor(inputs.num_learned or inputs.lengths, device=inputs.logprobs.device).clamp(min=1)
    weights: Details = {}
    mean = inputs.per_sequence(corrected_log_ratio(inputs, spec, weights)) / lengths
    loss, details = _surrogate(inputs.spread(torch.exp(mean)), inputs.advantages, spec)
    return add_common_terms(inputs, spec, (inputs.weights * loss).sum(), weights | details)


def answer_ratio(inputs: LossInputs, spec: AlgorithmSpec) -> tuple[torch.Tensor, Details]:
    """Sum over sequences of weight * -min(r A, clip(r) A), r being the product of the tokens' ratios.

    Source: Ahmadian et al. 2024, arXiv:2402.14740, section 3.2 (an answer is one action); clipped as in TRL 1.16.
    """
    assert inputs.sequence_advantages is not None
    of_tokens: Details = {}
    ratio = torch.exp(inputs.per_sequence(corrected_log_ratio(inputs, spec, of_tokens)))
    loss, details = _surrogate(ratio, inputs.sequence_advantages, spec)
    of_tokens |= {name: inputs.spread(value) for name, value in details.items()}
    return total_of_answers(inputs, spec, loss, of_tokens)


def _surrogate(ratio: torch.Tensor, advantages: torch.Tensor, spec: AlgorithmSpec) -> tuple[torch.Tensor, Details]:
    clipped = torch.clamp(ratio, 1 - spec.clip_low, 1 + spec.clip_high)
    is_clipped = (ratio * advantages > clipped * advantages).detach()
    return -torch.minimum(ratio * advantages, clipped * advantages), {"ratio": ratio.detach(), "is_clipped": is_clipped}


def log_prob(inputs: LossInputs, spec: AlgorithmSpec) -> tuple[torch.Tensor, Details]:
    """Sum over tokens of weight * -A log p.

    Source: Williams 1992, REINFORCE. After the first optimizer step of a batch it no longer is the policy gradient.
    """
    details = {"ratio": torch.exp(inputs.log_ratio.detach())}
    details["is_clipped"] = torch.zeros_like(details["ratio"], dtype=torch.bool)
    return total(inputs, spec, -inputs.advantages * inputs.logprobs, details)


def clipped_weight(inputs: LossInputs, spec: AlgorithmSpec) -> tuple[torch.Tensor, Details]:
    """Sum over tokens of weight * -min(r, 1 + clip_high) A log p, without gradient through r. clip_low is not used.

    Source: MiniMax-M1, arXiv:2506.13585, equations 4 and 5, without a lower bound as in the paper's runs.
    """
    ratio = torch.exp(inputs.log_ratio.detach())
    highest = 1 + spec.clip_high
    details = {"ratio": ratio, "is_clipped": (ratio > highest) & (inputs.advantages > 0)}
    return total(inputs, spec, -ratio.clamp(max=highest) * inputs.advantages * inputs.logprobs, details)


def preference(inputs: LossInputs, spec: AlgorithmSpec) -> tuple[torch.Tensor, Details]:
    """Sum over pairs of weight * -log sigmoid(kl_coef * (margin of the chosen - margin of the rejected)).

    An answer's margin is its log-prob less the reference's; its advantage says which it is (1 chosen, -1 rejected, 0
    neither). A pair weighs what its two answers weigh together.
    Source: Rafailov et al. 2023, arXiv:2305.18290, equation 7.
    """
    apart, weights = _pairs(inputs, _margins(inputs))
    losses = -torch.nn.functional.logsigmoid(spec.kl_coef * apart)
    return _sum_preference_losses(inputs, spec, weights * losses, (apart > 0)[weights != 0])


def squared_preference(inputs: LossInputs, spec: AlgorithmSpec) -> tuple[torch.Tensor, Details]:
    """Sum over pairs of weight * (margin of the chosen - margin of the rejected - 1 / (2 kl_coef))^2.

    Source: IPO, Azar et al. 2023, arXiv:2310.12036, equation 17. A margin is the mean over its answer's tokens, as in
    TRL 1.16, whose authors had it so from the paper's.
    """
    lengths = torch.tensor(inputs.num_learned or inputs.lengths, device=inputs.logprobs.device).clamp(min=1)
    apart, weights = _pairs(inputs, _margins(inputs) / lengths)
    losses = (apart - 1 / (2 * spec.kl_coef)) ** 2
    return _sum_preference_losses(inputs, spec, weights * losses, (apart > 0)[weights != 0])


def unpaired_preference(inputs: LossInputs, spec: AlgorithmSpec) -> tuple[torch.Tensor, Details]:
    """Sum over labelled answers of weight * (1 - sigmoid(kl_coef * sign * (margin - z))).

    sign: 1 of a good answer, -1 of a bad one. z: `inputs.baseline`, which `kl_baseline` computes before the passes.
    Source: KTO, Ethayarajh et al. 2024, arXiv:2402.01306, equations 7 and 8, with lambda 1 for good and bad.
    """
    assert inputs.sequence_weights is not None
    assert inputs.sequence_advantages is not None
    margins, signs = _margins(inputs), inputs.sequence_advantages.sign()
    above = signs * (margins - inputs.baseline)
    losses = inputs.sequence_weights * signs.abs() * (1 - torch.sigmoid(spec.kl_coef * above))
    return _sum_preference_losses(inputs, spec, losses, (above > 0)[(signs != 0) & (inputs.sequence_weights != 0)])


def kl_baseline(sums: torch.Tensor) -> float:
    """An estimate of KL(policy || reference): the mean margin of a mini-batch's answers to other prompts, at least 0.

    sums: `summed_margins` of all of them, added up over passes and ranks before the bound at 0 is taken, as TRL 1.16
    gathers the mean over ranks first (kto_trainer.py, `_compute_loss`). Differs: TRL's mean is over one micro-batch of
    every rank, so that its gradient depends on gradient accumulation.
    """
    total, count = sums.tolist()
    return max(total / count, 0.0) if count else 0.0


def summed_margins(inputs: LossInputs) -> torch.Tensor:
    """(sum of the answers' margins over the reference, number of answers), [2], fp64."""
    margins = _margins(inputs).detach().double()
    return torch.stack([margins.sum(), margins.new_tensor(len(inputs.lengths))])


def ranking(inputs: LossInputs, spec: AlgorithmSpec) -> tuple[torch.Tensor, Details]:
    """Sum over pairs of weight * -log sigmoid(score of the chosen - score of the rejected).

    In place of log-probs stand scores, one a sequence. Source: Ouyang et al. 2022, arXiv:2203.02155, equation 1; the
    probability that one is preferred is that of Bradley and Terry 1952.
    """
    apart, weights = _pairs(inputs, inputs.per_sequence(inputs.logprobs))
    losses = -torch.nn.functional.logsigmoid(apart)
    return _sum_preference_losses(inputs, spec, weights * losses, (apart > 0)[weights != 0])


def _margins(inputs: LossInputs) -> torch.Tensor:
    """Of each answer its log-prob less the reference's, [S]."""
    assert inputs.reference_logprobs is not None
    return inputs.per_sequence(inputs.logprobs - inputs.reference_logprobs)


def _pairs(inputs: LossInputs, margins: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(margin of the chosen answer less that of the rejected one, what both weigh together) of each pair."""
    assert inputs.sequence_weights is not None
    assert inputs.sequence_advantages is not None
    signs = inputs.sequence_advantages.sign().tolist()
    chosen = {group: index for index, (group, sign) in enumerate(zip(inputs.groups, signs, strict=True)) if sign > 0}
    rejected = {group: index for index, (group, sign) in enumerate(zip(inputs.groups, signs, strict=True)) if sign < 0}
    pairs = [(chosen[group], rejected[group]) for group in chosen if group in rejected]
    better, worse = ([pair[side] for pair in pairs] for side in (0, 1))
    return margins[better] - margins[worse], inputs.sequence_weights[better] + inputs.sequence_weights[worse]


def _sum_preference_losses(
    inputs: LossInputs, spec: AlgorithmSpec, losses: torch.Tensor, is_ranked_right: torch.Tensor
) -> tuple[torch.Tensor, Details]:
    """The sum of weighed losses, with what every loss has beside it; kl_coef is spent already."""
    details = {
        "ratio": torch.exp(inputs.logprobs.detach() - inputs.behaviour_logprobs),  # no ratio is in the loss
        "is_clipped": torch.zeros_like(inputs.logprobs, dtype=torch.bool),
        "is_ranked_right": is_ranked_right.detach(),
    }
    loss = losses.sum() + 0.0 * inputs.logprobs.sum()
    return add_common_terms(inputs, spec.model_copy(update={"kl_in": "reward"}), loss, details)
