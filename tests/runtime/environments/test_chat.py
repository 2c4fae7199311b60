"""Turns by the chat template: what was sampled stays as it was sampled, and what is put between is the template's."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlplan.errors import SpecError
from rlplan.runtime.data.layouts import Columns
from rlplan.runtime.data.loading import Chats, RowNeeds, load_rows
from rlplan.runtime.data.text_tokens import TextTokenizer
from rlplan.runtime.environments.chat import ChatTurns
from rlplan.runtime.environments.conversations import Conversations
from rlplan.runtime.environments.pool import EnvironmentPool
from rlplan.runtime.rollout.experience import Completion, RolloutRequest
from rlplan.spec.parts.environment import EnvironmentSpec
from tests.factories import EXAMPLES
from tests.repository.at_night import mark_nightly
from tests.runtime.environments.chat_policy import END, Script, chat_prompt, ids, write_policy

GAME = """
def play(messages, answer):
    assert [each["role"] for each in messages[:2]] == ["user", "assistant"]
    turns = len(messages) // 2
    return {"observation": "cab" * turns} if turns < 3 else {"reward": 1.0}
"""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("chat") / "policy")


@pytest.fixture(scope="module")
def chat(policy: Path) -> Iterator[ChatTurns]:
    chat = ChatTurns(policy, TextTokenizer(policy))
    yield chat
    chat.close()


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[EnvironmentPool]:
    (tmp_path / "game.py").write_text(GAME)
    spec = EnvironmentSpec(path=f"{tmp_path / 'game.py'}:play", max_observation_len=4, num_workers=1)
    pool = EnvironmentPool(spec, tmp_path / "log.txt")
    yield pool
    pool.close()


def rollout(engines: Script, pool: EnvironmentPool, chat: ChatTurns, max_tokens: int = 60) -> Completion:
    prompt = chat_prompt()
    talks = Conversations(engines, pool, chat.words, lambda name: prompt, chat)  # type: ignore[arg-type]
    request = RolloutRequest("generate/1/0", prompt.tokens, 1, 1.0, 0, max_tokens)
    return talks.generate([request], 30.0)[0][0].completions[0]


def test_tokens_that_were_sampled_stay_though_their_text_would_be_tokenized_otherwise(
    chat: ChatTurns, pool: EnvironmentPool
) -> None:
    sampled = (*ids("a", "b"), END)  # its text, `ab`, is one token
    assert tuple(chat.words.tokens(chat.words.text(sampled))) == ids("ab")
    engines = Script(sampled)
    completion = rollout(engines, pool, chat)
    between = [ids("<user>", *words, "<end>", "<assistant>") for words in (["c", "ab"], ["c", "ab", "c", "ab"])]
    assert completion.tokens == (*sampled, *between[0], *sampled, *between[1], *sampled)
    assert completion.chosen == sampled * 3
    assert len(completion.logprobs) == 9
    assert completion.observed == ((3, 8), (11, 18))
    assert [request.prompt for request in engines.asked] == [
        (*chat_prompt().tokens, *completion.tokens[:length]) for length in (0, 8, 18)
    ]


def test_a_turn_that_ended_otherwise_than_the_template_ends_it_is_ended_by_what_is_observed(
    chat: ChatTurns, pool: EnvironmentPool
) -> None:
    completion = rollout(Script(ids("a", "</call>")), pool, chat)  # as where the job stops at a text
    assert completion.tokens[:5] == ids("a", "</call>", "<end>", "<user>", "c")
    assert completion.observed[0] == (2, 8)


def test_an_observation_that_is_too_long_loses_its_end_and_not_the_template_s(chat: ChatTurns, tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("def play(messages, answer):\n    return {'observation': 'c' * 1000}")
    pool = EnvironmentPool(EnvironmentSpec(path=f"{tmp_path / 'long.py'}:play", max_observation_len=3), tmp_path / "l")
    completion = rollout(Script(ids("a", "<end>")), pool, chat, max_tokens=12)
    pool.close()
    assert completion.tokens[2:8] == ids("<user>", "ccc", "<end>", "<assistant>")
    assert (completion.ended, completion.failure) == ("context", "")


def test_rows_become_chats_where_the_job_has_a_system_prompt_or_tools(policy: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"id": "1", "prompt": "ab", "answer": "1"}\n'
        '{"id": "2", "prompt": [{"role": "system", "content": "c"}, {"role": "user", "content": "d"}], "answer": "2"}\n'
    )
    tools = ({"type": "function", "function": {"name": "add"}},)
    loaded = load_rows(rows, Columns(), policy, RowNeeds(), Chats("be", tools)).rows
    assert [row.prompt for row in loaded] == [
        "<bos><system>add<end><system>be<end><user>ab<end><assistant>",
        "<bos><system>add<end><system>c<end><user>d<end><assistant>",
    ]
    assert [len(row.chat or []) for row in loaded] == [2, 2]
    plain = load_rows(rows, Columns(), policy, RowNeeds()).rows
    assert [row.prompt for row in plain] == ["ab", "<bos><system>c<end><user>d<end><assistant>"]


def test_chats_that_a_job_needs_are_refused_without_a_template(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": "1", "prompt": "ab", "answer": "1"}\n')
    with pytest.raises(SpecError, match="the policy has no chat template"):
        load_rows(rows, Columns(), EXAMPLES / "models" / "sorter", RowNeeds(), Chats("be good"))


REFUSED = (
    ("{{ raise_exception('no tools here') }}", "no tools here"),
    ("{{ messages[-1].content }}", "does not write an earlier turn of the policy exactly once"),
    ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "does not write an earlier turn"),
    ("{% for m in messages %}{{ m.content[0].text }}{% endfor %}", "does not write an earlier turn"),
    ("{% for", "the policy's chat template cannot render the prompts"),
)


@pytest.mark.parametrize(("template", "reason"), mark_nightly(REFUSED, but=REFUSED[1:2]))
def test_templates_that_fail_are_refused_before_anything_starts(template: str, reason: str, tmp_path: Path) -> None:
    policy = write_policy(tmp_path / "policy", template)
    chat = ChatTurns(policy, TextTokenizer(policy))
    try:
        with pytest.raises(SpecError, match=reason):
            chat.check(["tool", "user"])
    finally:
        chat.close()
