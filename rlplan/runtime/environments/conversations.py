"""Conversations: rollouts of several turns, on engines that know of single turns only.

In: requests for whole rollouts, as the engines themselves take them. Out: finished requests, whose completions have the
policy's turns and what an environment said between them in one row of tokens.

Each rollout goes on by itself: when its turn has ended the environment is asked, and what it says is appended and sent
back to the same engine, where keys and values of everything before lie in the prefix cache. A rollout never has more
tokens than `workload.max_response_len`, so that no process needs more memory than for one long turn.
Left out: where the environment runs (pool.py); what a reward is worth (rewards/total.py).
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from rlplan.errors import RunError
from rlplan.runtime.data.text_tokens import TextTokenizer
from rlplan.runtime.environments.pool import Answer, EnvironmentPool
from rlplan.runtime.measure.memory_meter import Measurement, merged
from rlplan.runtime.rollout.experience import Completion, FinishedRequest, Prompt, RolloutRequest, WeightSpan
from rlplan.runtime.rollout.fleet import Fleet
from rlplan.spec.parts.environment import EnvironmentSpec

COLLECT_S = 0.2
"""How long engines wait for a turn to end before they answer with none."""

ANSWER_S = 0.01
"""The same while an environment may answer meanwhile."""

TURN_STRIDE = 1 << 40
"""How far the seeds of one turn lie from the next one's: no turn draws what another drew."""


@dataclass(slots=True)
class Conversation:
    """One rollout under way. R: its response tokens so far; C: those of them that the policy chose."""

    request: RolloutRequest
    """For the whole group."""

    sample: int
    """Its number in the group, from 0."""

    prompt: Prompt
    tokens: list[int] = field(default_factory=list)
    """Token ids of the response so far, [R]."""

    logprobs: list[float] = field(default_factory=list)
    """The engine's log-probs of the chosen tokens, [C]."""

    spans: list[WeightSpan] = field(default_factory=list)
    """The weights that tokens were sampled from; places in `tokens`."""

    observed: list[tuple[int, int]] = field(default_factory=list)
    """(start, end) in `tokens` of what the environment said."""

    messages: list[dict[str, str]] = field(default_factory=list)
    """What was said, as chat messages (role, content)."""

    num_turns: int = 0
    """The policy's turns so far."""

    finish_reason: str = ""
    """Of the policy's last turn."""

    @property
    def num_left(self) -> int:
        return self.request.max_tokens - len(self.tokens)

    def next_turn(self) -> RolloutRequest:
        """What the engine is asked for now."""
        whole = self.request
        return RolloutRequest(
            id=f"{whole.id}#{self.sample}.{self.num_turns}",
            prompt=(*whole.prompt, *self.tokens),
            num_samples=1,
            temperature=whole.temperature,
            seed=whole.seed + self.sample + self.num_turns * TURN_STRIDE,
            max_tokens=self.num_left,
            session=whole.id,
        )

    def append_policy_turn(self, turn: Completion, text: str) -> None:
        first = len(self.tokens)
        self.tokens += turn.tokens
        self.logprobs += turn.logprobs
        self.spans += [WeightSpan(span.version, first + span.start, first + span.end) for span in turn.spans]
        self.messages.append({"role": "assistant", "content": text})
        self.num_turns += 1
        self.finish_reason = turn.finish_reason

    def append_observation(self, text: str, tokens: Sequence[int]) -> None:
        self.observed.append((len(self.tokens), len(self.tokens) + len(tokens)))
        self.tokens += tokens
        self.messages.append({"role": "user", "content": text})

    def completion(self, answer: Answer) -> Completion:
        """The whole, as far as it went. A game that ends without a reward has won none."""
        return Completion(
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason,
            spans=tuple(self.spans),
            observed=tuple(self.observed),
            num_turns=self.num_turns,
            reward=None if answer.failure else answer.reward or 0.0,
            failure=answer.failure,
        )


class Conversations:
    """See the module docstring. It is asked like a Fleet. prompt_of: the prompt of a request, by the request's id.

    Requests are told apart by the first part of their ids (`generate/...`), so that two threads may each wait for
    theirs: whoever collects moves everybody's rollouts on.
    """

    def __init__(
        self,
        fleet: Fleet,
        pool: EnvironmentPool,
        spec: EnvironmentSpec,
        words: TextTokenizer,
        prompt_of: Callable[[str], Prompt],
    ) -> None:
        self.fleet, self.pool, self.spec, self.words, self.prompt_of = fleet, pool, spec, words, prompt_of
        self._talking: dict[str, Conversation] = {}
        self._finished: dict[str, dict[int, Completion]] = {}
        self._requests: dict[str, RolloutRequest] = {}
        self._ready: dict[str, list[FinishedRequest]] = {}
        self._unsent: list[RolloutRequest] = []
        self._num_asked = 0
        self._moving = threading.RLock()

    @property
    def processes(self) -> tuple[str, ...]:
        return self.fleet.processes

    def paused(self, timeout_s: float) -> AbstractContextManager[None]:
        return self.fleet.paused(timeout_s)

    def submit(self, requests: Sequence[RolloutRequest], timeout_s: float) -> None:
        """Begin rollouts, beside those under way. What has been submitted already is left as it is."""
        with self._moving:
            for request in [request for request in requests if request.id not in self._requests]:
                self._requests[request.id], self._finished[request.id] = request, {}
                prompt = self.prompt_of(request.id)
                for sample in range(request.num_samples):
                    messages = [{"role": "user", "content": prompt.text}]
                    self._begin_turn(Conversation(request, sample, prompt, messages=messages))
            self._send(timeout_s)

    def collect(
        self, max_wait_s: float, at_least: int, timeout_s: float, kind: str = "generate"
    ) -> tuple[list[FinishedRequest], list[Measurement]]:
        """Rollouts of a kind that have ended since the last time. Everybody's are moved on for a moment."""
        with self._moving:
            measurements = self._move_on(max_wait_s, timeout_s)
            return self._ready.pop(kind, []), measurements

    def generate(
        self, requests: Sequence[RolloutRequest], timeout_s: float
    ) -> tuple[list[FinishedRequest], list[Measurement]]:
        """Complete all rollouts; results in the requests' order."""
        deadline, kind = time.monotonic() + timeout_s, _kind(requests[0].id)
        finished: dict[str, FinishedRequest] = {}
        measurements: list[Measurement] = []
        self.submit(requests, timeout_s)
        while len(finished) < len(requests):
            collected, measured = self.collect(COLLECT_S, 1, timeout_s, kind)
            finished |= {one.id: one for one in collected}
            measurements = merged([*measurements, *measured])
            if time.monotonic() > deadline:
                raise RunError(
                    f"{len(requests) - len(finished)} of {len(requests)} rollouts did not end within {timeout_s:.0f} s",
                    where=", ".join(self.processes),
                    rule="every wait has a deadline (limits.action_timeout_s)",
                    way_out="allow fewer turns (rollout.environment.max_turns), or raise the limit",
                )
        return [finished[request.id] for request in requests], measurements

    def close(self) -> None:
        self.pool.close()

    def _move_on(self, max_wait_s: float, timeout_s: float) -> list[Measurement]:
        for name, answer in self.pool.ready():
            self._num_asked -= 1
            self._hear(self._talking.pop(name), answer)
        self._send(timeout_s)
        wait_s = min(max_wait_s, ANSWER_S) if self._num_asked else max_wait_s
        turns, measurements = self.fleet.collect(wait_s, 1, timeout_s)
        for turn in turns:
            conversation = self._talking[turn.id]
            (completion,) = turn.completions
            conversation.append_policy_turn(completion, self.words.text(completion.tokens))
            self.pool.ask(turn.id, conversation.messages, conversation.prompt.answer)
            self._num_asked += 1
        return measurements

    def _hear(self, conversation: Conversation, answer: Answer) -> None:
        """Go on with another turn, where the environment wants one and there is room for it."""
        if answer.failure or answer.observation is None or answer.reward is not None:
            return self._end(conversation, answer)
        tokens = self.words.tokens(answer.observation)[: self.spec.max_observation_len]
        if conversation.num_turns == self.spec.max_turns or len(tokens) >= conversation.num_left:
            return self._end(conversation, answer)
        conversation.append_observation(answer.observation, tokens)
        return self._begin_turn(conversation)

    def _begin_turn(self, conversation: Conversation) -> None:
        turn = conversation.next_turn()
        self._talking[turn.id] = conversation
        self._unsent.append(turn)

    def _end(self, conversation: Conversation, answer: Answer) -> None:
        name = conversation.request.id
        samples = self._finished[name]
        samples[conversation.sample] = conversation.completion(answer)
        if len(samples) == conversation.request.num_samples:
            whole = FinishedRequest(name, tuple(samples[index] for index in range(len(samples))))
            self._ready.setdefault(_kind(name), []).append(whole)
            self.fleet.end_session(name)
            del self._finished[name], self._requests[name]

    def _send(self, timeout_s: float) -> None:
        """Hand turns to the engines; what could not be handed over now is tried again."""
        if self._unsent:
            self.fleet.submit(self._unsent, timeout_s)
            self._unsent = []


def _kind(request_id: str) -> str:
    return request_id.partition("/")[0]
