"""Experience: prompts, requests, rollouts and samples of a step, as plain values that are sent between processes.

Shapes use R for the tokens of a response and C for those that the policy chose (not an environment's observations).
Left out: the buffer over steps (buffer.py).
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

SINGLE = frozenset({"logprobs", "reference_logprobs", "teacher_logprobs", "old_logprobs", "values"})
"""Fields whose numbers come from tensors of 32 bits, so that 4 bytes hold each of them."""


class Packed:
    """A dataclass that pickles its tuples of numbers as arrays, because a step sends millions of numbers.

    A token id takes 2 or 4 bytes instead of 3 to 5, and a log-prob 4 instead of 9. Equal advantages are sent once.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        names = [each.name for each in fields(self)]  # type: ignore[arg-type]
        return _unpack, (type(self), *(_pack(getattr(self, name), name in SINGLE) for name in names))


def _pack(value: Any, is_single: bool) -> Any:
    """Encode a tuple of numbers as (type code, bytes), or (number, count) if all are equal; wrap others in a list."""
    if type(value) is not tuple or not value or type(value[0]) not in (int, float):
        return [value]
    if is_single:
        return "f", array("f", value).tobytes()
    if type(value[0]) is float:
        is_equal = value.count(value[0]) == len(value)
        return (value[0], len(value)) if is_equal else ("d", array("d", value).tobytes())
    try:
        return "H", array("H", value).tobytes()
    except OverflowError:  # a large vocabulary
        return "i", array("i", value).tobytes()


def _unpack(kind: type[Any], *packed: Any) -> Any:
    return kind(*map(_unpack_value, packed))


def _unpack_value(packed: Any) -> Any:
    if type(packed) is list:
        return packed[0]
    code, content = packed
    return (code,) * content if type(content) is int else tuple(array(code, content))


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image in a prompt, resized by the policy's processor."""

    first: int
    """Index in the prompt of the first of its `rows * columns` consecutive tokens."""

    rows: int
    """Rows of tokens."""

    columns: int
    """Columns of tokens."""

    side: int
    """Width and height of one token, in pixels."""

    pixels: bytes = field(repr=False)
    """RGB values, [rows * side, columns * side, 3]."""

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of a data set."""

    id: str
    """Identifier, unique in its file."""

    text: str
    """Text after the chat template, as tokenized."""

    answer: str
    """The correct answer; only verifiers see it."""

    tokens: tuple[int, ...]
    """Token ids, [prompt_len]."""

    columns: str = "{}"
    """Other columns of the row as a JSON object, for reward functions."""

    answers: tuple[tuple[int, ...], ...] = ()
    """Token ids of the data set's answers, for offline algorithms: (chosen, rejected), or one; [response_len] each."""

    is_good: bool = True
    """Label of the single answer, for unpaired preferences (KTO)."""

    source: str = ""
    """Name of the data set, if there are several."""

    chat: str = ""
    """Messages from which the chat template built `text`, as JSON; empty without a template."""

    joined: str = ""
    """Messages of a chat without a template, as JSON; `text` is their contents, line by line."""

    images: tuple[PromptImage, ...] = ()
    """Images, in the order of their tokens."""

    @property
    def messages(self) -> str:
        """The row's chat as JSON; empty if its prompt is plain text."""
        return self.chat or self.joined

    @property
    def question(self) -> tuple[str, tuple[bytes, ...]]:
        """Key of the prompt's content: text and images. Prompts with equal keys are duplicates."""
        return self.text, tuple(image.pixels for image in self.images)


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """A request to an engine for `num_samples` completions of one prompt."""

    id: str
    """Identifier, unique among unfinished requests."""

    prompt: tuple[int, ...]
    """Token ids, [prompt_len]."""

    num_samples: int
    """Number of completions, including greedy ones."""

    temperature: float
    seed: int
    """Base seed; sample i uses seed + i."""

    max_tokens: int
    """Maximum length of a completion."""

    lengths: tuple[int, ...] = ()
    """Forced length of each sample, [num_samples]; empty to let the policy end its responses."""

    num_greedy: int = 0
    """Number of greedy samples; they are the last ones."""

    session: str = ""
    """Session name. All requests of a session go to one engine, which has the earlier turns cached; empty for none."""

    images: tuple[PromptImage, ...] = ()
    """Images of the prompt."""

    stop: tuple[str, ...] = ()
    """Texts that end a completion and are part of it, in addition to the job's."""


def chosen_indices(num_tokens: int, observed: Sequence[tuple[int, int]]) -> list[int]:
    """Indices of the policy's own tokens in a response. observed: (start, end) of an environment's tokens.

    >>> chosen_indices(6, [(1, 3)])
    [0, 3, 4, 5]
    """
    excluded = {index for start, end in observed for index in range(start, end)}
    return [index for index in range(num_tokens) if index not in excluded]


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Tokens `start` to `end` (exclusive) of a completion, which were sampled from weights of one version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Completion(Packed):
    """The response to a prompt: R tokens, C of which the policy chose (all but the observed ones)."""

    tokens: tuple[int, ...]
    """Token ids of the entire response, [R]."""

    logprobs: tuple[float, ...]
    """The engine's log-probs of the chosen tokens at sampling time, [C]."""

    finish_reason: str
    """`stop` (end of sequence, or one of the job's stop strings), `length` or `abort`."""

    spans: tuple[WeightSpan, ...] = ()
    """Weight versions of the tokens; several if a weight sync happened in between."""

    observed: tuple[tuple[int, int], ...] = ()
    """(start, end) in `tokens` of an environment's observations between the policy's turns."""

    num_turns: int = 1
    reward: float | None = None
    """The environment's reward over all turns; None without an environment."""

    turn_rewards: tuple[tuple[int, float], ...] = ()
    """(chosen tokens up to the turn's end, reward) of each turn with a reward, except the last turn."""

    ended: str = ""
    """Why a multi-turn rollout ended: a constant of conversation.py, such as ANSWERED."""

    calls: tuple[str, ...] = ()
    """Outcome of each tool call: one of OUTCOMES in tool_calls.py."""

    prompt_tokens: tuple[int, ...] = ()
    """Token ids of the prompt if the environment's `reset` changed it; empty for the prompt's own tokens."""

    failure: str = ""
    """The environment's error, which masks the completion from training; empty without an error."""

    experts: Any = None
    """Experts that the engine's routers chose for prompt and response but the last token, with
    `rollout.replays_experts`: int16, [tokens, layers with experts, experts of a token]."""

    answer: str | None = None
    """An agent's answer, which rewards judge. If it is None, they judge the text of the chosen tokens."""

    branches: "tuple[Completion, ...]" = ()
    """The rollout's other conversations, each with its own prompt; an agent that changes its messages starts one."""

    @property
    def chosen(self) -> tuple[int, ...]:
        return tuple(self.tokens[index] for index in chosen_indices(len(self.tokens), self.observed))


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request whose samples have all finished, with completions in sample order."""

    id: str
    completions: tuple[Completion, ...]


@dataclass(frozen=True, slots=True)
class TeacherTokens:
    """A teacher's distribution at the C tokens of a response that the policy chose: k tokens of the vocabulary each."""

    logprobs: "np.ndarray[Any, Any]"
    """Log-probs, fp32, [C, k]; of the whole vocabulary in its order, or the highest first."""

    ids: "np.ndarray[Any, Any] | None" = None
    """Token ids, int32, [C, k]; None for the whole vocabulary."""


@dataclass(slots=True)
class Rollout:
    """One completion with its rewards, scores and advantages. C: tokens that the policy chose."""

    prompt: Prompt
    group: int
    """Index of the prompt within the step."""

    completion: Completion
    text: str = ""
    """Text of the chosen tokens, which rewards judge."""

    num_ignored: int = 0
    """Number of last tokens that the loss ignores: those that a forced length added, or all of them."""

    has_failed: bool = False
    """Whether computing the reward failed; the rollout is then neither scored nor trained on."""

    is_judged: bool = False
    """Whether the job's rewards have been computed, successfully or not."""

    baseline: float = 0.0
    """Reward of the prompt's greedy completion, for algorithms with a greedy baseline; else 0."""

    rewards: dict[str, float] = field(default_factory=dict)
    """Unweighted rewards by name."""

    reward: float = 0.0
    """Weighted sum of all rewards; permuted among rollouts with `controls.shuffle_rewards`."""

    scores: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Scores by role: one number per chosen token, [C]; a reward model's single number, [1]."""

    teacher_tokens: TeacherTokens | None = None
    """The teacher's distributions, for `algorithm.teacher_top_k`."""

    turn_rewards: tuple[tuple[int, float], ...] = ()
    """(chosen tokens up to the turn's end, part of `reward`) of each turn before the last."""

    advantage: float = 0.0
    """Advantage of the response as one action."""

    advantages: tuple[float, ...] = ()
    """Advantages of the chosen tokens, [C]."""

    returns: tuple[float, ...] = ()
    """Targets of the value model, [C]; empty without one."""

    id: str = ""
    """Id of the request and index of the sample."""

    failure: str = ""
    """Why computing the reward failed; empty if it succeeded."""

    branches: "list[Rollout]" = field(default_factory=list)
    """An agent's other conversations, which are trained on with this rollout's advantage."""

    @property
    def num_learned(self) -> int:
        """Number of response tokens that the loss learns from."""
        return 0 if self.has_failed else len(self.completion.logprobs) - self.num_ignored


def add_branches(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """All sequences that are trained on: each rollout, followed by its branches."""
    return [sequence for rollout in rollouts for sequence in (rollout, *rollout.branches)]


@dataclass(frozen=True, slots=True)
class TrainSample(Packed):
    """The data of one rollout for a trainer rank: R response tokens, C of which the policy chose.

    Scores of roles that the job does not have are empty.
    """

    prompt_tokens: tuple[int, ...]
    """Token ids of the prompt, [prompt_len]."""

    response_tokens: tuple[int, ...]
    """Token ids of the entire response, [R]."""

    logprobs: tuple[float, ...]
    """The engine's log-probs at sampling time (behaviour policy), [C]."""

    reference_logprobs: tuple[float, ...]
    """The reference's log-probs, [C]."""

    advantages: tuple[float, ...]
    """Advantages, [C]."""

    teacher_logprobs: tuple[float, ...] = ()
    """The teacher's log-probs, [C]; empty with `teacher_tokens`."""

    values: tuple[float, ...] = ()
    """The value model's predictions at scoring time, [C]."""

    returns: tuple[float, ...] = ()
    """Targets of the value model, [C]."""

    num_ignored: int = 0
    """Number of last tokens that the loss ignores."""

    observed: tuple[tuple[int, int], ...] = ()
    """(start, end) in `response_tokens` of an environment's observations, which the policy did not choose."""

    old_logprobs: tuple[float, ...] = ()
    """The trainer's log-probs before the step, [C]."""

    group: int = 0
    """Index of the prompt within the step."""

    advantage: float = 0.0
    """Advantage of the response as one action."""

    images: tuple[PromptImage, ...] = ()
    """Images of the prompt."""

    teacher_tokens: TeacherTokens | None = None
    """The teacher's distributions, for `algorithm.teacher_top_k`."""

    experts: "np.ndarray[Any, Any] | None" = None
    """`Completion.experts`."""

    @property
    def num_learned(self) -> int:
        """Number of response tokens that the loss learns from."""
        return len(self.logprobs) - self.num_ignored

    @property
    def num_tokens(self) -> int:
        """Length of prompt and response."""
        return len(self.prompt_tokens) + len(self.response_tokens)

    def weigh_response(self, weight: float) -> float:
        """Weight of the response as one action, given each token's weight; an empty response counts as one token."""
        return weight * (self.num_learned if self.logprobs else 1)

    def spread(self, weight: float) -> tuple[float, ...]:
        """Weights of the chosen tokens: `weight`, and 0 for tokens that the loss ignores."""
        return (weight,) * self.num_learned + (0.0,) * self.num_ignored


def blank_sample(prompt_len: int, response_len: int) -> TrainSample:
    """A sample of the given lengths with all scores, as large as a real one; it gives no gradient."""
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
class SequencePair(Packed):
    """A prompt and its response, to be scored."""

    prompt_tokens: tuple[int, ...]
    """Token ids of the prompt, [prompt_len]."""

    response_tokens: tuple[int, ...]
    """Token ids of the response, [response_len]."""

    observed: tuple[tuple[int, int], ...] = ()
    """(start, end) of response tokens that are not scored."""

    images: tuple[PromptImage, ...] = ()
    """Images of the prompt."""

    experts: "np.ndarray[Any, Any] | None" = None
    """`Completion.experts`, for passes of the policy."""

    @property
    def num_tokens(self) -> int:
        """Length of prompt and response."""
        return len(self.prompt_tokens) + len(self.response_tokens)
