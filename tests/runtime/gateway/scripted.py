"""Agents, gateways and what generates for them, without engines: every turn says the same scripted words."""

import asyncio
import atexit
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openai import AsyncOpenAI
from pydantic import TypeAdapter

from rlplan.runtime.data.text_tokens import TextTokenizer
from rlplan.runtime.environments.chat import ChatTurns
from rlplan.runtime.gateway.agent_rollouts import AgentRollouts
from rlplan.runtime.gateway.agent_session import AgentSession, Outcome
from rlplan.runtime.gateway.gateway import Gateway
from rlplan.runtime.rollout.experience import Completion, RolloutRequest, WeightSpan
from rlplan.spec.parts.environment import EnvironmentSpec
from tests.runtime.environments.chat_policy import END, chat_prompt, ids, write_policy

CONTEXT = 64
SAID = ids("a", "b", "<end>")
"""Two tokens whose text, `ab`, is one token when it is encoded."""


def make_request(place: int = 0, num_samples: int = 1, max_tokens: int = 40) -> RolloutRequest:
    return RolloutRequest(f"generate/1/{place}", (1,), num_samples, 1.0, 7, max_tokens)


@contextmanager
def open_rollouts(folder: Path, engines: Any, agent: Any, **spec: Any) -> Iterator[AgentRollouts]:
    """Rollouts of an agent: the code of a function `run`, or a command."""
    folder.mkdir(exist_ok=True)
    if isinstance(agent, str):
        (folder / "agent.py").write_text(agent)
        agent = f"{folder / 'agent.py'}:run"
    job: Any = SimpleNamespace(
        rollout=SimpleNamespace(environment=EnvironmentSpec(agent=agent, **spec)),
        limits=SimpleNamespace(action_timeout_s=300.0),
        policy=SimpleNamespace(path=str(write_policy(folder / "policy"))),
        workload=SimpleNamespace(max_seq_len=CONTEXT),
    )
    rollouts = AgentRollouts(engines, job, lambda name: chat_prompt(), folder / "log.txt")
    try:
        yield rollouts
    finally:
        rollouts.close()


class _Gateway(Gateway):
    """A gateway that leaves the process which renders chats to the next test: it takes a second to start."""

    def _open_chat(self) -> ChatTurns:
        return _open_shared_chat()


@cache
def _open_shared_chat() -> ChatTurns:
    folder = Path(tempfile.mkdtemp())
    chat = ChatTurns(write_policy(folder), TextTokenizer(folder), has_tools=True)
    atexit.register(shutil.rmtree, folder)
    atexit.register(chat.close)
    return chat


class LiveGateway:
    """A gateway in this process. say: tokens of a turn, by its request. finished: completions by rollout."""

    def __init__(self, policy: Path, say: Callable[[RolloutRequest], tuple[int, ...]], **spec: Any) -> None:
        self.say, self.variables = say, dict[str, dict[str, str]]()
        self.clients: list[AsyncOpenAI] = []
        self.asked: list[RolloutRequest] = []
        self.finished: dict[str, Completion] = {}
        self.killed: list[str] = []
        self.version = 0
        self.is_held = False
        """Whether turns wait until `release`."""
        self._held: list[RolloutRequest] = []
        self.gateway = _Gateway(EnvironmentSpec(agent=("true",), **spec), policy, CONTEXT, self._take)

    def begin(self, request: RolloutRequest, sample: int = 0) -> AsyncOpenAI:
        """Begin a rollout; a client for its agent."""
        client = AsyncOpenAI(base_url=self.gateway.address, api_key=self.open(request, sample), max_retries=0)
        self.clients.append(client)
        return client

    def open(self, request: RolloutRequest, sample: int = 0) -> str:
        """Begin a rollout; the key of its agent."""
        session = AgentSession(request, sample, self.gateway.spec, CONTEXT)
        self.gateway.begin(session)
        return self.variables[session.name]["OPENAI_API_KEY"]

    def end(self, name: str, **outcome: Any) -> None:
        self.gateway.end_agent(name, Outcome(**outcome))

    def release(self) -> None:
        self.is_held = False
        for request in self._held:
            self._answer(request)
        self._held = []

    def _take(self, kind: str, name: str, content: Any) -> None:
        if kind == "start":
            self.variables[name] = content
        elif kind == "finished":
            self.finished[name] = TypeAdapter(Completion).validate_python(content)
        elif kind == "kill":
            self.killed.append(name)
        else:
            request = TypeAdapter(RolloutRequest).validate_python(content)
            self.asked.append(request)
            (self._held.append if self.is_held else self._answer)(request)

    def _answer(self, request: RolloutRequest) -> None:
        tokens = self.say(request)[: request.max_tokens]
        spans = (WeightSpan(self.version, 0, len(tokens)),)
        reason = "stop" if tokens[-1] == END else "length"
        completion = Completion(tokens, tuple(-1.0 - i for i in range(len(tokens))), reason, spans)
        asyncio.get_running_loop().call_soon(self.gateway.take_turn, request.id, completion)


@asynccontextmanager
async def open_gateway(
    folder: Path, say: Callable[[RolloutRequest], tuple[int, ...]] = lambda request: SAID, **spec: Any
) -> AsyncIterator[LiveGateway]:
    live = LiveGateway(write_policy(folder / "policy"), say, **spec)
    runner, watching = await live.gateway.start(), asyncio.create_task(live.gateway.watch())
    try:
        yield live
    finally:
        for client in live.clients:
            await client.close()
        watching.cancel()
        live.gateway.chat = None
        live.gateway.close()
        await runner.cleanup()


def list_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
