"""OpenAI's format: requests of agents, checked and normalized; answers and errors as the `openai` client reads them.

In: JSON of a request; the text and tool calls of a finished turn. Out: calls, answers, server-sent events, errors.
Left out: the meaning of a call (agent_session.py). Sampling settings such as `temperature` are ignored, because the
trainer needs log-probs of the job's own sampling. Settings that change the answer's form are refused.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from rlplan.runtime.environments.tool_calls import NOT_JSON, ToolCall
from rlplan.runtime.rollout.experience import Completion

TEXT = "text"
"""Role of a prompt that is a text or token ids."""
Message = dict[str, Any]
Body = TypeVar("Body", bound=BaseModel)
Name = Annotated[str, Field(min_length=1, max_length=200)]
StopText = Annotated[str, Field(max_length=256)]
One = Literal[1] | None


class ApiError(Exception):
    """A request that cannot be answered. The status decides whether OpenAI's clients try again: not after 4xx."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class _TextPart(BaseModel):
    text: str


class _Function(BaseModel, extra="allow"):
    """A function that the policy may call, or has called."""

    name: Name
    arguments: str = "{}"


class _Tool(BaseModel, extra="allow"):
    function: _Function
    id: str = ""


class _Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_TextPart] | None = None
    name: str | None = None
    tool_calls: list[_Tool] | None = None
    tool_call_id: str | None = None

    def normalize(self, names: dict[str, str]) -> Message:
        """The message for a chat template. names: names of the tools called so far, by the call's id."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        # `developer` is OpenAI's newer name of the role `system`, which chat templates do not know.
        message: Message = {"role": self.role.replace("developer", "system"), "content": text}
        if self.tool_calls:
            names |= {call.id: call.function.name for call in self.tool_calls}
            message["tool_calls"] = [
                write_call(call.function.name, _parse_arguments(call.function.arguments), call.id)
                for call in self.tool_calls
            ]
        if self.role == "tool":
            message["name"] = self.name or names.get(self.tool_call_id or "", "tool")
            message["tool_call_id"] = self.tool_call_id or ""
        return message


class Call(BaseModel):
    """A request to either endpoint. Unknown keys are ignored."""

    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    n: One = 1
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = None
    """Only `none` has an effect, because a forced call would not be sampled from the policy."""
    max_completion_tokens: int | None = Field(default=None, ge=1)

    def read_messages(self) -> list[Message]:
        """The normalized messages; a text is one message of role TEXT."""
        raise NotImplementedError

    def read_tools(self) -> list[dict[str, Any]]:
        """Schemas of the tools that the policy may call."""
        return []

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return tuple(text for text in stops if text)


class ChatCall(Call):
    """A request to /v1/chat/completions."""

    messages: list[_Message] = Field(min_length=1, max_length=100_000)
    tools: list[_Tool] | None = Field(default=None, max_length=1024)
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    logprobs: Literal[False] | None = None
    functions: None = None
    """OpenAI's older form of tools."""

    def read_messages(self) -> list[Message]:
        names: dict[str, str] = {}
        return [message.normalize(names) for message in self.messages]

    def read_tools(self) -> list[dict[str, Any]]:
        return [tool.model_dump(exclude_unset=True) for tool in self.tools or ()]


class TextCall(Call):
    """A request to /v1/completions. prompt: a text or token ids."""

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=1)] | list[Annotated[int, Field(ge=0)]]
    best_of: One = None
    echo: Literal[False] | None = None
    logprobs: Literal[0] | None = None

    def read_messages(self) -> list[Message]:
        is_listed = isinstance(self.prompt, list) and self.prompt and isinstance(self.prompt[0], str)
        return [{"role": TEXT, "content": self.prompt[0] if is_listed else self.prompt}]


class Reward(BaseModel):
    """A request to /v1/reward."""

    reward: float = Field(allow_inf_nan=False, strict=True)


def parse_body(kind: type[Body], text: bytes) -> Body:
    """A request of a kind. Raises: ApiError with the first fault and its place."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in fault["loc"])
        message = f"{place}: {fault['msg']}" if place else f"the body is no JSON object: {fault['msg']}"
        raise ApiError(400, message[:500], "invalid_value", place or None) from None


def write_call(name: str, arguments: Any, call_id: str) -> dict[str, Any]:
    """One tool call of a message, as chat templates take it: with its arguments as an object."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def make_message(text: str, calls: Sequence[ToolCall], turn: str) -> Message:
    """The message of a turn. Calls that are not JSON stay in its text. turn: makes the ids of calls unique."""
    called = [call for call in calls if call.fault != NOT_JSON and call.name]
    message: Message = {"role": "assistant", "content": text}
    if called:
        message["tool_calls"] = [
            write_call(call.name, call.arguments, f"call_{turn}_{place}") for place, call in enumerate(called)
        ]
    return message


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a call."""

    id: str
    call: Call
    message: Message
    completion: Completion
    num_prompt_tokens: int

    def write(self) -> dict[str, Any]:
        """The answer as one object."""
        name = "message" if self._is_chat else "text"
        return self._wrap([(self._write_message(), self._find_reason())], name, usage=self._count())

    def write_events(self) -> Iterator[bytes]:
        """The answer as server-sent events. All text is in one event, because engines report only finished turns."""
        message, name = self._write_message(), "delta" if self._is_chat else "text"
        for place, call in enumerate(message.get("tool_calls", ())):
            call["index"] = place
        events = [self._wrap([(message, None)], name), self._wrap([({}, self._find_reason())], name)]
        if (self.call.stream_options or {}).get("include_usage"):
            events.append(self._wrap([], name, usage=self._count()))
        for event in events:
            yield b"data: " + json.dumps(event).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    @property
    def _is_chat(self) -> bool:
        return isinstance(self.call, ChatCall)

    def _find_reason(self) -> str:
        if "tool_calls" in self.message:
            return "tool_calls"
        return "length" if self.completion.finish_reason == "length" else "stop"

    def _wrap(self, choices: Sequence[tuple[dict[str, Any], str | None]], name: str, **more: Any) -> dict[str, Any]:
        """One object with a choice for each (message, finish reason). name: key of the message, or of its text."""
        kind = {"message": "chat.completion", "delta": "chat.completion.chunk"}.get(name, "text_completion")
        fields = {"id": self.id, "object": kind, "created": int(time.time()), "model": self.call.model}
        written = [
            {name: message if self._is_chat else message.get("content") or "", "finish_reason": reason}
            for message, reason in choices
        ]
        return {**fields, "choices": [{"index": 0, "logprobs": None, **choice} for choice in written], **more}

    def _write_message(self) -> dict[str, Any]:
        calls = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in self.message.get("tool_calls", ())
        ]
        content = self.message["content"] or (None if calls else "")
        return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}

    def _count(self) -> dict[str, int]:
        prompt, answer = self.num_prompt_tokens, len(self.completion.tokens)
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def _parse_arguments(text: str) -> Any:
    """A call's arguments as an object, as chat templates take them; the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
