"""Agents that send or receive without end: no request takes more memory than its limit, and others are answered."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.runtime.gateway.scripted import LiveGateway, make_request
from tests.runtime.gateway.test_gateway import NAME, USER, play

CHUNK = b" " * (1 << 16)
LIMIT = 8 << 20
CALL: dict[str, Any] = {"model": "policy", "messages": [USER]}


@pytest.mark.parametrize("path", ["chat/completions", "completions", "reward"])
def test_a_body_without_an_end_is_refused_at_the_limit_and_the_agent_goes_on(tmp_path: Path, path: str) -> None:
    async def test(live: LiveGateway) -> None:
        client, sent = live.begin(make_request()), 0

        async def send() -> AsyncIterator[bytes]:
            nonlocal sent
            while True:
                sent += len(CHUNK)
                yield CHUNK

        headers = {"Authorization": f"Bearer {client.api_key}"}
        async with (
            aiohttp.ClientSession() as web,
            web.post(f"{client.base_url}{path}", data=send(), headers=headers) as answer,
        ):
            assert (answer.status, (await answer.json())["error"]["message"]) == (413, "the body has more than 8 MiB")
        assert LIMIT < sent < 2 * LIMIT
        reply = await client.chat.completions.create(**CALL)
        assert reply.choices[0].message.content == "ab"
        live.end(NAME)
        assert live.finished[NAME].num_turns == 1

    play(tmp_path, test)


def test_streams_that_nobody_reads_are_recorded_once_and_keep_no_other_call_waiting(tmp_path: Path) -> None:
    async def test(live: LiveGateway) -> None:
        client = live.begin(make_request())
        call = CALL | {"stream": True}
        headers = {"Authorization": f"Bearer {client.api_key}"}
        async with aiohttp.ClientSession() as web:
            unread = [
                await web.post(f"{client.base_url}chat/completions", json=call, headers=headers) for _ in range(20)
            ]
            reply = await client.chat.completions.create(**CALL)
            assert reply.choices[0].message.content == "ab"
            await asyncio.sleep(0.1)
            live.end(NAME)
            assert live.finished[NAME].num_turns == 21
            assert all(answer.status == 200 for answer in unread)

    play(tmp_path, test, max_turns=1000)
