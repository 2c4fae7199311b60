"""Tool calls in a turn of the policy, as JSON written by a model, and the outcomes of calls.

In: the text of a turn. Out: calls, each with its fault if it is invalid. Left out: running them (tools.py).
"""

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from rlplan.runtime.processes.line_process import GarbledError, check_depth
from rlplan.runtime.rewards.verifiers import PATTERN_TIMEOUT_S

MAX_CALLS = 32
"""Most calls of one turn; all further calls get one common error."""
OK, NOT_JSON, UNKNOWN, WRONG, TOO_MANY = "ok", "not_json", "unknown_tool", "wrong_arguments", "too_many"
RAISED, WRONG_RESULT, TOO_LONG, TIMED_OUT, DIED = "raised", "wrong_result", "too_long", "timed_out", "died"
BY_THE_POLICY = (NOT_JSON, UNKNOWN, WRONG, TOO_MANY)
BY_THE_TOOL = (RAISED, WRONG_RESULT, TOO_LONG, TIMED_OUT, DIED)
OUTCOMES = (OK, *BY_THE_POLICY, *BY_THE_TOOL)
"""Outcomes of a call: success, a fault of the policy, or a fault of the tool."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One valid or invalid call."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    fault: str = ""
    """Outcome of an invalid call; empty for a valid one."""

    why: str = ""
    """The fault in words, which the policy reads."""


def read_calls(text: str, pattern: str, names: Collection[str]) -> list[ToolCall]:
    """The calls in a turn, in order. names: names of the available tools."""
    return split_calls(text, pattern, names)[1]


def split_calls(text: str, pattern: str, names: Collection[str]) -> tuple[str, list[ToolCall]]:
    """(text before the first call, the calls in a turn in order). names: names of the available tools.

    >>> turn = 'So: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "ad'
    >>> before, calls = split_calls(turn, r"<tool_call>(.*?)(?:</tool_call>|$)", ["add"])
    >>> before, [(call.name, call.fault) for call in calls]
    ('So: ', [('add', ''), ('', 'not_json')])
    """
    import regex  # a dry run does not need it

    try:
        matches = [*regex.finditer(pattern, text, flags=regex.DOTALL, timeout=PATTERN_TIMEOUT_S, concurrent=True)]
    except TimeoutError:
        return text, [ToolCall("", fault=NOT_JSON, why="rollout.environment.call_pattern took too long on this turn")]
    calls = [call for match in matches for call in _parse_calls(match.group(1) or "", names)]
    if beyond := len(calls[MAX_CALLS:]):
        why = f"{beyond} calls after the first {MAX_CALLS} of the turn were ignored"
        calls[MAX_CALLS:] = [ToolCall("", fault=TOO_MANY, why=why)]
    return text[: matches[0].start()] if matches else text, calls


def _parse_calls(text: str, names: Collection[str]) -> Iterator[ToolCall]:
    try:
        parsed = json.loads(text)
        check_depth(parsed)
    except (ValueError, RecursionError, GarbledError) as error:
        yield ToolCall("", fault=NOT_JSON, why=f"the call is not JSON: {str(error)[:200]}")
        return
    if parsed == []:
        yield ToolCall("", fault=NOT_JSON, why="the list of calls is empty")
    for call in parsed if isinstance(parsed, list) else [parsed]:
        yield _parse_call(call, names)


def _parse_call(call: Any, names: Collection[str]) -> ToolCall:
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str):
        return ToolCall("", fault=NOT_JSON, why="a call must be an object with name and arguments")
    arguments = call.get("arguments", call.get("parameters", {}))
    if name not in names:
        why = f"there is no tool {name[:80]}; available tools: {', '.join(sorted(names))}"
        return ToolCall(name, arguments if isinstance(arguments, dict) else {}, fault=UNKNOWN, why=why)
    if not isinstance(arguments, dict):
        return ToolCall(name, fault=WRONG, why="arguments must be an object")
    return ToolCall(name, arguments)
