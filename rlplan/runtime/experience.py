"""Experience: what one step produces, from prompts to advantages, as plain values that travel between processes.

Left out: a buffer over steps; a synchronous on-policy step keeps nothing.
"""

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
    """

    id: str
    prompt: tuple[int, ...]
    num_samples: int
    temperature: float
    seed: int
    max_tokens: int
    lengths: tuple[int, ...] = ()
    num_greedy: int = 0


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Tokens `start` to `end` (exclusive) of a completion were sampled from weights of that version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Completion:
    """What the engine made of one prompt. tokens and logprobs have the same length (the sampled tokens).

    finish_reason: `stop` (end of sequence, or what the job stops at), `length` or `abort`.
    spans: the weights that each token was sampled from; several where an update came in between.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    spans: tuple[WeightSpan, ...] = ()


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
    rewards: by reward name. scores: what each scored role says, by role: one number a response token, of a reward
    model one in all. advantages, returns: one a response token; returns are empty without a value model.
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
        return 0 if self.has_failed else len(self.completion.tokens) - self.num_ignored


@dataclass(frozen=True, slots=True)
class TrainSample:
    """What a trainer rank needs of one rollout: one number a response token each, empty where nobody gives it.

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
    old_logprobs: tuple[float, ...] = ()
    group: int = 0
    advantage: float = 0.0

    @property
    def num_learned(self) -> int:
        """Response tokens that are learned from."""
        return len(self.response_tokens) - self.num_ignored

    def weighed(self, weight: float) -> float:
        """What the whole response counts where a token counts so much; an empty one as if it had one token."""
        return weight * (self.num_learned if self.response_tokens else 1)

    def spread(self, weight: float) -> tuple[float, ...]:
        """A weight for each response token: this one, and 0 for those that nobody learns from."""
        return (weight,) * self.num_learned + (0.0,) * self.num_ignored


@dataclass(frozen=True, slots=True)
class SequencePair:
    """A prompt and its response, to be scored."""

    prompt_tokens: tuple[int, ...]
    response_tokens: tuple[int, ...]
