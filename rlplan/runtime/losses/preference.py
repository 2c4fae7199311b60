"""The preference loss on pairs of answers to one prompt.

In: log-probs of both answers of every pair, in one micro-batch. Out: the summed loss and what is worth logging.
"""

import torch

from rlplan.runtime.losses.inputs import Details, LossInputs, with_others
from rlplan.spec.parts.algorithm import AlgorithmSpec


def preference(inputs: LossInputs, spec: AlgorithmSpec) -> tuple[torch.Tensor, Details]:
    """Sum over pairs of weight * -log sigmoid(kl_coef * (margin of the chosen - margin of the rejected)).

    An answer's margin is its log-prob less the reference's; its advantage says which it is (1 chosen, -1 rejected, 0
    neither). A pair weighs what its two answers weigh together.
    Source: Rafailov et al. 2023, arXiv:2305.18290, equation 7.
    """
    assert inputs.reference_logprobs is not None
    assert inputs.sequence_weights is not None
    assert inputs.sequence_advantages is not None
    margins = inputs.per_sequence(inputs.logprobs - inputs.reference_logprobs)
    signs = inputs.sequence_advantages.sign().tolist()
    chosen = {group: index for index, (group, sign) in enumerate(zip(inputs.groups, signs, strict=True)) if sign > 0}
    rejected = {group: index for index, (group, sign) in enumerate(zip(inputs.groups, signs, strict=True)) if sign < 0}
    pairs = [(chosen[group], rejected[group]) for group in chosen if group in rejected]
    better, worse = ([pair[side] for pair in pairs] for side in (0, 1))
    apart = margins[better] - margins[worse]
    weights = inputs.sequence_weights[better] + inputs.sequence_weights[worse]
    loss = -(weights * torch.nn.functional.logsigmoid(spec.kl_coef * apart)).sum() + 0.0 * inputs.logprobs.sum()
    details = {
        "ratio": torch.exp(inputs.log_ratio(spec).detach()),
        "is_clipped": torch.zeros_like(inputs.logprobs, dtype=torch.bool),
        "is_ranked_right": (apart > 0).detach()[weights != 0],
    }
    return with_others(inputs, spec.model_copy(update={"kl_in": "reward"}), loss, details)
