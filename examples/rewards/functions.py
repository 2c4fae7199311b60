"""Reward functions of one's own: TRL's signature and verl's, told apart by their parameters."""

import re
from itertools import pairwise


def digits_in_order(prompts, completions, **columns):
    """TRL's: lists in, one number for each completion out. The share of neighbours that stand in order."""
    rewards = []
    for completion in completions:
        digits = re.sub(r"\D", "", completion)
        pairs = list(pairwise(digits))
        rewards.append(sum(a <= b for a, b in pairs) / len(pairs) if pairs else 0.0)
    return rewards


def same_digits(data_source, solution_str, ground_truth, extra_info=None):
    """verl's: one response in, a number or a dict with `score` out. Whether no digit was lost or made up."""
    return {"score": float(sorted(re.sub(r"\D", "", solution_str)) == sorted(ground_truth))}


def length(completions, completion_ids, **columns):
    """Tokens of each completion: with a weight below 0 a penalty."""
    return [float(len(ids)) for ids in completion_ids]
