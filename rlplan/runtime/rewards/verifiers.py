"""Verifiers: rule-based rewards on the text of a response.

In: a reward's spec, the response and the right answer. Out: 0 or 1. They run in the driver, beside the reference.
Left out: anything that can hang or run code (child processes come with the sandbox).
"""

import re

from rlplan.runtime.experience import Rollout
from rlplan.spec.workload import AnswerMatcherSpec, FormatCheckerSpec, RewardSpec


def match_answer(spec: AnswerMatcherSpec, text: str, answer: str) -> float:
    """1 when the first group of the pattern's first match equals the answer, whitespace around it aside."""
    match = re.search(spec.pattern, text, flags=re.DOTALL)
    return float(match is not None and match.group(1) is not None and match.group(1).strip() == answer.strip())


def check_format(spec: FormatCheckerSpec, text: str) -> float:
    """1 when the whole response matches the pattern."""
    return float(re.fullmatch(spec.pattern, text.strip(), flags=re.DOTALL) is not None)


def score_rollout(rollout: Rollout, rewards: tuple[RewardSpec, ...]) -> None:
    """Fill in `rewards` (unweighted, by kind) and `reward` (their weighted sum)."""
    for spec in rewards:
        if isinstance(spec, AnswerMatcherSpec):
            value = match_answer(spec, rollout.text, rollout.prompt.answer)
        else:
            value = check_format(spec, rollout.text)
        rollout.rewards[spec.kind] = value
    rollout.reward = sum(spec.weight * rollout.rewards[spec.kind] for spec in rewards)
