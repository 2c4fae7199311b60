"""Experience: what one step produces, from prompts to advantages, as plain values that travel between processes.

Left out: a buffer over steps; a synchronous on-policy step keeps nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, tokenized. answer: the right answer, seen by verifiers only.

    columns: what else its row says, as JSON, for reward functions.
    answers: given ones, where the policy generates none: the chosen and the rejected.
    """

    id: str
    text: str
    answer: str
    tokens: tuple[int, ...]
    columns: str = "{}"
    answers: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """`num_samples` completions of one prompt, wanted from an engine. id: not that of another unfinished request.

    temperature: 0 is greedy. seed: sample i draws with seed + i. max_tokens: of a completion. num_greedy: of the
    samples, the last ones, that are greedy whatever the temperature.
    lengths: exactly so many tokens of each sample, whatever the policy says; empty: until it ends by itself.
    home: requests of one home lie on one engine, where the keys and values of their turns before are; empty: anywhere.
    """

    id: str
    prompt: tuple[int, ...]
    num_samples: int
    temperature: float
    seed: int
    max_tokens: int
    lengths: tuple[int, ...] = ()
    num_greedy: int = 0
    home: str = ""


def chosen_indices(num_tokens: int, observed: Sequence[tuple[int, int]]) -> list[int]:
    """Where the policy's own tokens lie in a response. observed: (start, end) of what an environment said.

    >>> chosen_indices(6, [(1, 3)])
    [0, 3, 4, 5]
    """
    said = {index for start, end in observed for index in range(start, end)}
    return [index for index in range(num_tokens) if index not in said]


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Tokens `start` to `end` (exclusive) of a completion were sampled from weights of that version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Completion:
    """What came after one prompt. tokens: all of the response. logprobs: of those that the policy chose.

    finish_reason: `stop` (end of sequence, or what the job stops at), `length` or `abort`.
    spans: the weights that each token was sampled from; several where an update came in between.
    observed: (start, end) of tokens that an environment said between the policy's turns; num_turns: of the policy.
    reward: that the environment gave. failure: why it has not answered; then nothing is learned from it.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    spans: tuple[WeightSpan, ...] = ()
    observed: tuple[tuple[int, int], ...] = ()
    num_turns: int = 1
    reward: float | None = None
    failure: str = ""

    @property
    def chosen(self) -> tuple[int, ...]:
        """The tokens that the policy chose."""
        return tuple(self.tokens[index] for index in chosen_indices(len(self.tokens), self.observed))


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request of which every sample has ended, in the samples' order."""

    id: str
    completions: tuple[Completion, ...]


@dataclass(slots=True)
class Rollout:
    """One completion with everything that is learned about it. group: index of its prompt within the step.

    num_ignored: last tokens that nobody learns from: what a forced length added, or all of them.
    id: its request's, and its number there. failure: why its reward could not be had; has_failed: that it could not, so
    that it is neither scored nor learned from.
    baseline: what its reward is compared with where that is not its group. advantage: of the whole response.
    rewards: by reward name. scores: what each scored role says, by role: one number a token that the policy chose, of a
    reward model one in all. advantages, returns: one a chosen token; returns are empty without a value model.
    """

    prompt: Prompt
    group: int
    completion: Completion
    text: str = ""
    num_ignored: int = 0
    has_failed: bool = False
    baseline: float = 0.0
    rewards: dict[str, float] = field(default_factory=dict)
    reward: float = 0.0
    scores: dict[str, tuple[float, ...]] = field(default_factory=dict)
    advantage: float = 0.0
    advantages: tuple[float, ...] = ()
    returns: tuple[float, ...] = ()
    id: str = ""
    failure: str = ""

    @property
    def num_learned(self) -> int:
        """Response tokens that are learned from."""
        return 0 if self.has_failed else len(self.completion.logprobs) - self.num_ignored


@dataclass(frozen=True, slots=True)
class TrainSample:
    """What a trainer rank needs of one rollout: one number a chosen token each, empty where nobody gives it.

    response_tokens: all of the response; observed: those that an environment said, which the policy has not chosen.
    logprobs: the engine's, at sampling time (the behaviour policy). values: the value model's, when the rollout was
    scored; returns: what it shall learn. num_ignored: last tokens that nobody learns from. old_logprobs: the trainer's
    own before the step. group: of the prompt, within the step; advantage: of the whole response.
    """

    prompt_tokens: tuple[int, ...]
    response_tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    reference_logprobs: tuple[float, ...]
    advantages: tuple[float, ...]
    teacher_logprobs: tuple[float, ...] = ()
    values: tuple[float, ...] = ()
    returns: tuple[float, ...] = ()
    num_ignored: int = 0
    observed: tuple[tuple[int, int], ...] = ()
    old_logprobs: tuple[float, ...] = ()
    group: int = 0
    advantage: float = 0.0

    @property
    def num_learned(self) -> int:
        """Response tokens that are learned from."""
        return len(self.logprobs) - self.num_ignored

    def weighed(self, weight: float) -> float:
        """What the whole response counts where a token counts so much; an empty one as if it had one token."""
        return weight * (self.num_learned if self.logprobs else 1)

    def spread(self, weight: float) -> tuple[float, ...]:
        """A weight for each response token: this one, and 0 for those that nobody learns from."""
        return (weight,) * self.num_learned + (0.0,) * self.num_ignored


@dataclass(frozen=True, slots=True)
class SequencePair:
    """A prompt and its response, to be scored. observed: tokens of the response that nobody is asked about."""

    prompt_tokens: tuple[int, ...]
    response_tokens: tuple[int, ...]
    observed: tuple[tuple[int, int], ...] = ()
