"""Policy losses: clipped ratios, weighted log-probs, and preferences between pairs of answers.

In: log-probs of sampled tokens, shape [tokens], fp32. Preference losses need both answers of a pair in one micro-batch.
Out: the summed loss and details for the log.
"""

import torch

from rlplan.runtime.losses.inputs import (
    Details,
    LossInputs,
    add_common_terms,
    corrected_log_ratio,
    sum_answer_losses,
    sum_token_losses,
)
from rlplan.spec.parts.algorithm import AlgorithmSpec


def clipped_ratio(inputs: LossInputs, spec: AlgorithmSpec) -> tuple[torch.Tensor, Details]:
    """Sum over tokens of weight * -min(r A, clip(r) A), where r = exp(log-prob - trainer's log-prob before the step).

    Source: Schulman et al. 2017, arXiv:1707.06347, equation 7.
    """
    loss, details = _surrogate(torch.exp(inputs.log_ratio), inputs.advantages, spec)
    return sum_token_losses(inputs, spec, loss, details)


def sequence_ratio(inputs: LossInputs, spec: AlgorithmSpec) -> tuple[torch.Tensor, Details]:
    """`clipped_ratio` with one ratio per sequence, the geometric mean over its tokens.

    Source: GSPO, Zheng et al. 2025, arXiv:2507.18071, equations 5 and 7.
    """
    weights: Details = {}
    mean = inputs.per_sequence(corrected_log_ratio(inputs, spec, weights)) / inputs.num_averaged
    loss, details = _surrogate(inputs.spread(torch.exp(mean)), inputs.advantages, spec)
    return add_common_terms(inputs, spec, (inputs.weights * loss).sum(), weights | details)


def answer_ratio(inputs: LossInputs, spec: AlgorithmSpec) -> tuple[torch.Tensor, Details]:
    """Sum over sequences of weight * -min(r A, clip(r) A), where r is the product of the tokens' ratios.

    Source: Ahmadian et al. 2024, arXiv:2402.14740, section 3.2 (an answer is one action); clipped as in TRL 1.16.
    """
    assert inputs.sequence_advantages is not None
    token_details: Details = {}
    ratio = torch.exp(inputs.per_sequence(corrected_log_ratio(inputs, spec, token_details)))
    loss, details = _surrogate(ratio, inputs.sequence_advantages, spec)
    token_details |= {name: inputs.spread(value) for name, value in details.items()}
    return sum_answer_losses(inputs, spec, loss, token_details)


def _surrogate(ratio: torch.Tensor, advantages: torch.Tensor, spec: AlgorithmSpec) -> tuple[torch.Tensor, Details]:
    clipped = torch.clamp(ratio, 1 - spec.clip_low, 1 + spec.clip_high)
    kept = torch.minimum(ratio * advantages, clipped * advantages)
    if spec.dual_clip:  # Ye et al. 2020, arXiv:1912.09729, equation 5
        kept = torch.where(advantages < 0, torch.maximum(kept, spec.dual_clip * advantages), kept)
    return -kept, {"ratio": ratio.detach(), "is_clipped": (ratio * advantages != kept).detach()}


def log_prob(inputs: LossInputs, spec: AlgorithmSpec) -> tuple[torch.Tensor, Details]:
    """Sum over tokens of weight * -A log p.

    Source: Williams 1992, REINFORCE. It is the policy gradient only until a batch's first optimizer step.
    """
    details = {"ratio": torch.exp(inputs.log_ratio.detach())}
    details["is_clipped"] = torch.zeros_like(details["ratio"], dtype=torch.bool)
    return sum_token_losses(inputs, spec, -inputs.advantages * inputs.logprobs, details)


def clipped_weight(inputs: LossInputs, spec: AlgorithmSpec) -> tuple[torch.Tensor, Details]:
    """Sum over tokens of weight * -min(r, 1 + clip_high) A log p (CISPO), without gradient through r.

    Source: MiniMax-M1, arXiv:2506.13585, equations 4 and 5. There is no lower bound, as in the paper's runs, so
    clip_low is not used.
    """
    ratio = torch.exp(inputs.log_ratio.detach())
    highest = 1 + spec.clip_high
    details = {"ratio": ratio, "is_clipped": (ratio > highest) & (inputs.advantages > 0)}
    return sum_token_losses(inputs, spec, -ratio.clamp(max=highest) * inputs.advantages * inputs.logprobs, details)


def preference(inputs: LossInputs, spec: AlgorithmSpec) -> tuple[torch.Tensor, Details]:
    """Sum over pairs of weight * -log sigmoid(kl_coef * (chosen margin - rejected margin)) (DPO).

    An answer's margin is its log-prob minus the reference's. An answer's advantage is 1 if it was chosen, -1 if it was
    rejected, else 0. A pair's weight is the sum of its answers' weights.
    Source: Rafailov et al. 2023, arXiv:2305.18290, equation 7.
    """
    difference, weights = _pairs(inputs, _margins(inputs))
    losses = -torch.nn.functional.logsigmoid(spec.kl_coef * difference)
    return _sum_preference_losses(inputs, spec, weights * losses, (difference > 0)[weights != 0])


def squared_preference(inputs: LossInputs, spec: AlgorithmSpec) -> tuple[torch.Tensor, Details]:
    """Sum over pairs of weight * (chosen margin - rejected margin - 1 / (2 kl_coef))^2 (IPO).

    Source: Azar et al. 2023, arXiv:2310.12036, equation 17. A margin is the mean over its answer's tokens, as in TRL
    1.16, whose authors confirmed it with the authors of the paper.
    """
    difference, weights = _pairs(inputs, _margins(inputs) / inputs.num_averaged)
    losses = (difference - 1 / (2 * spec.kl_coef)) ** 2
    return _sum_preference_losses(inputs, spec, weights * losses, (difference > 0)[weights != 0])


def unpaired_preference(inputs: LossInputs, spec: AlgorithmSpec) -> tuple[torch.Tensor, Details]:
    """Sum over labelled answers of weight * (1 - sigmoid(kl_coef * sign * (margin - z))) (KTO).

    sign: 1 for a good answer, -1 for a bad one. z: `inputs.baseline`, which `estimate_kl_baseline` computes before the
    passes.
    Source: Ethayarajh et al. 2024, arXiv:2402.01306, equations 7 and 8, with lambda 1 for good and bad answers.
    """
    assert inputs.sequence_weights is not None
    assert inputs.sequence_advantages is not None
    margins, signs = _margins(inputs), inputs.sequence_advantages.sign()
    above = signs * (margins - inputs.baseline)
    losses = inputs.sequence_weights * signs.abs() * (1 - torch.sigmoid(spec.kl_coef * above))
    return _sum_preference_losses(inputs, spec, losses, (above > 0)[(signs != 0) & (inputs.sequence_weights != 0)])


def estimate_kl_baseline(sums: torch.Tensor) -> float:
    """Estimate KL(policy || reference): the mean margin of a mini-batch's answers to other prompts, at least 0.

    sums: `sum_margins`, added up over passes and ranks. The mean is clamped at 0 only after that, as in TRL 1.16
    (kto_trainer.py, `_compute_loss`). Differs: TRL's mean covers one micro-batch of every rank, so its gradient depends
    on gradient accumulation.
    """
    total, count = sums.tolist()
    return max(total / count, 0.0) if count else 0.0


def sum_margins(inputs: LossInputs) -> torch.Tensor:
    """Sum of the answers' margins over the reference, and number of answers, [2], fp64."""
    margins = _margins(inputs).detach().double()
    return torch.stack([margins.sum(), margins.new_tensor(len(inputs.lengths))])


def ranking(inputs: LossInputs, spec: AlgorithmSpec) -> tuple[torch.Tensor, Details]:
    """Sum over pairs of weight * -log sigmoid(chosen score - rejected score), for reward models.

    `inputs.logprobs` holds scores, one per sequence. Source: Ouyang et al. 2022, arXiv:2203.02155, equation 1, with the
    preference model of Bradley and Terry 1952.
    """
    difference, weights = _pairs(inputs, inputs.per_sequence(inputs.logprobs))
    losses = -torch.nn.functional.logsigmoid(difference)
    return _sum_preference_losses(inputs, spec, weights * losses, (difference > 0)[weights != 0])


def _margins(inputs: LossInputs) -> torch.Tensor:
    """Each answer's log-prob minus the reference's, [S]."""
    assert inputs.reference_logprobs is not None
    return inputs.per_sequence(inputs.logprobs - inputs.reference_logprobs)


def _pairs(inputs: LossInputs, margins: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Margin difference (chosen minus rejected) and weight of each pair, [pairs] each."""
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
    """Sum weighted losses and add the common terms, except KL, because kl_coef is already part of the losses."""
    details = {
        "ratio": torch.exp(inputs.logprobs.detach() - inputs.behaviour_logprobs),  # logged only
        "is_clipped": torch.zeros_like(inputs.logprobs, dtype=torch.bool),
        "is_ranked_right": is_ranked_right.detach(),
    }
    loss = losses.sum() + 0.0 * inputs.logprobs.sum()  # a micro-batch without pairs still needs a backward pass
    return add_common_terms(inputs, spec.model_copy(update={"kl_in": "reward"}), loss, details)
