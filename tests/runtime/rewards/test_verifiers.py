"""Rule-based rewards: what is right is 1, everything else is 0, and the sum is weighted."""

import pytest

from rlplan.runtime.rewards.judge import Judge, Response
from rlplan.runtime.rewards.verifiers import check_format, match_answer
from rlplan.runtime.rollout.experience import Prompt
from rlplan.spec.parts.rewards import AnswerMatcherSpec, FormatCheckerSpec

MATCHER = AnswerMatcherSpec(kind="answer_matcher", weight=1.0)
CHECKER = FormatCheckerSpec(kind="format_checker", weight=0.25, pattern=r"<answer>\d+</answer>")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<answer>123</answer>", 1.0),
        ("thinking <answer> 123 </answer> done", 1.0),
        ("<answer>\n123\n</answer>", 1.0),
        ("<answer>0123</answer>", 0.0),
        ("<answer>124</answer><answer>123</answer>", 0.0),
        ("<answer>123", 0.0),
        ("123", 0.0),
        ("", 0.0),
    ],
)
def test_an_answer_counts_when_it_is_the_first_one_and_exactly_right(text: str, value: float) -> None:
    assert match_answer(MATCHER, text, "123") == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("<answer>1</answer>", 1.0), (" <answer>1</answer>\n", 1.0), ("<answer>1</answer>!", 0.0), ("", 0.0)],
)
def test_the_format_is_that_of_the_whole_response(text: str, value: float) -> None:
    assert check_format(CHECKER, text) == value


def test_a_pattern_that_goes_back_and_forth_is_the_response_s_own_doing_and_noted() -> None:
    slow = CHECKER.model_copy(update={"pattern": "(a|aa)+b(?=c)"})
    verdict = Judge((slow,), None).judge(Response(Prompt("a", "p", "12", (1,)), "a" * 400))
    assert (verdict.values, verdict.failure) == ({"format_checker": 0.0}, "")
    assert verdict.notes == {"format_checker/timeout": 1}


def test_a_verdict_has_each_reward_unweighted_under_its_name() -> None:
    second = CHECKER.model_copy(update={"name": "digits", "pattern": ".*"})
    verdict = Judge((MATCHER, CHECKER, second), None).judge(
        Response(Prompt("a", "p", "12", (1,)), "<answer>21</answer>")
    )
    assert verdict.values == {"answer_matcher": 0.0, "format_checker": 1.0, "digits": 1.0}
    assert verdict.failure == ""
