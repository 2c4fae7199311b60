"""Rewards that follow rules: how a response is judged, as the `rewards:` part of a job says it.

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


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return pattern


def pattern_with_group(pattern: str) -> str:
    """A regular expression that holds something. Raises: ValueError."""
    if re.compile(_compiles(pattern)).groups < 1:
        raise ValueError("the pattern needs one (group) that holds the answer")
    return pattern


class _Reward(Spec):
    """What all rewards have."""

    weight: float = 1.0
    name: Name | None = None
    """Under which its values are reported; None for its kind."""

    @property
    def label(self) -> str:
        """Its name among the rewards of a job."""
        return self.name or str(getattr(self, "kind", ""))


class AnswerMatcherSpec(_Reward):
    """Reward 1 when the pattern's first group equals the row's answer, whitespace around both aside."""

    kind: Literal["answer_matcher"]
    pattern: str = r"<answer>(.*?)</answer>"
    compares: Literal["text", "math"] = "text"
    """As `text`, or as `math`: equal by the rules of mathematics (math-verify, in a process of its own)."""
    timeout_s: float = Field(default=5.0, gt=0, le=600)
    """For one comparison of mathematics."""

    _pattern_has_group = field_validator("pattern")(pattern_with_group)


class FormatCheckerSpec(_Reward):
    """Reward 1 when the whole response matches the pattern."""

    kind: Literal["format_checker"]
    pattern: str = r"<answer>.*</answer>"

    _pattern_compiles = field_validator("pattern")(_compiles)


class CodeExecutorSpec(_Reward):
    """Runs the program in a response against the row's tests, in a sandbox."""

    kind: Literal["code_executor"]
    pattern: str = r"\x60{3}\w*[ \t]*\n(.*?)\x60{3}"
    """Its first group is the program; the last match counts."""
    template: str = "{program}"
    """What is run; `{program}` and `{prompt}` stand for them."""
    credit: Literal["all", "fraction"] = "all"
    """1 when `all` tests pass, or the `fraction` that do."""
    case_timeout_s: float = Field(default=4.0, gt=0, le=600)
    """For one test."""
    timeout_s: float = Field(default=30.0, gt=0, le=3600)
    """For all tests."""
    memory: ByteCount = 512 * MIB
    """Bytes of the whole sandbox."""
    max_processes: int = Field(default=32, ge=4, le=4096)
    """Of the whole sandbox."""

    _pattern_has_group = field_validator("pattern")(pattern_with_group)

    @field_validator("template")
    @classmethod
    def _holds_the_program(cls, template: str) -> str:
        if "{program}" not in template:
            raise ValueError("the template holds {program}")
        return template


class FunctionSpec(_Reward):
    """A function of the user's own, in a process of its own."""

    kind: Literal["function"]
    path: str
    """`FILE.py:NAME`."""
    signature: Literal["auto", "trl", "verl"] = "auto"
    """`trl`, f(prompts, completions, **columns) -> list, once per batch; `verl`, f(data_source, solution_str,
    ground_truth, extra_info) -> number or dict with `score`, per response; `auto` looks at its parameters."""
    timeout_s: float = Field(default=10.0, gt=0, le=3600)
    """Seconds for each response of a call."""
    memory: ByteCount = GIB
    """Bytes that it may take beside the responses that it is called with."""

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


def runs_elsewhere(reward: RewardSpec) -> bool:
    """Whether a reward takes processes of its own, so that it is worth starting early."""
    return not isinstance(reward, FormatCheckerSpec) and not (
        isinstance(reward, AnswerMatcherSpec) and reward.compares == "text"
    )


@dataclass(frozen=True)
class Evaluation:
    """A metric over held-out prompts, of one reward of the responses to each."""

    reward: str
    """Its label among a rollout's rewards."""
    name: str
    """The metric is `evaluate/NAME`."""
    title: str
    """The name in words, where it is ours."""
    is_share: bool
    """A share of the prompts or of their tests, between 0 and 1."""
    heldout: str = ""
    """The data set, where there are several."""
    passes_of: int = 0
    """k of pass@k: the share of prompts of which one of k responses is right; 0 is the mean over all responses."""

    @property
    def metric(self) -> str:
        """Its column among a run's metrics."""
        return EVALUATION_PREFIX + self.name


def evaluations_of(
    rewards: Iterable[RewardSpec], *, has_environment: bool, heldout_sets: Iterable[str] = ("",), num_samples: int = 0
) -> tuple[Evaluation, ...]:
    """What is evaluated, data set by data set: the answer matcher first, then the other rewards as they stand, the
    environment last. num_samples: responses that are sampled of each prompt; 0 for one greedy one.
    """
    found = [_evaluation(reward, is_greedy=not num_samples) for reward in rewards]
    found.sort(key=lambda one: one.name.removeprefix("greedy_") != "accuracy")
    if has_environment:
        found.append(Evaluation(ENVIRONMENT, "environment_reward", "environment reward", is_share=False))
    if num_samples:
        found = [each for one in found for each in _sampled(one, num_samples)]
    return tuple(one if not name else _within(one, name) for name in heldout_sets for one in found)


def ranking_evaluations(heldout_sets: Iterable[str]) -> tuple[Evaluation, ...]:
    """What is evaluated of a model that scores pairs, data set by data set."""
    one = Evaluation(PAIR_ACCURACY, PAIR_ACCURACY, "pair accuracy", is_share=True)
    return tuple(one if not name else _within(one, name) for name in heldout_sets)


def _sampled(one: Evaluation, num_samples: int) -> Iterator[Evaluation]:
    """avg@n, and of a reward that says right or wrong pass@k for each power of 2 up to n."""
    yield replace(one, name=f"{one.name}/avg@{num_samples}", title=f"{one.title} avg@{num_samples}")
    powers = [1 << exponent for exponent in range(1, num_samples.bit_length()) if one.is_share]
    for k in sorted({*powers, *([num_samples] if powers else [])}):
        yield replace(one, name=f"{one.name}/pass@{k}", title=f"{one.title} pass@{k}", passes_of=k)


def _within(one: Evaluation, heldout: str) -> Evaluation:
    return replace(one, name=f"{heldout}/{one.name}", title=f"{heldout}: {one.title}", heldout=heldout)


def _evaluation(reward: RewardSpec, *, is_greedy: bool) -> Evaluation:
    is_share = not isinstance(reward, FunctionSpec)
    if reward.name is not None or reward.kind not in _OUR_NAMES:
        return Evaluation(reward.label, reward.label, reward.label, is_share)
    name = _OUR_NAMES[reward.kind] if is_greedy else _OUR_NAMES[reward.kind].removeprefix("greedy_")
    return Evaluation(reward.label, name, name.replace("_", " "), is_share)


EVALUATION_PREFIX = "evaluate/"
PAIR_ACCURACY = "pair_accuracy"
"""The share of held-out pairs whose chosen answer a reward model scores higher; of equal ones a half."""
ENVIRONMENT = "environment"
"""The label of an environment's reward among those of a rollout."""
_OUR_NAMES = {"answer_matcher": "greedy_accuracy", "format_checker": "format_accuracy", "code_executor": "pass_rate"}
