"""AgentSession: one rollout of an agent, recorded as conversations while the agent calls the policy.

A call whose messages begin with all messages of a recorded conversation continues it: only the new messages are
encoded, so that recorded tokens are never tokenized again. Any other call begins a conversation of its own, a branch,
with everything before the policy's turn as its prompt.

In: calls, and finished turns. Out: the engine's requests, and at the end a completion with its branches.
Left out: HTTP (gateway.py), the agent's process (agents.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlplan.runtime.data.text_tokens import TextTokenizer
from rlplan.runtime.environments.chat import ChatTurns
from rlplan.runtime.environments.conversation import CONTEXT, FAILED, FINAL, MAX_TURNS, Conversation
from rlplan.runtime.environments.tool_calls import OK, split_calls
from rlplan.runtime.gateway.openai_api import LIMIT, ApiError, ChatCall, TextCall, make_message
from rlplan.runtime.rollout.experience import Completion, Prompt, RolloutRequest
from rlplan.spec.parts.environment import EnvironmentSpec

Message = dict[str, Any]
TEXT = "text"
"""Role of a prompt that is a text, in the messages of a conversation."""


@dataclass(slots=True)
class Branch:
    """A conversation, and what distinguishes it from others with the same messages."""

    talk: Conversation
    tools: list[Any] = field(default_factory=list)
    last_turn: int = -1
    is_busy: bool = False
    """Whether a turn of it is being generated, so that another call cannot continue it."""


@dataclass(slots=True)
class Turn:
    """A turn of the policy that the engine generates."""

    branch: Branch
    added: list[Message]
    """Messages since the conversation's last turn; the whole prompt for a new one."""
    observation: list[int]
    """Tokens of `added` in a conversation that continues."""
    request: RolloutRequest
    number: int
    is_new: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of an agent."""

    answer: str | None = None
    """The agent's answer, which rewards judge."""
    reward: float | None = None
    failure: str = ""
    """Why the agent failed; empty if it ended by itself."""


class Encoder:
    """Tokens of prompts and of messages between turns. Slow: it renders in a child process.

    chat: renders chats; None for a policy without a chat template. max_len: limit of prompt and turn, in tokens.
    """

    def __init__(self, words: TextTokenizer, chat: ChatTurns | None, max_len: int) -> None:
        self.words, self.chat, self.max_len = words, chat, max_len

    def encode(self, talk: Conversation | None, added: Sequence[Message], tools: Sequence[Any]) -> list[int]:
        """Tokens of messages that continue a conversation, or begin one. Raises: ApiError, SpecError."""
        last = added[-1]
        if last["role"] == TEXT:
            content = last["content"]
            if isinstance(content, str):
                self._check_text([content])
                return self.words.tokens(content, adds_special_tokens=talk is None)
            return list(content)
        if self.chat is None:
            raise ApiError(400, "the policy has no chat template: use /v1/completions", "no_chat_template")
        self._check_text([str(message["content"]) for message in added] + [str(tool) for tool in tools])
        if talk is None:
            return self.chat.encode_prompt(added, tools)
        return self.chat.encode_between(added, talk.tokens[-1], tools)

    def _check_text(self, texts: Sequence[str]) -> None:
        """Refuse at once what cannot fit, before it is rendered. Raises: ApiError."""
        longest = self.words.longest_token
        if (size := sum(map(len, texts))) > longest * self.max_len:
            raise ApiError(400, f"{size} characters are more than {self.max_len} tokens", LIMIT, "messages")


class AgentSession:
    """See the module docstring. Not thread-safe.

    refusal: the limit that the last call met, CONTEXT or MAX_TURNS; empty if it was answered.
    """

    def __init__(self, request: RolloutRequest, sample: int, prompt: Prompt, spec: EnvironmentSpec, max_len: int):
        """request: of the whole group. max_len: limit of a prompt and its response, in tokens."""
        self.request, self.sample, self.prompt, self.spec, self.max_len = request, sample, prompt, spec, max_len
        self.branches: list[Branch] = []
        self.num_turns = 0
        self.reward: float | None = None
        self.refusal = ""

    @property
    def name(self) -> str:
        return f"{self.request.id}#{self.sample}"

    def find_branch(self, messages: list[Message], tools: list[Any]) -> tuple[Branch | None, list[Message]]:
        """(the longest conversation that messages continue, the messages after it), or (None, all messages)."""
        best: tuple[Branch | None, list[Message]] = None, messages
        for branch in self.branches:
            if branch.is_busy or branch.tools != tools:
                continue
            added = _list_added(branch.talk, messages)
            if added and (best[0] is None or len(branch.talk.tokens) > len(best[0].talk.tokens)):
                best = branch, added
        return best

    def count_turn(self) -> int:
        """The number of a new turn. Raises: ApiError at the limit."""
        if self.num_turns >= self.spec.max_turns:
            why = f"this rollout has had its {self.spec.max_turns} turns (rollout.environment.max_turns)"
            raise ApiError(400, why, MAX_TURNS)
        self.num_turns += 1
        return self.num_turns - 1

    def begin_turn(
        self, call: ChatCall | TextCall, number: int, branch: Branch | None, added: list[Message], tokens: list[int]
    ) -> Turn | None:
        """The turn that answers a call; None if the conversation has no room to continue. Raises: ApiError.

        tokens: of `added`. A conversation without room is begun anew by the caller, with the whole chat as a prompt.
        """
        tools = call.read_tools() if isinstance(call, ChatCall) else []
        if branch is None:
            room = min(self.request.max_tokens, self.max_len - len(tokens))
            if room < 1:
                why = f"{len(tokens)} tokens of messages leave no room in the context of {self.max_len} tokens"
                raise ApiError(400, f"This model's maximum context length is {self.max_len} tokens: {why}", LIMIT)
            request, prompt = replace(self.request, max_tokens=room), replace(self.prompt, tokens=tuple(tokens))
            fresh = Branch(Conversation(request, self.sample, prompt, [], is_changed=True), tools)
            turn = Turn(fresh, added, [], fresh.talk.make_next_request(number), number, is_new=True)
        elif branch.talk.num_left <= len(tokens):
            return None
        else:
            turn = Turn(branch, added, tokens, branch.talk.make_next_request(number, tokens), number, is_new=False)
        asked = turn.request.max_tokens if call.most_tokens is None else call.most_tokens
        turn.request = replace(turn.request, max_tokens=min(asked, turn.request.max_tokens), stop=call.stops)
        turn.branch.is_busy = True
        return turn

    def finish_turn(self, turn: Turn, completion: Completion, words: TextTokenizer, *, reads_calls: bool) -> Message:
        """Record a finished turn, and return its message."""
        talk = turn.branch.talk
        text, calls = words.text(completion.tokens), []
        if reads_calls:
            names = [tool["function"]["name"] for tool in turn.branch.tools]
            marked = words.text(completion.tokens, keeps_special=True)
            before, calls = split_calls(marked, self.spec.call_pattern, names)
            text = before.strip() if any(not call.fault for call in calls) else text
        for stop in turn.request.stop:
            text = text.partition(stop)[0]
        message = make_message(text, calls, f"{self.sample}_{turn.number}")
        if turn.is_new:
            talk.messages += turn.added
            self.branches.append(turn.branch)
        else:
            talk.append_observation(turn.added, turn.observation)
        talk.append_policy_turn(completion, message)
        talk.outcomes += [call.fault or OK for call in calls]
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
        *others, main = talks or [Conversation(self.request, self.sample, self.prompt, [])]
        return replace(
            main.make_completion(),
            num_turns=sum(talk.num_turns for talk in talks),
            calls=tuple(call for talk in talks for call in talk.outcomes),
            reward=self.reward if outcome.reward is None else outcome.reward,
            answer=outcome.answer,
            failure=failure,
            ended=ended,
            branches=tuple(replace(talk.make_completion(), reward=None) for talk in others),
        )


def _list_added(talk: Conversation, messages: list[Message]) -> list[Message]:
    """Messages after those of a conversation; none if they do not continue it."""
    if messages[0]["role"] != TEXT:
        count = len(talk.messages)
        return messages[count:] if messages[:count] == talk.messages else []
    content = messages[0]["content"]
    parts = [message["content"] for message in talk.messages]
    recorded = "".join(parts) if isinstance(content, str) and all(isinstance(p, str) for p in parts) else None
    before = recorded if isinstance(content, str) else [*talk.prompt.tokens, *talk.tokens]
    if before is None or talk.messages[0]["role"] != TEXT or content[: len(before)] != before:
        return []
    return [{"role": TEXT, "content": content[len(before) :]}] if len(content) > len(before) else []
