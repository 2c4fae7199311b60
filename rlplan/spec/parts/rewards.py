"""Rule-based rewards (verifiers): how a response is judged, as the `rewards:` part of a job defines it.

In: parsed YAML. Out: frozen values. Left out: how they are computed (runtime/rewards); learned rewards are a role.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from rlplan.spec.base import ByteCount, Spec
from rlplan.units import GIB, MIB

Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")]


MAX_PATTERN_PARTS = 100_000
"""Most parts of a pattern after counted repeats are written out, as the matcher does; that many take it 27 MB."""
_PATTERN_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(?P<count>\d+)[^}]*\}|.", re.DOTALL)


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from None
    if (num_parts := _count_parts(pattern)) > MAX_PATTERN_PARTS:
        raise ValueError(f"its repeats, written out, have {num_parts:,} parts; at most {MAX_PATTERN_PARTS:,}")
    return pattern


def _count_parts(pattern: str) -> int:
    """Parts of a pattern after counted repeats are written out.

    >>> _count_parts("ab"), _count_parts("(ab|c){10}d"), _count_parts("((a{9}){9}){9}"), _count_parts("[{9}(]{2}")
    (2, 41, 729, 2)
    """
    counts, last = [0], 0
    for part in _PATTERN_PART.finditer(pattern):
        if part[0] == "(":
            counts.append(0)
            continue
        if part[0] == ")" and len(counts) > 1:
            last = counts.pop()
        else:
            last = last * (int(part["count"]) - 1) if part["count"] else 1
        counts[-1] += last
    return sum(counts)


def check_group(pattern: str) -> str:
    """A regular expression with at least one group. Raises: ValueError."""
    if re.compile(_compiles(pattern)).groups < 1:
        raise ValueError("the pattern needs one (group) that holds the answer")
    return pattern


class _Reward(Spec):
    """Keys shared by all rewards."""

    weight: float = 1.0
    """Weight of the reward in a rollout's total reward."""
    name: Name | None = None
    """Name of the reward in metrics; None: its kind."""

    @property
    def label(self) -> str:
        """The reward's name within the job."""
        return self.name or str(getattr(self, "kind", ""))


class AnswerMatcherSpec(_Reward):
    """Reward 1 if the pattern's first group equals the row's answer, ignoring surrounding whitespace."""

    kind: Literal["answer_matcher"]
    pattern: str = r"<answer>(.*?)</answer>"
    """Regular expression whose first group is the answer."""
    compares: Literal["text", "math"] = "text"
    """How answers are compared: as `text`, or by mathematical equality (math-verify, in a separate process)."""
    timeout_s: float = Field(default=5.0, gt=0, le=600)
    """Timeout in seconds of one mathematical comparison."""

    _pattern_has_group = field_validator("pattern")(check_group)


class FormatCheckerSpec(_Reward):
    """Reward 1 if the whole response matches the pattern."""

    kind: Literal["format_checker"]
    pattern: str = r"<answer>.*</answer>"
    """Regular expression that the response must match."""

    _pattern_compiles = field_validator("pattern")(_compiles)


class CodeExecutorSpec(_Reward):
    """Runs the program in a response against the row's tests, in a sandbox."""

    kind: Literal["code_executor"]
    pattern: str = r"\x60{3}\w*[ \t]*\n(.*?)\x60{3}"
    """Regular expression whose first group is the program; the last match counts."""
    template: str = "{program}"
    """Text of the program that is run, with `{program}` and `{prompt}` filled in."""
    credit: Literal["all", "fraction"] = "all"
    """`all`: 1 if all tests pass; `fraction`: the fraction of tests that pass."""
    case_timeout_s: float = Field(default=4.0, gt=0, le=600)
    """Timeout in seconds of one test."""
    timeout_s: float = Field(default=30.0, gt=0, le=3600)
    """Timeout in seconds of all tests."""
    memory: ByteCount = 512 * MIB
    """Memory limit of the sandbox in bytes."""
    max_processes: int = Field(default=32, ge=4, le=4096)
    """Process limit of the sandbox."""

    _pattern_has_group = field_validator("pattern")(check_group)

    @field_validator("template")
    @classmethod
    def _holds_the_program(cls, template: str) -> str:
        if "{program}" not in template:
            raise ValueError("the template holds {program}")
        return template


class FunctionSpec(_Reward):
    """A user-defined reward function, run in a separate process."""

    kind: Literal["function"]
    path: str
    """Function as `FILE.py:NAME`."""
    signature: Literal["auto", "trl", "verl"] = "auto"
    """Calling convention. `trl`: f(prompts, completions, **columns) -> list, once per batch. `verl`: f(data_source,
    solution_str, ground_truth, extra_info) -> number or dict with `score`, once per response. `auto`: decided by the
    function's parameters."""
    timeout_s: float = Field(default=10.0, gt=0, le=3600)
    """Timeout in seconds per response of a call."""
    memory: ByteCount = GIB
    """Memory limit in bytes, in addition to the responses passed in."""

    @model_validator(mode="after")
    def _path_names_a_function(self) -> "FunctionSpec":
        file, _, name = self.path.rpartition(":")
        if not file.endswith(".py") or not name.isidentifier():
            raise ValueError(f"'{self.path}' is not FILE.py:NAME")
        return self

    @property
    def file(self) -> str:
        """The Python file."""
        return self.path.rpartition(":")[0]


RewardSpec = Annotated[
    AnswerMatcherSpec | FormatCheckerSpec | CodeExecutorSpec | FunctionSpec, Field(discriminator="kind")
]


def needs_processes(reward: RewardSpec) -> bool:
    """Whether a reward uses processes of its own, which are worth starting early."""
    return not isinstance(reward, FormatCheckerSpec) and not (
        isinstance(reward, AnswerMatcherSpec) and reward.compares == "text"
    )


@dataclass(frozen=True)
class Evaluation:
    """A metric over held-out prompts: one reward of the responses to them."""

    reward: str
    """Label of the reward."""
    name: str
    """Name of the metric, which is `evaluate/NAME`."""
    title: str
    """Name in words, for metrics of rlplan's own rewards."""
    is_share: bool
    """Whether the metric is a share of the prompts or of their tests, between 0 and 1."""
    heldout: str = ""
    """Name of the data set, if there are several."""
    passes_of: int = 0
    """k of pass@k: the share of prompts with at least one right response among k. 0: the mean over all responses."""

    @property
    def metric(self) -> str:
        """Column of the metric in a run's metrics."""
        return EVALUATION_PREFIX + self.name


def list_evaluations(
    rewards: Iterable[RewardSpec], *, has_environment: bool, heldout_sets: Iterable[str] = ("",), num_samples: int = 0
) -> tuple[Evaluation, ...]:
    """Evaluations per data set: the answer matcher first, then the other rewards in order, the environment last.

    num_samples: sampled responses per prompt; 0 for one greedy response.
    """
    evaluations = [_evaluation(reward, is_greedy=not num_samples) for reward in rewards]
    evaluations.sort(key=lambda evaluation: evaluation.name.removeprefix("greedy_") != "accuracy")
    if has_environment:
        evaluations.append(Evaluation(ENVIRONMENT, "environment_reward", "environment reward", is_share=False))
    if num_samples:
        evaluations = [metric for evaluation in evaluations for metric in _list_sampled(evaluation, num_samples)]
    return tuple(_add_prefix(evaluation, name) for name in heldout_sets for evaluation in evaluations)


def list_ranking_evaluations(heldout_sets: Iterable[str]) -> tuple[Evaluation, ...]:
    """Evaluations of a model that scores pairs, per data set."""
    evaluation = Evaluation(PAIR_ACCURACY, PAIR_ACCURACY, "pair accuracy", is_share=True)
    return tuple(_add_prefix(evaluation, name) for name in heldout_sets)


def _list_sampled(evaluation: Evaluation, num_samples: int) -> Iterator[Evaluation]:
    """avg@n, and for a right-or-wrong reward pass@k for each power of 2 up to n."""
    yield replace(
        evaluation, name=f"{evaluation.name}/avg@{num_samples}", title=f"{evaluation.title} avg@{num_samples}"
    )
    powers = [1 << exponent for exponent in range(1, num_samples.bit_length()) if evaluation.is_share]
    for k in sorted({*powers, *([num_samples] if powers else [])}):
        yield replace(evaluation, name=f"{evaluation.name}/pass@{k}", title=f"{evaluation.title} pass@{k}", passes_of=k)


def _add_prefix(evaluation: Evaluation, heldout: str) -> Evaluation:
    """The evaluation named after its data set, if that has a name."""
    name, title = f"{heldout}/{evaluation.name}", f"{heldout}: {evaluation.title}"
    return replace(evaluation, name=name, title=title, heldout=heldout) if heldout else evaluation


def _evaluation(reward: RewardSpec, *, is_greedy: bool) -> Evaluation:
    is_share = not isinstance(reward, FunctionSpec)
    if reward.name is not None or reward.kind not in _OUR_NAMES:
        return Evaluation(reward.label, reward.label, reward.label, is_share)
    name = _OUR_NAMES[reward.kind] if is_greedy else _OUR_NAMES[reward.kind].removeprefix("greedy_")
    return Evaluation(reward.label, name, name.replace("_", " "), is_share)


EVALUATION_PREFIX = "evaluate/"
PAIR_ACCURACY = "pair_accuracy"
"""Metric: the share of held-out pairs whose chosen answer a reward model scores higher; ties count half."""
ENVIRONMENT = "environment"
"""Label of an environment's reward."""
_OUR_NAMES = {"answer_matcher": "greedy_accuracy", "format_checker": "format_accuracy", "code_executor": "pass_rate"}
