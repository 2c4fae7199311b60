"""AgentSession: one rollout of an agent, recorded as conversations while the agent calls the policy.

A call whose messages begin with all messages of a recorded conversation continues it. Only its new messages are
encoded, so that recorded tokens are never tokenized again. Any other call begins a conversation of its own, a branch,
with everything before the policy's turn as its prompt.

In: calls, and finished turns. Out: the engine's requests, and at the end a completion with its branches.
Left out: HTTP (gateway.py), the agent's process (agent_starter.py).
"""

from dataclasses import dataclass, field, replace
from typing import Any

from rlplan.runtime.data.text_tokens import TextTokenizer
from rlplan.runtime.environments.chat import ChatTurns
from rlplan.runtime.environments.conversation import CONTEXT, FAILED, FINAL, MAX_TURNS, Conversation
from rlplan.runtime.environments.tool_calls import OK, ToolCall, split_calls
from rlplan.runtime.gateway.openai_api import TEXT, ApiError, Call, Message, make_message
from rlplan.runtime.rollout.experience import Completion, Prompt, RolloutRequest
from rlplan.spec.parts.environment import EnvironmentSpec

FRAME_CHARACTERS = 500
"""Characters allowed for a message's keys and ids, which do not become tokens."""


@dataclass(slots=True)
class Branch(Conversation):
    """A conversation of an agent."""

    tools: list[Any] = field(default_factory=list)
    """Schemas of its tools. A call continues the conversation only with the same ones."""
    last_turn: int = -1
    is_busy: bool = False
    """Whether a turn is being generated, so that another call cannot continue the conversation."""


@dataclass(slots=True)
class Turn:
    """A turn of the policy that is being generated."""

    branch: Branch
    number: int
    added: list[Message]
    """Messages since the conversation's last turn; the whole prompt of a new one."""
    observation: list[int] = field(default_factory=list)
    """Tokens of `added` in a conversation that continues."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of an agent: its answer, which rewards judge, its reward, and why it failed, if it did."""

    answer: str | None = None
    reward: float | None = None
    failure: str = ""


class AgentSession:
    """See the module docstring. reward: the number that the agent posted. refusal: the limit that the last call met.

    request: the request of the whole group. max_len: limit of a prompt and its response, in tokens.
    """

    def __init__(self, request: RolloutRequest, sample: int, spec: EnvironmentSpec, max_len: int) -> None:
        self.request, self.sample, self.spec, self.max_len = request, sample, spec, max_len
        self.name = f"{request.id}#{sample}"
        self.branches: list[Branch] = []
        self.num_turns, self.refusal = 0, ""
        self.reward: float | None = None

    def begin_turn(self, call: Call) -> Turn:
        """Find the longest conversation that a call continues, or begin one. Raises: ApiError at the limit of turns."""
        if self.num_turns >= self.spec.max_turns:
            why = f"this rollout has had its {self.spec.max_turns} turns (rollout.environment.max_turns)"
            raise self._refuse(MAX_TURNS, why, MAX_TURNS)
        messages, tools = call.read_messages(), call.read_tools()
        continued = [
            (branch, added)
            for branch in self.branches
            if not branch.is_busy and branch.tools == tools and (added := _list_added(branch, messages))
        ]
        new = self._begin_branch(tools), messages
        branch, added = max(continued, key=lambda pair: len(pair[0].tokens), default=new)
        branch.is_busy, self.num_turns = True, self.num_turns + 1
        return Turn(branch, self.num_turns - 1, added)

    def make_request(self, turn: Turn, call: Call, words: TextTokenizer, chat: ChatTurns | None) -> RolloutRequest:
        """The engine's request for a turn. Slow: it may render in a child process.

        If a conversation has no room left, the call begins a new one. Raises: ApiError, SpecError.
        """
        tokens = self._encode(turn, words, chat)
        if turn.branch.num_turns and turn.branch.num_left <= len(tokens):
            turn.branch.is_busy = False
            turn.branch, turn.added = self._begin_branch(turn.branch.tools), call.read_messages()
            tokens = self._encode(turn, words, chat)
        branch = turn.branch
        if branch.num_turns:
            turn.observation = tokens
        elif (room := min(self.request.max_tokens, self.max_len - len(tokens))) <= 0:
            raise self._refuse(CONTEXT, f"the messages have {len(tokens)} tokens")
        elif not tokens or max(tokens) >= words.num_tokens:
            raise ApiError(400, f"a prompt has tokens from 0 to {words.num_tokens - 1}", "invalid_value", "prompt")
        else:
            branch.request = replace(self.request, max_tokens=room)
            branch.prompt = replace(branch.prompt, tokens=tuple(tokens))
        request = branch.make_next_request(turn.number, turn.observation)
        asked = call.most_tokens or request.max_tokens
        return replace(request, max_tokens=min(asked, request.max_tokens), stop=call.stops)

    def finish_turn(self, turn: Turn, completion: Completion, call: Call, words: TextTokenizer) -> Message:
        """Record a finished turn, and return its message."""
        branch, text = turn.branch, words.text(completion.tokens)
        calls: list[ToolCall] = []
        if branch.tools and call.tool_choice != "none":
            marked = words.text(completion.tokens, keeps_special=True)
            names = [tool["function"]["name"] for tool in branch.tools]
            before, calls = split_calls(marked, self.spec.call_pattern, names)
            text = before.strip() if any(not tool_call.fault for tool_call in calls) else text
        for stop in call.stops:
            text = text.partition(stop)[0]
        message = make_message(text, calls, f"{self.sample}_{turn.number}")
        if branch.num_turns:
            branch.append_observation(turn.added, turn.observation)
        else:
            branch.messages += turn.added
            self.branches.append(branch)
        branch.append_policy_turn(completion, message)
        branch.outcomes += [tool_call.fault or OK for tool_call in calls]
        branch.last_turn, self.refusal = turn.number, ""
        return message

    def make_completion(self, outcome: Outcome) -> Completion:
        """The whole rollout: the conversation with the last turn, and the others as its branches."""
        failure, ended = outcome.failure, self.refusal or (FAILED if outcome.failure else FINAL)
        if self.refusal == CONTEXT and self.spec.at_context_limit == "mask":
            failure = f"the next turn does not fit the context of {self.max_len} tokens"
        elif self.refusal:  # an agent that ends after such an error has not failed: the policy used up its limit
            failure = ""
        elif not failure and not self.branches:
            failure = "the agent never called the policy"
        *others, main = sorted(self.branches, key=lambda branch: branch.last_turn) or [self._begin_branch([])]
        return replace(
            main.make_completion(),
            num_turns=sum(branch.num_turns for branch in self.branches),
            calls=tuple(call for branch in self.branches for call in branch.outcomes),
            reward=self.reward if outcome.reward is None else outcome.reward,
            answer=outcome.answer,
            failure=failure,
            ended=ended,
            branches=tuple(branch.make_completion() for branch in others),
        )

    def _begin_branch(self, tools: list[Any]) -> Branch:
        return Branch(self.request, self.sample, Prompt("", "", "", ()), [], is_changed=True, tools=tools, is_busy=True)

    def _encode(self, turn: Turn, words: TextTokenizer, chat: ChatTurns | None) -> list[int]:
        """Tokens of a turn's new messages."""
        branch, content = turn.branch, turn.added[0]["content"]
        if isinstance(content, list):
            return content
        size = sum(len(str(part)) for part in (*turn.added, *branch.tools))
        if size > words.longest_token * self.max_len + FRAME_CHARACTERS * len(turn.added):  # not worth rendering
            raise self._refuse(CONTEXT, f"the messages have {size} characters")
        if turn.added[0]["role"] == TEXT:
            return words.tokens(content, adds_special_tokens=not branch.num_turns)
        if chat is None:
            raise ApiError(400, "the policy has no chat template: use /v1/completions", "no_chat_template")
        chat.tools = branch.tools
        return (
            chat.encode_between(turn.added, branch.tokens[-1]) if branch.num_turns else chat.encode_prompt(turn.added)
        )

    def _refuse(self, limit: str, why: str, code: str = "context_length_exceeded") -> ApiError:
        self.refusal = limit
        if limit == CONTEXT:
            why = f"This model's maximum context length is {self.max_len} tokens, but {why}"
        return ApiError(400, why, code, "messages")


def _list_added(branch: Branch, messages: list[Message]) -> list[Message]:
    """Messages after those of a conversation; none if they do not continue it."""
    count, content, first = len(branch.messages), messages[0]["content"], branch.messages[0]
    if TEXT not in (messages[0]["role"], first["role"]):
        return messages[count:] if messages[:count] == branch.messages else []
    if messages[0]["role"] != first["role"] or type(content) is not type(first["content"]):
        return []
    is_text, tokens = isinstance(content, str), [*branch.prompt.tokens, *branch.tokens]
    before = "".join(message["content"] for message in branch.messages) if is_text else tokens
    added = content[len(before) :] if content[: len(before)] == before else ""
    return [{"role": TEXT, "content": added}] if added else []
