"""Conversation: one rollout of several turns under way, as tokens and as messages.

In: turns of the policy's and what is said between them. Out: requests for further turns; at the end a completion.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlplan.runtime.environments.tool_calls import ToolCall
from rlplan.runtime.rollout.experience import Completion, Prompt, RolloutRequest, WeightSpan

TURN_STRIDE = 1 << 40
"""How far the seeds of one turn lie from the next one's: no turn draws what another drew."""
ANSWERED, FINAL, MAX_TURNS, CONTEXT, FAILED = "answered", "final", "max_turns", "context", "failed"
"""Why a rollout goes no further: the environment said so; a turn called no tool and there is no environment; there were
enough turns; the next one does not fit; something failed."""


@dataclass(slots=True)
class Conversation:
    """One rollout under way. R: its response tokens so far; C: those of them that the policy chose."""

    request: RolloutRequest
    """For the whole group."""

    sample: int
    """Its number in the group, from 0."""

    prompt: Prompt
    messages: list[dict[str, Any]]
    """What was said, as chat messages (role, content), the prompt first."""

    tokens: list[int] = field(default_factory=list)
    """Token ids of the response so far, [R]."""

    logprobs: list[float] = field(default_factory=list)
    """The engine's log-probs of the chosen tokens, [C]."""

    spans: list[WeightSpan] = field(default_factory=list)
    """The weights that tokens were sampled from; places in `tokens`."""

    observed: list[tuple[int, int]] = field(default_factory=list)
    """(start, end) in `tokens` of what the environment said."""

    num_turns: int = 0
    """The policy's turns so far."""

    finish_reason: str = ""
    """Of the policy's last turn."""

    rewards: list[tuple[int, float]] = field(default_factory=list)
    """(C when it was given, reward)."""

    calls: list[ToolCall] = field(default_factory=list)
    """Of the last turn."""

    results: dict[int, str] = field(default_factory=dict)
    """What those of them that have ended gave, by their place."""

    outcomes: list[str] = field(default_factory=list)
    """How calls of all turns ended."""

    is_changed: bool = False
    """Whether the environment has added to the prompt."""

    ended: str = ""
    failure: str = ""

    @property
    def name(self) -> str:
        """Unlike that of any other rollout under way."""
        return f"{self.request.id}#{self.sample}"

    @property
    def num_left(self) -> int:
        return self.request.max_tokens - len(self.tokens)

    def make_next_request(self) -> RolloutRequest:
        """What the engine is asked for now."""
        whole = self.request
        return RolloutRequest(
            id=f"{self.name}.{self.num_turns}",
            prompt=(*self.prompt.tokens, *self.tokens),
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

    def append_observation(self, messages: Sequence[dict[str, Any]], tokens: Sequence[int]) -> None:
        self.observed.append((len(self.tokens), len(self.tokens) + len(tokens)))
        self.tokens += tokens
        self.messages += messages

    def add_reward(self, reward: float | None) -> None:
        if reward is not None:
            self.rewards.append((len(self.logprobs), reward))

    def end_call(self, place: int, outcome: str, result: str) -> None:
        """A call of the last turn has ended."""
        self.outcomes.append(outcome)
        self.results[place] = result

    def make_completion(self) -> Completion:
        """The whole, as far as it went. A game that ends without a reward has won none."""
        return Completion(
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason,
            spans=tuple(self.spans),
            observed=tuple(self.observed),
            num_turns=self.num_turns,
            reward=None if self.failure else sum(reward for _, reward in self.rewards),
            turn_rewards=tuple((at, reward) for at, reward in self.rewards if at < len(self.logprobs)),
            failure=self.failure,
            ended=self.ended,
            calls=tuple(self.outcomes),
            prompt_tokens=self.prompt.tokens if self.is_changed else (),
        )
