"""Regular-expression verifiers: rule-based rewards on the text of a response, computed in the driver.

The response decides how long a pattern runs, so a pattern that takes too long is an ExhaustedError of the response.

In: a reward's spec, the response and the right answer. Out: 0 or 1. Left out: rewards in child processes (judge.py).
"""

from typing import Any

from rlplan.runtime.rewards.verdict import ExhaustedError
from rlplan.spec.parts.rewards import AnswerMatcherSpec, FormatCheckerSpec, RewardSpec

PATTERN_TIMEOUT_S = 1.0
"""Time limit of one pattern, in seconds. A normal one takes microseconds; this long means catastrophic backtracking."""

WHITE_SPACE = " \t\r\n"
"""White space that comparisons ignore: around answers, and at the ends of printed lines. All else counts."""


def match_answer(spec: AnswerMatcherSpec, text: str, answer: str) -> float:
    """1 when the first group of the pattern's first match equals the answer, ignoring surrounding whitespace."""
    extracted = extract_answer(spec, text)
    return float(extracted is not None and extracted == answer.strip(WHITE_SPACE))


def extract_answer(spec: AnswerMatcherSpec, text: str) -> str | None:
    """The first group of the pattern's first match, without surrounding whitespace; None without a match."""
    match = _match_pattern("search", spec, text)
    return None if match is None or match.group(1) is None else str(match.group(1)).strip(WHITE_SPACE)


def check_format(spec: FormatCheckerSpec, text: str) -> float:
    return float(_match_pattern("fullmatch", spec, text.strip(WHITE_SPACE)) is not None)


def _match_pattern(name: str, spec: RewardSpec, text: str) -> Any:
    """A match or None. `concurrent` releases the GIL, so that other threads and signal handlers still run."""
    import regex  # a dry run does not need it

    pattern, function = getattr(spec, "pattern", ""), getattr(regex, name)
    try:
        return function(pattern, text, flags=regex.DOTALL, timeout=PATTERN_TIMEOUT_S, concurrent=True)
    except TimeoutError:
        raise ExhaustedError("timeout") from None
