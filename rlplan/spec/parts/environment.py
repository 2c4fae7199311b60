"""The environment: what answers the policy between its turns, where a rollout has several: an environment of the
job's own, tools that the policy calls, or both.

In: the `rollout.environment` part of a job. Out: frozen values. Left out: how they are called (runtime/environments/),
and what they are: the job's own Python, or servers.
"""

import ipaddress
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator, model_validator

from rlplan.spec.base import Spec
from rlplan.spec.parts.rewards import pattern_with_group
from rlplan.vocabulary import TOKEN_VARIABLE

PATH_PATTERN = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_][A-Za-z0-9_]*)")


def _names_something(path: str) -> str:
    if not PATH_PATTERN.fullmatch(path):
        raise ValueError(f"'{path}' names no function; the form is file.py:function")
    return path


def is_loopback(host: str) -> bool:
    """Whether a host is this one, by its name alone.

    >>> is_loopback("localhost"), is_loopback("127.0.0.2"), is_loopback("::1"), is_loopback("example.org")
    (True, True, True, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_safe(address: str) -> str:
    """No text can be read on its way, and no secret stands in it: addresses are written into plans."""
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        raise ValueError(f"'{address}' is no address") from None
    if not host or not (parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host))):
        raise ValueError(f"'{address}' is neither https://HOST… nor http:// on this machine (127.0.0.1, localhost)")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(
            f"an address has no user, password, query or fragment: a token is given in {TOKEN_VARIABLE}, not in files"
        )
    return address


def _is_server(place: str) -> str:
    return place if place.endswith(".py") and "://" not in place else _is_safe(place)


Address = Annotated[str, Field(max_length=500), AfterValidator(_is_safe)]
"""https://…, or http:// on this machine."""
McpPlace = Annotated[str, Field(max_length=500), AfterValidator(_is_server)]
"""The Python file of a server over stdio, or its address."""
PythonPath = Annotated[str, AfterValidator(_names_something)]
"""FILE.py:NAME."""


class EnvironmentSpec(Spec):
    """What answers the policy. Without a path and without tools a rollout is one turn."""

    path: PythonPath | None = None
    """FILE.py:NAME of a function that sees all turns, or of a class with one object for each rollout."""
    url: Address | None = None
    """Of an environment behind HTTP, in place of a path."""
    tools: tuple[PythonPath, ...] = Field(default=(), max_length=128)
    """FILE.py:NAME of each function that the policy may call."""
    mcp: tuple[McpPlace, ...] = Field(default=(), max_length=16)
    """MCP servers whose tools the policy may call."""
    call_pattern: str = r"<tool_call>((?:(?!</tool_call>).)*)"
    """Finds calls in a turn: its first group is JSON, an object with `name` and `arguments`, or a list of such."""
    max_turns: int = Field(default=4, ge=1, le=1000)
    """Of the policy, in one rollout."""
    max_observation_len: int = Field(default=64, ge=1)
    """Tokens of an answer; a longer one loses its end."""
    at_context_limit: Literal["end", "mask"] = "end"
    """What becomes of a rollout whose next turn does not fit: it ends as it is, or is masked from the loss."""
    timeout_s: float = Field(default=10.0, gt=0, le=3600)
    """For one answer, or one call of a tool."""
    num_workers: int = Field(default=2, ge=1, le=256)
    """Processes that answer."""
    weight: float = 1.0
    """Of its reward."""

    _pattern_has_group = field_validator("call_pattern")(pattern_with_group)

    @field_validator("tools")
    @classmethod
    def _names_differ(cls, tools: tuple[str, ...]) -> tuple[str, ...]:
        names = [tool.rpartition(":")[2] for tool in tools]
        if len(set(names)) < len(names):
            raise ValueError(f"each tool has a name of its own, these are {', '.join(names)}")
        return tools

    @model_validator(mode="after")
    def _is_one_environment(self) -> Self:
        if self.path is not None and self.url is not None:
            raise ValueError("path and url each name an environment, and a rollout has one")
        return self

    @property
    def is_given(self) -> bool:
        """Whether anything answers."""
        return self.has_environment or self.has_tools

    @property
    def has_environment(self) -> bool:
        """Whether something beside tools answers."""
        return self.path is not None or self.url is not None

    @property
    def has_tools(self) -> bool:
        """Whether functions or servers are named whose tools the policy calls; an environment may have some, too."""
        return bool(self.tools or self.mcp)

    @property
    def is_remote(self) -> bool:
        """Whether a worker itself waits for a server."""
        return self.url is not None or bool(self.mcp)

    @property
    def files(self) -> tuple[tuple[str, str], ...]:
        """(key, file) of all that is named."""
        named = [("path", self.path)] * (self.path is not None) + [("tools", tool) for tool in self.tools]
        found = [(key, str(path).rpartition(":")[0]) for key, path in named]
        found += [("mcp", place) for place in self.mcp if "://" not in place]
        return tuple((f"rollout.environment.{key}", file) for key, file in found)

    def with_paths(self, change: Callable[[str], str]) -> Self:
        """The same with every file's path passed through `change`."""

        def moved(path: str) -> str:
            file, _, name = path.rpartition(":")
            return f"{change(file)}:{name}"

        path = None if self.path is None else moved(self.path)
        servers = tuple(place if "://" in place else change(place) for place in self.mcp)
        return self.model_copy(update={"path": path, "tools": tuple(map(moved, self.tools)), "mcp": servers})

    @property
    def file(self) -> Path:
        """The file of the environment. Only with a path."""
        assert self.path is not None, "there is an environment"
        return Path(self.path.rpartition(":")[0])
