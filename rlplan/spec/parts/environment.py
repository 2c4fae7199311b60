"""The environment: what answers the policy between its turns, where a rollout has several: an environment of the
job's own, tools that the policy calls, or both.

In: the `rollout.environment` part of a job. Out: frozen values. Left out: how they are called (runtime/environments/),
and what they are: the job's own Python.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator

from rlplan.spec.base import Spec
from rlplan.spec.parts.rewards import pattern_with_group

PATH_PATTERN = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_][A-Za-z0-9_]*)")


def _names_something(path: str) -> str:
    if not PATH_PATTERN.fullmatch(path):
        raise ValueError(f"'{path}' names no function; the form is file.py:function")
    return path


PythonPath = Annotated[str, AfterValidator(_names_something)]
"""FILE.py:NAME."""


class EnvironmentSpec(Spec):
    """What answers the policy. Without a path and without tools a rollout is one turn."""

    path: PythonPath | None = None
    """FILE.py:NAME of a function that sees all turns, or of a class with one object for each rollout."""
    tools: tuple[PythonPath, ...] = Field(default=(), max_length=128)
    """FILE.py:NAME of each function that the policy may call."""
    call_pattern: str = r"<tool_call>((?:(?!</tool_call>).)*)"
    """Finds calls in a turn: its first group is JSON, an object with `name` and `arguments`, or a list of such."""
    max_turns: int = Field(default=4, ge=1, le=1000)
    """Of the policy, in one rollout."""
    max_observation_len: int = Field(default=64, ge=1)
    """Tokens of an answer; a longer one loses its end."""
    at_context_limit: Literal["end", "mask"] = "end"
    """What becomes of a rollout whose next turn does not fit: it ends as it is, or nobody learns from it."""
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

    @property
    def is_given(self) -> bool:
        """Whether anything answers."""
        return self.path is not None or bool(self.tools)

    @property
    def files(self) -> tuple[tuple[str, str], ...]:
        """(key, file) of all that is named."""
        named = [("path", self.path)] * (self.path is not None) + [("tools", tool) for tool in self.tools]
        return tuple((f"rollout.environment.{key}", str(path).rpartition(":")[0]) for key, path in named)

    def with_paths(self, change: Callable[[str], str]) -> Self:
        """The same with every file's path passed through `change`."""

        def moved(path: str) -> str:
            file, _, name = path.rpartition(":")
            return f"{change(file)}:{name}"

        path = None if self.path is None else moved(self.path)
        return self.model_copy(update={"path": path, "tools": tuple(map(moved, self.tools))})

    @property
    def file(self) -> Path:
        """The file of the environment. Only with a path."""
        assert self.path is not None, "there is an environment"
        return Path(self.path.rpartition(":")[0])
