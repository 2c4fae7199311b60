"""AgentSession: one rollout of an agent, recorded as conversations while the agent calls the policy.

A call whose messages begin with all messages of a recorded conversation continues it: only the new messages are
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
from rlplan.runtime.environments.tool_calls import OK, split_calls
from rlplan.runtime.gateway.openai_api import TEXT, ApiError, Call, Message, make_message
from rlplan.runtime.rollout.experience import Completion, Prompt, RolloutRequest
from rlplan.spec.parts.environment import EnvironmentSpec


@dataclass(slots=True)
class Branch:
    """A conversation with what a further call must have in common with it."""

    talk: Conversation
    tools: list[Any]
    last_turn: int = -1
    is_busy: bool = False
    """Whether a turn of it is being generated, so that another call cannot continue it."""


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
    """The end of an agent."""

    answer: str | None = None
    """The agent's answer, which rewards judge."""
    reward: float | None = None
    failure: str = ""
    """Why the agent failed; empty if it ended by itself."""


class AgentSession:
    """See the module docstring. reward: what the agent has posted. refusal: the limit that the last call met, if any.

    request: of the whole group. max_len: limit of a prompt and its response, in tokens.
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
            if not branch.is_busy and branch.tools == tools and (added := _list_added(branch.talk, messages))
        ]
        new = Branch(Conversation(self.request, self.sample, Prompt("", "", "", ()), [], is_changed=True), tools)
        branch, added = max(continued, key=lambda pair: len(pair[0].talk.tokens), default=(new, messages))
        branch.is_busy, self.num_turns = True, self.num_turns + 1
        return Turn(branch, self.num_turns - 1, added)

    def make_request(self, turn: Turn, call: Call, words: TextTokenizer, chat: ChatTurns | None) -> RolloutRequest:
        """The engine's request for a turn. Slow: it may render in a child process.

        A conversation without room to continue is left, and the call begins a new one. Raises: ApiError, SpecError.
        """
        talk, tokens = turn.branch.talk, self._encode(turn, words, chat)
        if talk.num_turns and talk.num_left <= len(tokens):
            turn.branch.is_busy = False
            talk = Conversation(self.request, self.sample, Prompt("", "", "", ()), [], is_changed=True)
            turn.branch, turn.added = Branch(talk, turn.branch.tools, is_busy=True), call.read_messages()
            tokens = self._encode(turn, words, chat)
        if talk.num_turns:
            turn.observation = tokens
        elif (room := min(self.request.max_tokens, self.max_len - len(tokens))) > 0:
            talk.request = replace(self.request, max_tokens=room)
            talk.prompt = replace(talk.prompt, tokens=tuple(tokens))
        else:
            raise self._refuse(CONTEXT, f"the messages have {len(tokens)} tokens")
        request = talk.make_next_request(turn.number, turn.observation)
        asked = call.most_tokens or request.max_tokens
        return replace(request, max_tokens=min(asked, request.max_tokens), stop=call.stops)

    def finish_turn(self, turn: Turn, completion: Completion, call: Call, words: TextTokenizer) -> Message:
        """Record a finished turn, and return its message."""
        talk, tools = turn.branch.talk, turn.branch.tools
        text, calls = words.text(completion.tokens), []
        if tools and call.tool_choice != "none":
            marked = words.text(completion.tokens, keeps_special=True)
            names = [tool["function"]["name"] for tool in tools]
            before, calls = split_calls(marked, self.spec.call_pattern, names)
            text = before.strip() if any(not tool_call.fault for tool_call in calls) else text
        for stop in call.stops:
            text = text.partition(stop)[0]
        message = make_message(text, calls, f"{self.sample}_{turn.number}")
        if talk.num_turns:
            talk.append_observation(turn.added, turn.observation)
        else:
            talk.messages += turn.added
            self.branches.append(turn.branch)
        talk.append_policy_turn(completion, message)
        talk.outcomes += [tool_call.fault or OK for tool_call in calls]
        turn.branch.last_turn, self.refusal = turn.number, ""
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
        talks = [branch.talk for branch in sorted(self.branches, key=lambda branch: branch.last_turn)]
        *others, main = talks or [Conversation(self.request, self.sample, Prompt("", "", "", ()), [])]
        return replace(
            main.make_completion(),
            num_turns=sum(talk.num_turns for talk in talks),
            calls=tuple(call for talk in talks for call in talk.outcomes),
            reward=self.reward if outcome.reward is None else outcome.reward,
            answer=outcome.answer,
            failure=failure,
            ended=ended,
            branches=tuple(talk.make_completion() for talk in others),
        )

    def _encode(self, turn: Turn, words: TextTokenizer, chat: ChatTurns | None) -> list[int]:
        """Tokens of a turn's new messages."""
        talk, tools, content = turn.branch.talk, turn.branch.tools, turn.added[0]["content"]
        if isinstance(content, list):
            return content
        size = sum(len(str(part)) for part in (*turn.added, *tools))
        if size > words.longest_token * self.max_len + LARGEST_FRAME * len(turn.added):  # not worth rendering
            raise self._refuse(CONTEXT, f"the messages have {size} characters")
        if turn.added[0]["role"] == TEXT:
            return words.tokens(content, adds_special_tokens=not talk.num_turns)
        if chat is None:
            raise ApiError(400, "the policy has no chat template: use /v1/completions", "no_chat_template")
        if talk.num_turns:
            return chat.encode_between(turn.added, talk.tokens[-1], tools)
        return chat.encode_prompt(turn.added, tools)

    def _refuse(self, limit: str, why: str, code: str = "context_length_exceeded") -> ApiError:
        self.refusal = limit
        if limit == CONTEXT:
            why = f"This model's maximum context length is {self.max_len} tokens, but {why}"
        return ApiError(400, why, code, "messages")


LARGEST_FRAME = 500
"""Characters of a message's keys and ids, which are no tokens."""


def _list_added(talk: Conversation, messages: list[Message]) -> list[Message]:
    """Messages after those of a conversation; none if they do not continue it."""
    count, content = len(talk.messages), messages[0]["content"]
    if messages[0]["role"] != TEXT:
        return messages[count:] if messages[:count] == talk.messages else []
    if isinstance(content, str):
        before = "".join(message["content"] for message in talk.messages if isinstance(message["content"], str))
    else:
        before = [*talk.prompt.tokens, *talk.tokens]
    is_continued = talk.messages[0]["role"] == TEXT and type(talk.messages[0]["content"]) is type(content)
    added = content[len(before) :] if is_continued and content[: len(before)] == before else ""
    return [{"role": TEXT, "content": added}] if added else []
