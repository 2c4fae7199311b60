"""Environments with state: ours, Gymnasium's, TRL's and verifiers' forms, sync and async, one object a rollout."""

from collections.abc import Callable, Iterator

import pytest

from rlplan.runtime.data.text_tokens import TextTokenizer
from rlplan.runtime.environments.chat import ChatTurns
from rlplan.runtime.environments.conversations import Conversations
from rlplan.runtime.environments.pool import EnvironmentPool, describe_environment
from rlplan.runtime.losses.advantages import token_rewards
from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.runtime.rewards.total import add_environment
from rlplan.runtime.rollout.experience import Completion, Rollout, RolloutRequest
from rlplan.spec.parts.environment import EnvironmentSpec
from tests.factories import make_job
from tests.repository.at_night import mark_nightly
from tests.runtime.environments.chat_policy import Script, chat_prompt, ids, write_policy

FORMS = '''
import os, time

class Counter:
    """Counts its own steps; ends at the third."""
    def reset(self, answer):
        self.count, self.answer = 0, answer
    def step(self, text):
        self.count += 1
        return {"observation": f"{self.count}{self.answer}", "reward": float(self.count), "done": self.count == 3}
    def close(self):
        print("closed after", self.count, flush=True)

class Gym:
    async def reset(self, seed=None, options=None):
        self.left = 2
        return "cd", {}
    async def step(self, action):
        self.left -= 1
        return "e", 0.5, self.left == 0, False, {}

class Trl:
    """TRL's environment_factory."""
    def reset(self, **kwargs):
        self.sum = 0
        return " begin"
    def add(self, number: int) -> int:
        """Adds to the sum.

        Args:
            number: What is added.
        """
        self.sum += number
        return self.sum
    def get_reward(self):
        return float(self.sum)
    def _hidden(self): ...

class Turns:
    """verifiers' MultiTurnEnv."""
    class rubric:
        funcs = [lambda completion, answer: len(completion) + float(answer), lambda state: state["seen"]]
        weights = [1.0, 0.5]
    async def setup_state(self, state):
        state["seen"] = 0
        return state
    async def is_completed(self, messages, state):
        return state["seen"] == 2
    async def env_response(self, messages, state):
        state["seen"] += 1
        return [{"role": "user", "content": "f"}]

def load_environment(hardness=1):
    return Turns()

class Bad:
    def reset(self): ...
    def step(self, text):
        if text == "a":
            raise ValueError("no")
        if text == "b":
            time.sleep(60)
        if text == "c":
            return 3
        if text == "d":
            return {"observation": 3}
        return {"observation": "x" * 10_000_000}

class Endless:
    def reset(self): ...
    def step(self, text):
        return {"observation": "c"}

class Empty: ...
'''
Play = Callable[..., list[Completion]]


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    """Gives the rollouts in which the policy says these texts to an environment."""
    folder = tmp_path_factory.mktemp("forms")
    (folder / "forms.py").write_text(FORMS)
    policy = write_policy(folder / "policy")
    words = TextTokenizer(policy)
    chat = ChatTurns(policy, words)

    def play(
        name: str, *texts: str, num_samples: int = 1, max_tokens: int = 90, max_prompt_len: int = 40, **keys: object
    ) -> list[Completion]:
        path = f"{folder / 'forms.py'}:{name}"
        spec = EnvironmentSpec(
            path=path, timeout_s=scale_seconds(1.5), num_workers=2, call_pattern="<call>(.*?)</call>", **keys
        )
        described = describe_environment(spec)
        pool = EnvironmentPool(spec, folder / "log.txt", described)
        engines = Script(*[(*words.tokens(turn), *ids("<end>")) for turn in texts])
        prompt = chat_prompt("a")
        talks = Conversations(engines, pool, words, lambda name: prompt, chat, max_prompt_len)  # type: ignore[arg-type]
        request = RolloutRequest("generate/1/0", prompt.tokens, num_samples, 1.0, 0, max_tokens)
        try:
            return list(talks.generate([request], 60.0)[0][0].completions)
        finally:
            pool.close()

    yield play
    chat.close()


def test_each_rollout_has_an_object_of_its_own_that_is_closed_at_its_end(play: Play) -> None:
    completion = play("Counter", "a", num_samples=5)
    for each in completion:
        assert (each.num_turns, each.reward, each.ended, each.failure) == (3, 6.0, "answered", "")
        assert each.turn_rewards == ((2, 1.0), (4, 2.0))
        assert each.tokens == ids("a", "<end>", "<user>", "142", "<end>", "<assistant>", "a", "<end>", "<user>", "242",
                                  "<end>", "<assistant>", "a", "<end>")  # fmt: skip


def test_a_turn_s_reward_stands_on_its_last_token(play: Play) -> None:
    (completion,) = play("Counter", "ab")
    job = make_job(
        rewards=[], **{"rollout.environment": {"path": f"{__file__}:play", "weight": 2.0}, "algorithm.kl_coef": 0.0}
    )
    rollout = Rollout(chat_prompt(), 0, completion)
    add_environment([rollout], job)
    assert rollout.reward == 12.0
    assert token_rewards(rollout, job.algorithm) == [0.0, 2.0, 0.0, 4.0, 0.0, 6.0]


def test_gymnasium_s_tuples_are_taken_and_what_reset_says_is_added_to_the_prompt(play: Play) -> None:
    (completion,) = play("Gym", "a")
    assert completion.prompt_tokens == ids("<bos>", "<user>", "acd", "<end>", "<assistant>")
    assert (completion.num_turns, completion.reward, completion.turn_rewards) == (2, 1.0, ((2, 0.5),))


def test_a_prompt_that_reset_has_made_too_long_is_masked(play: Play) -> None:
    (completion,) = play("Gym", "a", max_prompt_len=6)
    assert completion.failure == "with the text from reset the prompt has 7 tokens, more than workload.max_prompt_len=6"


def test_methods_of_trl_s_environments_are_tools_with_state(play: Play) -> None:
    turn = '<call>{"name": "add", "arguments": {"number": 2}}</call>'
    hidden = '<call>{"name": "_hidden", "arguments": {}}</call>'
    (completion,) = play("Trl", turn + turn, turn + hidden, "c", max_tokens=900, max_observation_len=400)
    assert completion.calls == ("ok", "ok", "unknown_tool", "ok")
    assert (completion.reward, completion.ended, completion.num_turns) == (6.0, "final", 3)
    assert completion.prompt_tokens == ids("<bos>", "<user>", "a begin", "<end>", "<assistant>")


@pytest.mark.parametrize("name", mark_nightly(["Turns", "load_environment"], but=["load_environment"]))
def test_verifiers_environments_are_asked_as_they_are(play: Play, name: str) -> None:
    (completion,) = play(name, "a")
    assert (completion.num_turns, completion.ended) == (3, "answered")
    assert completion.reward == (5 + 42.0) + 0.5 * 2  # five messages, the answer, and half of what the state counted


WRONG = (
    ("a", "ValueError: no"),
    ("b", "timeout after "),
    ("c", "the answer is '3', not a dict"),
    ("d", "observation is '3', not a text"),
    ("e", "an answer of more than 1048576 bytes"),
)


@pytest.mark.parametrize(("text", "reason"), mark_nightly(WRONG, but=(WRONG[0], WRONG[1], WRONG[3])))
def test_an_environment_that_goes_wrong_is_masked_with_its_reason(play: Play, text: str, reason: str) -> None:
    (completion,) = play("Bad", text)
    assert reason in completion.failure
    assert (completion.reward, completion.ended) == (None, "failed")


def test_what_never_ends_is_ended_by_the_turns_or_the_room_that_there_are(play: Play) -> None:
    (completion,) = play("Endless", "a")
    assert (completion.num_turns, completion.ended, completion.failure) == (4, "max_turns", "")
    (completion,) = play("Endless", "a", max_tokens=9)
    assert (completion.num_turns, completion.ended, completion.failure) == (2, "context", "")
    (completion,) = play("Endless", "a", max_tokens=9, at_context_limit="mask")
    assert "the next turn does not fit workload.max_response_len=9" in completion.failure


def test_what_is_no_environment_is_refused(play: Play) -> None:
    from rlplan.errors import SpecError

    with pytest.raises(SpecError, match="no reset, step or env_response"):
        play("Empty", "a")
