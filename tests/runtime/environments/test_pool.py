"""The environment's processes: what they answer, and that no failure passes for an answer or holds the run up."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlplan.errors import SpecError
from rlplan.runtime.environments.pool import Answer, EnvironmentPool, RawAnswer, describe_environment, read_answer
from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.spec.parts.environment import EnvironmentSpec
from tests.factories import EXAMPLES
from tests.repository.at_night import mark_nightly
from tests.runtime.conftest import alive
from tests.waiting import limit_time, wait_until

GAME = """
import os, sys, time

def play(messages, answer):
    word = messages[-1]["content"]
    print("heard", word)
    if word == "hang":
        time.sleep(60)
    if word == "die":
        os._exit(3)
    if word == "fail":
        raise ValueError("no such move")
    if word == "long":
        return {"observation": "x" * 3_000_000}
    return {
        "again": {"observation": answer}, "won": {"reward": 1}, "both": {"observation": "over", "reward": 0.5},
        "neither": {}, "none": None, "text": {"reward": "1"}, "nan": {"reward": float("nan")}, "other": {"prize": 1},
        "bool": {"reward": True}, "number": {"observation": 3}, "set": {"observation": {1}},
    }[word]
"""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[EnvironmentPool]:
    (tmp_path / "game.py").write_text(GAME)
    spec = EnvironmentSpec(path=f"{tmp_path / 'game.py'}:play", timeout_s=scale_seconds(1.0), num_workers=1)
    pool = EnvironmentPool(spec, tmp_path / "log.txt")
    yield pool
    pool.close()


def ask_all(pool: EnvironmentPool, *words: str) -> list[Answer]:
    for index, word in enumerate(words):
        pool.ask(index, {"play": [{"role": "assistant", "content": word}], "answer": "42"})
    answers: dict[int, RawAnswer] = {}
    wait_until(lambda: answers.update(pool.take_answers()) or len(answers) == len(words), 30, pause_s=0.005)
    return [read_answer(answers[index]) for index in range(len(words))]


def get_words(answer: Answer) -> str | None:
    return answer.messages[0]["content"] if answer.messages else None


def test_an_answer_has_an_observation_a_reward_both_or_neither(pool: EnvironmentPool, tmp_path: Path) -> None:
    again, won, both, neither = ask_all(pool, "again", "won", "both", "neither")
    assert (get_words(again), again.reward, again.is_end) == ("42", None, False)
    assert (get_words(won), won.reward, won.is_end) == (None, 1.0, True)
    assert (get_words(both), both.reward, both.is_end) == ("over", 0.5, True)
    assert neither == Answer()
    assert "heard again" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize("value", [{"done": False}, {"done": False, "reward": 1.0}, {"observation": [], "done": False}])
def test_an_answer_without_an_observation_is_the_end_whatever_it_says_of_it(value: dict[str, Any]) -> None:
    assert read_answer(RawAnswer(value)) == Answer((), value.get("reward"), True)
    assert not read_answer(RawAnswer({"observation": "on", "reward": 1.0, "done": False})).is_end
    assert read_answer(RawAnswer({"done": 0})).failure == "done is '0', not true or false"


@pytest.mark.parametrize(
    ("word", "reason"),
    mark_nightly(
        [
            ("hang", "timeout after "),
            ("die", "its process ended with exit code 3"),
            ("fail", "ValueError: no such move"),
            ("long", "an answer of more than 1048576 bytes"),
            ("none", "not a dict with observation, reward or both"),
            ("other", "not a dict with observation, reward or both"),
            ("text", "reward is '1', not a finite number"),
            ("nan", "reward is 'nan', not a finite number"),
            ("bool", "reward is 'True', not a finite number"),
            ("number", "observation is '3', not a text"),
            ("set", "the answer is not JSON"),
            ("unheard of", "KeyError: 'unheard of'"),
        ],
        but=5,
    ),
)
def test_what_is_no_answer_is_a_failure_with_its_reason_and_the_next_question_is_answered(
    pool: EnvironmentPool, word: str, reason: str
) -> None:
    failed, next_one = ask_all(pool, word, "won")
    assert reason in failed.failure
    assert failed.reward is None
    assert next_one == Answer(reward=1.0)


def test_a_hang_costs_its_deadline_and_not_much_more(pool: EnvironmentPool) -> None:
    ask_all(pool, "won")
    with limit_time(1.0, beyond_s=pool.spec.timeout_s):
        ask_all(pool, "hang")


def test_a_killed_process_is_replaced_and_none_is_left_when_the_pool_is_closed(pool: EnvironmentPool) -> None:
    ask_all(pool, "won")
    first = pool.pids
    os.kill(first[0], signal.SIGKILL)
    assert ask_all(pool, "won", "won")[1] == Answer(reward=1.0)
    second = pool.pids
    assert second != first
    pool.ask(0, {"play": [{"role": "assistant", "content": "hang"}], "answer": "42"})
    time.sleep(0.1)
    pool.close()
    assert alive([*first, *second]) == []


@pytest.mark.parametrize(
    ("text", "function", "reason"),
    [
        ("def play(messages, answer): return {}", "player", "there is no function 'player'"),
        ("import no_such_module", "play", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def play(:", "play", "SyntaxError"),
    ],
)
def test_a_function_that_cannot_be_had_is_refused_before_anything_starts(
    text: str, function: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "game.py").write_text(text)
    with pytest.raises(SpecError, match=reason):
        describe_environment(EnvironmentSpec(path=f"{tmp_path / 'game.py'}:{function}"))


def test_the_example_s_game_is_won_by_the_largest_digit_and_gives_hints() -> None:
    spec = EnvironmentSpec(path=f"{EXAMPLES / 'environments' / 'guess_digit.py'}:play")
    assert not describe_environment(spec).is_stateful
    pool = EnvironmentPool(spec, Path(os.devnull))
    turns = [{"role": "user", "content": "Sort: 52914"}]
    value = []
    for guess in ("<answer>5", "no", "9"):
        turns.append({"role": "assistant", "content": guess})
        pool.ask(0, {"play": turns, "answer": "12459"})
        answers: list[tuple[object, RawAnswer]] = []
        wait_until(lambda: answers.extend(pool.take_answers()) or answers, 60, pause_s=0.005)  # noqa: B023
        value.append(read_answer(answers[0][1]))
        turns.append({"role": "user", "content": str(get_words(value[-1]))})
    pool.close()
    assert [(get_words(each), each.reward) for each in value] == [("+", None), ("?", None), (None, 0.25)]
