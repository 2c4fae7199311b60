"""The environment: what answers the policy between its turns, where a rollout has several.

In: the `rollout.environment` part of a job. Out: frozen values. Left out: how the function is called
(runtime/environments/), and what it is: the job's own Python.
"""

import re
from pathlib import Path

from pydantic import Field, field_validator

from rlplan.spec.base import Spec

PATH_PATTERN = re.compile(r"(?P<file>.+\.py):(?P<function>[A-Za-z_][A-Za-z0-9_]*)")


class EnvironmentSpec(Spec):
    """A function of the user's that sees the turns so far and answers. Without a path a rollout is one turn."""

    path: str | None = None
    """`file.py:function`."""
    max_turns: int = Field(default=4, ge=1, le=1000)
    """Of the policy, in one rollout."""
    max_observation_len: int = Field(default=64, ge=1)
    """Tokens of an answer; a longer one loses its end."""
    timeout_s: float = Field(default=10.0, gt=0, le=3600)
    """For one answer."""
    num_workers: int = Field(default=2, ge=1, le=256)
    """Processes that answer."""
    weight: float = 1.0
    """Of its reward."""

    @field_validator("path")
    @classmethod
    def _names_a_function(cls, path: str | None) -> str | None:
        if path is not None and not PATH_PATTERN.fullmatch(path):
            raise ValueError(f"'{path}' names no function; the form is file.py:function")
        return path

    @property
    def file(self) -> Path:
        """The file that holds the function. Only with a path."""
        return Path(self._parts["file"])

    @property
    def function(self) -> str:
        """The function's name. Only with a path."""
        return self._parts["function"]

    @property
    def _parts(self) -> dict[str, str]:
        match = PATH_PATTERN.fullmatch(self.path or "")
        assert match is not None, "there is an environment"
        return match.groupdict()
