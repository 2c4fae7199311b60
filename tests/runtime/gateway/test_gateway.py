"""The endpoint as agents see it, by the `openai` client and by hand: what is recorded, and what bad requests get."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from rlplan.runtime.environments.conversation import FINAL, MAX_TURNS
from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.runtime.rollout.experience import WeightSpan
from tests.runtime.environments.chat_policy import ids
from tests.runtime.gateway.scripted import CONTEXT, SAID, LiveGateway, list_open_files, make_request, open_gateway

USER = {"role": "user", "content": "ab"}
PROMPT = ids("<bos>", "<user>", "ab", "<end>", "<assistant>")
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
NAME = "generate/1/0#0"


def play(folder: Path, test: Callable[[LiveGateway], Awaitable[None]], within_s: float = 60.0, **options: Any) -> None:
    async def run() -> None:
        async with asyncio.timeout(scale_seconds(within_s)), open_gateway(folder, **options) as live:
            await test(live)

    asyncio.run(run())


def test_a_conversation_that_grows_is_one_sample_whose_tokens_are_never_encoded_again(tmp_path: Path) -> None:
    async def test(live: LiveGateway) -> None:
        client, messages = live.begin(make_request()), [USER]
        for _ in range(3):
            reply = await client.chat.completions.create(model="policy", messages=messages)
            assert reply.choices[0].message.content == "ab"
            assert (reply.choices[0].finish_reason, reply.usage.completion_tokens) == ("stop", 3)
            live.version += 1  # a weight sync between two turns
            messages += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "c"}]
        live.end(NAME, answer="ab")
        observed = ids("<user>", "c", "<end>", "<assistant>")
        completion = live.finished[NAME]
        assert completion.prompt_tokens == PROMPT
        assert completion.tokens == (*SAID, *observed, *SAID, *observed, *SAID)
        assert completion.observed == ((3, 7), (10, 14))
        assert completion.logprobs == (-1.0, -2.0, -3.0) * 3
        assert completion.spans == (WeightSpan(0, 0, 3), WeightSpan(1, 7, 10), WeightSpan(2, 14, 17))
        assert completion.branches == ()
        assert (completion.num_turns, completion.answer, completion.failure) == (3, "ab", "")
        assert live.asked[2].prompt == (*PROMPT, *completion.tokens[:14])
        assert len({request.seed for request in live.asked}) == 3

    play(tmp_path, test)


def test_a_changed_history_is_a_branch_with_a_prompt_of_its_own(tmp_path: Path) -> None:
    async def test(live: LiveGateway) -> None:
        client = live.begin(make_request())
        answer = {"role": "assistant", "content": "ab"}
        for messages in (
            [USER],
            [USER, answer, USER],
            [USER, {**answer, "content": "b"}, USER],
            [USER, answer, {**USER, "content": "c"}],
        ):
            await client.chat.completions.create(model="policy", messages=messages)
        live.end(NAME)
        completion = live.finished[NAME]
        changed, first = completion.branches[1], completion.branches[0]
        assert first.num_turns == 2
        assert first.prompt_tokens == PROMPT
        assert changed.prompt_tokens == (*PROMPT, *ids("b", "<end>"), *PROMPT[1:])
        assert completion.prompt_tokens[-4:] == ids("<user>", "c", "<end>", "<assistant>")
        assert completion.prompt_tokens[5] == ids("ab")[0]  # a history is text: only a prompt
        assert (completion.num_turns, completion.tokens, changed.tokens) == (4, SAID, SAID)

    play(tmp_path, test)


def test_the_same_call_twice_is_recorded_twice_and_sampled_differently(tmp_path: Path) -> None:
    async def test(live: LiveGateway) -> None:
        client = live.begin(make_request())
        calls = [client.chat.completions.create(model="policy", messages=[USER]) for _ in range(2)]
        await asyncio.gather(*calls)
        live.end(NAME)
        completion = live.finished[NAME]
        assert [branch.prompt_tokens for branch in completion.branches] == [completion.prompt_tokens]
        assert len({request.seed for request in live.asked}) == 2

    play(tmp_path, test)


def test_tool_calls_are_those_of_openai_and_go_on_in_one_sample(tmp_path: Path) -> None:
    call = ids("a", "<call>", '{"name": "add", "arguments": {"a": 1}}', "</call>", "<end>")

    async def test(live: LiveGateway) -> None:
        client = live.begin(make_request(max_tokens=60))
        reply = await client.chat.completions.create(model="policy", messages=[USER], tools=[TOOL])
        message = reply.choices[0].message
        (called,) = message.tool_calls
        assert (called.function.name, json.loads(called.function.arguments)) == ("add", {"a": 1})
        assert (message.content, reply.choices[0].finish_reason) == ("a", "tool_calls")
        result = {"role": "tool", "tool_call_id": called.id, "content": "c"}
        messages = [USER, message.model_dump(), result]
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        assert reply.choices[0].finish_reason == "length"  # the rest of the context
        live.end(NAME)
        completion = live.finished[NAME]
        observed = ids("<tool>", "c", "<end>", "<assistant>")
        assert completion.prompt_tokens == ids(
            "<bos>", "<system>", "add", "<end>", "<user>", "ab", "<end>", "<assistant>"
        )
        assert completion.tokens[: len(call) + 4] == (*call, *observed)
        assert len(completion.prompt_tokens) + len(completion.tokens) == CONTEXT
        assert (completion.calls, completion.ended, completion.branches) == (("ok",), FINAL, ())

    play(tmp_path, test, say=lambda request: call, call_pattern="<call>(.*?)</call>")


def test_a_stream_says_the_same_as_an_answer_in_one_piece(tmp_path: Path) -> None:
    async def test(live: LiveGateway) -> None:
        client = live.begin(make_request())
        for has_usage in (False, True):
            options: Any = {"stream_options": {"include_usage": True}} if has_usage else {}
            stream = await client.chat.completions.create(model="policy", messages=[USER], stream=True, **options)
            chunks = [chunk async for chunk in stream]
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "ab"
            assert [c.choices[0].finish_reason for c in chunks if c.choices] == [None, "stop"]
            assert [c.usage.total_tokens for c in chunks if c.usage] == [8] * has_usage

    play(tmp_path, test)


def test_completions_of_texts_and_tokens_continue_what_they_begin_with(tmp_path: Path) -> None:
    async def test(live: LiveGateway) -> None:
        client = live.begin(make_request())
        reply = await client.completions.create(model="policy", prompt="c")
        assert reply.choices[0].text == "ab"
        await client.completions.create(model="policy", prompt=["cabd"])
        await client.completions.create(model="policy", prompt=[*ids("e")])
        chunks = [
            c
            async for c in await client.completions.create(
                model="policy", prompt=[*ids("e"), *SAID, *ids("f")], stream=True
            )
        ]
        assert "".join(c.choices[0].text for c in chunks) == "ab"
        live.end(NAME)
        second, (first,) = live.finished[NAME], live.finished[NAME].branches
        assert (first.prompt_tokens, first.tokens) == (ids("c"), (*SAID, *ids("d"), *SAID))
        assert (second.prompt_tokens, second.tokens) == (ids("e"), (*SAID, *ids("f"), *SAID))

    play(tmp_path, test)


def test_what_an_agent_limits_ends_its_turn(tmp_path: Path) -> None:
    async def test(live: LiveGateway) -> None:
        client = live.begin(make_request())
        reply = await client.chat.completions.create(
            model="policy", messages=[USER], max_tokens=1, stop=["b"], temperature=0
        )
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("a", "length")
        assert (live.asked[0].max_tokens, live.asked[0].stop, live.asked[0].temperature) == (1, ("b",), 1.0)

    play(tmp_path, test)


BAD = {
    "another model": ({"model": "gpt-4o"}, 404, "there is no model 'gpt-4o'; use one of: policy, mine"),
    "no messages": ({"messages": []}, 400, "messages: List should have at least 1 item"),
    "no text": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        400,
        "messages.0.content",
    ),
    "a role": ({"messages": [{"role": "critic", "content": "a"}]}, 400, "messages.0.role"),
    "two answers": ({"n": 2}, 400, "n: Input should be 1"),
    "a schema": ({"response_format": {"type": "json_schema"}}, 400, "response_format.type: Input should be 'text'"),
    "a forced call": ({"tool_choice": "maybe"}, 400, "tool_choice"),
    "a long prompt": (
        {"messages": [{"role": "user", "content": "c" * 60}]},
        400,
        "maximum context length is 64 tokens, but the messages have 64 tokens",
    ),
    "a very long prompt": ({"messages": [{"role": "user", "content": "c" * 7_000_000}]}, 400, "characters"),
}


def test_what_cannot_be_answered_is_refused_in_openai_s_format(tmp_path: Path) -> None:
    async def test(live: LiveGateway) -> None:
        client = live.begin(make_request())
        for changed, status, words in BAD.values():
            with pytest.raises(openai.APIStatusError) as error:
                await client.chat.completions.create(**({"model": "policy", "messages": [USER]} | changed))  # type: ignore[call-overload]
            assert error.value.status_code == status
            assert set(error.value.body) == {"message", "type", "param", "code"}  # type: ignore[call-overload]
            assert words in error.value.message
        reply = await client.chat.completions.create(model="mine", messages=[USER])  # and the next one is answered
        assert reply.choices[0].message.content == "ab"
        assert [model.id for model in (await client.models.list()).data] == ["policy", "mine"]

    play(tmp_path, test, model_names=("policy", "mine"), max_turns=1000)


RAW = {
    "no JSON": ("chat/completions", b"{", 400, "the body is no JSON object"),
    "a list": ("chat/completions", b"[]", 400, "the body is no JSON object"),
    "deep JSON": ("chat/completions", b"[" * 100_000, 400, "the body is no JSON object"),
    "no UTF-8": ("completions", b'{"model": "\xff"}', 400, "the body is no JSON object"),
    "10 MB": ("chat/completions", b" " * 10_000_000, 413, "8 MiB"),
    "a lone surrogate": ("completions", rb'{"model": "policy", "prompt": "\ud800"}', 400, ""),
    "an empty prompt": ("completions", b'{"model": "policy", "prompt": ""}', 400, "tokens from 0 to 56"),
    "an unknown token": ("completions", b'{"model": "policy", "prompt": [57]}', 400, "tokens from 0 to 56"),
    "no tokens": ("completions", b'{"model": "policy", "prompt": []}', 400, "tokens from 0 to 56"),
    "another address": ("embeddings", b"{}", 404, "/v1/embeddings"),
    "a reward of no number": ("reward", b'{"reward": NaN}', 400, "reward: Input should be a finite number"),
}


def test_bytes_that_are_no_request_are_refused_in_openai_s_format(tmp_path: Path) -> None:
    async def test(live: LiveGateway) -> None:
        client = live.begin(make_request())
        async with aiohttp.ClientSession() as web:
            for path, content, status, words in RAW.values():
                for key, wanted in ((client.api_key, status), ("sk-wrong", 401), ("", 401)):
                    headers = {"Authorization": f"Bearer {key}"}
                    async with web.post(f"{client.base_url}{path}", data=BytesIO(content), headers=headers) as answer:
                        error = (await answer.json())["error"]
                        assert (path, answer.status) == (path, wanted)
                        assert wanted == 401 or words in error["message"]

    play(tmp_path, test, max_turns=1000)


def test_a_client_that_leaves_is_not_recorded_and_its_rollout_ends_when_the_engine_has(tmp_path: Path) -> None:
    async def test(live: LiveGateway) -> None:
        client = live.begin(make_request())
        live.is_held = True
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(model="policy", messages=[USER], timeout=0.2)
        assert len(live.asked) == 1
        live.end(NAME)
        await asyncio.sleep(0.05)
        assert live.finished == {}  # the engine still generates
        live.release()
        await asyncio.sleep(0.05)
        assert live.finished[NAME].num_turns == 0
        assert live.finished[NAME].failure == "the agent never called the policy"
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model="policy", messages=[USER])

    play(tmp_path, test)


def test_turns_are_limited_and_an_agent_that_fails_of_it_has_not_failed(tmp_path: Path) -> None:
    async def test(live: LiveGateway) -> None:
        client = live.begin(make_request())
        for _ in range(2):
            await client.chat.completions.create(model="policy", messages=[USER])
        with pytest.raises(openai.BadRequestError, match="has had its 2 turns"):
            await client.chat.completions.create(model="policy", messages=[USER])
        live.end(NAME, failure="BadRequestError")
        assert (live.finished[NAME].ended, live.finished[NAME].failure) == (MAX_TURNS, "")

    play(tmp_path, test, max_turns=2)


def test_an_agent_that_does_nothing_is_ended_and_one_that_waits_for_the_policy_is_not(tmp_path: Path) -> None:
    async def test(live: LiveGateway) -> None:
        waiting = live.begin(make_request(1))
        live.begin(make_request(0))
        live.gateway.start_s, live.is_held = 0.0, True
        call = asyncio.create_task(waiting.chat.completions.create(model="policy", messages=[USER]))
        while NAME not in live.finished:
            await asyncio.sleep(0.05)
        assert live.killed == [NAME]
        assert live.finished[NAME].failure.startswith("timeout: the agent neither called the policy nor ended")
        live.release()
        assert (await call).choices[0].message.content == "ab"

    play(tmp_path, test, timeout_s=0.5)


def test_an_agent_that_repeats_refused_calls_forever_is_ended(tmp_path: Path) -> None:
    async def test(live: LiveGateway) -> None:
        client = live.begin(make_request())

        async def repeat() -> None:
            while True:
                with suppress(openai.NotFoundError):
                    await client.chat.completions.create(model="gpt-4o", messages=[USER])

        with pytest.raises((openai.AuthenticationError, openai.APIConnectionError)):
            await repeat()
        assert live.killed == [NAME]
        assert live.finished[NAME].failure.startswith("the agent went on after 100 refused calls")

    play(tmp_path, test)


def test_a_request_that_is_never_complete_does_not_keep_its_agent_alive(tmp_path: Path) -> None:
    async def test(live: LiveGateway) -> None:
        client = live.begin(make_request())
        live.gateway.start_s = 0.0
        host, port = str(client.base_url).split("/")[2].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.api_key}\r\n"
        writer.write(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
        assert await reader.read() == b""  # the connection is closed with the rollout
        assert live.killed == [NAME]
        writer.close()

    play(tmp_path, test, timeout_s=0.5)


def test_a_reward_that_the_agent_posts_is_the_rollout_s(tmp_path: Path) -> None:
    async def test(live: LiveGateway) -> None:
        client = live.begin(make_request())
        await client.chat.completions.create(model="policy", messages=[USER])
        assert await client.post("/reward", cast_to=dict, body={"reward": 0.25}) == {"reward": 0.25}
        live.end(NAME)
        assert live.finished[NAME].reward == 0.25

    play(tmp_path, test)


def test_nothing_is_left_of_ended_rollouts(tmp_path: Path) -> None:
    async def test(live: LiveGateway) -> None:
        before = list_open_files()
        for place in range(20):
            async with live.begin(make_request(place)) as client:
                await client.chat.completions.create(model="policy", messages=[USER])
            live.end(f"generate/1/{place}#0")
        await asyncio.sleep(0.1)
        gateway = live.gateway
        assert (gateway._keys, gateway._names, gateway._turns) == ({}, {}, {})
        assert len(live.finished) == 20
        assert list_open_files() <= before + 2
        assert max(len(request.prompt) + request.max_tokens for request in live.asked) <= CONTEXT

    play(tmp_path, test)


@pytest.mark.nightly
def test_2000_conversations_at_once_lose_nothing_and_memory_stays_flat(tmp_path: Path) -> None:
    count, sizes = 2000, []
    observed = ids("<user>", "c", "<end>", "<assistant>")

    async def talk(live: LiveGateway, web: aiohttp.ClientSession, place: int) -> None:
        key, messages = live.open(make_request(place)), [USER]
        for _ in range(3):
            content = {"model": "policy", "messages": messages}
            url, headers = f"{live.gateway.address}/chat/completions", {"Authorization": f"Bearer {key}"}
            async with web.post(url, json=content, headers=headers) as answer:
                message = (await answer.json())["choices"][0]["message"]
            messages = [*messages, message, {"role": "user", "content": "c"}]
        live.end(f"generate/1/{place}#0")

    async def test(live: LiveGateway) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as web:
            for wave in range(4):
                live.is_held = True
                talks = [asyncio.create_task(talk(live, web, count * wave + place)) for place in range(count)]
                while len(live.asked) < count:  # all of them wait for their first turn
                    await asyncio.sleep(0.1)
                live.release()
                await asyncio.gather(*talks)
                await asyncio.sleep(0.1)
                assert len(live.finished) == count
                assert {completion.tokens for completion in live.finished.values()} == {
                    (*SAID, *observed, *SAID, *observed, *SAID)
                }
                assert len(live.asked) == 3 * count
                live.finished.clear()
                live.asked.clear()
                live.variables.clear()
                sizes.append(int(Path("/proc/self/statm").read_text().split()[1]))

    play(tmp_path, test, within_s=600.0, timeout_s=600.0)
    assert sizes[3] <= 1.1 * sizes[1]
