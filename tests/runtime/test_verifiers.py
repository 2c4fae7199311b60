"""Rule-based rewards: what is right is 1, everything else is 0, and the sum is weighted."""

import pytest

from rlplan.runtime.experience import Completion, Prompt, Rollout
from rlplan.runtime.rewards.verifiers import check_format, match_answer, score_rollout
from rlplan.spec.workload import AnswerMatcherSpec, FormatCheckerSpec

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


def test_the_reward_is_the_weighted_sum_and_its_parts_are_kept() -> None:
    rollout = Rollout(Prompt("a", "p", "12", (1,)), 0, Completion((2,), (-0.1,), "stop"), "<answer>21</answer>")
    score_rollout(rollout, (MATCHER, CHECKER))
    assert rollout.rewards == {"answer_matcher": 0.0, "format_checker": 1.0}
    assert rollout.reward == 0.25
