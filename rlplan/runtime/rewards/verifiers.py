"""Verifiers: rule-based rewards on the text of a response.

In: a reward's spec, the response and the right answer. Out: 0 or 1. They run in the driver, beside the reference.
A pattern that takes too long ends the run by name: it comes from the job, and would be as slow in every step.
Left out: anything that runs code (child processes come with the sandbox).
"""

from typing import Any

import regex

from rlplan.errors import RunError
from rlplan.runtime.experience import Rollout
from rlplan.spec.workload import AnswerMatcherSpec, FormatCheckerSpec, RewardSpec

PATTERN_TIMEOUT_S = 5.0


def match_answer(spec: AnswerMatcherSpec, text: str, answer: str) -> float:
    """1 when the first group of the pattern's first match equals the answer, whitespace around it aside."""
    match = _matched(regex.search, spec, text)
    return float(match is not None and match.group(1) is not None and match.group(1).strip() == answer.strip())


def check_format(spec: FormatCheckerSpec, text: str) -> float:
    """1 when the whole response matches the pattern."""
    return float(_matched(regex.fullmatch, spec, text.strip()) is not None)


def score_rollout(rollout: Rollout, rewards: tuple[RewardSpec, ...]) -> None:
    """Fill in `rewards` (unweighted, by kind) and `reward` (their weighted sum)."""
    for spec in rewards:
        if isinstance(spec, AnswerMatcherSpec):
            value = match_answer(spec, rollout.text, rollout.prompt.answer)
        else:
            value = check_format(spec, rollout.text)
        rollout.rewards[spec.kind] = value
    rollout.reward = sum(spec.weight * rollout.rewards[spec.kind] for spec in rewards)


def _matched(function: Any, spec: RewardSpec, text: str) -> Any:
    """A match or None. `concurrent` lets other threads run meanwhile, so that deadlines and signals are heard."""
    try:
        return function(spec.pattern, text, flags=regex.DOTALL, timeout=PATTERN_TIMEOUT_S, concurrent=True)
    except TimeoutError:
        raise RunError(
            f"a pattern took more than {PATTERN_TIMEOUT_S:.0f} s on a response of {len(text)} characters",
            where=f"rewards: {spec.kind}: pattern {spec.pattern!r}",
            rule=f"a match takes at most {PATTERN_TIMEOUT_S:.0f} s",
            way_out="write the pattern without nested repetition",
        ) from None
