"""Gateway: the HTTP endpoint that agents call, in a process of its own, and the sessions behind it.

It listens on loopback. Each rollout has an API key of its own, so that a call names its rollout and nothing else. A
turn that its client no longer waits for is not recorded, so that a call which is sent again is recorded once.

In: rollouts to start and finished turns, as JSON lines from the driver. Out: turns to generate and finished rollouts.
Left out: recording (agent_session.py), agents' processes (agents.py), engines (agent_rollouts.py).
"""

import asyncio
import json
import math
import os
import secrets
import sys
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from pydantic import TypeAdapter

from rlplan.errors import SpecError
from rlplan.runtime.data.text_tokens import TextTokenizer
from rlplan.runtime.environments.chat import ChatTurns
from rlplan.runtime.environments.conversation import CONTEXT, MAX_TURNS
from rlplan.runtime.environments.conversations import make_row
from rlplan.runtime.gateway.agent_session import TEXT, AgentSession, Encoder, Outcome, Turn
from rlplan.runtime.gateway.agents import AgentProcesses
from rlplan.runtime.gateway.openai_api import (
    LIMIT,
    ApiError,
    Call,
    ChatCall,
    Reply,
    TextCall,
    list_models,
    parse_call,
)
from rlplan.runtime.processes.answer_channel import AnswerChannel
from rlplan.runtime.processes.child_processes import die_with_parent
from rlplan.runtime.rollout.experience import Completion, Prompt, RolloutRequest
from rlplan.spec.model_files import chat_template
from rlplan.spec.parts.environment import EnvironmentSpec

MAX_BODY_BYTES = 8 << 20
"""Most bytes of a request; larger ones are answered with status 413."""
MAX_LINE_BYTES = 1 << 28
WATCH_S = 0.25
"""Seconds between two looks at agents that do nothing."""
LIMITS = {LIMIT: CONTEXT, MAX_TURNS: MAX_TURNS}
_PROMPT, _REQUEST, _COMPLETION = TypeAdapter(Prompt), TypeAdapter(RolloutRequest), TypeAdapter(Completion)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(eq=False)
class _Open:
    """A running rollout. turns: those that the engine still generates; handlers: tasks that answer its requests."""

    session: AgentSession
    key: str
    turns: set[str] = field(default_factory=set)
    handlers: set["asyncio.Task[Any]"] = field(default_factory=set)
    active_s: float = 0.0
    """When the agent last began to wait for an answer, or got one."""
    outcome: Outcome | None = None
    """How the agent ended; None while it runs."""


class Gateway:
    """See the module docstring. send: takes events for the driver. address: of the endpoint, once it listens."""

    def __init__(self, spec: EnvironmentSpec, policy: Path, max_len: int, send: Callable[[dict[str, Any]], None]):
        """policy: folder of the tokenizer and chat template. max_len: limit of a prompt and its response, in tokens."""
        self.spec, self.policy, self.max_len, self.send = spec, policy, max_len, send
        self.words = TextTokenizer(policy)
        self.has_template = chat_template(policy, has_tools=True) is not None
        self.chat: ChatTurns | None = None
        self.address = ""
        self.agents: Any = None
        self._keys: dict[str, _Open] = {}
        self._names: dict[str, _Open] = {}
        self._turns: dict[str, asyncio.Future[Completion]] = {}
        self._waiting: deque[tuple[AgentSession, dict[str, Any]]] = deque()
        # One thread: the process that renders chats answers one request after the other.
        self._encoding = ThreadPoolExecutor(1, "encoding")

    async def start(self) -> web.AppRunner:
        """Open the endpoint on a free port of this machine."""
        application = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._answer_errors])
        application.router.add_post("/v1/chat/completions", self._complete_chat)
        application.router.add_post("/v1/completions", self._complete_text)
        application.router.add_get("/v1/models", self._list_models)
        application.router.add_post("/v1/reward", self._take_reward)
        runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
        await site.start()
        self.address = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        await self._run(self._open_chat)
        return runner

    def begin(self, session: AgentSession, row: dict[str, Any]) -> None:
        """Start a rollout's agent, now or when another one has ended. row: the prompt's row."""
        self._waiting.append((session, row))
        self._start_agents()

    def take_turn(self, name: str, completion: Completion) -> None:
        """Deliver a turn that the engine has finished."""
        waiting = self._turns.pop(name, None)
        entry = self._names[name.rpartition(".")[0]]
        entry.turns.discard(name)
        if waiting is not None and not waiting.done():
            waiting.set_result(completion)
        self._report(entry)

    def end_agent(self, name: str, outcome: Outcome) -> None:
        """Record that an agent has ended; its rollout ends once the engine has finished its turns."""
        entry = self._names.get(name)
        if entry is None or entry.outcome is not None:
            return
        entry.outcome = outcome
        self._keys.pop(entry.key, None)
        for handler in entry.handlers:
            handler.cancel()
        self._report(entry)

    async def watch(self) -> None:
        """End agents that neither wait for the policy nor call it within rollout.environment.timeout_s."""
        while True:
            await asyncio.sleep(WATCH_S)
            now = time.monotonic()
            for entry in [*self._keys.values()]:
                if not entry.handlers and now - entry.active_s > self.spec.timeout_s:
                    why = f"timeout: the agent did not call the policy or end within {self.spec.timeout_s:g} s"
                    self.agents.kill(entry.session.name)
                    self.end_agent(entry.session.name, Outcome(failure=why))

    def close(self) -> None:
        self._encoding.shutdown(wait=False, cancel_futures=True)
        if self.chat is not None:
            self.chat.close()

    def _start_agents(self) -> None:
        while self._waiting and len(self._names) < self.spec.num_agents:
            session, row = self._waiting.popleft()
            key = f"sk-{secrets.token_urlsafe(32)}"
            self._keys[key] = self._names[session.name] = _Open(session, key, active_s=time.monotonic())
            variables = {"OPENAI_BASE_URL": self.address, "OPENAI_API_KEY": key, "OPENAI_API_BASE": self.address}
            self.agents.start(session.name, variables | {"OPENAI_MODEL": self.spec.model_names[0]}, row)

    def _report(self, entry: _Open) -> None:
        """Report an ended rollout, once no turn of it is left in the engine."""
        session = entry.session
        if entry.outcome is None or entry.turns or self._names.pop(session.name, None) is None:
            return
        completion = session.make_completion(entry.outcome)
        self.send({"ended": [session.request.id, session.sample, asdict(completion)]})
        self._start_agents()

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer every error in OpenAI's format."""
        try:
            entry = self._find_entry(request)
            task = asyncio.current_task()
            assert task is not None, "a handler is a task"
            entry.handlers.add(task)
            request["entry"], entry.active_s = entry, time.monotonic()
            try:
                return await handler(request)
            finally:
                entry.handlers.discard(task)
                entry.active_s = time.monotonic()
        except ApiError as error:
            return web.json_response(error.body, status=error.status)
        except web.HTTPException as error:
            why = "the body has more than 8 MiB" if error.status == 413 else f"{request.path}: {error.reason}"
            return web.json_response(ApiError(error.status, why).body, status=error.status, headers=_keep(error))
        except ConnectionError:
            raise
        except Exception as error:
            traceback.print_exc()
            body = ApiError(500, f"the gateway failed: {type(error).__name__}; logs/environment.log").body
            return web.json_response(body, status=500)

    def _find_entry(self, request: web.Request) -> _Open:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        entry = self._keys.get(key.strip()) if scheme.lower() == "bearer" else None
        if entry is None:
            raise ApiError(
                401, "this API key belongs to no running rollout: use OPENAI_API_KEY of the agent", "invalid_api_key"
            )
        return entry

    async def _list_models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(list_models(self.spec.model_names, self.max_len))

    async def _take_reward(self, request: web.Request) -> web.StreamResponse:
        """Set the rollout's reward: {"reward": number}."""
        try:
            reward = json.loads(await request.read())["reward"]
        except (ValueError, RecursionError, KeyError, TypeError):
            reward = None
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise ApiError(400, 'the body is {"reward": NUMBER}, with a finite number', "invalid_value", "reward")
        request["entry"].session.reward = float(reward)
        return web.json_response({"reward": reward})

    async def _complete_chat(self, request: web.Request) -> web.StreamResponse:
        call: ChatCall = parse_call(ChatCall, await request.read())
        return await self._complete(request, call, call.read_messages(), call.read_tools())

    async def _complete_text(self, request: web.Request) -> web.StreamResponse:
        call: TextCall = parse_call(TextCall, await request.read())
        return await self._complete(request, call, [{"role": TEXT, "content": call.prompt}], [])

    async def _complete(
        self, request: web.Request, call: ChatCall | TextCall, messages: list[Any], tools: list[Any]
    ) -> web.StreamResponse:
        entry: _Open = request["entry"]
        self._check_model(call)
        try:
            turn = await self._begin_turn(entry.session, call, messages, tools)
        except ApiError as error:
            entry.session.refusal = LIMITS.get(str(error.body["error"]["code"]), entry.session.refusal)
            raise
        try:
            completion = await self._generate(entry, turn.request)
            if request.transport is None or request.transport.is_closing():
                raise ConnectionResetError
            reads_calls = bool(tools) and isinstance(call, ChatCall) and call.tool_choice != "none"
            message = entry.session.finish_turn(turn, completion, self.words, reads_calls=reads_calls)
        finally:
            turn.branch.is_busy = False
        is_chat = isinstance(call, ChatCall)
        name = f"{'chatcmpl' if is_chat else 'cmpl'}-{turn.request.id}"
        reply = Reply(name, call.model, is_chat, message, completion, len(turn.request.prompt))
        if not call.stream:
            return web.json_response(reply.write())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        includes_usage = call.stream_options is not None and call.stream_options.include_usage
        for event in reply.write_events(includes_usage=includes_usage):
            await response.write(event)
        await response.write_eof()
        return response

    def _check_model(self, call: Call) -> None:
        if call.model not in self.spec.model_names:
            names = ", ".join(self.spec.model_names)
            why = f"there is no model '{call.model[:100]}'; use one of: {names} (rollout.environment.model_names)"
            raise ApiError(404, why, "model_not_found", "model")

    async def _begin_turn(
        self, session: AgentSession, call: ChatCall | TextCall, messages: list[Any], tools: list[Any]
    ) -> Turn:
        number = session.count_turn()
        branch, added = session.find_branch(messages, tools)
        if branch is not None:
            branch.is_busy = True  # while its messages are encoded
            try:
                tokens = await self._encode(branch.talk, added, tools)
                turn = session.begin_turn(call, number, branch, added, tokens)
            except BaseException:
                branch.is_busy = False
                raise
            if turn is not None:
                return turn
            branch.is_busy = False
        turn = session.begin_turn(call, number, None, messages, await self._encode(None, messages, tools))
        assert turn is not None, "a new conversation has room, or there is an error"
        return turn

    async def _encode(self, *arguments: Any) -> list[int]:
        """Raises: ApiError."""

        def encode() -> list[int]:
            self._open_chat()
            return Encoder(self.words, self.chat, self.max_len).encode(*arguments)

        try:
            return await self._run(encode)
        except SpecError as error:
            raise ApiError(400, str(error)[:2000], "invalid_value", "messages") from None

    def _open_chat(self) -> None:
        """Start the process that renders chats, if there is none that works."""
        if self.has_template and (self.chat is None or not self.chat.text.is_usable):
            if self.chat is not None:
                self.chat.close()
            self.chat = ChatTurns(self.policy, self.words, has_tools=True)

    async def _run(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._encoding, function)

    async def _generate(self, entry: _Open, request: RolloutRequest) -> Completion:
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._turns[request.id] = future
        entry.turns.add(request.id)
        self.send({"turn": asdict(request)})
        return await future


def _keep(error: web.HTTPException) -> dict[str, str]:
    return {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}


class DriverLink:
    """JSON lines to the driver and from it. Events of one turn of the loop go out as one line, and never block."""

    def __init__(self, channel: AnswerChannel) -> None:
        self.channel = channel
        self._events: list[dict[str, Any]] = []
        self._out: asyncio.WriteTransport | None = None
        self.reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(self.reader), self.channel.requests)
        pipe = os.fdopen(self.channel.answers, "wb", buffering=0)
        self._out, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, pipe)

    def send(self, event: dict[str, Any]) -> None:
        if not self._events:
            asyncio.get_running_loop().call_soon(self._flush)
        self._events.append(event)

    def _flush(self) -> None:
        assert self._out is not None, "the link is open"
        self._out.write(json.dumps({"events": self._events}).encode() + b"\n")
        self._events = []


async def serve(setting: dict[str, Any]) -> None:
    """Answer agents until the driver closes its end."""
    link = DriverLink(AnswerChannel())
    await link.open()
    spec = EnvironmentSpec.model_validate(setting["spec"])
    gateway = Gateway(spec, Path(setting["policy"]), setting["max_len"], link.send)
    runner = await gateway.start()
    gateway.agents = AgentProcesses(spec, gateway.end_agent)
    await gateway.agents.open()
    watching = asyncio.create_task(gateway.watch())
    chat = [] if gateway.chat is None else [gateway.chat.text.pid]
    link.send({"pids": [os.getpid(), *chat]})
    try:
        while line := await link.reader.readline():
            message = json.loads(line)
            for begun in message.get("begin", ()):
                prompt, request = _PROMPT.validate_python(begun["prompt"]), _REQUEST.validate_python(begun["request"])
                session = AgentSession(request, begun["sample"], prompt, spec, gateway.max_len)
                gateway.begin(session, make_row(prompt))
            for name, completion in message.get("turns", ()):
                gateway.take_turn(name, _COMPLETION.validate_python(completion))
    finally:
        watching.cancel()
        with suppress(Exception):
            await gateway.agents.close()
        gateway.close()
        await runner.cleanup()


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(serve(json.loads(sys.argv[1])))
