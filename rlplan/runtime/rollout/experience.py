"""Experience: what one step produces, from prompts to advantages, as plain values that travel between processes.

Left out: a buffer over steps; a synchronous on-policy step keeps nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image in a prompt, of the size that the policy's processor gives it."""

    first: int
    """Index in the prompt of the first of the tokens that stand for it, `rows * columns` one after the other."""

    rows: int
    """Of tokens."""

    columns: int
    """Of tokens."""

    side: int
    """Of one token, in pixels."""

    pixels: bytes = field(repr=False)
    """Red, green and blue, [rows * side, columns * side, 3]."""

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class Prompt:
    id: str
    """Unique in its file."""

    text: str
    """As it was tokenized, after the chat template."""

    answer: str
    """The right answer; only verifiers see it."""

    tokens: tuple[int, ...]
    """Token ids, [prompt_len]."""

    columns: str = "{}"
    """The row's other columns as a JSON object, for reward functions."""

    answers: tuple[tuple[int, ...], ...] = ()
    """Token ids of the given answers where the policy generates none: (chosen, rejected), or one; [response_len] each.
    """

    is_good: bool = True
    """What was said of its one answer, where such are judged."""

    source: str = ""
    """The name of its data set where there are several."""

    chat: str = ""
    """The messages that the policy's template made `text` of, as JSON; empty where there were none."""

    joined: str = ""
    """The messages of a chat that no template has written, as JSON: `text` is their contents, line by line."""

    images: tuple[PromptImage, ...] = ()
    """In the order of their tokens."""

    @property
    def messages(self) -> str:
        """The chat that the row holds, as JSON; empty where its prompt is a text."""
        return self.chat or self.joined

    @property
    def question(self) -> tuple[str, tuple[bytes, ...]]:
        """What is asked: text and images. Two prompts with one question are the same."""
        return self.text, tuple(image.pixels for image in self.images)


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """`num_samples` completions of one prompt, wanted from an engine."""

    id: str
    """Unlike that of any other unfinished request."""

    prompt: tuple[int, ...]
    """Token ids, [prompt_len]."""

    num_samples: int
    """Completions, the greedy ones among them."""

    temperature: float
    seed: int
    """Sample i draws with seed + i."""

    max_tokens: int
    """The most tokens of one completion."""

    lengths: tuple[int, ...] = ()
    """Exactly so many tokens of each sample, [num_samples]; empty: until the policy ends it."""

    num_greedy: int = 0
    """So many of the samples, the last ones, are greedy whatever the temperature."""

    session: str = ""
    """Requests of one session go to one engine, which has the keys and values of earlier turns; empty: to any."""

    images: tuple[PromptImage, ...] = ()
    """Of the prompt."""


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
    """What came after one prompt: R tokens, C of which the policy chose (all but the observed ones)."""

    tokens: tuple[int, ...]
    """Token ids of the whole response, [R]."""

    logprobs: tuple[float, ...]
    """The engine's log-probs of the chosen tokens when they were sampled, [C]."""

    finish_reason: str
    """`stop` (end of sequence, or what the job stops at), `length` or `abort`."""

    spans: tuple[WeightSpan, ...] = ()
    """The weights that each token was sampled from; several where an update came in between."""

    observed: tuple[tuple[int, int], ...] = ()
    """(start, end) in `tokens` of what an environment said between the policy's turns."""

    num_turns: int = 1
    reward: float | None = None
    """The environment's reward, of all turns together; None without an environment."""

    turn_rewards: tuple[tuple[int, float], ...] = ()
    """(chosen tokens up to the turn's end, reward) of turns before the last that the environment gave a reward for."""

    ended: str = ""
    """Why the rollout of several turns went no further: one of conversation.py's words, ANSWERED and so on."""

    calls: tuple[str, ...] = ()
    """How each call of a tool ended: a word of tool_calls.py's OUTCOMES."""

    prompt_tokens: tuple[int, ...] = ()
    """Token ids of the prompt where the environment's `reset` has added to it; empty: the prompt's own."""

    failure: str = ""
    """Why the environment has not answered; then nothing is learned from the completion. Empty: it has."""

    @property
    def chosen(self) -> tuple[int, ...]:
        return tuple(self.tokens[index] for index in chosen_indices(len(self.tokens), self.observed))


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request of which every sample has ended, in the samples' order."""

    id: str
    completions: tuple[Completion, ...]


@dataclass(slots=True)
class Rollout:
    """One completion with everything that is learned about it. C: tokens that the policy chose."""

    prompt: Prompt
    group: int
    """Index of its prompt within the step."""

    completion: Completion
    text: str = ""
    """The chosen tokens as text, which rewards judge."""

    num_ignored: int = 0
    """So many of the last tokens are masked from the loss: what a forced length added, or all of them."""

    has_failed: bool = False
    """Its reward could not be had: it is neither scored nor learned from."""

    is_judged: bool = False
    """The job's rewards have been asked about it, whatever they gave."""

    baseline: float = 0.0
    """The reward of its prompt's greedy completion where rewards are compared with that, else 0."""

    rewards: dict[str, float] = field(default_factory=dict)
    """Unweighted, by reward name."""

    reward: float = 0.0
    """The sum of all rewards by their weights; dealt out anew where `controls.shuffle_rewards` says so."""

    scores: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """By scored role: one number a chosen token, [C]; of a reward model one in all, [1]."""

    turn_rewards: tuple[tuple[int, float], ...] = ()
    """(chosen tokens up to the turn's end, part of `reward` that came with it) of turns before the last."""

    advantage: float = 0.0
    """Of the whole response."""

    advantages: tuple[float, ...] = ()
    """One a chosen token, [C]."""

    returns: tuple[float, ...] = ()
    """What the value model shall learn, [C]; empty without one."""

    id: str = ""
    """Its request's id and its number there."""

    failure: str = ""
    """Why its reward could not be had; empty where it could."""

    @property
    def num_learned(self) -> int:
        """Response tokens that are learned from."""
        return 0 if self.has_failed else len(self.completion.logprobs) - self.num_ignored


@dataclass(frozen=True, slots=True)
class TrainSample:
    """What a trainer rank needs of one rollout: R response tokens, C of which the policy chose.

    Scores are empty where no role gives them.
    """

    prompt_tokens: tuple[int, ...]
    """Token ids, [prompt_len]."""

    response_tokens: tuple[int, ...]
    """Token ids of the whole response, [R]."""

    logprobs: tuple[float, ...]
    """The engine's at sampling time (the behaviour policy), [C]."""

    reference_logprobs: tuple[float, ...]
    """The reference's, [C]."""

    advantages: tuple[float, ...]
    """[C]."""

    teacher_logprobs: tuple[float, ...] = ()
    """The teacher's, [C]."""

    values: tuple[float, ...] = ()
    """The value model's when the rollout was scored, [C]."""

    returns: tuple[float, ...] = ()
    """What the value model shall learn, [C]."""

    num_ignored: int = 0
    """So many of the last tokens are masked from the loss."""

    observed: tuple[tuple[int, int], ...] = ()
    """(start, end) in `response_tokens` of what an environment said; the policy has not chosen it."""

    old_logprobs: tuple[float, ...] = ()
    """The trainer's own before the step, [C]."""

    group: int = 0
    """Index of its prompt within the step."""

    advantage: float = 0.0
    """Of the whole response."""

    images: tuple[PromptImage, ...] = ()
    """Of the prompt."""

    @property
    def num_learned(self) -> int:
        """Response tokens that are learned from."""
        return len(self.logprobs) - self.num_ignored

    @property
    def num_tokens(self) -> int:
        """Of prompt and response."""
        return len(self.prompt_tokens) + len(self.response_tokens)

    def weigh_response(self, weight: float) -> float:
        """What the whole response counts where a token counts so much; an empty one as if it had one token."""
        return weight * (self.num_learned if self.logprobs else 1)

    def spread(self, weight: float) -> tuple[float, ...]:
        """A weight for each response token: this one, and 0 for those that are masked from the loss."""
        return (weight,) * self.num_learned + (0.0,) * self.num_ignored


def blank_sample(prompt_len: int, response_len: int) -> TrainSample:
    """A sample of so many tokens with every score that there may be: as large as any real one; it gives no gradient."""
    scores = (0.0,) * response_len
    return TrainSample(
        prompt_tokens=(0,) * prompt_len,
        response_tokens=(0,) * response_len,
        logprobs=scores,
        reference_logprobs=scores,
        advantages=scores,
        teacher_logprobs=scores,
        values=scores,
        returns=scores,
        old_logprobs=scores,
    )


@dataclass(frozen=True, slots=True)
class SequencePair:
    """A prompt and its response, to be scored."""

    prompt_tokens: tuple[int, ...]
    """Token ids, [prompt_len]."""

    response_tokens: tuple[int, ...]
    """Token ids, [response_len]."""

    observed: tuple[tuple[int, int], ...] = ()
    """(start, end) of response tokens that are not scored."""

    images: tuple[PromptImage, ...] = ()
    """Of the prompt."""

    @property
    def num_tokens(self) -> int:
        """Of both."""
        return len(self.prompt_tokens) + len(self.response_tokens)
