"""Gateway: the HTTP endpoint that agents call, in a process of its own, and the rollouts that it records.

It listens on loopback. Each rollout has an API key of its own, which tells the gateway whose call it is. A turn is not
recorded if its client has stopped waiting. So a call that the client sends again is recorded once.

In: rollouts to start, ended agents and finished turns, as JSON lines from the driver. Out: agents to start, turns to
generate and finished rollouts. Left out: recording (agent_session.py), agents' processes (agent_starter.py).
"""

import asyncio
import json
import os
import secrets
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web
from pydantic import TypeAdapter

from rlplan.errors import SpecError
from rlplan.runtime.data.text_tokens import TextTokenizer
from rlplan.runtime.environments.chat import ChatTurns
from rlplan.runtime.gateway.agent_session import AgentSession, Outcome, Turn
from rlplan.runtime.gateway.openai_api import ApiError, Call, ChatCall, Reply, Reward, TextCall, parse_body
from rlplan.runtime.processes.answer_channel import AnswerChannel
from rlplan.runtime.processes.child_processes import die_with_parent, raise_open_files
from rlplan.runtime.processes.line_process import START_S
from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.runtime.rollout.experience import Completion, RolloutRequest
from rlplan.spec.model_files import chat_template
from rlplan.spec.parts.environment import EnvironmentSpec

MAX_BODY_BYTES = 8 << 20
"""Most bytes of a request; larger ones are answered with status 413."""
MAX_LINE_BYTES = 1 << 28
MAX_REFUSALS = 100
"""Number of refused calls after which an agent is ended, because it might repeat them forever."""
MAX_CALLS_AT_ONCE = 256
WATCH_S = 0.25
"""Seconds between two looks at agents that do nothing."""
_REQUEST, _COMPLETION = TypeAdapter(RolloutRequest), TypeAdapter(Completion)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Send = Callable[[str, str, Any], None]
"""Takes an event for the driver: its kind, the name of its rollout or turn, its content."""


@dataclass(eq=False, slots=True)
class _Open:
    """A running rollout."""

    session: AgentSession
    key: str
    active_s: float
    """When the agent last got an answer of the policy, or began."""
    num_waiting: int = 0
    """Calls of the policy that are being answered."""
    num_refusals: int = 0
    turns: set[str] = field(default_factory=set)
    """Turns that the engine still generates."""
    handlers: set["asyncio.Task[Any]"] = field(default_factory=set)
    """Tasks that answer its requests of all kinds."""
    outcome: Outcome | None = None
    """How the agent ended; None while it runs."""


ENTRY = web.RequestKey("entry", _Open)


class Gateway:
    """See the module docstring."""

    def __init__(self, spec: EnvironmentSpec, policy: Path, max_len: int, send: Send) -> None:
        """policy: folder of the tokenizer and chat template. max_len: limit of a prompt and its response, in tokens."""
        self.spec, self.policy, self.max_len, self.send = spec, policy, max_len, send
        self.words = TextTokenizer(policy)
        self.chat = None if chat_template(policy) is None else self._open_chat()
        self.address, self.start_s = "", scale_seconds(START_S)
        self._keys: dict[str, _Open] = {}
        self._names: dict[str, _Open] = {}
        self._turns: dict[str, asyncio.Future[Completion]] = {}
        # One thread: the process that renders chats answers one request after the other.
        self._encoding = ThreadPoolExecutor(1, "encoding")

    async def start(self) -> web.AppRunner:
        """Open the endpoint on a free port of this machine."""
        application = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._answer_errors])
        application.router.add_post("/v1/chat/completions", partial(self._complete, ChatCall))
        application.router.add_post("/v1/completions", partial(self._complete, TextCall))
        application.router.add_get("/v1/models", self._list_models)
        application.router.add_post("/v1/reward", self._take_reward)
        # A handler is cancelled when its client disconnects; its turn is then not recorded.
        runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        self.address = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        return runner

    def begin(self, session: AgentSession) -> None:
        """Open a rollout, and let its agent start."""
        key = f"sk-{secrets.token_urlsafe(32)}"
        self._keys[key] = self._names[session.name] = _Open(session, key, time.monotonic())
        variables = {"OPENAI_BASE_URL": self.address, "OPENAI_API_BASE": self.address, "OPENAI_API_KEY": key}
        variables["OPENAI_MODEL"] = self.spec.model_names[0]
        for name in ("NO_PROXY", "no_proxy"):  # a proxy of the machine cannot reach this process
            variables[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1"]))
        self.send("start", session.name, variables)

    def take_turn(self, name: str, completion: Completion) -> None:
        """Deliver a turn that the engine has finished."""
        waiting, entry = self._turns.pop(name), self._names[name.rpartition(".")[0]]
        entry.turns.discard(name)
        if not waiting.done():
            waiting.set_result(completion)
        self._finish(entry)

    def end_agent(self, name: str, outcome: Outcome) -> None:
        """Record that an agent has ended; its rollout ends once the engine has finished its turns."""
        entry = self._names.get(name)
        if entry is None or entry.outcome is not None:
            return
        entry.outcome = outcome
        del self._keys[entry.key]
        for handler in entry.handlers:
            handler.cancel()
        self._finish(entry)

    async def watch(self) -> None:
        """End agents that neither wait for the policy nor call it within rollout.environment.timeout_s."""
        while True:
            await asyncio.sleep(WATCH_S)
            now, timeout_s = time.monotonic(), self.spec.timeout_s
            for entry in [entry for entry in self._keys.values() if not entry.num_waiting]:
                # Many agents may start and import their packages at once, so time until the first turn is added.
                limit_s = timeout_s if entry.session.num_turns else timeout_s + self.start_s
                if now - entry.active_s > limit_s:
                    why = f"timeout: the agent neither called the policy nor ended within {timeout_s:g} s"
                    self._end(entry, why)

    def _end(self, entry: _Open, why: str) -> None:
        """End an agent that does not end by itself."""
        self.send("kill", entry.session.name, None)
        self.end_agent(entry.session.name, Outcome(failure=why))

    def close(self) -> None:
        self._encoding.shutdown(wait=False, cancel_futures=True)
        if self.chat is not None:
            self.chat.close()

    def _finish(self, entry: _Open) -> None:
        """Report an ended rollout, once none of its turns is left in the engine."""
        if entry.outcome is not None and not entry.turns and entry.session.name in self._names:
            del self._names[entry.session.name]
            self.send("finished", entry.session.name, asdict(entry.session.make_completion(entry.outcome)))

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Find the rollout of a request, and answer every error in OpenAI's format."""
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        entry, task = self._keys.get(key.strip()) if scheme.lower() == "bearer" else None, asyncio.current_task()
        try:
            if entry is None or task is None:
                why = "this API key belongs to no running rollout: send the agent's OPENAI_API_KEY as a bearer token"
                raise ApiError(401, why, "invalid_api_key")
            if len(entry.handlers) >= MAX_CALLS_AT_ONCE:
                raise ApiError(429, f"an agent has at most {MAX_CALLS_AT_ONCE} requests at once", "rate_limit_exceeded")
            entry.handlers.add(task)
            request[ENTRY] = entry
            try:
                return await handler(request)
            finally:
                entry.handlers.discard(task)
        except ApiError as error:
            if entry is not None:
                entry.num_refusals += 1
                if entry.num_refusals > MAX_REFUSALS:
                    self._end(entry, f"the agent went on after {MAX_REFUSALS} refused calls, such as: {error}")
            return web.json_response(error.body, status=error.status)
        except web.HTTPException as error:
            why = "the body has more than 8 MiB" if error.status == 413 else f"{request.path}: {error.reason}"
            return web.json_response(ApiError(error.status, why).body, status=error.status)
        except ConnectionError:
            raise  # the client has disconnected
        except Exception as error:
            traceback.print_exc()
            return web.json_response(ApiError(500, f"the gateway failed: {error!r}"[:500]).body, status=500)

    async def _list_models(self, request: web.Request) -> web.StreamResponse:
        fixed = {"object": "model", "created": 0, "owned_by": "rlplan", "max_model_len": self.max_len}
        return web.json_response({"object": "list", "data": [{"id": name, **fixed} for name in self.spec.model_names]})

    async def _take_reward(self, request: web.Request) -> web.StreamResponse:
        reward = parse_body(Reward, await request.read()).reward
        request[ENTRY].session.reward = reward
        return web.json_response({"reward": reward})

    async def _complete(self, kind: type[Call], request: web.Request) -> web.StreamResponse:
        """Let the policy answer a call. kind: the endpoint's."""
        entry = request[ENTRY]
        call, session = parse_body(kind, await request.read()), entry.session
        if call.model not in self.spec.model_names:
            names = ", ".join(self.spec.model_names)
            why = f"there is no model '{call.model[:100]}'; use one of: {names} (rollout.environment.model_names)"
            raise ApiError(404, why, "model_not_found", "model")
        turn, entry.num_waiting = session.begin_turn(call), entry.num_waiting + 1
        try:
            asked = await self._encode(session, turn, call)
            completion = await self._generate(entry, asked)
            if request.transport is None or request.transport.is_closing():
                raise ConnectionResetError
            message = session.finish_turn(turn, completion, call, self.words)
        finally:
            turn.branch.is_busy, entry.num_waiting, entry.active_s = False, entry.num_waiting - 1, time.monotonic()
        reply = Reply(f"cmpl-{asked.id}", call, message, completion, len(asked.prompt))
        if not call.stream:
            return web.json_response(reply.write())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for event in reply.write_events():
            await response.write(event)
        await response.write_eof()
        return response

    async def _encode(self, session: AgentSession, turn: Turn, call: Call) -> RolloutRequest:
        """The engine's request for a turn, made in another thread. Raises: ApiError."""

        def encode() -> RolloutRequest:
            if self.chat is not None and not self.chat.text.is_usable:
                self.chat.close()
                self.chat = self._open_chat()
            return session.make_request(turn, call, self.words, self.chat)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._encoding, encode)
        except SpecError as error:
            raise ApiError(400, str(error)[:2000], "invalid_value", "messages") from None

    def _open_chat(self) -> ChatTurns:
        return ChatTurns(self.policy, self.words, has_tools=True)

    async def _generate(self, entry: _Open, request: RolloutRequest) -> Completion:
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._turns[request.id] = future
        entry.turns.add(request.id)
        self.send("turn", request.id, asdict(request))
        return await future


async def serve(setting: dict[str, Any]) -> None:
    """Answer agents until the driver closes its end."""
    channel, loop, reader = AnswerChannel(), asyncio.get_running_loop(), asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), channel.requests)
    out, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(channel.answers, "wb", buffering=0))
    events: list[dict[str, Any]] = []

    def send(kind: str, name: str, content: Any) -> None:
        """Write the events of one turn of the loop as one line. The transport buffers, so that nothing blocks."""
        if not events:
            loop.call_soon(flush)
        events.append({"kind": kind, "name": name, "content": content})

    def flush() -> None:
        out.write(json.dumps({"lines": events}).encode() + b"\n")
        events.clear()

    spec = EnvironmentSpec.model_validate(setting["spec"])
    gateway = Gateway(spec, Path(setting["policy"]), setting["max_len"], send)
    runner, watching = await gateway.start(), asyncio.create_task(gateway.watch())
    pids = [os.getpid()] + ([] if gateway.chat is None else [gateway.chat.text.pid])
    out.write(json.dumps({"lines": pids}).encode() + b"\n")
    try:
        while line := await reader.readline():
            message = json.loads(line)
            for request, sample in message.get("begin", ()):
                gateway.begin(AgentSession(_REQUEST.validate_python(request), sample, spec, gateway.max_len))
            for name, outcome in message.get("ended", ()):
                gateway.end_agent(name, Outcome(**outcome))
            for name, completion in message.get("turns", ()):
                gateway.take_turn(name, _COMPLETION.validate_python(completion))
    finally:
        watching.cancel()
        gateway.close()
        await runner.cleanup()


if __name__ == "__main__":
    die_with_parent()
    raise_open_files()
    asyncio.run(serve(json.loads(sys.argv[1])))
