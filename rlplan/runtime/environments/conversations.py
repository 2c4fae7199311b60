"""Conversations: multi-turn rollouts on engines that only generate single turns.

Each rollout advances independently. When a turn ends, its tool calls run, or the environment answers. The answer is
appended, through the chat template if the prompt is a chat. The next turn goes to the same engine, whose prefix cache
holds the keys and values so far. A rollout never exceeds `workload.max_response_len` tokens, so it needs no more memory
than one long turn.

In: requests for whole rollouts, in the engines' own format. Out: finished requests. A completion has the policy's turns
and the messages between them in one sequence of tokens.
Left out: processes of environment and tools (pool.py); the value of rewards (rewards/total.py).
"""

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from rlplan.errors import RunError, SpecError
from rlplan.runtime.data.text_tokens import TextTokenizer
from rlplan.runtime.environments.chat import ChatTurns, Message
from rlplan.runtime.environments.conversation import (
    ANSWERED,
    CONTEXT,
    FAILED,
    FINAL,
    MAX_TURNS,
    Conversation,
)
from rlplan.runtime.environments.pool import EnvironmentPool, RawAnswer, read_answer
from rlplan.runtime.environments.tool_calls import OK, read_calls
from rlplan.runtime.measure.memory_meter import Measurement, merge_measurements
from rlplan.runtime.rollout.experience import Completion, FinishedRequest, Prompt, RolloutRequest
from rlplan.runtime.rollout.fleet import Fleet

COLLECT_S = 0.2
"""Seconds that engines wait for a turn to end before they return nothing."""

ANSWER_S = 0.01
"""The same wait while answers of the environment are pending."""


class MultiTurnRollouts(ABC):
    """Rollouts of several turns, behind the interface of a Fleet. Subclasses start rollouts and advance their turns.

    The first part of a request's id is its kind (`generate/...`). Two threads may each wait for their own kind, because
    every call of `collect` advances all rollouts.
    """

    def __init__(self, fleet: Fleet, prompt_of: Callable[[str], Prompt]) -> None:
        """prompt_of: maps a request id to its prompt."""
        self.fleet, self.prompt_of = fleet, prompt_of
        self._finished: dict[str, dict[int, Completion]] = {}
        """Completions of each running request, by sample."""
        self._requests: dict[str, RolloutRequest] = {}
        self._ready: dict[str, list[FinishedRequest]] = {}
        """Finished requests by kind, until `collect` takes them."""
        self._unsent: list[RolloutRequest] = []
        self._lock = threading.RLock()

    @property
    def processes(self) -> tuple[str, ...]:
        return self.fleet.processes

    @property
    @abstractmethod
    def pids(self) -> list[int]:
        """Ids of the processes that run the environment, besides the engines."""

    @abstractmethod
    def close(self) -> None:
        """End these processes."""

    @abstractmethod
    def _begin(self, request: RolloutRequest, sample: int) -> None:
        """Start one rollout of a request."""

    @abstractmethod
    def _advance_all(self, max_wait_s: float, timeout_s: float) -> list[Measurement]:
        """Advance all rollouts; wait at most `max_wait_s` for a turn to end."""

    def pause(self, timeout_s: float) -> AbstractContextManager[None]:
        return self.fleet.pause(timeout_s)

    def submit(self, requests: Sequence[RolloutRequest], timeout_s: float) -> None:
        """Start rollouts in addition to the running ones. Requests that were submitted before are ignored."""
        with self._lock:
            for request in [request for request in requests if request.id not in self._requests]:
                self._requests[request.id], self._finished[request.id] = request, {}
                for sample in range(request.num_samples):
                    self._begin(request, sample)
            self._send(timeout_s)

    def collect(
        self, max_wait_s: float, at_least: int, timeout_s: float, kind: str = "generate"
    ) -> tuple[list[FinishedRequest], list[Measurement]]:
        """Rollouts of a kind that ended since the last call; rollouts of all kinds are advanced."""
        with self._lock:
            measurements = self._advance_all(max_wait_s, timeout_s)
            return self._ready.pop(kind, []), measurements

    def generate(
        self, requests: Sequence[RolloutRequest], timeout_s: float
    ) -> tuple[list[FinishedRequest], list[Measurement]]:
        """Complete all rollouts. Returns: results in the order of the requests."""
        deadline, kind = time.monotonic() + timeout_s, _parse_kind(requests[0].id)
        finished: dict[str, FinishedRequest] = {}
        measurements: list[Measurement] = []
        self.submit(requests, timeout_s)
        while len(finished) < len(requests):
            collected, measured = self.collect(COLLECT_S, 1, timeout_s, kind)
            finished |= {rollout.id: rollout for rollout in collected}
            measurements = merge_measurements([*measurements, *measured])
            if time.monotonic() > deadline:
                raise RunError(
                    f"{len(requests) - len(finished)} of {len(requests)} rollouts did not end within {timeout_s:.0f} s",
                    where=", ".join(self.processes),
                    rule="rollouts must end within limits.action_timeout_s",
                    way_out="allow fewer turns (rollout.environment.max_turns), or raise the limit",
                )
        return [finished[request.id] for request in requests], measurements

    def _send(self, timeout_s: float) -> None:
        """Send turns to the engines. If this fails, they stay queued for the next call."""
        if self._unsent:
            self.fleet.submit(self._unsent, timeout_s)
            self._unsent = []

    def _end_sample(self, name: str, sample: int, completion: Completion) -> None:
        """Record a finished rollout; its request is ready once all of its samples are."""
        samples = self._finished[name]
        samples[sample] = completion
        if len(samples) == self._requests[name].num_samples:
            finished = FinishedRequest(name, tuple(samples[index] for index in range(len(samples))))
            self._ready.setdefault(_parse_kind(name), []).append(finished)
            self.fleet.end_session(name)
            del self._finished[name], self._requests[name]


class Conversations(MultiTurnRollouts):
    """See the module docstring."""

    def __init__(
        self,
        fleet: Fleet,
        pool: EnvironmentPool,
        words: TextTokenizer,
        prompt_of: Callable[[str], Prompt],
        chat: ChatTurns | None = None,
        max_prompt_len: int | None = None,
    ) -> None:
        """chat: renders prompts that are chats. max_prompt_len: limit of a prompt that the environment extended."""
        super().__init__(fleet, prompt_of)
        self.pool, self.words = pool, words
        self.spec, self.described, self.chat, self.max_prompt_len = pool.spec, pool.described, chat, max_prompt_len
        self._running: dict[str, Conversation] = {}
        self._num_pending = 0

    @property
    def pids(self) -> list[int]:
        """Ids of the environment's processes and of the process that renders chats."""
        return [*self.pool.pids, *([] if self.chat is None else [self.chat.text.pid])]

    def close(self) -> None:
        self.pool.close()
        if self.chat is not None:
            self.chat.close()

    def _advance_all(self, max_wait_s: float, timeout_s: float) -> list[Measurement]:
        for (name, request), answer in self.pool.take_answers():
            self._num_pending -= 1
            self._handle_answer(self._running[name], request, answer)
        self._send(timeout_s)
        # the fleet does not notice an answer of the environment, so a pending one must not wait for a turn
        wait_s = min(max_wait_s, ANSWER_S) if self._num_pending else max_wait_s
        finished_turns, measurements = self.fleet.collect(wait_s, 1, timeout_s)
        for turn in finished_turns:
            conversation = self._running[turn.id.rpartition(".")[0]]
            (completion,) = turn.completions
            message = {"role": "assistant", "content": self.words.text(completion.tokens)}
            conversation.append_policy_turn(completion, message)
            self._answer_turn(conversation, completion)
        return measurements

    def _ask(self, conversation: Conversation, key: int | str, question: dict[str, Any], *, is_shared: bool) -> None:
        session = None if is_shared else conversation.name
        self.pool.ask((conversation.name, key), question, session)
        self._num_pending += 1

    def _begin(self, request: RolloutRequest, sample: int) -> None:
        """Start a rollout: reset its environment if it is stateful, else request the first turn."""
        prompt = self.prompt_of(request.id)
        conversation = Conversation(request, sample, prompt, make_messages(prompt))
        self._running[conversation.name] = conversation
        if not self.described.is_stateful:
            return self._begin_turn(conversation)
        return self._ask(conversation, "reset", {"reset": make_row(prompt)}, is_shared=False)

    def _answer_turn(self, conversation: Conversation, turn: Completion) -> None:
        """Request answers to a finished turn: from the tools that it calls, else from the environment."""
        names = self.described.tool_names
        text = self.words.text(turn.tokens, keeps_special=True) if names else ""
        conversation.calls = read_calls(text, self.spec.call_pattern, names) if names else []
        if conversation.calls:
            return self._call(conversation)
        if not self.spec.has_environment or self.described.has_tools_alone:
            return self._end(conversation, FINAL)
        if self.described.is_stateful:
            question: dict[str, Any] = {"step": conversation.messages[-1]["content"]}
        else:
            question = {"play": conversation.messages, "answer": conversation.prompt.answer}
        return self._ask(conversation, "step", question, is_shared=not self.described.is_stateful)

    def _call(self, conversation: Conversation) -> None:
        """Run all tool calls of a turn concurrently; an invalid call is answered with an error message."""
        if conversation.num_turns == self.spec.max_turns:
            return self._end(conversation, MAX_TURNS)
        # the results and the next turn need at least one token each, so the calls would run in vain
        if conversation.num_left <= 1:
            return self._end_at_limit(conversation)
        conversation.results = {}
        for place, call in enumerate(conversation.calls):  # invalid calls end at once, valid ones when the pool answers
            if call.fault:
                conversation.end_call(place, call.fault, f"error: {call.why}")
                continue
            question = {"call": call.name, "arguments": call.arguments}
            self._ask(conversation, place, question, is_shared=call.name not in self.described.methods)
        return self._continue_after_calls(conversation)

    def _continue_after_calls(self, conversation: Conversation) -> None:
        """Continue with the results of all calls, in call order, once the last one has finished."""
        if len(conversation.results) == len(conversation.calls):
            results = [conversation.results[place] for place in range(len(conversation.calls))]
            named = [call.name or "unknown" for call in conversation.calls]
            tools = [{"role": "tool", "name": n, "content": text} for n, text in zip(named, results, strict=True)]
            self._continue(conversation, tools)

    def _handle_answer(self, conversation: Conversation, request: int | str, answered: RawAnswer) -> None:
        """Handle an answer of the pool. request: the index of a tool call, or `reset`, `step` or `finish`."""
        if isinstance(request, int):
            text = answered.value if isinstance(answered.value, str) else f"error: {answered.failure}"
            conversation.end_call(request, answered.kind or OK, text)
            return self._continue_after_calls(conversation)
        if request == "finish":
            return self._finish(conversation, answered)
        answer = read_answer(answered)
        if answer.failure:
            return self._end(conversation, FAILED, answer.failure)
        if request == "reset":
            return self._reset(conversation, answer.messages)
        conversation.add_reward(answer.reward)
        if answer.is_end:
            return self._end(conversation, ANSWERED)
        return self._continue(conversation, answer.messages)

    def _reset(self, conversation: Conversation, added_messages: Sequence[Message]) -> None:
        """Append the environment's first observation to the last message of the prompt, and request the first turn."""
        added = "".join(message["content"] for message in added_messages)
        if not added:
            return self._begin_turn(conversation)
        prompt, last = conversation.prompt, conversation.messages[-1]
        conversation.messages[-1] = {**last, "content": last["content"] + added}
        try:
            tokens = self._get_chat(prompt).encode_prompt(conversation.messages) if prompt.chat else None
        except SpecError as error:
            return self._end(conversation, FAILED, str(error))
        tokens = tokens or self.words.tokens(prompt.text + added, adds_special_tokens=True)
        if self.max_prompt_len is not None and len(tokens) > self.max_prompt_len:
            why = (
                f"with the text from reset the prompt has {len(tokens)} tokens, "
                f"more than workload.max_prompt_len={self.max_prompt_len}"
            )
            return self._end(conversation, FAILED, why)
        conversation.prompt, conversation.is_changed = replace(prompt, tokens=tuple(tokens)), True
        return self._begin_turn(conversation)

    def _continue(self, conversation: Conversation, messages: Sequence[Message]) -> None:
        """Append messages and request another turn, unless the turn or context limit is reached."""
        if conversation.num_turns == self.spec.max_turns:
            return self._end(conversation, MAX_TURNS)
        try:
            tokens = self._encode_observation(conversation, messages)
        except SpecError as error:
            return self._end(conversation, FAILED, str(error))
        if len(tokens) >= conversation.num_left:
            return self._end_at_limit(conversation)
        conversation.append_observation(messages, tokens)
        return self._begin_turn(conversation)

    def _encode_observation(self, conversation: Conversation, messages: Sequence[Message]) -> list[int]:
        """Tokens of messages, each truncated to max_observation_len."""
        max_tokens = self.spec.max_observation_len
        if not conversation.prompt.chat:
            return self.words.tokens("".join(message["content"] for message in messages))[:max_tokens]
        cut = [{**message, "content": self.words.truncate(message["content"], max_tokens)} for message in messages]
        return self._get_chat(conversation.prompt).encode_between(cut, conversation.tokens[-1])

    def _get_chat(self, prompt: Prompt) -> ChatTurns:
        assert self.chat is not None, f"{prompt.id} is a chat"
        return self.chat

    def _begin_turn(self, conversation: Conversation) -> None:
        self._unsent.append(conversation.make_next_request())

    def _end_at_limit(self, conversation: Conversation) -> None:
        why = ""
        if self.spec.at_context_limit == "mask":
            why = f"the next turn does not fit workload.max_response_len={conversation.request.max_tokens}"
        self._end(conversation, CONTEXT, why)

    def _end(self, conversation: Conversation, why: str, failure: str = "") -> None:
        conversation.ended, conversation.failure = why, failure
        if self.described.is_stateful:
            return self._ask(conversation, "finish", {"finish": conversation.name}, is_shared=False)
        return self._finish(conversation, RawAnswer())

    def _finish(self, conversation: Conversation, last_answer: RawAnswer) -> None:
        """End a rollout. last_answer: final answer of a stateful environment, which may hold a reward."""
        if not conversation.failure and last_answer != RawAnswer():
            answer = read_answer(last_answer)
            conversation.add_reward(answer.reward)
            conversation.failure = answer.failure
        del self._running[conversation.name]
        self.pool.forget(conversation.name)
        self._end_sample(conversation.request.id, conversation.sample, conversation.make_completion())


def make_messages(prompt: Prompt) -> list[Message]:
    """A prompt as chat messages."""
    return list(json.loads(prompt.chat)) if prompt.chat else [{"role": "user", "content": prompt.text}]


def make_row(prompt: Prompt) -> dict[str, Any]:
    """A prompt's row, as environments and agents see it: its columns, `prompt` (messages) and `answer`."""
    return {**json.loads(prompt.columns), "prompt": make_messages(prompt), "answer": prompt.answer}


def _parse_kind(request_id: str) -> str:
    return request_id.partition("/")[0]
