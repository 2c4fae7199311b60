"""Tools: what the policy's calls give, at once and with a deadline each, and that no wrong one is silent."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlplan.errors import SpecError
from rlplan.runtime.data.text_tokens import TextTokenizer
from rlplan.runtime.environments.chat import ChatTurns
from rlplan.runtime.environments.conversations import Conversations
from rlplan.runtime.environments.pool import EnvironmentDescription, EnvironmentPool, describe_environment
from rlplan.runtime.environments.tool_calls import MAX_CALLS, read_calls
from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.runtime.rollout.experience import Completion, RolloutRequest
from rlplan.spec.parts.environment import EnvironmentSpec
from tests.repository.at_night import mark_nightly
from tests.runtime.environments.chat_policy import Script, chat_prompt, ids, write_policy

TOOLS = '''
import os, time
from typing import Literal

def add(a: int, b: float = 1.0) -> float:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b

async def later(word: str) -> str:
    """Says a word again, later.

    Args:
        word: What is said.
    """
    import asyncio
    await asyncio.sleep(0.3)
    return word

def bad(how: Literal["raise", "hang", "die", "long", "object", "exit"]) -> str:
    """Goes wrong.

    Args:
        how: In what way.
    """
    if how == "raise":
        raise ValueError("no")
    if how == "hang":
        time.sleep(60)
    if how == "die":
        os._exit(3)
    if how == "exit":
        raise SystemExit(1)
    return "x" * 10_000_000 if how == "long" else object()
'''
PATTERN = "<call>(.*?)(?:</call>|$)"


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> EnvironmentSpec:
    file = tmp_path_factory.mktemp("tools") / "tools.py"
    file.write_text(TOOLS)
    tools = tuple(f"{file}:{name}" for name in ("add", "later", "bad"))
    return EnvironmentSpec(
        tools=tools, call_pattern=PATTERN, timeout_s=scale_seconds(1.5), max_observation_len=400, num_workers=3
    )


@pytest.fixture(scope="module")
def description(spec: EnvironmentSpec) -> EnvironmentDescription:
    return describe_environment(spec)


Run = Callable[..., tuple[Completion, list[str]]]


@pytest.fixture(scope="module")
def run(
    spec: EnvironmentSpec, description: EnvironmentDescription, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Run]:
    """Yields a function that plays the policy's texts; it returns the rollout and the results after its first turn."""
    folder = tmp_path_factory.mktemp("run")
    policy = write_policy(folder / "policy")
    pool = EnvironmentPool(spec, folder / "log.txt", description)
    words = TextTokenizer(policy)
    chat = ChatTurns(policy, words, description.schemas)

    def run(*texts: str, max_tokens: int = 4000) -> tuple[Completion, list[str]]:
        engines = Script(*[(*words.tokens(turn), *ids("<end>")) for turn in texts])
        prompt = chat_prompt()
        talks = Conversations(engines, pool, words, lambda name: prompt, chat)  # type: ignore[arg-type]
        request = RolloutRequest("generate/1/0", prompt.tokens, 1, 1.0, 0, max_tokens)
        completion = talks.generate([request], 60.0)[0][0].completions[0]
        start, end = completion.observed[0] if completion.observed else (0, 0)
        results = words.text(completion.tokens[start:end], keeps_special=True).split("<tool>")[1:]
        return completion, [each.partition("<end>")[0] for each in results]

    yield run
    pool.close()
    chat.close()


def call(name: str, **arguments: object) -> str:
    return f"<call>{json.dumps({'name': name, 'arguments': arguments})}</call>"


def test_schemas_come_from_annotations_and_docstrings(description: EnvironmentDescription) -> None:
    add = description.schemas[0]["function"]
    assert (add["name"], add["description"]) == ("add", "Adds two numbers.")
    assert add["parameters"]["properties"]["a"] == {"type": "integer", "description": "The first."}
    assert add["parameters"]["required"] == ["a"]
    assert not description.is_stateful


def test_a_call_is_answered_in_a_tool_message_and_the_turn_after_is_the_last(run: Run) -> None:
    completion, results = run(call("add", a=2, b=3), "5.")
    assert results == ["5.0"]
    assert (completion.calls, completion.ended, completion.num_turns, completion.failure) == (("ok",), "final", 2, "")


def test_calls_of_one_turn_run_side_by_side_and_are_answered_in_their_order(run: Run) -> None:
    run(call("add", a=1), "x")  # the processes are up
    start = time.monotonic()
    completion, results = run(call("later", word="c") + call("add", a=1) + call("later", word="d"), "x")
    assert results == ["c", "2.0", "d"]
    assert completion.calls == ("ok",) * 3
    assert time.monotonic() - start < scale_seconds(60)


@pytest.mark.parametrize(
    ("turn", "outcome", "error_text"),
    [
        (call("sub", a=1), "unknown_tool", "error: there is no tool sub; available tools: add, bad, later"),
        ("<call>{add</call>", "not_json", "error: the call is not JSON"),
        ("<call>[1]</call>", "not_json", "error: a call must be an object with name and arguments"),
        ('<call>{"name": "add", "argu', "not_json", "error: the call is not JSON"),
        (call("add"), "wrong_arguments", "missing: a"),
        (call("add", a="2"), "wrong_arguments", "a: "),
        (call("add", a=1, c=2), "wrong_arguments", "unknown: c; known: a, b"),
        (call("bad", how="well"), "wrong_arguments", "how: "),
        (call("bad", how="raise"), "raised", "no"),
        (call("bad", how="exit"), "raised", "1"),
        (call("bad", how="hang"), "timed_out", "error: timeout after "),
        (call("bad", how="die"), "died", "error: its process ended with exit code 3"),
        (call("bad", how="long"), "too_long", "characters, the limit is 65536"),
        (call("bad", how="object"), "wrong_result", "returned neither text nor "),
    ],
)
def test_a_wrong_call_or_tool_is_told_to_the_policy_and_counted_and_the_rollout_goes_on(
    run: Run, turn: str, outcome: str, error_text: str
) -> None:
    completion, (results,) = run(turn, "c")
    assert completion.calls == (outcome,)
    plain = "".join(each for each in error_text if each in '{}":,[] 0123456789abcdefghijklmnopqrstuvwxyz_.')
    assert plain in results.replace("<unk>", "")
    assert (completion.num_turns, completion.failure) == (2, "")
    assert run(call("add", a=1), "c")[1] == ["2.0"]


def test_calls_that_do_not_fit_or_come_after_the_last_turn_are_not_made(run: Run) -> None:
    turn = call("add", a=1)
    assert run(turn, max_tokens=60)[0].ended == "context"
    completion, _ = run(turn)
    assert (completion.num_turns, completion.ended, completion.calls) == (4, "max_turns", ("ok",) * 3)


def test_an_empty_list_of_calls_is_a_wrong_call_and_not_the_last_turn() -> None:
    [empty] = read_calls("<call>[]</call>", PATTERN, ["add"])
    assert (empty.fault, empty.why) == ("not_json", "the list of calls is empty")


def test_no_more_than_so_many_calls_of_a_turn_are_made() -> None:
    calls = read_calls(call("add", a=1) * (MAX_CALLS + 1), PATTERN, ["add"])
    assert [each.fault for each in calls] == [""] * MAX_CALLS + ["too_many"]
    many = read_calls("<call>" + json.dumps([{"name": "add"}] * 20_000) + "</call>", PATTERN, ["add"])
    assert len(many) == MAX_CALLS + 1
    assert many[-1].why == "19968 calls after the first 32 of the turn were ignored"
    deep = read_calls("<call>" + "[" * 100_000, PATTERN, ["add"])
    assert [each.fault for each in deep] == ["not_json"]


UNDESCRIBED = (
    ('def f(a):\n    """Does.\n\n    Args:\n        a: It.\n    """', "argument a of f has no type annotation"),
    ("def f(a: int): ...", "it has no docstring"),
    ('def f(a: int):\n    """Does."""', "f cannot be described"),
    ('def f(*a: int):\n    """Does."""', r"f takes \*a: int"),
    ('class X: ...\ndef f(a: X):\n    """D.\n\n    Args:\n        a: It.\n    """', "f cannot be described"),
    ("f = 3", r"the tool cannot be used: there is no function 'f' in tools\.py"),
)


# Two that transformers refuses, which takes 3 s to import, are seen at night.
@pytest.mark.parametrize(
    ("function", "reason"), mark_nightly(UNDESCRIBED, but=[UNDESCRIBED[at] for at in (0, 2, 3, 5)])
)
def test_a_function_that_cannot_be_described_is_refused_with_the_way_out(
    function: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "tools.py").write_text(function)
    with pytest.raises(SpecError, match=reason) as refused:
        describe_environment(EnvironmentSpec(tools=(f"{tmp_path / 'tools.py'}:f",)))
    assert refused.value.where.startswith("rollout.environment.tools: ")
    assert refused.value.way_out


def test_a_tool_that_is_not_in_its_file_is_told_what_is(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text("import os\ndef add(a: int): ...\ndef _own(): ...\ndef take(a: int): ...\n")
    with pytest.raises(SpecError, match="the tool cannot be used") as refused:
        describe_environment(EnvironmentSpec(tools=(f"{tmp_path / 'tools.py'}:nope",)))
    assert refused.value.way_out == "use one of add, take"
