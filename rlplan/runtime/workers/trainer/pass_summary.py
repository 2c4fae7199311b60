"""Pass summaries: the sums, counts and maxima of a training pass, from which a step's metrics are computed.

In: tensors of a pass and of its loss. Out: numbers by name (`*_sum`, `*_count`, `*_max`).
"""

import torch

from rlplan.runtime.learning.logprob_mismatch import BINS_PER_DOUBLING, DIFFERENCE, HIGHEST_BIN, LOWEST_BIN


def summarize_pass(
    loss: float,
    difference: torch.Tensor,
    entropies: torch.Tensor,
    details: dict[str, torch.Tensor],
    learned: torch.Tensor,
) -> dict[str, float]:
    """Sums and maxima of a micro-batch for the log; a maximum over zero tokens is left out.

    learned: mask of the tokens that the loss learns from. The difference between engine and trainer covers all tokens,
    because it shows whether both hold the same weights. Details per answer, pair or corrected token are summed
    unmasked.
    """
    per_token = {
        name: details[name][learned] for name in ("is_clipped", "ratio", "kl", "teacher_reverse_kl") if name in details
    }
    summary = {
        "num_tokens": float(learned.sum()),
        "loss": loss,
        "entropy_sum": _sum(entropies[learned]),
        "is_clipped_sum": _sum(per_token["is_clipped"]),
    } | _summarize_differences(difference)
    summary |= {f"{name}_sum": _sum(per_token[name]) for name in ("kl", "teacher_reverse_kl") if name in per_token}
    if summary["num_tokens"]:
        summary |= {f"{name}_max": float(per_token[name].max()) for name in ("ratio", "kl") if name in per_token}
    for name in ("importance", "is_corrected", "is_masked", "is_ranked_right"):
        if name in details:
            summary[f"{name}_sum"], summary[f"{name}_count"] = _sum(details[name]), float(details[name].numel())
    if "importance" in details:
        summary["importance_squared_sum"] = _sum(details["importance"].double() ** 2)
    return summary


def _summarize_differences(difference: torch.Tensor) -> dict[str, float]:
    """Summarize the absolute log-prob differences between engine and trainer: sum, count, maximum and histogram.

    `_kl_sum` sums the k3 estimates of KL(engine || trainer) from the engine's tokens.
    """
    apart = difference.abs()
    summary = {
        f"{DIFFERENCE}_kl_sum": _sum(torch.expm1(difference.double()) - difference),
        f"{DIFFERENCE}_sum": _sum(apart),
        f"{DIFFERENCE}_count": float(apart.numel()),
        f"{DIFFERENCE}_max": float(apart.max()) if apart.numel() else 0.0,
    }
    bins = (apart.double().log2() * BINS_PER_DOUBLING).ceil().clamp(LOWEST_BIN, HIGHEST_BIN)
    # The conversion of NaN to an integer is undefined, so NaN counts as the largest difference.
    indices, counts = bins.nan_to_num(HIGHEST_BIN).long().unique(return_counts=True)
    return summary | {
        f"{DIFFERENCE}_bin:{index}": float(count)
        for index, count in zip(indices.tolist(), counts.tolist(), strict=True)
    }


def _sum(values: torch.Tensor) -> float:
    return float(values.double().sum())
