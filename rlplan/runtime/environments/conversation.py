"""Conversation: the state of one running multi-turn rollout, as tokens and as messages.

In: turns of the policy and the messages between them. Out: requests for further turns, and at the end a completion.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlplan.runtime.environments.tool_calls import ToolCall
from rlplan.runtime.rollout.experience import Completion, Prompt, RolloutRequest, WeightSpan

TURN_STRIDE = 1 << 40
"""Distance between the seeds of successive turns, so that no two turns of a run sample with the same seed.

It leaves room for the seeds of 2^20 steps, which are 2^20 apart (rollout/requests.py)."""
ANSWERED, FINAL, MAX_TURNS, CONTEXT, FAILED = "answered", "final", "max_turns", "context", "failed"
"""Reasons why a rollout ends.

In this order: the environment ended it; a turn called no tool and there is no environment; the turn limit is reached;
the next turn does not fit; something failed."""


@dataclass(slots=True)
class Conversation:
    """One running rollout. R: number of response tokens so far; C: number of them that the policy sampled."""

    request: RolloutRequest
    """Request of the whole group."""

    sample: int
    """Index in the group, from 0."""

    prompt: Prompt
    messages: list[dict[str, Any]]
    """All chat messages (role, content) so far, starting with the prompt."""

    tokens: list[int] = field(default_factory=list)
    """Token ids of the response so far, [R]."""

    logprobs: list[float] = field(default_factory=list)
    """Log-probs of the sampled tokens from the engine, [C]."""

    spans: list[WeightSpan] = field(default_factory=list)
    """Weight version of each stretch of `tokens`."""

    observed: list[tuple[int, int]] = field(default_factory=list)
    """(start, end) in `tokens` of the environment's messages."""

    num_turns: int = 0
    """Finished turns of the policy."""

    finish_reason: str = ""
    """Finish reason of the policy's last turn."""

    rewards: list[tuple[int, float]] = field(default_factory=list)
    """(C at the time of the reward, reward)."""

    calls: list[ToolCall] = field(default_factory=list)
    """Tool calls of the last turn."""

    results: dict[int, str] = field(default_factory=dict)
    """Results of finished calls, by index in `calls`."""

    outcomes: list[str] = field(default_factory=list)
    """Outcomes of the calls of all turns."""

    is_changed: bool = False
    """Whether the environment appended text to the prompt."""

    ended: str = ""
    """Reason why the rollout ended; empty while it runs."""

    failure: str = ""
    """Error that ended the rollout; empty without one."""

    @property
    def name(self) -> str:
        """A name that is unique among the running rollouts."""
        return f"{self.request.id}#{self.sample}"

    @property
    def num_left(self) -> int:
        return self.request.max_tokens - len(self.tokens)

    def make_next_request(self, turn: int | None = None, observation: Sequence[int] = ()) -> RolloutRequest:
        """The engine's request for the next turn.

        turn: number of the turn in the rollout, if the rollout has several conversations. observation: tokens that will
        be appended before the turn.
        """
        group, turn = self.request, self.num_turns if turn is None else turn
        return RolloutRequest(
            id=f"{self.name}.{turn}",
            prompt=(*self.prompt.tokens, *self.tokens, *observation),
            num_samples=1,
            temperature=group.temperature,
            seed=group.seed + self.sample + turn * TURN_STRIDE,
            max_tokens=self.num_left - len(observation),
            session=group.id,
        )

    def append_policy_turn(self, turn: Completion, message: dict[str, Any]) -> None:
        first = len(self.tokens)
        self.tokens += turn.tokens
        self.logprobs += turn.logprobs
        self.spans += [WeightSpan(span.version, first + span.start, first + span.end) for span in turn.spans]
        self.messages.append(message)
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
        """Record the outcome and result of one call of the last turn."""
        self.outcomes.append(outcome)
        self.results[place] = result

    def make_completion(self) -> Completion:
        """The rollout so far as one completion. Without a reward from the environment its reward is 0."""
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
