"""The environment or tools that answer the policy between the turns of a multi-turn rollout.

In: the `rollout.environment` part of a job. Out: frozen values. Left out: how they are called (runtime/environments/),
and their code: the job's own Python, or servers.
"""

import ipaddress
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator, model_validator

from rlplan.spec.base import Spec
from rlplan.spec.parts.rewards import check_group
from rlplan.vocabulary import TOKEN_VARIABLE

PATH_PATTERN = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_][A-Za-z0-9_]*)")


def _names_something(path: str) -> str:
    if not PATH_PATTERN.fullmatch(path):
        raise ValueError(f"'{path}' does not name a function as file.py:function")
    return path


def is_loopback(host: str) -> bool:
    """Whether a host name is a loopback name or address.

    >>> is_loopback("localhost"), is_loopback("127.0.0.2"), is_loopback("::1"), is_loopback("example.org")
    (True, True, True, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_safe(address: str) -> str:
    """An address that cannot be read in transit and contains no secret: addresses are written into plans."""
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        raise ValueError(f"'{address}' is not an address") from None
    if not host or not (parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host))):
        raise ValueError(f"'{address}' is neither https://HOST… nor http:// on this machine (127.0.0.1, localhost)")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(
            f"an address has no user, password, query or fragment: a token goes into the environment variable "
            f"{TOKEN_VARIABLE}"
        )
    return address


def _is_script(part: str) -> bool:
    """Whether a part of an agent's command is a Python file, whose path is relative to the job file."""
    return len(part) > 3 and part.endswith(".py") and not part.startswith("-")


def _is_server(place: str) -> str:
    return place if place.endswith(".py") and "://" not in place else _is_safe(place)


Address = Annotated[str, Field(max_length=500), AfterValidator(_is_safe)]
"""HTTPS address, or an HTTP address on this machine."""
McpPlace = Annotated[str, Field(max_length=500), AfterValidator(_is_server)]
"""Python file of an MCP server over stdio, or the server's address."""
PythonPath = Annotated[str, AfterValidator(_names_something)]
"""Function or class as FILE.py:NAME."""


class EnvironmentSpec(Spec):
    """The environment and tools, or the agent, of a rollout. Without any, a rollout has one turn."""

    path: PythonPath | None = None
    """FILE.py:NAME of a function that receives all turns, or of a class with one object per rollout."""
    url: Address | None = None
    """Address of an environment behind HTTP, instead of a path."""
    tools: tuple[PythonPath, ...] = Field(default=(), max_length=128)
    """FILE.py:NAME of each function that the policy may call."""
    mcp: tuple[McpPlace, ...] = Field(default=(), max_length=16)
    """MCP servers whose tools the policy may call."""
    agent: PythonPath | Annotated[tuple[str, ...], Field(min_length=1, max_length=64)] | None = None
    """Program that calls the policy through an OpenAI endpoint: FILE.py:NAME of a function, or a list with a command
    and its arguments."""
    num_agents: int = Field(default=64, ge=1, le=4096)
    """Agents that run at once; the rest queue."""
    model_names: tuple[str, ...] = Field(default=("policy",), min_length=1, max_length=32)
    """Model names by which agents may call the policy. Agents find the first one in OPENAI_MODEL."""
    call_pattern: str = r"<tool_call>((?:(?!</tool_call>).)*)"
    """Regular expression of tool calls in a turn. Its first group is JSON: an object with `name` and `arguments`, or a
    list of such objects."""
    max_turns: int = Field(default=4, ge=1, le=1000)
    """Limit on the policy's turns in one rollout."""
    max_observation_len: int = Field(default=64, ge=1)
    """Limit on the tokens of an answer; longer ones are truncated at their end."""
    at_context_limit: Literal["end", "mask"] = "end"
    """Handling of rollouts whose next turn exceeds the context: they end there, or are masked from the loss."""
    timeout_s: float = Field(default=10.0, gt=0, le=3600)
    """Timeout in seconds of one answer or one tool call."""
    num_workers: int = Field(default=2, ge=1, le=256)
    """Processes that run environments and tools."""
    weight: float = 1.0
    """Weight of the environment's reward."""

    _pattern_has_group = field_validator("call_pattern")(check_group)

    @field_validator("tools")
    @classmethod
    def _names_differ(cls, tools: tuple[str, ...]) -> tuple[str, ...]:
        names = [tool.rpartition(":")[2] for tool in tools]
        if len(set(names)) < len(names):
            raise ValueError(f"tool names are unique, these are {', '.join(names)}")
        return tools

    @model_validator(mode="after")
    def _is_one_environment(self) -> Self:
        if self.path is not None and self.url is not None:
            raise ValueError("path and url each name an environment, and a rollout has one")
        if self.agent is not None and (self.path or self.url or self.has_tools):
            raise ValueError("an agent has tools and an environment of its own: remove path, url, tools and mcp")
        return self

    @property
    def is_given(self) -> bool:
        """Whether an environment or tools answer the policy."""
        return self.has_environment or self.has_tools

    @property
    def has_environment(self) -> bool:
        """Whether there is an environment, with or without tools, or an agent, which may report rewards too."""
        return self.path is not None or self.url is not None or self.agent is not None

    @property
    def has_tools(self) -> bool:
        """Whether the job names functions or MCP servers as tools; an environment may offer its own."""
        return bool(self.tools or self.mcp)

    @property
    def command(self) -> tuple[str, ...]:
        """Command of an agent; empty if the agent is a function, or there is none."""
        return self.agent if isinstance(self.agent, tuple) else ()

    @property
    def is_remote(self) -> bool:
        """Whether a worker waits for servers."""
        return self.url is not None or bool(self.mcp)

    @property
    def files(self) -> tuple[tuple[str, str], ...]:
        """(key, file) of each named file."""
        named = [("path", self.path)] * (self.path is not None) + [("tools", tool) for tool in self.tools]
        if isinstance(self.agent, str):
            named.append(("agent", self.agent))
        files = [(key, str(path).rpartition(":")[0]) for key, path in named]
        files += [("agent", part) for part in self.command if _is_script(part)]
        files += [("mcp", place) for place in self.mcp if "://" not in place]
        return tuple((f"rollout.environment.{key}", file) for key, file in files)

    def map_paths(self, change: Callable[[str], str]) -> Self:
        """A copy with every file's path passed through `change`."""

        def move(path: str) -> str:
            file, _, name = path.rpartition(":")
            return f"{change(file)}:{name}"

        path = None if self.path is None else move(self.path)
        servers = tuple(place if "://" in place else change(place) for place in self.mcp)
        agent = move(self.agent) if isinstance(self.agent, str) else self.agent
        if isinstance(agent, tuple):
            agent = tuple(change(part) if _is_script(part) else part for part in agent)
        moved = {"path": path, "tools": tuple(map(move, self.tools)), "mcp": servers, "agent": agent}
        return self.model_copy(update=moved)

    @property
    def file(self) -> Path:
        """The environment's file. Requires a path."""
        assert self.path is not None, "there is an environment"
        return Path(self.path.rpartition(":")[0])
