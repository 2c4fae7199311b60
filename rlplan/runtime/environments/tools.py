"""Tools: Python functions that the policy calls, in the process where they run.

A model writes the arguments, so they are validated strictly against the annotations before a call.

In: functions with annotations and docstrings. Out: schemas made by transformers, and results of calls as text.
"""

import inspect
import json
import traceback
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, get_type_hints

from rlplan.runtime.processes.awaiting import run_awaitable

MAX_RESULT = 1 << 16
"""Most characters of a call's result."""


class UnusableError(Exception):
    """A job's file cannot be used. parts: further parts of the error message (key, where, rule, way_out)."""

    def __init__(self, what: str, **parts: str) -> None:
        super().__init__(what)
        self.parts = parts


class ToolError(UnusableError):
    """A function cannot be used as a tool."""

    def __init__(self, what: str, where: str) -> None:
        rule = "a plain function; each argument has a type annotation and a line under `Args:` in the docstring"
        way_out = "example: def add(a: int) with a docstring that has a summary, `Args:` and `a: First number.`"
        super().__init__(what, key="tools", where=where, rule=rule, way_out=way_out)


class Tool:
    """One function. where: FILE.py:NAME, for messages. Raises: ToolError for arguments without types."""

    def __init__(self, function: Callable[..., Any], where: str) -> None:
        self.function, self.where = function, where
        self.name = where.rpartition(":")[2]
        self.parameters = inspect.signature(function).parameters
        for parameter in self.parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise ToolError(f"{self.name} takes {parameter}, which a model cannot pass by name", where)
            if parameter.annotation is parameter.empty:
                raise ToolError(f"argument {parameter.name} of {self.name} has no type annotation", where)

    @cached_property
    def adapters(self) -> dict[str, Any]:
        """Validators by argument name."""
        from pydantic import TypeAdapter

        hints = get_type_hints(self.function)
        return {name: TypeAdapter(hints[name]) for name in self.parameters}

    def call(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Call the function. Returns: its result as text, or an error with its outcome."""
        try:
            values = self._validate(arguments)
        except ValueError as error:
            return {"error": f"wrong arguments of {self.name}: {str(error)[:300]}", "kind": "wrong_arguments"}
        try:
            result = run_awaitable(self.function(**values))
        except BaseException as error:  # also SystemExit, because only the run may end this process
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {str(error)[:300]}", "kind": "raised"}
        return self._convert_result(result)

    def _validate(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Validate arguments. Raises: ValueError with the fault."""
        if unknown := set(arguments) - set(self.parameters):
            raise ValueError(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(self.parameters)}")
        required = {name for name, parameter in self.parameters.items() if parameter.default is parameter.empty}
        if missing := required - set(arguments):
            raise ValueError(f"missing: {', '.join(sorted(missing))}")
        values = {}
        for name, value in arguments.items():
            try:
                # Validated as JSON: strict validation of Python values rejects lists for tuples and texts for dates.
                values[name] = self.adapters[name].validate_json(json.dumps(value), strict=True)
            except ValueError as error:
                why = error.errors()[0]["msg"] if hasattr(error, "errors") else str(error)
                raise ValueError(f"{name}: {why}") from None
        return values

    def _convert_result(self, result: Any) -> dict[str, Any]:
        try:
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            return {"error": f"{self.name} returned neither text nor JSON: {error}", "kind": "wrong_result"}
        if len(text) > MAX_RESULT:
            why = f"{self.name} returned {len(text)} characters, the limit is {MAX_RESULT}"
            return {"error": why, "kind": "too_long"}
        return {"said": text}


def describe_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Schemas of tools in the format of chat templates. Raises: ToolError when one cannot be derived."""
    if not tools:
        return []
    from transformers.utils.chat_template_utils import get_json_schema

    schemas = []
    for tool in tools:
        try:
            schemas.append(get_json_schema(tool.function))
            assert tool.adapters is not None, "its types can be read"
        except Exception as error:
            raise ToolError(f"{tool.name} cannot be described: {str(error)[:300]}", tool.where) from None
    return schemas
